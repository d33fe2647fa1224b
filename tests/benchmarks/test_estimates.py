"""Figures from samples, in numbers that one can check by eye."""

import pytest

from dflash_aot.benchmarks.tables import (
    choose,
    estimate_median,
    estimate_ratio,
    group_by,
    median,
    pair_up,
    percentile,
)

SAMPLES = [
    {"way": way, "prompt": prompt, "repeat": repeat, "seconds": seconds}
    for way, prompt, repeat, seconds in (
        *(("ours", 0, 0, 1.0), ("ours", 1, 0, 10.0), ("ours", 0, 1, 2.0)),
        *(("theirs", 1, 0, 30.0), ("theirs", 0, 1, 4.0), ("theirs", 0, 0, 4.0)),
    )
]
OURS, THEIRS = {"way": "ours"}, {"way": "theirs"}


def test_percentile_is_interpolated():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
    assert percentile([10.0, 20.0, 30.0], 95) == pytest.approx(29.0)
    with pytest.raises(AssertionError, match="no samples"):
        median([])


@pytest.mark.parametrize(
    ("values", "ends"),
    [([3.0], (3.0, 3.0)), ([1.0, 3.0], (1.0, 3.0)), ([1.0, 2.0, 3.0], (1.0, 3.0)), ([1.0, 2.0, 3.0] * 40, (2.0, 2.0))],
)
def test_interval_is_that_of_95_percent_of_the_draws(values, ends):
    """Of two samples a quarter, a quarter and a half of the draws: 95 of 100 reach from one to the other."""
    estimate = estimate_median(values)
    assert estimate == estimate_median(values)
    assert (estimate.value, (estimate.low, estimate.high)) == (median(values), ends)


def test_ratio_is_that_of_pairs_and_not_of_means():
    """Half of the time each, and a slow prompt that both meet: the means would say 0.34."""
    above, below = pair_up(SAMPLES, "seconds", ("prompt", "repeat"), OURS, THEIRS)
    assert (above, below) == ([1.0, 10.0, 2.0], [4.0, 30.0, 4.0])
    estimate = estimate_ratio(above, below)
    assert (estimate.value, estimate.low, estimate.high) == (pytest.approx(1 / 3), 0.25, 0.5)
    with pytest.raises(KeyError, match="no pair"):
        pair_up(SAMPLES[:-1], "seconds", ("prompt", "repeat"), OURS, THEIRS)
    with pytest.raises(AssertionError, match="the same prompt"):
        pair_up(SAMPLES, "seconds", ("prompt",), OURS, THEIRS)


def test_samples_are_chosen_and_grouped():
    assert choose(SAMPLES, way="ours", repeat=1) == [SAMPLES[2]]
    assert choose(SAMPLES, way="nobody's") == [] == choose(SAMPLES, other=None, way="nobody's")
    groups = group_by(SAMPLES, "repeat", "way")
    assert list(groups) == [(0, "ours"), (1, "ours"), (0, "theirs"), (1, "theirs")]
    assert groups[1, "ours"] == [SAMPLES[2]]
