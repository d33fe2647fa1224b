"""Figures from samples, in numbers that one can check by eye."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.benchmarks.estimates import choose, estimate_median, estimate_ratio, median, pair_up, percentile

SAMPLES = [
    {"way": "ours", "prompt": prompt, "repeat": repeat, "seconds": seconds}
    for prompt, repeat, seconds in ((0, 0, 1.0), (1, 0, 10.0), (0, 1, 2.0))
] + [
    {"way": "theirs", "prompt": prompt, "repeat": repeat, "seconds": seconds}
    for prompt, repeat, seconds in ((1, 0, 30.0), (0, 1, 4.0), (0, 0, 4.0))
]
OURS, THEIRS = {"way": "ours"}, {"way": "theirs"}


def test_a_percentile_lies_between_two_samples():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
    assert percentile([10.0, 20.0, 30.0], 95) == pytest.approx(29.0)
    assert (percentile([1.0, 5.0], 0), percentile([1.0, 5.0], 100)) == (1.0, 5.0)


def test_a_figure_of_nothing_is_refused():
    with pytest.raises(AssertionError, match="no samples"):
        median([])


def test_one_sample_has_no_range():
    estimate = estimate_median([3.0])
    assert (estimate.value, estimate.low, estimate.high) == (3.0, 3.0, 3.0)


def test_of_two_samples_draws_are_one_the_other_or_their_middle():
    """A quarter, a quarter and a half of the draws: 95 of 100 reach from one to the other."""
    estimate = estimate_median([1.0, 3.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 1.0, 3.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_a_range_holds_its_median_and_is_always_the_same(values):
    estimate = estimate_median(values)
    assert min(values) <= estimate.low <= estimate.value <= estimate.high <= max(values)
    assert estimate == estimate_median(values)


def test_more_samples_narrow_a_range():
    few, many = estimate_median([1.0, 2.0, 3.0]), estimate_median([1.0, 2.0, 3.0] * 40)
    assert (few.low, few.high) == (1.0, 3.0)
    assert (many.low, many.high) == (2.0, 2.0)


def test_a_ratio_is_that_of_pairs_and_not_of_means():
    """Half of the time each, and a slow prompt that both meet: the means would say 0.34."""
    above, below = pair_up(SAMPLES, "seconds", ("prompt", "repeat"), OURS, THEIRS)
    assert (above, below) == ([1.0, 10.0, 2.0], [4.0, 30.0, 4.0])
    estimate = estimate_ratio(above, below)
    assert (estimate.value, estimate.low, estimate.high) == (pytest.approx(1 / 3), 0.25, 0.5)


def test_a_comparison_of_other_work_is_refused():
    with pytest.raises(KeyError, match="no pair"):
        pair_up(SAMPLES[:-1], "seconds", ("prompt", "repeat"), OURS, THEIRS)
    with pytest.raises(AssertionError, match="the same prompt"):
        pair_up(SAMPLES, "seconds", ("prompt",), OURS, THEIRS)


def test_samples_are_chosen_by_all_that_is_wanted():
    assert choose(SAMPLES, way="ours", repeat=1) == [SAMPLES[2]]
    assert choose(SAMPLES, way="nobody's") == [] == choose(SAMPLES, other=None, way="nobody's")
