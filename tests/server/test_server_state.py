"""Watchdog: detection of a device that hangs."""

from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.server.served_model import Watchdog


def test_watchdog_detects_missing_rounds():
    watchdog = Watchdog(stall_seconds=10)
    assert not watchdog.is_stalled(Counters(rounds=5, running=1), 100)
    assert not watchdog.is_stalled(Counters(rounds=5, running=1), 110)
    assert watchdog.is_stalled(Counters(rounds=5, running=1), 110.1)
    assert not watchdog.is_stalled(Counters(rounds=6, running=1), 111)  # progress
    assert not watchdog.is_stalled(Counters(rounds=6, running=1), 121)


def test_watchdog_ignores_an_idle_engine():
    watchdog = Watchdog(stall_seconds=10)
    assert not watchdog.is_stalled(Counters(rounds=5), 0)
    assert not watchdog.is_stalled(Counters(rounds=5), 1000)
    assert not watchdog.is_stalled(Counters(rounds=5, running=1), 1005)
    assert watchdog.is_stalled(Counters(rounds=5, running=1), 1015.1)


def test_requests_that_wait_for_a_slot_in_vain_are_noticed():
    watchdog = Watchdog(stall_seconds=10)
    assert not watchdog.is_stalled(Counters(waiting=1), 0)
    assert watchdog.is_stalled(Counters(waiting=2), 10.1)
