"""Acceptance estimate: how often drafted tokens of a request were accepted lately."""

from itertools import accumulate
from operator import mul

PRIOR = 0.8  # of an engine without requests so far: optimistic, so that drafting is tried
WINDOW = 32  # rounds after which an outcome weighs 1/e of a new one
PRIOR_WEIGHT = 4.0  # outcomes that the past weighs at least, however old: a few new ones overturn it


class AcceptanceEstimate:
    """Running acceptance of one request, or of all.

    A position of the block has its own rate, the share of accepted tokens given that all before them were accepted. It
    starts from, and returns to, `rate`, that of all positions: so a position that was not verified lately is expected
    to do as well as the others.

    Attributes:
        rate: how often a drafted token is accepted, given that all before it were.
        is_new: no round was chosen for the request yet.
    """

    def __init__(self, rate: float = PRIOR, window: float = WINDOW):
        """rate: what is expected before the first outcome. window: rounds that the estimate averages over."""
        self.rate, self.is_new = rate, True
        self._keep, self._weight = 1 - 1 / window, PRIOR_WEIGHT
        self._verified: list[float] = []  # by position: outcomes, and how many of them accepted; older ones weigh less
        self._accepted: list[float] = []
        self._tokens: list[float] = []

    def update(self, k: int, accepted: int) -> None:
        """One round: `accepted` of `k` drafted tokens were accepted. With every round, older outcomes weigh less."""
        keep, outcomes = self._keep, min(accepted + 1, k)
        self._weight = max(self._weight * keep, PRIOR_WEIGHT)
        self.rate = (self.rate * self._weight + min(accepted, k)) / (self._weight + outcomes)
        self._weight += outcomes
        missing = [0.0] * (k - len(self._verified))
        self._verified = [one * keep for one in self._verified] + missing
        self._accepted = [one * keep for one in self._accepted] + missing
        for position in range(outcomes):
            self._verified[position] += 1.0
            self._accepted[position] += position < accepted
        self._tokens = []

    def expected_tokens(self, k: int) -> list[float]:
        """Tokens that a round is expected to commit, for each K from 0 to at least `k`: 1 + Σ_i Π_{j≤i} rate_j."""
        if len(self._tokens) <= k:
            prior, rate = PRIOR_WEIGHT * self.rate, self.rate
            pairs = zip(self._accepted, self._verified, strict=True)
            rates = [(accepted + prior) / (verified + PRIOR_WEIGHT) for accepted, verified in pairs]
            rates += [rate] * (k - len(rates))
            self._tokens = [*accumulate(accumulate(rates, mul), initial=1.0)]
        return self._tokens
