"""The speculation controller: how many drafted tokens (K) the next round verifies. No JAX and no clock."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from typing import Literal, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.model_config.speculative_config import KRanges
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.executables.required_executables import RoundShape

PRIOR = 0.8  # of an engine without requests so far: optimistic, so that drafting is tried
WINDOW = 32  # rounds after which an outcome weighs 1/e of a new one
LEAST_WEIGHT = 4.0  # outcomes that the past weighs at least, however old: a few new ones overturn it

Why = Literal["worth", "trial", "request", "room", "loading"]


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

    def note_outcomes(self, k: int, outcomes: Sequence[tuple[AcceptanceEstimate, int]]) -> None:
        """Of rounds with the same K: the request's estimate, and how many of `k` drafted tokens were accepted."""

    def note_round_time(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        """A round that ran back to back with the previous one took `seconds`. resumed: see `RoundPlan.resumes`."""

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
        return find_bucket(buckets, max([self._k if one.requested_k is None else one.requested_k for one in members]))


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
    for bucket in reversed(buckets):
        if bucket.k <= k:
            return bucket
    raise AssertionError("every list of buckets begins with K = 0")
