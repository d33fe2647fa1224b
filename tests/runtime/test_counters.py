"""Counters, latency histograms, acceptance summaries and the watchdog, computed by hand."""

import math

from dflash_aot.runtime.metrics import counters as module
from dflash_aot.runtime.metrics.counters import Counters, Histogram, Watchdog, summarize_acceptance
from dflash_aot.runtime.requests.request import Result


def make_result(accepted: list[int]) -> Result:
    return Result([1] * 9, None, "length", 3, accepted, [], None, 0.1, 0.2)


def test_row_counts_at_each_verified_position():
    counters = Counters()
    for k, accepted in ((3, [2, 0]), (7, [5]), (0, [0])):
        counters.note_rows(k, accepted)
    assert (counters.row_rounds, counters.drafted, counters.accepted) == (4, 13, 7)
    assert counters.verified_at == [3, 3, 3, 1, 1, 1, 1]
    assert counters.accepted_at == [2, 2, 1, 1, 1, 0, 0]


def test_copy_of_counters_is_independent():
    counters = Counters()
    counters.note_rows(2, [1])
    before = counters.copy()
    counters.note_rows(2, [2])
    counters.latency.observe(0.25)
    assert (before.accepted, before.accepted_at) == (1, [1, 0])
    assert not sum(before.latency.counts) and not sum(Counters().latency.counts)


def test_summary_has_both_averages_of_tau():
    counters = Counters()
    runs = [[3, 1], [0], []]  # the last request ended with its first token
    for run in runs:
        for accepted in run:
            counters.note_rows(3, [accepted])
    found = summarize_acceptance([make_result(run) for run in runs], counters)
    assert found.rounds == 3
    assert found.micro_tau == 1 + 4 / 3
    assert found.mean_tau == ((1 + 2) + (1 + 0)) / 2
    assert found.per_position == (2 / 3, 1 / 3, 1 / 3)


def test_summary_without_rounds_is_empty():
    found = summarize_acceptance([make_result([])], Counters())
    assert (found.rounds, found.per_position) == (0, ())


# -- histograms


def test_duration_counts_once_in_its_bucket():
    one, last = module.BUCKET_BOUNDS_SECONDS.index(1.0), len(module.BUCKET_BOUNDS_SECONDS)
    buckets = {0.0: 0, 0.0005: 0, 0.0006: 1, 1.0: one, math.nextafter(1.0, 2): one + 1}  # a bound belongs below it
    for seconds, bucket in (buckets | {100.0: last - 1, 100.1: last, math.inf: last}).items():
        histogram = Histogram()
        histogram.observe(seconds)
        assert (seconds, sum(histogram.counts), histogram.counts[bucket]) == (seconds, 1, 1)
        assert histogram.total == seconds


def test_watchdog_misses_progress_where_requests_run_or_wait():
    watchdog = Watchdog(stall_seconds=10)
    assert not watchdog.is_stalled(Counters(rounds=5), 0)
    assert not watchdog.is_stalled(Counters(rounds=5), 1000)  # idle
    assert not watchdog.is_stalled(Counters(rounds=5, running=1), 1005)
    assert watchdog.is_stalled(Counters(rounds=5, running=1), 1015.1)
    assert not watchdog.is_stalled(Counters(rounds=6, running=1), 1016)  # progress
    assert not watchdog.is_stalled(Counters(rounds=6, waiting=1), 1026)
    assert watchdog.is_stalled(Counters(rounds=6, waiting=2), 1026.1)
