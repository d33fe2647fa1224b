"""What the benchmarks measure with: the plain loop's answers, a trace's rounds and gaps, the callers' lists."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.manifest import read_manifest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
gap, jit_loop, traffic = (importlib.import_module(name) for name in ("gap", "jit_loop", "traffic"))
sys.path.remove(str(BENCHMARKS))
TOKENS = 24


@pytest.fixture(scope="module")
def loop(bundle, untied):
    """Two rows at K = 15."""
    jitted = jit_loop.Jitted(read_manifest(bundle("untied")), str(untied.target), str(untied.draft))
    return jit_loop.JitLoop(jitted, 2, 15, longest=70, tokens=TOKENS)


@pytest.fixture(scope="module")
def cases(untied) -> dict[str, tuple[list[int], tuple[int, ...]]]:
    """Prompts of one, two and three chunks, and what the reference says behind each."""
    chosen = [one for one in untied.facts["prompts"] if one["name"] in ("len1", "len30", "len70")]
    return {
        one["name"]: (one["prompt_ids"], tuple(one["ar_output_ids"][len(one["prompt_ids"]) :][:TOKENS]))
        for one in chosen
    }


def test_the_plain_loop_says_what_the_reference_says(loop, cases):
    lists = [["len1"], ["len30", "len70", "len1"]]
    served = loop.serve([[cases[name][0] for name in names] for names in lists])
    assert [[one.token_ids for one in row] for row in served.answers] == [
        [cases[name][1] for name in names] for names in lists
    ]
    assert served.compile_events == 0
    assert served.rows == 2 * served.rounds == served.row_rounds + served.padded_rows
    assert served.padded_rows > 0  # the first row has nothing to do while the second one goes on
    assert all(0 < one.first_seconds < one.seconds < served.seconds for row in served.answers for one in row)


def test_a_row_waits_for_the_prefills_before_it(loop, cases):
    prompt = cases["len30"][0]
    (first,), (second,) = loop.serve([[prompt], [prompt]]).answers
    assert first.token_ids == second.token_ids and first.first_seconds < second.first_seconds


def test_a_trace_holds_every_round(loop, cases):
    prompt = cases["len1"][0]
    stretches, served = gap.trace_rounds(lambda: loop.serve([[prompt, prompt], [prompt]]), gap.SPECULATIVE)
    assert sum(map(len, stretches)) == served.rounds
    assert len(stretches) == 2  # the second prompt's prefill is between them
    ordered = [one for stretch in stretches for round_ in stretch for one in round_]
    assert all(one.begin < one.end for one in ordered)
    assert all(earlier.end <= later.begin for earlier, later in zip(ordered, ordered[1:], strict=False))


# -- gaps, in numbers that one can check by eye


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
    served = traffic.Served([], 1.0, 4, 4, 4, 0, 0.0, 0)
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


# -- callers


@given(st.lists(st.integers(), min_size=1, max_size=30), st.integers(1, 9))
def test_answers_come_back_in_the_prompts_order(prompts, callers):
    dealt = traffic.deal(prompts, callers)
    assert len(dealt) == callers and max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert traffic.gather(dealt) == prompts


def test_time_per_token_leaves_the_first_one_out():
    assert traffic.Answer((5, 6, 7), first_seconds=1.0, seconds=2.0).seconds_per_token == 0.5
