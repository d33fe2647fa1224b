"""Acceptance estimate: how often drafted tokens of a request were accepted lately."""

from itertools import accumulate, repeat
from operator import mul

PRIOR = 0.8  # of an engine without requests so far: optimistic, so that drafting is tried
WINDOW = 32  # rounds after which an outcome weighs 1/e of a new one
LEAST_WEIGHT = 4.0  # outcomes that the past weighs at least, however old: a few new ones overturn it


class AcceptanceEstimate:
    """Running acceptance of one request, or of all. Older outcomes weigh less with every round, drafted or not.

    One rate for all positions: rates of their own chose no better K on recorded texts.

    Attributes:
        rate: how often a drafted token is accepted, given that all before it were.
        is_new: no round was chosen for the request yet.
    """

    def __init__(self, rate: float = PRIOR, window: float = WINDOW):
        """rate: what is expected before the first outcome. window: rounds that the estimate averages over."""
        self.rate, self.is_new = rate, True
        self._keep, self._weight = 1 - 1 / window, LEAST_WEIGHT

    def update(self, k: int, accepted: int) -> None:
        """One round: `accepted` of `k` drafted tokens were accepted."""
        weight, outcomes = max(self._weight * self._keep, LEAST_WEIGHT), min(accepted + 1, k)
        self._weight = weight + outcomes
        self.rate = (self.rate * weight + min(accepted, k)) / self._weight

    def expected_tokens(self, k: int) -> list[float]:
        """Tokens that a round is expected to commit, for each K from 0 to `k`: 1 + Σ_i rate^i."""
        return [*accumulate(accumulate(repeat(self.rate, k), mul), initial=1.0)]
