"""The acceptance estimate, by hand and against a slow computation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.runtime.speculation.controller import (
    OF_ALL,
    OF_REQUEST,
    PRIOR,
    RECENT,
    SLOPE_CENTRE,
    AcceptanceEstimate,
    PositionSlope,
)

KEEP, PRIOR_WEIGHT = OF_ALL
outcomes = st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


def test_one_outcome_by_hand():
    """One of three drafted tokens accepted: the first one was, the second one was not, the third one tells nothing."""
    acceptance = AcceptanceEstimate()
    acceptance.update(3, 1)
    rate = (PRIOR * PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 2)
    assert acceptance.rate == rate
    assert acceptance.expected_tokens(2) == pytest.approx([1, 1 + rate, 1 + rate + rate**2])


def test_requests_without_outcomes_expect_what_all_others_show():
    of_all = AcceptanceEstimate()
    seen, new = AcceptanceEstimate(of_all), AcceptanceEstimate(of_all)
    for _ in range(200):
        seen.update(1, 0)
    assert seen.rate < new.rate == of_all.rate < 0.1


def test_rounds_without_drafts_return_to_the_common_rate():
    """They tell nothing about the other requests."""
    of_all = AcceptanceEstimate()
    acceptance = AcceptanceEstimate(of_all)
    for _ in range(20):
        acceptance.update(3, 3)
    easy = of_all.rate
    for _ in range(100):
        AcceptanceEstimate(of_all).update(3, 0)
    hard = of_all.rate
    assert acceptance.rate > 0.9 * easy > 2 * hard
    for _ in range(1000):
        acceptance.update(0, 0)
    assert acceptance.rate == pytest.approx(hard) and of_all.rate == hard


def test_latest_rounds_fall_back_to_what_their_request_showed():
    """A long request that was easy is expected to become easy again after a few hard rounds; a hard one is not."""
    of_all = AcceptanceEstimate()
    requests = [AcceptanceEstimate(AcceptanceEstimate(of_all, OF_REQUEST), RECENT) for _ in range(2)]
    for _ in range(60):
        for request, accepted in zip(requests, (3, 0), strict=True):
            request.update(3, accepted)
    for _ in range(4):
        requests[0].update(3, 0)
    after_hard_rounds = requests[0].rate
    for _ in range(60):
        for request in requests:
            request.update(0, 0)
    easy, hard = (request.rate for request in requests)
    assert after_hard_rounds < 0.9 < easy and hard < 0.3 < of_all.rate


def test_positions_of_all_requests_share_a_slope():
    """Seven tokens or none are accepted: of 4 verified tokens 3.5, of those at position 0 half, later all."""
    slope = PositionSlope()
    for number in range(400):
        slope.update(0.875, 7, 7 * (number % 2))
    rates = slope.rates(0.875, 7)
    assert rates[SLOPE_CENTRE] == pytest.approx(0.875) and rates == sorted(rates) and rates[0] < 0.8
    assert slope.rates(1.0, 2) == [1.0, 1.0] and slope.rates(0.0, 2) == [0.0, 0.0]


@given(st.lists(outcomes, max_size=60))
def test_rate_is_the_weighted_share_of_accepted_tokens(verdicts):
    """The weight of an outcome is a power of its age in rounds."""
    acceptance, weight, accepted = AcceptanceEstimate(), PRIOR_WEIGHT, PRIOR * PRIOR_WEIGHT
    for verdict in verdicts:
        acceptance.update(*verdict)
    for age, (k, one) in enumerate(reversed(verdicts)):
        weight += KEEP**age * min(one + 1, k)
        accepted += KEEP**age * one
    assert acceptance.rate == pytest.approx(accepted / weight)
    assert acceptance.expected_tokens(7)[7] <= 8 + 1e-9
