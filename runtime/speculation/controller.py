"""The speculation controller: how many drafted tokens (K) the next round verifies. No JAX and no clock."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.model_config.speculative_config import KRanges
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.executables.required_executables import RoundShape
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate
from dflash_aot.runtime.speculation.cost_model import NO_TIMES, CostModel

TRIAL_SHARE = 0.02  # of the time that trials may lose
TRIALS_SAVED = 4  # trials that the time share may have paid for in advance
FIRST_INTERVAL = 4  # rounds from one trial to the next; doubles with each
ENGINE_WINDOW = 64  # drafting rounds that a new request's acceptance estimate starts from
ROUNDS_BEFORE_LOADING = 256  # rounds of an engine before a K is loaded only for a trial
DECISIONS_KEPT = 512

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


class LoadedShapes(Protocol):
    """Tells which round shapes run without loading an executable first."""

    def holds(self, shape: RoundShape) -> bool: ...

    def prepare(self, shape: RoundShape) -> None:
        """Has the executables of a round shape loaded in the background."""


class _AllLoaded:
    """Every executable is loaded."""

    def holds(self, shape: RoundShape) -> bool:
        return True

    def prepare(self, shape: RoundShape) -> None:
        """No-op: every executable is loaded."""


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
        return _find_bucket(buckets, max(self._k if one.requested_k is None else one.requested_k for one in members))


class KByBatchSize(SpeculationController):
    """K by the number of requests in the round, for every request without its own K."""

    def __init__(self, ranges: KRanges):
        """ranges: see `check_k_ranges`."""
        self._ends, self._choices = [last for _, last, _ in ranges], [FixedK(k) for *_, k in ranges]

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        choice = self._choices[min(bisect_left(self._ends, len(members)), len(self._choices) - 1)]
        return choice.choose_bucket(buckets, members, mode)


class AdaptiveK(SpeculationController):
    """Chooses the K with the fewest expected seconds per token: seconds(K) / Σ_requests E(K).

    E is the number of tokens that a request's acceptance estimate expects of a round. While K = 0 is the best, nothing
    is seen of acceptance, and a K that never ran was never timed. So single rounds, the trials, run with another K: at
    once for a new request, then at doubling intervals. They may lose TRIAL_SHARE of the time, their `credit`. A trial
    whose accepted tokens pay for it costs nothing, and the next one follows at once.
    """

    def __init__(
        self,
        times: Mapping[RoundShape, float],
        estimates: Mapping[RoundShape, float] = NO_TIMES,
        loaded: LoadedShapes | None = None,
    ):
        """times: measured seconds of whole rounds; empty if nothing was timed yet. Served rounds correct them.

        estimates: for shapes that were not measured, see `CostModel`. loaded: which shapes are loaded; where the best
        K is not, the best loaded one takes its place meanwhile.
        """
        self.costs = CostModel(times, estimates)
        self._loaded = loaded or _AllLoaded()
        self._engine_acceptance = AcceptanceEstimate(window=ENGINE_WINDOW)
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._round, self._settled_k, self._last_k = 0, -1, -1
        self._credit, self._earned = math.inf, 0.0  # seconds: that trials may lose, and what each round adds
        self._due = self._interval = float(FIRST_INTERVAL)  # rounds
        self._unpaid = self._loss = self._token_seconds = 0.0  # of the last trial

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def start_request(self) -> AcceptanceEstimate:
        return AcceptanceEstimate(self._engine_acceptance.rate)

    def note_outcome(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        acceptance.update(k, accepted)
        if not k:
            return
        self._engine_acceptance.update(k, accepted)
        if self._unpaid > 0:
            self._unpaid -= accepted * self._token_seconds
            if self._unpaid <= 0:
                self._credit += self._loss
                self._schedule_trials(0)

    def note_round_time(self, shape: RoundShape, seconds: float) -> None:
        """As `SpeculationController.note_round_time`. KeyError for a shape without times."""
        self.costs.note_served(shape, seconds)

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        """As `SpeculationController.choose_bucket`. KeyError for a bucket without times."""
        self._round += 1
        requested = max((one.requested_k for one in members if one.requested_k is not None), default=0)
        free = [one.acceptance for one in members if one.requested_k is None]
        if not free:
            return self._decide(_find_bucket(buckets, requested), "request", {})
        self._try_new_requests(free)
        most = buckets[-1].k
        expected = [one.expected_tokens(most) for one in free]
        times = {bucket.k: self.costs[bucket, mode] for bucket in buckets}
        seconds = {k: time / sum(one[k] for one in expected) for k, time in times.items()}
        why = self._settle({bucket.k: (bucket, mode) for bucket in buckets}, seconds)
        if requested > self._settled_k:
            return self._decide(_find_bucket(buckets, requested), "request", seconds)
        rate = seconds[self._settled_k]
        losses = {k: time * (1 - rate / seconds[k]) for k, time in times.items()}
        self._earned = TRIAL_SHARE * times[self._settled_k]
        trial = self._find_trial(buckets, mode, losses)
        if trial is None:
            return self._decide(_find_bucket(buckets, self._settled_k), why, seconds)
        self._unpaid, self._token_seconds = times[trial.k] - times[self._settled_k], rate
        return self._decide(trial, "trial", seconds)

    def repeat_choice(self, rounds: int) -> None:
        self._round += rounds
        self._credit += rounds * self._earned

    # -- the best K

    def _try_new_requests(self, acceptances: Sequence[AcceptanceEstimate]) -> None:
        """A trial is due at once for new requests."""
        if any(one.is_new for one in acceptances):
            self._schedule_trials(0)
            for one in acceptances:
                one.is_new = False

    def _settle(self, shapes: Mapping[int, RoundShape], seconds: Mapping[int, float]) -> Why:
        """Settles on the best K; while that K is not loaded, on the best loaded one, if there is any. Returns why."""
        before = self._settled_k
        best = chosen = min(seconds, key=seconds.__getitem__)
        if not self._loaded.holds(shapes[best]):
            self._loaded.prepare(shapes[best])
            chosen = min(
                filter(lambda k: self._loaded.holds(shapes[k]), seconds), key=seconds.__getitem__, default=best
            )
        self._settled_k = chosen
        if before > chosen:
            self._schedule_trials(FIRST_INTERVAL)
        if before > max(shapes):
            return "room"
        return "worth" if chosen == best else "loading"

    # -- trials

    def _find_trial(self, buckets: Sequence[Bucket], mode: SamplingMode, losses: Mapping[int, float]) -> Bucket | None:
        """The loaded bucket of another K that loses the fewest seconds, if a trial is due and paid for.

        Candidates are larger Ks while K = 0 is the best, and Ks whose time is an estimate.
        """
        self._credit += self._earned
        settled = self._settled_k
        candidates = [
            bucket
            for bucket in buckets
            if bucket.k != settled and (settled == 0 or not self.costs.is_measured((bucket, mode)))
        ]
        if not candidates or self._round < self._due:
            return None
        loaded = [bucket for bucket in candidates if self._loaded.holds((bucket, mode))]
        trial = min(loaded or candidates, key=lambda bucket: losses[bucket.k])
        if not loaded and self._round > ROUNDS_BEFORE_LOADING:
            self._loaded.prepare((trial, mode))
        self._loss = loss = losses[trial.k]
        self._credit = min(self._credit, TRIALS_SAVED * loss)
        if not loaded or self._credit < loss:
            return None
        self._credit -= loss
        self._due = self._round + self._interval
        self._interval = max(FIRST_INTERVAL, min(2 * self._interval, loss / self._earned))
        return trial

    def _schedule_trials(self, distance: int) -> None:
        """The next trial is due after `distance` rounds; later ones at doubling distances."""
        self._due, self._interval = self._round + distance, float(FIRST_INTERVAL)

    def _decide(self, bucket: Bucket, why: Why, seconds: Mapping[int, float]) -> Bucket:
        """The bucket; a change of K is recorded as a decision."""
        if bucket.k != self._last_k:
            before = None if self._last_k < 0 else self._last_k
            self._decisions.append(Decision(self._round, bucket.batch, bucket.length, before, bucket.k, why, seconds))
            self._last_k = bucket.k
        return bucket


def _find_bucket(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)
