"""K auto: each round verifies the K with the fewest expected seconds per token. No JAX and no clock."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.cache.signature import RoundShape
from dflash_aot.runtime.speculation import controller
from dflash_aot.runtime.speculation.controller import (
    NO_TIMES,
    AcceptanceEstimate,
    CostModel,
    Decision,
    RoundMember,
    RoundTimes,
    Why,
    find_bucket,
)

TRIAL_SHARE = 0.015  # of the time that trials may lose
DECISIONS_KEPT = 512


class LoadedShapes(Protocol):
    """Tells which round shapes run without loading an executable first. `prepare` loads a shape in the background."""

    def holds(self, shape: RoundShape) -> bool: ...
    def prepare(self, shape: RoundShape) -> None: ...


class AdaptiveK(controller.SpeculationController):
    """Chooses the K with the fewest expected seconds per token, in the mean over the requests of a round.

    A request's seconds per token are seconds(K) / E(K). E is the number of tokens that its acceptance estimate expects,
    at most the tokens that the request still needs. The mean over requests counts, not the tokens of all requests per
    second: a batch runs until its slowest request ends, so a K that is bad for the slowest request leaves rows empty.

    Rounds with K = 0 show no acceptance, and a K that never ran was never timed. So single rounds, the trials, run
    another K: the first round, and later a round whenever TRIAL_SHARE of the time since the last trial covers the
    expected loss of a trial.
    """

    def __init__(
        self,
        times: RoundTimes,
        estimates: RoundTimes = NO_TIMES,
        loaded: LoadedShapes | None = None,
    ):
        """times: measured seconds of whole rounds; empty if nothing was timed yet. Served rounds correct them.

        estimates: for shapes that were not measured, see `CostModel`. loaded: which shapes are loaded, by default all;
        until the best K is loaded, the best loaded K takes its place.
        """
        self.costs = CostModel(times, estimates)
        self._loaded = loaded
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._of_all = AcceptanceEstimate()
        self._round = 0
        self._pending: Sequence[Decision] = ()  # of a bucket that is not dispatched yet

    def start_request(self) -> AcceptanceEstimate:
        return AcceptanceEstimate(
            AcceptanceEstimate(self._of_all, controller.OF_REQUEST), controller.RECENT
        )

    def note_round_time(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        self.costs.note_served(shape, seconds, resumed)

    def note_dispatch(self, rounds: int) -> None:
        self._round += rounds
        self.decisions.extend(self._pending)
        self._pending = ()

    def choose_bucket(
        self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode
    ) -> Bucket:
        """As `SpeculationController.choose_bucket`. KeyError for a bucket without times."""
        free = [one for one in members if one.requested_k is None]
        k, why = (
            self._choose_k({bucket.k: (bucket, mode) for bucket in buckets}, free)
            if free
            else (0, "request")
        )
        requested = max(one.requested_k or 0 for one in members)
        k, why = (requested, "request") if requested > k else (k, why)
        bucket = find_bucket(buckets, k)
        before = self.decisions[-1].after if self.decisions else None
        self._pending = (
            [Decision(self._round + 1, bucket.batch, before, bucket.k, why)]
            if bucket.k != before
            else ()
        )
        return bucket

    def _choose_k(
        self, shapes: Mapping[int, RoundShape], members: Sequence[RoundMember]
    ) -> tuple[int, Why]:
        seconds = self._expect_seconds(shapes, members)
        best = min(seconds, key=seconds.__getitem__)
        loaded = {
            k: shape for k, shape in shapes.items() if not self._loaded or self._loaded.holds(shape)
        }
        if self._loaded and best not in loaded:
            self._loaded.prepare(shapes[best])
        settled = min(loaded, key=seconds.__getitem__, default=best)
        trial = self._find_trial(settled, loaded, seconds)
        if trial is not None:
            return trial, "trial"
        if settled != best:
            return settled, "loading"
        return best, "room" if self.decisions and self.decisions[-1].after > max(
            shapes
        ) else "worth"

    def _expect_seconds(
        self, shapes: Mapping[int, RoundShape], members: Sequence[RoundMember]
    ) -> dict[int, float]:
        """Expected seconds per token, in the mean over `members`, for each K."""
        tokens = [
            (one.acceptance.expected_tokens(max(shapes)), one.tokens_outstanding) for one in members
        ]
        return {
            k: self.costs[shape]
            * sum(1 / min(expected[k], wanted) for expected, wanted in tokens)
            / len(tokens)
            for k, shape in shapes.items()
        }

    def _find_trial(
        self, settled: int, loaded: Mapping[int, RoundShape], seconds: Mapping[int, float]
    ) -> int | None:
        """The K that loses the least, if a trial is due. Ks with estimated times are tried, and all Ks while K = 0."""
        last = self.decisions[-1] if self.decisions else None
        tried = [
            k
            for k in loaded
            if k != settled and (settled == 0 or not self.costs.is_measured(loaded[k]))
        ]
        if not tried or (last and last.after != settled):
            return None
        losses = {k: self.costs[loaded[k]] * (1 - seconds[settled] / seconds[k]) for k in tried}
        trial = min(losses, key=losses.__getitem__)
        resume = 0.0 if settled else self.costs.resume.get(loaded[trial][0].batch, 0.0)
        paid = (
            self.costs[loaded[settled]]
            * TRIAL_SHARE
            * (self._round + 1 - last.round if last else inf)
        )
        return trial if losses[trial] + resume <= paid else None
