"""dflash-bench startup: starts give the reference's tokens, phases add up; tables, with numbers checked by hand."""

import re
from pathlib import Path
from time import monotonic_ns

import msgspec
import pytest

from dflash_aot.benchmarks import startup_bench
from dflash_aot.benchmarks.contenders import BenchmarkPair
from dflash_aot.benchmarks.start import PhaseTimer, StartSpec
from dflash_aot.benchmarks.startup_bench import (
    BUNDLE,
    CACHED,
    COLD,
    Settings,
    find_fault,
    list_contenders,
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


def test_phases_have_no_gaps():
    timer = PhaseTimer(monotonic_ns() - 2 * 10**9)
    timer.end("before")
    assert timer.seconds["before"] >= 2.0
    timer.end_parts("whole", {"part": -1.0})  # of another clock, which went backwards
    assert list(timer.seconds) == ["before", "part", "whole"]
    assert timer.seconds["part"] + timer.seconds["whole"] >= 0.0
    assert 2.0 <= sum(timer.seconds.values()) <= timer.total


def test_only_the_smallest_grid_is_started_without_a_bundle(tmp_path):
    bundles = {grid: tmp_path / f"{grid}" for grid in (10, 50)}
    pair = BenchmarkPair(tmp_path / "target", tmp_path / "draft")
    found = list(list_contenders(Settings(grids=(10, 50)), pair, bundles, [1], "cache"))
    assert [(one.name, one.spec.scope, one.grid) for one in found] == [
        *((name, scope, 10) for scope in ("grid", "request") for name in (BUNDLE, CACHED, COLD)),
        *((BUNDLE, scope, 50) for scope in ("grid", "request")),
    ]
    assert [one.spec.cache for one in found] == ["", "cache", ""] * 2 + ["", ""]


def make_sample(way: str, repeat: int, seconds: float, **facts: object) -> dict:
    phases = {"process": 0.25, "imports": 0.5, "first token": seconds - 0.75}
    common = {"scope": "grid", "grid": 10, "executables": 11, "bundle_bytes": 2_500_000}
    measured = {"last_seconds": seconds + 1, "ready": 11, "phases": phases, "token_ids": [5, 6]}
    return {"way": way, "repeat": repeat, "seconds": seconds, **common, **measured, **facts}


@pytest.fixture
def samples() -> list[dict]:
    """Three repeats: the bundle takes 1, 2 and 3 s, the others 3, 4, 6 and 10, 20, 30 times as long."""
    found = []
    for repeat, (seconds, warm) in enumerate([(1.0, 3.0), (3.0, 4.0), (2.0, 6.0)]):
        for scope, factor in (("grid", 1.0), ("request", 0.5)):
            times = {BUNDLE: 1.0, CACHED: warm, COLD: 10.0 * (repeat + 1)}
            for way, ratio in times.items():
                found.append(make_sample(way, repeat, factor * max(2.0, seconds * ratio * 2), scope=scope))
            found.append(make_sample(BUNDLE, repeat, factor * seconds * 4, scope=scope, grid=50, executables=51))
    return found


def test_tables_have_every_contender_and_grid(samples, make_record):
    tables = {table.name: table for table in startup_bench.make_findings(make_record(samples)).tables}
    names = [row[:2] for row in tables["ways"].rows]
    assert names == [(name, scope) for scope in ("whole grid", "first request") for name in (BUNDLE, CACHED, COLD)]
    assert tables["ways"].rows[0][2:4] == ("4.00", "1")
    # Ratios of starts of the same repeat: medians of 3, 4, 6 and of 10, 20, 30; the larger grid takes twice as long.
    assert [row[3][:4] for row in tables["ways"].rows[1:3]] == ["4.00", "20.0"]
    assert [row[:3] for row in tables["growth"].rows] == [("11", "2.5", "4.00"), ("51", "2.5", "8.00")]
    assert tables["growth"].rows[1][3].startswith("2.00 (")


def test_chart_stacks_the_phases_of_a_start(samples, make_record):
    charts = {chart.name: chart for chart in startup_bench.make_findings(make_record(samples)).charts}
    stack = charts["start_grid"]
    assert stack.kind == "stack" and stack.series[0].x == (BUNDLE, CACHED, COLD)
    assert [sum(heights) for heights in zip(*(one.y for one in stack.series), strict=True)] == [4.0, 24.0, 120.0]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, "^$"),
        ({"token_ids": [5, 7]}, r"do not agree on the tokens: \(5, 6\) and \(5, 7\)"),
        ({"seconds": 99.0}, "do not add up"),
        ({"seconds": 1.0, "phases": {"a": -0.5, "b": 1.5}}, "do not add up"),
    ],
)
def test_impossible_start_makes_the_record_void(samples, facts, why):
    assert re.search(why, find_fault([*samples[:-1], samples[-1] | facts]))
