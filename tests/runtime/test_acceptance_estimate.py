"""The acceptance estimate, by hand and against a slow computation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.runtime.speculation.controller import LEAST_WEIGHT, PRIOR, AcceptanceEstimate

outcomes = st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


def test_new_request_expects_the_optimistic_prior():
    assert AcceptanceEstimate().expected_tokens(2) == pytest.approx([1, 1 + PRIOR, 1 + PRIOR + PRIOR**2])


def test_one_outcome_by_hand():
    """One of three drafted tokens accepted: the first one was, the second one was not, the third one tells nothing."""
    acceptance = AcceptanceEstimate(0.5)
    acceptance.update(3, 1)
    rate = (0.5 * LEAST_WEIGHT + 1) / (LEAST_WEIGHT + 2)
    assert acceptance.rate == rate
    assert acceptance.expected_tokens(2) == pytest.approx([1, 1 + rate, 1 + rate + rate**2])


def test_rounds_without_drafts_change_no_rate():
    acceptance = AcceptanceEstimate(0.25)
    for _ in range(1000):
        acceptance.update(0, 0)
    assert acceptance.rate == pytest.approx(0.25)
    assert acceptance.expected_tokens(1)[1] == pytest.approx(1.25)


def test_old_outcomes_are_overturned_sooner():
    acceptance = AcceptanceEstimate(0.5)
    for _ in range(100):
        acceptance.update(1, 0)
    before = acceptance.rate
    acceptance.update(1, 1)
    assert acceptance.rate - before < 0.05
    for _ in range(200):
        acceptance.update(0, 0)
    before = acceptance.rate
    acceptance.update(1, 1)
    assert acceptance.rate - before == pytest.approx((1 - before) / (LEAST_WEIGHT + 1))


@given(st.lists(outcomes.filter(lambda one: one[0] > 0), max_size=60), st.floats(0, 1))
def test_rate_is_the_weighted_share_of_accepted_tokens(verdicts, rate):
    """Where no outcome is so old that the least weight counts: the weight of an outcome is a power of its age."""
    acceptance, keep = AcceptanceEstimate(rate, window=1e9), 1 - 1e-9
    for verdict in verdicts:
        acceptance.update(*verdict)
    weight, accepted = LEAST_WEIGHT * keep ** len(verdicts), rate * LEAST_WEIGHT * keep ** len(verdicts)
    for age, (k, one) in enumerate(reversed(verdicts)):
        weight += keep**age * min(one + 1, k)
        accepted += keep**age * one
    assert acceptance.rate == pytest.approx(accepted / weight)
    assert acceptance.expected_tokens(7)[7] <= 8 + 1e-9


def test_estimate_converges_to_the_true_rate():
    rng, acceptance, found = random.Random(1), AcceptanceEstimate(), []
    for _ in range(2000):
        first, second = rng.random() < 0.7, rng.random() < 0.7
        acceptance.update(2, first + (first and second))
        found.append(acceptance.rate)
    assert sum(found) / len(found) == pytest.approx(0.7, abs=0.02)
