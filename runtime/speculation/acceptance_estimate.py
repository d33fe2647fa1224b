"""Acceptance estimate: how often drafted tokens were accepted lately, by position in the block."""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

PRIOR = 0.8  # optimistic, so that a position that was never verified is tried
WINDOW = 32  # rounds after which an outcome weighs 1/e of a new one
MIN_PAST_WEIGHT = 2.0  # outcomes that the past weighs at least, however old: a single outcome says little
RESCALE_ABOVE = 1e30


@dataclass(eq=False)
class AcceptanceEstimate:
    """Running acceptance per position, of one request or of all.

    rates: rates[i] is how often the drafted token at position i is accepted, given that all before it were.
    window: rounds that the estimate averages over.
    rounds: rounds with K > 0 so far.

    Outcomes lose weight with every round, also with those of K = 0. A position that was not verified for long keeps
    its rate, and a few new outcomes overturn it.
    """

    rates: list[float] = field(default_factory=list)
    window: float = WINDOW
    rounds: int = 0
    _weights: list[float] = field(default_factory=list)
    _now: float = 1.0  # the weight of a new outcome; it grows, which is how older outcomes lose theirs

    def __post_init__(self) -> None:
        self._growth = 1.0 + 1.0 / self.window
        self._weights = [0.0] * len(self.rates)

    def update(self, k: int, accepted: int) -> None:
        """One round: `accepted` of `k` drafted tokens were accepted."""
        self._now = now = self._now * self._growth
        if not k:
            return
        self.rounds += 1
        self._widen(k)
        rates, weights, least = self.rates, self._weights, MIN_PAST_WEIGHT * now
        for position in range(min(accepted + 1, k)):
            before = weights[position]
            weights[position] = total = now + (before if before > least else least)
            outcome = 1.0 if position < accepted else 0.0
            rates[position] += (outcome - rates[position]) * now / total
        if now > RESCALE_ABOVE:
            self._rescale()

    def expected_tokens(self, k: int) -> list[float]:
        """Tokens that a round is expected to commit, for each K from 0 to at least `k`: 1 + Σ_i Π_{j≤i} rates[j]."""
        self._widen(k)
        return [*accumulate(accumulate(self.rates, mul), initial=1.0)]

    def _widen(self, k: int) -> None:
        missing = k - len(self.rates)
        if missing > 0:
            self.rates += [PRIOR] * missing
            self._weights += [0.0] * missing

    def _rescale(self) -> None:
        self._weights = [weight / self._now for weight in self._weights]
        self._now = 1.0
