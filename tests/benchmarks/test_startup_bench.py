"""Starts: real ones give the same tokens and phases that add up; what samples say, worked out by hand."""

import re
from pathlib import Path

import msgspec
import pytest

from dflash_aot.benchmarks import startup_bench
from dflash_aot.benchmarks.laps import Laps, read_clock
from dflash_aot.benchmarks.pairs import Pair
from dflash_aot.benchmarks.record import Record, describe_site
from dflash_aot.benchmarks.start import Order
from dflash_aot.benchmarks.startup_bench import GRIDS, Settings, find_fault, list_ways, run_start
from dflash_aot.benchmarks.startup_findings import BUNDLE, COLD, WARM
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import PeerFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.signature import ProgramWeights, derive_pair_shapes, list_signatures


@pytest.fixture(scope="module")
def order(bundle, tied) -> Order:
    prompt = next(one for one in tied.facts["prompts"] if one["name"] == "len1")["prompt_ids"]
    return Order("bundle", "request", str(bundle("tiny")), str(tied.target), str(tied.draft), prompt, 12)


@pytest.mark.parametrize(("way", "scope"), [("bundle", "grid"), ("bundle", "request"), ("jit", "request")])
def test_a_start_says_what_the_reference_says_and_its_phases_add_up(order, tied, way, scope):
    prompt = next(one for one in tied.facts["prompts"] if one["name"] == "len1")
    began = read_clock()
    start = run_start(msgspec.structs.replace(order, way=way, scope=scope))
    seconds = (read_clock() - began) / 1e9
    assert start.token_ids == prompt["ar_output_ids"][len(prompt["prompt_ids"]) :][:12]
    assert sum(start.phases.values()) == pytest.approx(start.first, abs=1e-3)
    assert 0 < start.first < start.last < seconds
    names = list(start.phases)
    assert names[:2] == ["process", "imports"] and names[-1] == "first token" and "weights" in names
    assert 0 < start.executables <= len(read_manifest(Path(order.bundle)).entries)


def test_a_start_that_fails_is_reported_with_its_last_words(order):
    with pytest.raises(PeerFailed, match="nowhere"):
        run_start(msgspec.structs.replace(order, bundle="/nowhere"))


# -- laps


def test_phases_follow_each_other_without_a_gap():
    laps = Laps(read_clock() - 2 * 10**9)
    laps.end("before")
    laps.end("next")
    assert laps.seconds["before"] >= 2.0
    assert sum(laps.seconds.values()) <= laps.total < 2.0 + 1e9
    laps.split("whole", {"part": -1.0})  # as if another clock had gone backwards: nothing is lost
    assert list(laps.seconds) == ["before", "next", "part", "whole"]
    assert laps.seconds["part"] + laps.seconds["whole"] >= 0.0
    assert sum(laps.seconds.values()) == pytest.approx(laps.total, abs=0.5)


# -- ways


