"""Durations counted by size, by hand and against the list of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.runtime.metrics.histogram import BUCKET_BOUNDS_SECONDS, Histogram


def observed(*seconds: float) -> Histogram:
    histogram = Histogram()
    for one in seconds:
        histogram.observe(one)
    return histogram


def test_bounds_rise():
    assert [*BUCKET_BOUNDS_SECONDS] == sorted(set(BUCKET_BOUNDS_SECONDS))
    assert BUCKET_BOUNDS_SECONDS[0] > 0 and BUCKET_BOUNDS_SECONDS[-1] < math.inf


@pytest.mark.parametrize(
    ("seconds", "place"),
    [
        (0.0, 0),
        (0.0005, 0),  # a bound belongs to what lies below it
        (0.0006, 1),
        (1.0, BUCKET_BOUNDS_SECONDS.index(1.0)),
        (math.nextafter(1.0, 2), BUCKET_BOUNDS_SECONDS.index(1.0) + 1),
        (100.0, len(BUCKET_BOUNDS_SECONDS) - 1),
        (100.1, len(BUCKET_BOUNDS_SECONDS)),
        (math.inf, len(BUCKET_BOUNDS_SECONDS)),
    ],
)
def test_a_duration_is_counted_once_at_the_smallest_bound_that_holds_it(seconds, place):
    counts = observed(seconds).counts
    assert (sum(counts), counts[place]) == (1, 1)


def test_the_total_is_their_sum():
    assert observed().total == 0
    assert observed(0.25, 0.5, 200.0).total == 200.75


def test_a_copy_and_another_histogram_stay_as_they_are():
    histogram = observed(0.25)
    copied, other = histogram.copy(), Histogram()
    histogram.observe(0.25)
    assert copied == observed(0.25) != histogram
    assert other == Histogram() and not sum(other.counts)


@given(st.lists(st.floats(min_value=0, max_value=1000)))
def test_counts_are_those_of_the_list(seconds):
    counts = observed(*seconds).counts
    assert len(counts) == len(BUCKET_BOUNDS_SECONDS) + 1 and sum(counts) == len(seconds)
    for place, bound in enumerate(BUCKET_BOUNDS_SECONDS):
        assert sum(counts[: place + 1]) == sum(one <= bound for one in seconds)
