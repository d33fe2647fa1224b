"""The cost model follows served rounds, by hand and against known truths."""

import pytest

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.speculation.controller import BURST_SECONDS, CostModel

PLAIN, DEEP = (Bucket(1, 64, 0), "greedy"), (Bucket(1, 64, 7), "greedy")


def test_one_served_round_by_hand():
    """Half of the log ratio goes to the shape's own factor, a sixteenth to the speed that all shapes share."""
    times = CostModel({PLAIN: 1.0, DEEP: 3.0})
    times.note_served(PLAIN, 1.5)
    assert times[PLAIN] == pytest.approx(1.5 ** (1 / 2 + 1 / 16))
    assert times[DEEP] == pytest.approx(3.0 * 1.5 ** (1 / 16))


@pytest.mark.parametrize("seconds", [1e-6, 1e3])
def test_single_outlier_changes_little(seconds):
    times = CostModel({PLAIN: 1.0})
    for _ in range(100):
        times.note_served(PLAIN, 1.0)
    times.note_served(PLAIN, seconds)
    assert times[PLAIN] == pytest.approx(1.0, rel=0.06)


def test_resuming_rounds_change_the_time_of_resuming_only():
    times = CostModel({PLAIN: 1.0, DEEP: 3.0})
    times.note_served(DEEP, 3.8, resumed=True)
    assert times.resume == {1: pytest.approx(0.8)}
    times.note_served(DEEP, 99.0, resumed=True)
    assert times.resume == {1: pytest.approx(3.0)}, "at most a round's own time"
    assert (times[PLAIN], times[DEEP]) == pytest.approx((1.0, 3.0))
    times.note_served(DEEP, 2.0, resumed=True)  # shorter than a round that resumes nothing: that time was wrong
    assert times[DEEP] < 3.0


def test_burst_holds_the_rounds_that_fit():
    times = CostModel()
    assert times.count_burst_rounds(PLAIN) == 1, "no time is known yet"
    times.note_served(PLAIN, 0.19 * BURST_SECONDS)
    assert (times.count_burst_rounds(PLAIN), times.count_burst_rounds(DEEP)) == (5, 1)
    for _ in range(40):
        times.note_served(PLAIN, 4 * BURST_SECONDS)
    assert times.count_burst_rounds(PLAIN) == 1


# -- estimates

SHORT, LONG_ONE = (Bucket(1, 64, 7), "greedy"), (Bucket(1, 256, 7), "greedy")
FOUR = (Bucket(4, 64, 7), "greedy")
ESTIMATES = {PLAIN: 10.0, SHORT: 20.0, LONG_ONE: 30.0, FOUR: 60.0}


def test_estimates_scale_with_the_measured_shapes():
    """By the mean of their logarithms: 1 : 10 and 2 : 20 agree, 24 : 60 does not."""
    times = CostModel({}, ESTIMATES)
    assert [times[kind] for kind in ESTIMATES] == pytest.approx([10.0, 20.0, 30.0, 60.0])
    times.set_measured(SHORT, 2.0)
    times.set_measured(PLAIN, 1.0)
    assert [times[kind] for kind in ESTIMATES] == pytest.approx([1.0, 2.0, 3.0, 6.0])
    times.set_measured(FOUR, 24.0)
    assert [times[kind] for kind in ESTIMATES] == pytest.approx([1.0, 2.0, 3.0 * 4 ** (1 / 3), 24.0])


def test_first_served_round_measures_an_estimated_shape():
    times = CostModel({}, ESTIMATES)
    assert not times.is_measured(SHORT)
    times.note_served(SHORT, 2.0)
    assert times[SHORT] == pytest.approx(2.0) and times.is_measured(SHORT)
    times.note_served(SHORT, 3.0)
    assert times[SHORT] == pytest.approx(2.0 * 1.5 ** (1 / 2 + 1 / 16))
