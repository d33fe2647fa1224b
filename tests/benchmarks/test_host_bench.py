"""What the host's samples say, worked out by hand; which of them are void."""

import pytest

from dflash_aot.benchmarks import host_bench
from dflash_aot.benchmarks.host_bench import Settings, check_callers, find_fault
from dflash_aot.benchmarks.observation import Floor
from dflash_aot.benchmarks.peer_floor import measure_floor
from dflash_aot.benchmarks.record import Record, describe_site
from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.cache.grid import parse_grid


def make_samples() -> list[dict]:
    """Two repeats of both ways, one caller, K = 3.

    The engine's rounds cost the host 100 and 120 µs of 1 and 2 ms; what comes before them costs 5 ms of 50 in all.
    The loop's cost twice as much.
    """
    samples = []
    for way, factor in (("engine", 1), ("jax.jit loop", 2)):
        for repeat, (host, whole) in enumerate([(100, 1000), (120, 2000)]):
            same = {"way": way, "k": 3, "callers": 1, "repeat": repeat, "compile_events": 0}
            for length, rounds in (("short", 10), ("long", 60)):
                wall = (2000 + 300 * rounds) * (way == "engine")
                times = {"us": 50_000 + whole * rounds, "host_us": 5_000 + factor * host * rounds, "host_wall_us": wall}
                counted = {"rounds": rounds, "row_rounds": rounds, "tokens": [f"{length} one", f"{length} two"]}
                samples.append({"kind": "times", "length": length, **same, **times, **counted})
            calls = {"draft": 50, "kv_write": 50, "verify": 50 + repeat}
            counts = {"calls": calls, "call_us": 4000, "to_device": 0, "to_host": 50, "reads": 50, "waits": 25}
            times = {"us": 100_000, "wait_us": 60_000, "rounds": 50, "unseen": 0, "tokens": ["long one"]}
            samples.append({"kind": "counts", "length": "long", **same, **counts, **times})
    for arguments in (1, 30):
        for device, spent in (("idle", [10.0, 30.0, 20.0]), ("busy", [100.0, 100.0, 200.0])):
            samples.append(
                {"kind": "floor", "way": "one call", "arguments": arguments, "device": device, "work_us": spent}
            )
    return samples


def describe(samples: list[dict]):
    return host_bench.describe(Record(1, "host", "", "", "", 0.0, describe_site(0.0), {}, samples, ""))


def test_what_comes_before_the_rounds_is_in_no_figure():
    assert describe(make_samples()).figures == pytest.approx(
        {
            "engine_1_k3_us": 110.0,
            "engine_1_k3_share": 0.08,  # of 10 % and 6 %
            "loop_1_k3_us": 220.0,
            "loop_1_k3_share": 0.16,
        }
    )


def test_tables_are_per_round():
    times, counts, floor = describe(make_samples()).tables
    engine, loop = times.rows
    assert engine == ("1", "3", "engine", "110 (100-120)", "300", "800", "80.0", "1.500", "8.0%")
    assert loop[4] == ""  # nobody counted it
    assert counts.rows[0][3:] == ("3-3.02", "0", "1", "1", "0.50", "draft kv_write verify")
    assert floor.rows == (("1", "20", "29", "100", "190"), ("30", "20", "29", "100", "190"))


def test_charts_hold_every_way():
    work, asked = describe(make_samples()).charts
    assert [one.label for one in work.series] == [one.label for one in asked.series] == ["engine", "jax.jit loop"]
    assert work.series[0].y == (110.0,) and work.series[0].low == (100.0,)
    assert asked.series[0].y == (3.01, 0.0, 1.0, 1.0, 0.5)


def test_sound_samples_have_no_fault():
    assert find_fault(make_samples()) == ""


@pytest.mark.parametrize(
    ("kind", "facts", "why"),
    [
        ("times", {"tokens": ["long one", "else"]}, "jax.jit loop, K = 3 gives other tokens than engine, K = 3"),
        ("counts", {"tokens": ["else"]}, "gives other tokens"),
        ("times", {"compile_events": 1}, "jax.jit loop, K = 3 compiled while serving"),
        ("counts", {"unseen": 2}, "jax.jit loop, K = 3 waited where nobody looked"),
        ("counts", {"reads": 0}, "jax.jit loop, K = 3 read nothing"),
    ],
)
def test_what_cannot_be_makes_the_record_void(kind, facts, why):
    samples = make_samples()
    last = max(place for place, one in enumerate(samples) if one["kind"] == kind)
    samples[last] |= facts
    assert why in find_fault(samples)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (Settings(callers=(1, 2)), BadInput),  # no batch of the grid
        (Settings(callers=(8,), prompts=4), BadInput),
        (Settings(short=128), BadInput),
        (Settings(long=192), GridMiss),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(settings, error):
    grid = parse_grid("batch=1,8 length=256 k=0,7 prefill=64", 16)
    check_callers(Settings(), grid)
    with pytest.raises(error):
        check_callers(settings, grid)


def test_the_floor_has_a_time_for_every_call():
    seconds = measure_floor(Floor(arguments=3, width=8, calls=5))
    assert len(seconds) == 5 and min(seconds) > 0
