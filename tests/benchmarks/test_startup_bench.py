"""dflash-bench startup: starts give the reference's tokens, and phases add up."""

from pathlib import Path
from time import monotonic_ns

import msgspec
import pytest

from dflash_aot.benchmarks.start import BUNDLE, COLD, StartSpec
from dflash_aot.benchmarks.startup_bench import run_start
from dflash_aot.cache.bundle.manifest import read_manifest


@pytest.fixture(scope="module")
def spec(bundle, tied) -> StartSpec:
    prompt = next(one for one in tied.facts["prompts"] if one["name"] == "len1")["prompt_ids"]
    return StartSpec(str(bundle("tiny")), str(tied.target), str(tied.draft), BUNDLE, "request", prompt, 12)


@pytest.mark.parametrize(("way", "scope"), [(BUNDLE, "grid"), (BUNDLE, "request"), (COLD, "request")])
def test_start_gives_the_reference_tokens_and_its_phases_add_up(spec, tied, way, scope):
    prompt = next(one for one in tied.facts["prompts"] if one["name"] == "len1")
    began = monotonic_ns()
    start = run_start(msgspec.structs.replace(spec, way=way, scope=scope))
    seconds = (monotonic_ns() - began) / 1e9
    assert start.token_ids == prompt["ar_output_ids"][len(prompt["prompt_ids"]) :][:12]
    assert sum(start.phases.values()) == pytest.approx(start.seconds, abs=1e-3)
    assert min(start.phases.values()) > -1e-3
    assert 0 < start.seconds < start.last_seconds < seconds
    names = list(start.phases)
    assert names[:2] == ["process", "imports"] and names[-1] == "first token" and "weights" in names
    assert 0 < start.ready <= len(read_manifest(Path(spec.bundle)).entries)
