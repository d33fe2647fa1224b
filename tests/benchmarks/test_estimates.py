"""Figures from samples, in numbers that one can check by eye."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.benchmarks.estimates import (
    choose,
    estimate_median,
    estimate_ratio,
    group_by,
    median,
    pair_up,
    percentile,
)

SAMPLES = [
    {"way": "ours", "prompt": prompt, "repeat": repeat, "seconds": seconds}
    for prompt, repeat, seconds in ((0, 0, 1.0), (1, 0, 10.0), (0, 1, 2.0))
] + [
    {"way": "theirs", "prompt": prompt, "repeat": repeat, "seconds": seconds}
    for prompt, repeat, seconds in ((1, 0, 30.0), (0, 1, 4.0), (0, 0, 4.0))
]
OURS, THEIRS = {"way": "ours"}, {"way": "theirs"}


def test_percentile_is_interpolated():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
    assert percentile([10.0, 20.0, 30.0], 95) == pytest.approx(29.0)
    assert (percentile([1.0, 5.0], 0), percentile([1.0, 5.0], 100)) == (1.0, 5.0)


def test_no_samples_are_refused():
    with pytest.raises(AssertionError, match="no samples"):
        median([])


def test_one_sample_has_an_interval_of_length_zero():
    estimate = estimate_median([3.0])
    assert (estimate.value, estimate.low, estimate.high) == (3.0, 3.0, 3.0)


def test_interval_of_two_samples_reaches_both():
    """A quarter, a quarter and a half of the draws: 95 of 100 reach from one to the other."""
    estimate = estimate_median([1.0, 3.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 1.0, 3.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_interval_contains_the_median_and_is_deterministic(values):
    estimate = estimate_median(values)
    assert min(values) <= estimate.low <= estimate.value <= estimate.high <= max(values)
    assert estimate == estimate_median(values)


def test_more_samples_narrow_the_interval():
    few, many = estimate_median([1.0, 2.0, 3.0]), estimate_median([1.0, 2.0, 3.0] * 40)
    assert (few.low, few.high) == (1.0, 3.0)
    assert (many.low, many.high) == (2.0, 2.0)


def test_ratio_is_that_of_pairs_and_not_of_means():
    """Half of the time each, and a slow prompt that both meet: the means would say 0.34."""
    above, below = pair_up(SAMPLES, "seconds", ("prompt", "repeat"), OURS, THEIRS)
    assert (above, below) == ([1.0, 10.0, 2.0], [4.0, 30.0, 4.0])
    estimate = estimate_ratio(above, below)
    assert (estimate.value, estimate.low, estimate.high) == (pytest.approx(1 / 3), 0.25, 0.5)


def test_missing_side_of_a_pair_is_refused():
    with pytest.raises(KeyError, match="no pair"):
        pair_up(SAMPLES[:-1], "seconds", ("prompt", "repeat"), OURS, THEIRS)
    with pytest.raises(AssertionError, match="the same prompt"):
        pair_up(SAMPLES, "seconds", ("prompt",), OURS, THEIRS)


def test_samples_are_chosen_by_all_wanted_values():
    assert choose(SAMPLES, way="ours", repeat=1) == [SAMPLES[2]]
    assert choose(SAMPLES, way="nobody's") == [] == choose(SAMPLES, other=None, way="nobody's")


def test_groups_are_in_the_order_of_their_first_samples():
    samples = [{"k": 7, "way": "b"}, {"k": 0, "way": "a"}, {"k": 7, "way": "a"}]
    assert group_by(samples, "k") == {(7,): [samples[0], samples[2]], (0,): [samples[1]]}
    assert list(group_by(samples, "k", "way")) == [(7, "b"), (0, "a"), (7, "a")]
