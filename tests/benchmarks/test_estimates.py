"""Figures from samples, in numbers that one can check by eye."""

import pytest

from dflash_aot.benchmarks.tables import estimate_interval, format_ratio, pair_up

SAMPLES = [
    {"way": way, "prompt": prompt, "repeat": repeat, "seconds": seconds}
    for way, prompt, repeat, seconds in (
        *(("ours", 0, 0, 1.0), ("ours", 1, 0, 10.0), ("ours", 0, 1, 2.0)),
        *(("theirs", 1, 0, 30.0), ("theirs", 0, 1, 4.0), ("theirs", 0, 0, 4.0)),
    )
]
OURS, THEIRS = {"way": "ours"}, {"way": "theirs"}


@pytest.mark.parametrize(
    ("values", "ends"),
    [([3.0], (3.0, 3.0)), ([1.0, 3.0], (1.0, 3.0)), ([1.0, 2.0, 3.0], (1.0, 3.0)), ([1.0, 2.0, 3.0] * 40, (2.0, 2.0))],
)
def test_interval_is_that_of_95_percent_of_the_draws(values, ends):
    """Of two samples a quarter, a quarter and a half of the draws: 95 of 100 reach from one to the other."""
    assert estimate_interval(values) == estimate_interval(values) == ends


def test_ratio_is_that_of_pairs_and_not_of_means():
    """Half of the time each, and a slow prompt that both meet: the means would say 0.34."""
    above, below = pair_up(SAMPLES, "seconds", ("prompt", "repeat"), OURS, THEIRS)
    assert (above, below) == ([1.0, 10.0, 2.0], [4.0, 30.0, 4.0])
    assert format_ratio(SAMPLES, "seconds", ("prompt", "repeat"), OURS, THEIRS) == "0.333 (0.250-0.500)"
    with pytest.raises(KeyError, match="no pair"):
        pair_up(SAMPLES[:-1], "seconds", ("prompt", "repeat"), OURS, THEIRS)
