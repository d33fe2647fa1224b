"""Calls that take a while, because their executable was not called before, on a toy device: who waits for them."""

import pytest

from dflash_aot.cache.errors import CorruptBundle
from tests.runtime.toy import SAMPLED, ToyEngine, programs

GRID = "batch=1,2 length=16,64 k=0,3 prefill=4,16"


def test_what_is_there_is_told_before_a_round_that_takes_a_while():
    engine = ToyEngine(GRID, k=3, cold=True)
    request = engine.ask([1], 30)
    assert programs(engine.step()) == ["prefill", "kv_write", "read prefill", "draft", "verify", "kv_write"]
    assert len(engine.news[request]) == 1
    assert programs(engine.step()) == ["draft", "verify", "kv_write", "read verify"]  # from here on a round late
    engine.run()
    engine.check(request)


def test_and_before_a_chunk_that_takes_a_while():
    engine = ToyEngine(GRID, k=3, cold=True)
    first = engine.ask([1], 30)
    engine.step()
    engine.step()
    second = engine.ask([2] * 9, 30)  # a chunk of another width
    assert programs(engine.step())[:3] == ["read verify", "prefill", "kv_write"]
    engine.run()
    engine.check(first)
    engine.check(second)


@pytest.mark.parametrize("buckets", [GRID, "batch=1,2 length=16,64 k=0,3 prefill=4,16 rounds=4"])
def test_cold_or_warm_everybody_gets_what_they_get_alone(buckets):
    for cold in (False, True):
        engine = ToyEngine(buckets, k=3, cold=cold)
        for number in range(12):
            engine.ask([number] * (1 + number), 3 * number + 1, **(SAMPLED if number % 3 == 0 else {}))
            engine.step()
        engine.run()
        for request in engine.requests:
            engine.check(request)


def test_an_executable_that_is_none_ends_who_is_in_a_slot_and_never_the_engine():
    """As often as somebody needs it: it says nothing of the device."""
    engine = ToyEngine("batch=1 length=64 k=0,3 prefill=4", k=3)
    refusal, whole = CorruptBundle("verify: does not load. Mend it: so"), engine.bundle.verify

    def verify(bucket):
        if bucket.k:
            raise refusal
        return whole(bucket)

    engine.bundle.verify = verify
    requests = [engine.ask([number], 9, k=None if number % 4 else 0) for number in range(12)]
    engine.run()
    for number, request in enumerate(requests):
        engine.check(request)
        if number % 4:
            assert request.finish_reason == "error" and request.error.endswith(str(refusal))
        else:
            assert request.finish_reason == "length"
    assert engine.counters.failures == 9
