"""dflash-bench startup: starts give the reference's tokens, and phases add up."""

from pathlib import Path
from time import monotonic_ns

import msgspec
import pytest

from dflash_aot.benchmarks.start import StartSpec
from dflash_aot.benchmarks.startup_bench import (
    BUNDLE,
    find_fault,
    run_start,
)
from dflash_aot.cache.bundle.manifest import read_manifest


@pytest.fixture(scope="module")
def spec(bundle, tied) -> StartSpec:
    prompt = next(one for one in tied.facts["prompts"] if one["name"] == "len1")["prompt_ids"]
    return StartSpec("bundle", "request", str(bundle("tiny")), str(tied.target), str(tied.draft), prompt, 12)


@pytest.mark.parametrize(("way", "scope"), [("bundle", "grid"), ("bundle", "request"), ("jit", "request")])
def test_start_gives_the_reference_tokens_and_its_phases_add_up(spec, tied, way, scope):
    prompt = next(one for one in tied.facts["prompts"] if one["name"] == "len1")
    began = monotonic_ns()
    start = run_start(msgspec.structs.replace(spec, way=way, scope=scope))
    seconds = (monotonic_ns() - began) / 1e9
    assert start.token_ids == prompt["ar_output_ids"][len(prompt["prompt_ids"]) :][:12]
    assert sum(start.phases.values()) == pytest.approx(start.first, abs=1e-3)
    assert 0 < start.first < start.last < seconds
    names = list(start.phases)
    assert names[:2] == ["process", "imports"] and names[-1] == "first token" and "weights" in names
    assert 0 < start.executables <= len(read_manifest(Path(spec.bundle)).entries)


def test_impossible_start_makes_the_record_void():
    start = {"way": BUNDLE, "repeat": 0, "seconds": 1.0, "scope": "grid", "grid": 10, "token_ids": [5, 6]}
    start |= {"phases": {"process": 0.25, "first token": 0.75}}
    assert find_fault([start, start]) == ""
    for facts, why in (
        ({"token_ids": [5, 7]}, "do not agree on the tokens: (5, 6) and (5, 7)"),
        ({"seconds": 99.0}, "do not add up"),
        ({"phases": {"a": -0.5, "b": 1.5}}, "do not add up"),
    ):
        assert why in find_fault([start, start | facts])
