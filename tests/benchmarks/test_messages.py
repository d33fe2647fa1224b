"""Prompts dealt to callers, and arrival times."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.benchmarks.messages import deal, draw_arrivals, gather


@given(st.lists(st.integers(), min_size=1, max_size=30), st.integers(1, 9))
def test_gather_undoes_deal(prompts, callers):
    dealt = deal(prompts, callers)
    assert len(dealt) == callers and max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert gather(dealt) == prompts


def test_arrivals_are_a_poisson_process():
    due = draw_arrivals(4000, 5.0, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *due])]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    # Exponential gaps: a share of 1/e is above the mean, and the standard deviation equals the mean.
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert draw_arrivals(9, 2.0, seed=1) == draw_arrivals(9, 2.0, seed=1) != draw_arrivals(9, 2.0, seed=2)
