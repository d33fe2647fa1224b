"""Prompts in lists and at times, and what an answer says of its time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.benchmarks.traffic import Answer, deal, draw_arrivals, gather


@given(st.lists(st.integers(), min_size=1, max_size=30), st.integers(1, 9))
def test_answers_come_back_in_the_prompts_order(prompts, callers):
    dealt = deal(prompts, callers)
    assert len(dealt) == callers and max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert gather(dealt) == prompts


def test_time_per_token_leaves_the_first_one_out():
    answer = Answer([5, 6, 7], [1.0, 1.5, 2.0])
    assert (answer.first_seconds, answer.seconds, answer.seconds_per_token) == (1.0, 2.0, 0.5)


def test_arrivals_are_those_of_a_poisson_process():
    due = draw_arrivals(4000, 5.0, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *due])]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    # Of independent callers, who know nothing of each other: the share behind the mean is 1/e, the deviation the mean.
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def test_arrivals_are_the_same_for_the_same_seed_alone():
    assert draw_arrivals(9, 2.0, seed=1) == draw_arrivals(9, 2.0, seed=1) != draw_arrivals(9, 2.0, seed=2)
