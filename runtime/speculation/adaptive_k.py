"""K auto: each round verifies the K with the fewest expected seconds per token. No JAX and no clock."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.executables.required_executables import RoundShape
from dflash_aot.runtime.speculation.controller import (
    AcceptanceEstimate,
    Decision,
    RoundMember,
    SpeculationController,
    Why,
    find_bucket,
)
from dflash_aot.runtime.speculation.cost_model import NO_TIMES, CostModel

TRIAL_SHARE = 0.015  # of the time that trials may lose
TRIALS_SAVED = 2.0  # trials that may be paid for in advance
ENGINE_WINDOW = 64  # drafting rounds that a new request's acceptance estimate starts from
RESUMED_ROUNDS = 8  # that drafting lasts where it is resumed because it is worth it
ROUNDS_BEFORE_LOADING = 256  # rounds of an engine before a K is loaded only for a trial
DECISIONS_KEPT = 512


class LoadedShapes(Protocol):
    """Tells which round shapes run without loading an executable first."""

    def holds(self, shape: RoundShape) -> bool: ...

    def prepare(self, shape: RoundShape) -> None:
        """Has the executables of a round shape loaded in the background."""


class AllLoaded:
    """Every executable is loaded."""

    def holds(self, shape: RoundShape) -> bool:
        return True

    def prepare(self, shape: RoundShape) -> None:
        """No-op."""


ALL_LOADED = AllLoaded()


class AdaptiveK(SpeculationController):
    """Chooses the K with the fewest expected seconds per token: seconds(K) / Σ_requests E(K).

    E is the number of tokens that a request's acceptance estimate expects of a round. While K = 0 is the best, nothing
    is seen of acceptance, and a K that never ran was never timed. So single rounds, the trials, run with another K: at
    once for a new request, otherwise the sooner the more trials are paid for. TRIAL_SHARE of the time pays for what
    they lose. A trial whose accepted tokens were worth its time lost nothing, and the next one follows at once.
    """

    def __init__(
        self,
        times: Mapping[RoundShape, float],
        estimates: Mapping[RoundShape, float] = NO_TIMES,
        loaded: LoadedShapes = ALL_LOADED,
    ):
        """times: measured seconds of whole rounds; empty if nothing was timed yet. Served rounds correct them.

        estimates: for shapes that were not measured, see `CostModel`. loaded: which shapes are loaded, by default all;
        where the best K is not, the best loaded one takes its place meanwhile.
        """
        self.costs = CostModel(times, estimates)
        self._loaded = loaded
        self._engine_acceptance = AcceptanceEstimate(window=ENGINE_WINDOW)
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._round, self._settled_k, self._last_k = 0, -1, -1
        self._credit, self._earned = TRIALS_SAVED, 0.0  # trials that are paid for, and what each round adds
        self._waited = 0.0  # rounds since the last trial
        self._unpaid = self._token_seconds = 0.0  # seconds that the last trial lost so far, and that a token is worth

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def start_request(self) -> AcceptanceEstimate:
        return AcceptanceEstimate(self._engine_acceptance.rate)

    def note_outcomes(self, k: int, outcomes: Sequence[tuple[AcceptanceEstimate, int]]) -> None:
        for acceptance, accepted in outcomes:
            self.note_outcome(acceptance, k, accepted)

    def note_outcome(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        acceptance.update(k, accepted)
        if not k:
            return
        self._engine_acceptance.update(k, accepted)
        if self._unpaid > 0:
            self._unpaid -= accepted * self._token_seconds
            if self._unpaid <= 0:
                self._credit, self._waited = TRIALS_SAVED, math.inf

    def note_round_time(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        """As `SpeculationController.note_round_time`. KeyError for a shape without times."""
        if resumed:
            self.costs.note_resumed(shape, seconds)
        else:
            self.costs.note_served(shape, seconds)

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        """As `SpeculationController.choose_bucket`. KeyError for a bucket without times."""
        self.repeat_choice(1)
        requested = max((one.requested_k for one in members if one.requested_k is not None), default=0)
        free = [one.acceptance for one in members if one.requested_k is None]
        if not free:
            return self._decide(find_bucket(buckets, requested), "request", {})
        expected = [one.expected_tokens(buckets[-1].k) for one in free]
        times = {bucket.k: self.costs[bucket, mode] for bucket in buckets}
        resume = self.costs.estimate_resume(buckets[0].batch) if self._last_k == 0 else 0.0
        tokens = {k: sum(one[k] for one in expected) for k in times}
        seconds = {k: (time + (resume / RESUMED_ROUNDS if k else 0.0)) / tokens[k] for k, time in times.items()}
        why = self._settle({bucket.k: (bucket, mode) for bucket in buckets}, seconds)
        settled, rate = self._settled_k, seconds[self._settled_k]
        if requested > settled:
            return self._decide(find_bucket(buckets, requested), "request", seconds)
        trials = {k: time + (resume if k else 0.0) for k, time in times.items()}
        losses = {k: (time - rate * tokens[k]) / times[settled] for k, time in trials.items()}
        trial = self._find_trial([(bucket, mode) for bucket in buckets], losses)
        if trial is None or not self._pay(losses[trial.k], free):
            return self._decide(find_bucket(buckets, settled), why, seconds)
        self._unpaid, self._token_seconds = trials[trial.k] - times[settled], rate
        return self._decide(trial, "trial", seconds)

    def repeat_choice(self, rounds: int) -> None:
        self._round += rounds
        self._waited += rounds
        self._credit = min(self._credit + rounds * self._earned, TRIALS_SAVED)

    def _settle(self, shapes: Mapping[int, RoundShape], seconds: Mapping[int, float]) -> Why:
        """Settles on the best K; while that K is not loaded, on the best loaded one, if there is any. Returns why."""
        before, best = self._settled_k, min(seconds, key=seconds.__getitem__)
        if not self._loaded.holds(shapes[best]):
            self._loaded.prepare(shapes[best])
        loaded = [k for k in seconds if self._loaded.holds(shapes[k])]
        self._settled_k = min(loaded, key=seconds.__getitem__, default=best)
        if before > max(shapes):
            return "room"
        return "worth" if self._settled_k == best else "loading"

    def _find_trial(self, shapes: Sequence[RoundShape], losses: Mapping[int, float]) -> Bucket | None:
        """The loaded bucket that loses the least.

        Candidates are larger Ks while K = 0 is the best, and Ks whose time is an estimate.
        """
        settled = self._settled_k
        shapes = [one for one in shapes if one[0].k != settled and (settled == 0 or not self.costs.is_measured(one))]
        loaded = [one for one in shapes if self._loaded.holds(one)]
        trial = min(loaded or shapes, key=lambda shape: losses[shape[0].k], default=None)
        if trial and not loaded and self._round > ROUNDS_BEFORE_LOADING:
            self._loaded.prepare(trial)
        return trial[0] if trial and loaded else None

    def _pay(self, loss: float, acceptances: Sequence[AcceptanceEstimate]) -> bool:
        """Takes a trial that loses `loss` rounds from the credit. False if there is too little, or it is too soon."""
        is_new = any(one.is_new for one in acceptances)
        for one in acceptances:
            one.is_new = False
        self._earned = TRIAL_SHARE / max(loss, TRIAL_SHARE)
        is_due = is_new or self._credit * self._waited * self._earned >= 1
        if self._credit < 1 or not is_due:
            return False
        self._credit, self._waited = self._credit - 1, 0.0
        return True

    def _decide(self, bucket: Bucket, why: Why, seconds: Mapping[int, float]) -> Bucket:
        """The bucket; a change of K is recorded as a decision."""
        if bucket.k != self._last_k:
            before = None if self._last_k < 0 else self._last_k
            self._decisions.append(Decision(self._round, bucket.batch, bucket.length, before, bucket.k, why, seconds))
            self._last_k = bucket.k
        return bucket
