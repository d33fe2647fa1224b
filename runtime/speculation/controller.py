"""The speculation controller: how many drafted tokens (K) the next round verifies. No JAX and no clock."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from typing import Literal, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.model_config.speculative_config import KRanges
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.executables.required_executables import RoundShape

PRIOR = 0.75  # acceptance that an engine expects of its first request: drafting is tried at once where it costs little
PRIOR_WEIGHT = 4.0  # drafted tokens that the expectation weighs as much as
KEEP = 0.98  # what an outcome weighs a round later

Why = Literal["worth", "trial", "request", "room", "loading"]


class AcceptanceEstimate:
    """Running acceptance of one request, or of all. Older outcomes weigh less with every round, drafted or not.

    The fewer recent outcomes a request has, the nearer its rate is to that of all requests: those that start together
    learn from one another. One rate for all positions: rates of their own chose no better K on recorded texts.
    """

    def __init__(self, of_all: "AcceptanceEstimate | None" = None):
        """of_all: the estimate over all requests; without it, PRIOR is expected before the first outcome."""
        self._of_all = of_all
        self._verified = self._accepted = 0.0  # drafted tokens with a known outcome, weighted by age

    @property
    def rate(self) -> float:
        """How often a drafted token is accepted, given that all before it were."""
        expected = self._of_all.rate if self._of_all else PRIOR
        return (expected * PRIOR_WEIGHT + self._accepted) / (PRIOR_WEIGHT + self._verified)

    def update(self, k: int, accepted: int) -> None:
        """One round: `accepted` of `k` drafted tokens were accepted. Those behind the first refused tell nothing."""
        self._accepted = self._accepted * KEEP + accepted
        self._verified = self._verified * KEEP + min(accepted + 1, k)
        if k and self._of_all:
            self._of_all.update(k, accepted)

    def expected_tokens(self, k: int) -> list[float]:
        """Tokens that a round is expected to commit, for each K from 0 to `k`: 1 + Σ_i rate^i."""
        return [*accumulate(accumulate(repeat(self.rate, k), mul), initial=1.0)]


class RoundMember(Protocol):
    """A request of the next round, such as a `RunningRequest`. requested_k: None where the controller chooses."""

    @property
    def acceptance(self) -> AcceptanceEstimate: ...
    @property
    def requested_k(self) -> int | None: ...
    @property
    def tokens_outstanding(self) -> int: ...


@dataclass(frozen=True)
class Decision:
    """One change of K.

    round: the round it was made for, counted from 1.
    batch: rows of the round's bucket.
    before, after: K; `before` is None for the first decision.
    why: "worth": fewest expected seconds per token. "trial": a round to see what another K is worth.
        "request": a request's own K. "room": the K before needs more positions or kv pages than there are.
        "loading": a better K is not loaded yet.
    """

    round: int
    batch: int
    before: int | None
    after: int
    why: Why


class SpeculationController:
    """Chooses the bucket, and so the K, of every round."""

    decisions: Sequence[Decision] = ()  # the latest changes of K, newest last

    def start_request(self) -> AcceptanceEstimate:
        """The acceptance estimate of a new request."""
        return AcceptanceEstimate()

    def note_round_time(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        """A round that ran back to back with the previous one took `seconds`. resumed: see `RoundPlan.resumes`."""

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        """One of `buckets`, which ascend by K and hold the next round of `members`.

        All requests of a round share its K: the largest of their own Ks and of the controller's choice for the rest;
        where there is no room for it, the next smaller one.
        """
        raise NotImplementedError

    def note_dispatch(self, rounds: int) -> None:
        """The bucket that was chosen last is dispatched, for so many rounds. Until then it may be chosen anew."""


class KByBatchSize(SpeculationController):
    """K by the number of requests in the round (see `check_k_ranges`), for every request without its own K."""

    def __init__(self, ranges: KRanges):
        self._ends, self._ks = [last for _, last, _ in ranges], [k for *_, k in ranges]

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        k = self._ks[min(bisect_left(self._ends, len(members)), len(self._ks) - 1)]
        return find_bucket(buckets, max([k if one.requested_k is None else one.requested_k for one in members]))


class FixedK(KByBatchSize):
    """The same K for every request without its own."""

    def __init__(self, k: int):
        super().__init__(((1, 1, k),))


def find_bucket(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)
