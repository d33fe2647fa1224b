"""dflash-bench decode: what is recorded, and what makes a record void."""

import pytest

from dflash_aot.benchmarks import decode_bench
from dflash_aot.benchmarks.contenders import Contender, hash_tokens
from dflash_aot.benchmarks.messages import Served, ServingWork, TimedAnswer
from tests.benchmarks.toy_worker import ToySpec, say

PROMPTS = [[4], [5], [6]]


def make_contender(name: str, exact: bool = True) -> Contender:
    return Contender(name, "toy_worker", ToySpec(), k=0, dtype="float32" if exact else "bfloat16")


@pytest.fixture
def take(open_toy):
    """Faults of the second of two toys → the samples."""

    def run(exact: bool = True, **faults) -> list[dict]:
        with open_toy("honest") as honest, open_toy("other", **faults) as other:
            workers = [(make_contender("honest"), honest), (make_contender("other", exact), other)]
            settings = decode_bench.Settings(max_tokens=4, repeats=2)
            return list(decode_bench.take_answers(workers, PROMPTS, settings, lambda words: None))

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
    sample = decode_bench.make_answer(make_contender("torch"), Served([answer], 2.0, ServingWork(rounds=1)))
    assert sample["passes"] == 1 and sample["gaps_us"] == [1, 2, 1]  # rounded so that their sums are exact
