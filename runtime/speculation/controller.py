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
# Weight that an outcome keeps after another round; weight of the expected rate, in drafted tokens.
OF_ALL, OF_REQUEST, RECENT = (0.98, 6.0), (0.99, 24.0), (0.9, 6.0)

Why = Literal["worth", "trial", "request", "room", "loading"]


class AcceptanceEstimate:
    """Running acceptance of all requests, of a request, or of a request's latest rounds. Older outcomes weigh less.

    With few outcomes the rate is near an expected rate. For a request's latest rounds that is the request's rate, for a
    request the rate of all requests. So requests that start together learn from each other. Separate rates for each
    position chose no better K.
    """

    def __init__(self, expected: "AcceptanceEstimate | None" = None, ages: tuple[float, float] = OF_ALL):
        """expected: the estimate that gives the expected rate and is updated too; None for PRIOR.

        ages: OF_ALL, OF_REQUEST or RECENT.
        """
        self._expected, (self._keep, self._weight) = expected, ages
        self._verified = self._accepted = 0.0  # drafted tokens with a known outcome, weighted by age

    @property
    def rate(self) -> float:
        """How often a drafted token is accepted if all drafted tokens before it were accepted."""
        expected = self._expected.rate if self._expected else PRIOR
        return (expected * self._weight + self._accepted) / (self._weight + self._verified)

    def update(self, k: int, accepted: int) -> None:
        """Adds a round that accepted `accepted` of `k` drafted tokens. Tokens after the first refused do not count."""
        self._accepted = self._accepted * self._keep + accepted
        self._verified = self._verified * self._keep + min(accepted + 1, k)
        if k and self._expected:
            self._expected.update(k, accepted)

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
        where there is no room for it, the next smaller K.
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