def test_grids_have_about_as_many_executables_as_they_say(order):
    manifest = read_manifest(Path(order.bundle))
    pair = derive_pair_shapes(manifest.target.facts, manifest.draft.facts, "float32", ("greedy",))
    for promised, buckets in GRIDS.items():
        found = len(list_signatures(pair, parse_grid(buckets, 16), ProgramWeights((), (), ())))
        assert abs(found - promised) <= max(1, promised // 20)


def test_only_the_first_grid_is_started_without_a_bundle(tmp_path):
    bundles = {grid: tmp_path / f"{grid}" for grid in (10, 50)}
    pair = Pair("toy", tmp_path / "target", tmp_path / "draft")
    ways = list(list_ways(Settings(grids=(10, 50)), pair, bundles, [1], "cache"))
    kinds = [(way.name, way.order.scope, way.files) for way in ways if way.grid == 10]
    assert kinds == [
        (name, scope, files)
        for files in ("warm", "cold")
        for scope in ("grid", "request")
        for name in (BUNDLE, WARM, COLD)
    ]
    assert [(way.name, way.order.scope, way.files) for way in ways if way.grid == 50] == [
        (BUNDLE, scope, "warm") for scope in ("grid", "request")
    ]
    assert {way.order.cache for way in ways if way.name != WARM} == {""}
    assert {way.order.cache for way in ways if way.name == WARM} == {"cache"}


# -- what samples say


def make_sample(way: str, repeat: int, seconds: float, **facts: object) -> dict:
    phases = {"process": 0.25, "imports": 0.5, "first token": seconds - 0.75}
    common = {"scope": "grid", "files": "warm", "grid": 10, "executables": 11, "bundle_bytes": 2_500_000, "cached": 1.0}
    measured = {"last_seconds": seconds + 1, "ready": 11, "phases": phases, "token_ids": [5, 6]}
    return {"way": way, "repeat": repeat, "seconds": seconds, **common, **measured, **facts}


@pytest.fixture
def samples() -> list[dict]:
    """Three repeats: the bundle takes 1, 2 and 3 s, its rivals 3, 4, 6 and 10, 20, 30 times as long."""
    found = []
    for repeat, (seconds, warm) in enumerate([(1.0, 3.0), (3.0, 4.0), (2.0, 6.0)]):
        for scope, factor in (("grid", 1.0), ("request", 0.5)):
            times = {BUNDLE: 1.0, WARM: warm, COLD: 10.0 * (repeat + 1)}
            for way, ratio in times.items():
                found.append(make_sample(way, repeat, factor * max(2.0, seconds * ratio * 2), scope=scope))
            found.append(make_sample(BUNDLE, repeat, factor * seconds * 4, scope=scope, grid=50, executables=51))
    return found


def describe(samples: list[dict]):
    record = Record(1, "startup", "", "", "", 0.0, describe_site(0.0), {}, samples, "")
    return startup_bench.describe(record)


def test_ratios_are_of_starts_of_the_same_repeat(samples):
    findings = describe(samples)
    assert findings.figures == pytest.approx(
        {
            "grid_seconds": 4.0,  # of 2, 6, 4
            "grid_warm_ratio": 4.0,  # of 3, 4, 6
            "grid_cold_ratio": 20.0,
            "grid_growth": 2.0,
            "request_seconds": 2.0,
            "request_warm_ratio": 4.0,
            "request_cold_ratio": 20.0,
            "request_growth": 2.0,
        }
    )


def test_tables_show_every_way_and_phases_that_add_up(samples):
    tables = {table.name: table for table in describe(samples).tables}
    ways = [row[:2] for row in tables["ways"].rows]
    assert ways == [(way, scope) for scope in ("whole grid", "first request") for way in (BUNDLE, WARM, COLD)]
    assert tables["ways"].rows[0][2:6] == ("warm, 100%", "4.00", "2.00-6.00", "1")
    assert tables["ways"].rows[1][5].startswith("4.00 (")
    phases = {row[0]: row[1:] for row in tables["phases_grid"].rows}
    assert phases["together"] == ("4.000", "24.000", "120.000")  # the start in the middle: repeats 2, 1 and 2
    for column in range(3):
        parts = [float(cells[column]) for name, cells in phases.items() if name != "together"]
        assert sum(parts) == pytest.approx(float(phases["together"][column]))
    assert [row[:3] for row in tables["growth"].rows] == [("11", "2.5", "4.00"), ("51", "2.5", "8.00")]


def test_a_chart_stacks_what_a_start_took(samples):
    charts = {chart.name: chart for chart in describe(samples).charts}
    stack = charts["start_grid"]
    assert stack.kind == "stack" and stack.series[0].x == (BUNDLE, WARM, COLD)
    assert [sum(heights) for heights in zip(*(one.y for one in stack.series), strict=True)] == [4.0, 24.0, 120.0]
    assert charts["sizes"].series[0].x == (11, 51) and charts["sizes"].series[0].y == (4.0, 8.0)


def test_more_phases_than_a_chart_can_show_are_one(samples):
    many = {f"phase {number}": 0.1 + number / 100 for number in range(12)}
    for one in samples:
        one["phases"], one["seconds"] = many, sum(many.values())
    (stack, *_) = describe(samples).charts
    assert [one.label for one in stack.series] == [*(f"phase {number}" for number in range(5, 12)), "rest"]
    assert sum(one.y[0] for one in stack.series) == pytest.approx(sum(many.values()))


def change(samples: list[dict], **facts: object) -> list[dict]:
    return [*samples[:-1], samples[-1] | facts]


def test_sound_samples_have_no_fault(samples):
    assert find_fault(samples) == ""


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"token_ids": [5, 7]}, r"do not agree on the tokens: \(5, 6\) and \(5, 7\)"),
        ({"seconds": 99.0}, "do not add up"),
        ({"seconds": 1.0, "phases": {"a": -0.5, "b": 1.5}}, "do not add up"),
    ],
)
def test_a_start_that_cannot_be_makes_the_record_void(samples, facts, why):
    assert re.search(why, find_fault(change(samples, **facts)))
