"""Gaps between rounds: a trace holds every round, and they are those that one can check by eye."""

import pytest

from dflash_aot.benchmarks import gap
from dflash_aot.benchmarks.jit_loop import JitLoop, Jitted
from dflash_aot.benchmarks.traffic import Served, Work
from dflash_aot.cache.bundle.manifest import read_manifest


def test_a_trace_holds_every_round(bundle, untied):
    jitted = Jitted(read_manifest(bundle("untied")), untied.target, untied.draft)
    loop = JitLoop(jitted, 2, 15, longest=1, tokens=24)
    stretches, served = gap.trace_rounds(lambda: loop.serve([[[5], [5]], [[5]]]), gap.SPECULATIVE)
    assert sum(map(len, stretches)) == served.work.rounds
    assert len(stretches) == 2  # the second prompt's prefill is between them
    ordered = [one for stretch in stretches for round_ in stretch for one in round_]
    assert all(one.begin < one.end for one in ordered)
    assert all(earlier.end <= later.begin for earlier, later in zip(ordered, ordered[1:], strict=False))


def operation(program: str, run: int, begin: float, end: float) -> gap.Operation:
    return gap.Operation(program, run, begin * 1e6, end * 1e6)  # milliseconds


def make_round(start: float, run: int) -> list[gap.Operation]:
    """3 ms of draft, two operations at a time; 1 ms of nothing; 4 ms of verify; 2 ms of kv_write."""
    return [
        operation("draft", run, start, start + 2),
        operation("draft", run, start + 1, start + 3),
        operation("verify", run + 1, start + 4, start + 8),
        operation("kv_write", run + 2, start + 8, start + 10),
    ]


def test_gaps_are_between_rounds_that_follow_each_other():
    chunk = [operation("prefill", 100, 25, 35), operation("kv_write", 101, 36, 38)]
    operations = [*make_round(50, 9), *make_round(0, 0), *chunk, *make_round(12, 3), *make_round(40, 6)]
    stretches = gap.find_rounds(gap.find_executions(operations), gap.SPECULATIVE)
    assert [len(stretch) for stretch in stretches] == [2, 2]
    served = Served([], 1.0, Work(rounds=4))
    figures = gap.describe(1, "by hand", [served], [(stretches, served)])
    assert figures.gaps == 2
    assert figures.gap_ms == pytest.approx((1.0, 1.9))  # 2 and 0
    assert figures.inner_ms == pytest.approx((1.0, 0.0))  # draft to verify, verify to kv_write
    assert figures.busy == pytest.approx(18 / 22)
    assert figures.round_ms == (250.0, 250.0)


def test_a_round_that_the_trace_cut_off_ends_a_stretch():
    whole = make_round(0, 0)
    cut = gap.find_executions([*whole, *make_round(10, 3)[:-1]])
    assert gap.find_rounds(cut, gap.SPECULATIVE) == [[tuple(gap.find_executions(whole))]]
    assert gap.find_rounds([], gap.SPECULATIVE) == []


def test_a_round_without_a_draft_is_a_verification():
    chunk = [operation("prefill", 0, 0, 5)]
    verifies = [operation("verify", run, 10 * run, 10 * run + 4) for run in (1, 2, 3)]
    (stretch,) = gap.find_rounds(gap.find_executions([*chunk, *verifies]), gap.PLAIN)
    assert [[one.begin for one in round_] for round_ in stretch] == [[1e7], [2e7], [3e7]]
