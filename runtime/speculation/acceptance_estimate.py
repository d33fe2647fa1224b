"""How well drafted tokens stand at each position of the block, as it was lately."""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

PRIOR = 0.8  # optimistic: what was never tried is tried
WINDOW = 32  # rounds after which a verdict counts for 1/e of a new one
LEAST = 2.0  # new verdicts that the past weighs at least, however long ago: one verdict alone says little
LARGEST = 1e30


@dataclass(eq=False)
class AcceptanceEstimate:
    """Running acceptance per position of one request (or of all).

    `shares[i]`: given that all drafted tokens before it stood, how often the one at position i does. Verdicts lose
    weight with the rounds that pass, with K = 0 too: a position that was not verified for long keeps its share, and
    a few new verdicts overturn it. `rounds` counts those with K > 0.
    """

    shares: list[float] = field(default_factory=list)
    window: float = WINDOW
    rounds: int = 0
    _weights: list[float] = field(default_factory=list)
    _now: float = 1.0  # the weight of a new verdict: that it grows is how older ones lose theirs

    def __post_init__(self) -> None:
        self._growth = 1.0 + 1.0 / self.window
        self._weights = [0.0] * len(self.shares)

    def note(self, k: int, accepted: int) -> None:
        """One round: `accepted` of `k` drafted tokens stood."""
        self._now = now = self._now * self._growth
        if not k:
            return
        self.rounds += 1
        self._widen(k)
        shares, weights, least = self.shares, self._weights, LEAST * now
        for position in range(min(accepted + 1, k)):
            before = weights[position]
            weights[position] = total = now + (before if before > least else least)
            stood = 1.0 if position < accepted else 0.0
            shares[position] += (stood - shares[position]) * now / total
        if now > LARGEST:
            self._rescale()

    def expected_tokens(self, k: int) -> list[float]:
        """Tokens that a round is expected to commit, 1 … K+1, for each K up to `k`: 1 + Σ_i Π_{j≤i} shares[j]."""
        self._widen(k)
        return [*accumulate(accumulate(self.shares, mul), initial=1.0)]

    def _widen(self, k: int) -> None:
        missing = k - len(self.shares)
        if missing > 0:
            self.shares += [PRIOR] * missing
            self._weights += [0.0] * missing

    def _rescale(self) -> None:
        self._weights = [weight / self._now for weight in self._weights]
        self._now = 1.0
