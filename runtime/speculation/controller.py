"""The speculation controller: how many drafted tokens (K) the next round verifies. No JAX and no clock."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.model_config.speculative_config import KRanges
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.executables.required_executables import RoundShape
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate

Why = Literal["worth", "trial", "request", "room", "loading"]


class RoundMember(Protocol):
    """A request of the next round. requested_k: its own K, None where the controller chooses."""

    @property
    def acceptance(self) -> AcceptanceEstimate: ...

    @property
    def requested_k(self) -> int | None: ...


@dataclass(frozen=True)
class Decision:
    """One change of K.

    round: the round it was made for, counted from 1.
    batch, length: of the round's bucket.
    before, after: K; `before` is None for the first decision.
    why: "worth": fewest expected seconds per token. "trial": a round to see what another K is worth.
        "request": a request's own K. "room": the K before needs more positions or kv pages than there are.
        "loading": a better K is not loaded yet.
    seconds: expected seconds per token of the batch, for each K that there was room for; empty where every request had
        its own K.
    """

    round: int
    batch: int
    length: int
    before: int | None
    after: int
    why: Why
    seconds: Mapping[int, float]


class SpeculationController:
    """Chooses the bucket, and so the K, of every round."""

    def start_request(self) -> AcceptanceEstimate:
        """The acceptance estimate that a new request starts with."""
        return AcceptanceEstimate()

    def note_outcome(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        """In one round of one request, `accepted` of `k` drafted tokens were accepted."""

    def note_round_time(self, shape: RoundShape, seconds: float) -> None:
        """A round that ran back to back with the previous one took `seconds`."""

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        """One of `buckets`, which ascend by K and hold the next round of `members`.

        All requests of a round share its K: the largest of their own Ks and of the controller's choice for the rest;
        where there is no room for it, the next smaller one.
        """
        raise NotImplementedError

    def repeat_choice(self, rounds: int) -> None:
        """The last choice runs for so many rounds more before the next one."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The latest changes of K, newest last."""
        return ()


class FixedK(SpeculationController):
    """The same K for every request without its own."""

    def __init__(self, k: int):
        self._k = k

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        return find_bucket(buckets, max(self._k if one.requested_k is None else one.requested_k for one in members))


class KByBatchSize(SpeculationController):
    """K by the number of requests in the round, for every request without its own K."""

    def __init__(self, ranges: KRanges):
        """ranges: see `check_k_ranges`."""
        self._ends, self._choices = [last for _, last, _ in ranges], [FixedK(k) for *_, k in ranges]

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        choice = self._choices[min(bisect_left(self._ends, len(members)), len(self._choices) - 1)]
        return choice.choose_bucket(buckets, members, mode)


def find_bucket(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)
