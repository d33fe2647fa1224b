"""The acceptance estimate, by hand and against a slow computation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.runtime.speculation.acceptance_estimate import PRIOR, PRIOR_WEIGHT, AcceptanceEstimate

outcomes = st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


def expect_slowly(verdicts: list[tuple[int, int]], rate: float, window: float, k: int) -> list[float]:
    """The slow computation: the weight of an outcome is a power of its age."""
    keep, weight = 1 - 1 / window, PRIOR_WEIGHT
    for drafted, accepted in verdicts:
        weight, seen = max(weight * keep, PRIOR_WEIGHT), min(accepted + 1, drafted)
        rate, weight = (rate * weight + accepted) / (weight + seen), weight + seen
    tokens, all_before = [1.0], 1.0
    for position in range(k):
        found = [
            (keep**age, position < accepted)
            for age, (drafted, accepted) in enumerate(reversed(verdicts))
            if position < min(accepted + 1, drafted)
        ]
        stood = sum(weight for weight, stands in found if stands) + PRIOR_WEIGHT * rate
        all_before *= stood / (sum(weight for weight, _ in found) + PRIOR_WEIGHT)
        tokens.append(tokens[-1] + all_before)
    return tokens


def test_new_request_expects_the_optimistic_prior():
    assert AcceptanceEstimate().expected_tokens(2) == pytest.approx([1, 1 + PRIOR, 1 + PRIOR + PRIOR**2])


def test_one_outcome_by_hand():
    """One of three drafted tokens accepted: two outcomes for the rate of all, one each for the first two positions."""
    acceptance = AcceptanceEstimate(0.5)
    acceptance.update(3, 1)
    rate = (0.5 * PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 2)
    first, second = ((PRIOR_WEIGHT * rate + accepted) / (PRIOR_WEIGHT + 1) for accepted in (1, 0))
    assert acceptance.rate == rate
    assert acceptance.expected_tokens(3)[:4] == pytest.approx(
        [1, 1 + first, 1 + first + first * second, 1 + first + first * second * (1 + rate)]
    )


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
    assert acceptance.rate - before == pytest.approx((1 - before) / (PRIOR_WEIGHT + 1))


def test_position_that_was_not_verified_lately_follows_the_others():
    """K = 3 failed at its third position long ago; since then K = 1 is always accepted."""
    acceptance = AcceptanceEstimate()
    for _ in range(20):
        acceptance.update(3, 2)
    assert acceptance.expected_tokens(3)[3] < 3.3
    for _ in range(300):
        acceptance.update(1, 1)
    assert acceptance.expected_tokens(3)[3] > 3.9


@given(st.lists(outcomes, max_size=60), st.floats(0, 1))
def test_estimate_equals_the_slow_computation(verdicts, rate):
    acceptance = AcceptanceEstimate(rate, window=8)
    for verdict in verdicts:
        acceptance.update(*verdict)
    assert acceptance.expected_tokens(5)[:6] == pytest.approx(expect_slowly(verdicts, rate, 8, 5))
    assert acceptance.expected_tokens(7)[7] <= 8 + 1e-9


def test_estimate_converges_to_the_true_rates():
    rng, acceptance, found = random.Random(1), AcceptanceEstimate(), []
    for _ in range(2000):
        first, second = rng.random() < 0.7, rng.random() < 0.5
        acceptance.update(2, first + (first and second))
        found.append(acceptance.expected_tokens(2)[:3])
    means = [sum(column) / len(found) for column in zip(*found, strict=True)]
    assert means == pytest.approx([1, 1.7, 2.05], abs=0.05)
