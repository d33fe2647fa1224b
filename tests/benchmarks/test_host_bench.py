"""dflash-bench host: its table, with numbers checked by hand, and which records are void."""

import pytest

from dflash_aot.benchmarks import host_bench
from dflash_aot.benchmarks.host_bench import Settings, check_callers, find_fault
from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.cache.grid import parse_grid


def make_samples() -> list[dict]:
    """Two repeats of two contenders, one caller, K = 3.

    The engine's rounds cost the host 100 and 120 µs of 1 and 2 ms; work before the rounds costs 5 ms of 50.
    The loop's rounds cost twice as much.
    """
    samples = []
    for name, factor in (("engine", 1), ("jax.jit loop", 2)):
        for repeat, (host, whole) in enumerate([(100, 1000), (120, 2000)]):
            same = {"way": name, "k": 3, "callers": 1, "repeat": repeat, "compile_events": 0}
            for length, rounds in (("short", 10), ("long", 60)):
                times = {"us": 50_000 + whole * rounds, "host_us": 5_000 + factor * host * rounds}
                counted = {"rounds": rounds, "row_rounds": rounds, "tokens": [f"{length} one", f"{length} two"]}
                samples.append({"kind": "times", "length": length, **same, **times, **counted})
    samples.append({"kind": "parts", "callers": 1, "k": 3})  # of records of earlier versions
    return samples


def test_work_before_the_rounds_is_in_no_figure(make_record):
    findings = host_bench.make_findings(make_record(make_samples()))
    assert findings.tables[0].rows == (
        ("1", "3", "engine", "110 (100-120)", "8.0%"),
        ("1", "3", "jax.jit loop", "220 (200-240)", "16.0%"),
    )


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""),
        ({"tokens": ["long one", "else"]}, "jax.jit loop, K = 3 gives other tokens than engine, K = 3"),
        ({"compile_events": 1}, "jax.jit loop, K = 3 compiled while serving"),
    ],
)
def test_faults_are_found(facts, why):
    samples = make_samples()
    samples[-2] |= facts
    fault = find_fault(samples)
    assert why in fault and bool(why) == bool(fault)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (Settings(callers=(1, 2)), BadInput),  # not a batch of the grid
        (Settings(callers=(8,), prompts=4), BadInput),
        (Settings(short=128), BadInput),
        (Settings(long=192), GridMiss),
    ],
)
def test_impossible_settings_are_refused(settings, error):
    grid = parse_grid("batch=1,8 length=256 k=0,7 prefill=64", 16)
    check_callers(Settings(), grid)
    with pytest.raises(error):
        check_callers(settings, grid)
