"""dflash-bench decode: what is recorded, what makes a record void, and its tables, with numbers checked by hand."""

import pytest

from dflash_aot.benchmarks import decode_bench
from dflash_aot.benchmarks.contenders import Contender, hash_tokens
from dflash_aot.benchmarks.messages import ServedClosed, ServingWork, TimedAnswer
from dflash_aot.benchmarks.tables import Findings
from tests.benchmarks.toy_worker import ToySpec, say

PROMPTS = [[4], [5], [6]]


def make_contender(name: str, exact: bool = True) -> Contender:
    return Contender(name, "toy_worker", ToySpec(), exact, k=0)


@pytest.fixture
def take(open_toy):
    """Faults of the second of two toys → the samples."""

    def run(exact: bool = True, **faults) -> list[dict]:
        with open_toy("honest") as honest, open_toy("other", **faults) as other:
            workers = [(make_contender("honest"), honest), (make_contender("other", exact), other)]
            return list(decode_bench.take_answers(workers, PROMPTS, 4, 2, lambda words: None))

    return run


def test_contenders_take_turns_in_another_order_each_time(take):
    samples = take()
    turns = [(one["repeat"], one["prompt"], one["way"]) for one in samples if one["kind"] == "answer"]
    first, second = ["honest", "other"], ["other", "honest"]
    orders = [first, second, first, second, first, second]
    rounds = [(repeat, prompt) for repeat in range(2) for prompt in range(3)]
    assert turns == [(*place, name) for place, order in zip(rounds, orders, strict=True) for name in order]
    assert decode_bench.find_fault(samples) == ""
    (answer,) = (one for one in samples if one.get("prompt") == 2 and one["way"] == "other" and one["repeat"] == 1)
    assert answer["tokens"] == hash_tokens(say([6], 4))
    assert answer["gaps_us"] == [500_000] * 4
    assert answer["accepted"] == [0, 0, 0] and answer["passes"] == 3


def test_other_tokens_and_compilations_make_the_record_void(take):
    found = decode_bench.find_fault(take(lies=True, compile_events=1))
    assert found == "other gives other tokens than honest for prompts 1; other compiled while serving"
    assert decode_bench.find_fault(take(exact=False, lies=True)) == ""


def test_contender_without_rounds_counts_its_passes_and_gaps_add_up():
    answer = TimedAnswer([1, 2, 3], [0.0000014, 0.0000028, 0.0000042])
    sample = decode_bench.make_answer(make_contender("torch"), ServedClosed([[answer]], 2.0, ServingWork(rounds=1)))
    assert sample["passes"] == 1 and sample["gaps_us"] == [1, 2, 1]  # rounded so that their sums are exact


NAMES = ["engine, K = 0", "engine, K = 3", "engine, K chosen", "PyTorch float32", "PyTorch bfloat16"]


def answer(way: str, k: int | None, repeat: int, prompt: int, gaps_us: list[int], accepted: list[int], **more) -> dict:
    return {
        "kind": "answer",
        "way": way,
        "k": k,
        "exact": True,
        "tokens": f"tokens of {prompt}",
        "gaps_us": gaps_us,
        "accepted": accepted,
        "passes": len(accepted) or 4,
        "rounds": 4,
        "compile_events": 0,
        "prompt": prompt,
        "repeat": repeat,
    } | more


def make_samples() -> list[dict]:
    """Per token, K = 0 takes 10 ms, K = 3 takes 5 and 4, PyTorch 20 in float32 and 2.5 in bfloat16."""
    samples = []
    for repeat in range(2):
        for prompt, (gaps, accepted) in enumerate([([0, 0, 0, 20], [3]), ([0, 0, 16, 0], [2, 0])]):
            plain = [30_000] + [10_000] * 4
            fast = [40_000] + [1000 * gap for gap in gaps]
            samples.append(answer("engine, K = 0", 0, repeat, prompt, plain, [0] * 4))
            samples.append(answer("engine, K = 3", 3, repeat, prompt, fast, accepted))
            samples.append(answer("engine, K chosen", None, repeat, prompt, fast, accepted))
            samples.append(answer("PyTorch float32", None, repeat, prompt, [50_000] + [20_000] * 4, []))
            rounded = answer("PyTorch bfloat16", None, repeat, prompt, [50_000] + [2500] * 4, [], exact=False)
            samples.append(rounded | {"tokens": "others" if prompt else rounded["tokens"]})
    return samples


@pytest.fixture(scope="module")
def findings(make_record) -> Findings:
    samples = make_samples()
    assert decode_bench.find_fault(samples) == ""
    return decode_bench.make_findings(make_record(samples))


def test_speed_is_the_median_and_ratios_are_pair_by_pair(findings, read_table):
    rows = read_table(findings, "speed")
    assert list(rows) == NAMES
    assert rows["engine, K = 0"]["tokens/s"] == "100"
    assert rows["engine, K = 3"]["tokens/s"] == "225"  # of 200 and 250
    assert rows["engine, K = 3"]["x engine, K = 0"].startswith("2.25 (2.00-2.50)")
    assert rows["engine, K = 3"]["x PyTorch float32"].startswith("4.50")
    assert rows["engine, K = 3"]["first token ms"] == "40.0"
    assert {name: row["same tokens"] for name, row in rows.items()} == {
        **dict.fromkeys(NAMES, "2/2"),
        "PyTorch bfloat16": "1/2",
    }
    # 1 + (3 + 2 + 0) / 3; PyTorch has no rounds.
    assert [row["τ"] for row in rows.values()] == ["1.00", "2.67", "2.67", "", ""]


def test_chart_has_the_acceptance_of_each_position(findings):
    (chart,) = findings.charts
    assert [one.label for one in chart.series] == ["engine, K = 3"]
    assert chart.series[0].y == pytest.approx((2 / 3, 2 / 3, 1 / 3))
