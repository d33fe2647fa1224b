"""When a device that says nothing is taken to hang."""

from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.server.watchdog import StallWatch


def test_rounds_that_do_not_come_are_noticed():
    watch = StallWatch(patience=10)
    assert not watch.is_stalled(Counters(rounds=5, running=1), 100)
    assert not watch.is_stalled(Counters(rounds=5, running=1), 110)
    assert watch.is_stalled(Counters(rounds=5, running=1), 110.1)
    assert not watch.is_stalled(Counters(rounds=6, running=1), 111)  # it goes on
    assert not watch.is_stalled(Counters(rounds=6, running=1), 121)


def test_a_long_prompt_is_no_stall():
    watch = StallWatch(patience=10)
    for chunk in range(9):
        assert not watch.is_stalled(Counters(prefill_chunks=chunk, running=1), 9.0 * chunk)


def test_an_engine_that_nobody_asks_anything_does_not_hang():
    watch = StallWatch(patience=10)
    assert not watch.is_stalled(Counters(rounds=5), 0)
    assert not watch.is_stalled(Counters(rounds=5), 1000)
    assert not watch.is_stalled(Counters(rounds=5, running=1), 1005)
