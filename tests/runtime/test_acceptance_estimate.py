"""The acceptance estimate, by hand and against a slow computation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.runtime.speculation.acceptance_estimate import MIN_PAST_WEIGHT, PRIOR, AcceptanceEstimate

rounds = st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


def decay(verdicts: list[tuple[int, int]], start: list[float], window: float) -> list[float]:
    """The slow computation: each round lowers the weight of all older outcomes."""
    shares, weights = [*start], [0.0] * len(start)
    for k, accepted in verdicts:
        weights = [weight / (1 + 1 / window) for weight in weights]
        for position in range(min(accepted + 1, k)):
            before = max(weights[position], MIN_PAST_WEIGHT)
            shares[position] = (shares[position] * before + (position < accepted)) / (before + 1)
            weights[position] = before + 1
    return shares


def test_expected_tokens_by_hand():
    assert AcceptanceEstimate([0.5, 0.5, 0.0]).expected_tokens(3) == [1.0, 1.5, 1.75, 1.75]


def test_unverified_position_has_the_optimistic_prior():
    assert AcceptanceEstimate().expected_tokens(2) == pytest.approx([1, 1 + PRIOR, 1 + PRIOR + PRIOR**2])


def test_outcome_counts_up_to_the_first_rejected_token():
    acceptance = AcceptanceEstimate([0.5, 0.5, 0.5])
    acceptance.update(3, 1)
    step = 0.5 / (MIN_PAST_WEIGHT + 1)
    assert acceptance.rates == pytest.approx([0.5 + step, 0.5 - step, 0.5])
    assert acceptance.rounds == 1


def test_round_without_drafts_changes_no_rate():
    acceptance = AcceptanceEstimate([0.25])
    for _ in range(1000):
        acceptance.update(0, 0)
    assert (acceptance.rates, acceptance.rounds) == ([0.25], 0)


def test_new_outcomes_overturn_an_old_rate():
    acceptance = AcceptanceEstimate([0.5])
    for _ in range(100):
        acceptance.update(1, 0)
    lately, long_ago = acceptance.rates[0], 0.0
    acceptance.update(1, 1)
    just_after = acceptance.rates[0]
    for _ in range(200):
        acceptance.update(0, 0)
    long_ago = acceptance.rates[0]
    acceptance.update(1, 1)
    assert just_after - lately < 0.05
    assert acceptance.rates[0] - long_ago == pytest.approx((1 - long_ago) / (MIN_PAST_WEIGHT + 1))


@given(st.lists(rounds, max_size=60), st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_estimate_equals_the_slow_computation(verdicts, start):
    acceptance = AcceptanceEstimate([*start], window=8)
    for verdict in verdicts:
        acceptance.update(*verdict)
    assert acceptance.rates == pytest.approx(decay(verdicts, start, 8))
    assert all(0 <= share <= 1 for share in acceptance.rates)


def test_estimate_survives_many_rounds():
    """Weights grow by a third per round, so they are rescaled many times."""
    verdicts = [(2, turn % 3) for turn in range(3000)]
    acceptance = AcceptanceEstimate([0.5, 0.5], window=3)
    for verdict in verdicts:
        acceptance.update(*verdict)
    assert acceptance.rates == pytest.approx(decay(verdicts, [0.5, 0.5], 3))


def test_estimate_converges_to_the_true_rates():
    rng, acceptance, found = random.Random(1), AcceptanceEstimate(), []
    for _ in range(2000):
        first, second = rng.random() < 0.7, rng.random() < 0.3
        acceptance.update(2, first + (first and second))
        found.append([*acceptance.rates])
    means = [sum(column) / len(found) for column in zip(*found, strict=True)]
    assert means == pytest.approx([0.7, 0.3], abs=0.05)
