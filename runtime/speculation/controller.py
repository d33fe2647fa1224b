"""The speculation controller: which K the next round verifies, by acceptance and cost. No JAX and no clock."""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import exp, inf, log, prod, sqrt
from operator import mul
from typing import Literal, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.model_config.speculative_config import KRanges
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.cache.signature import RoundShape

# -- the cost model: seconds of a round of every shape, measured at load and corrected while serving

SLOWDOWN_ROUNDS = 16  # the machine's slowdown is a mean over this number of rounds
OWN_ROUNDS = 128  # a shape's own time is a mean over at most this number of rounds
MAX_SURPRISE = log(2.0)  # a larger difference from the expected time has another cause
BURST_SECONDS = 0.05  # at most, between two deltas; a request that arrives meanwhile waits for at most two bursts
RoundTimes = Mapping[RoundShape, float]  # seconds
NO_TIMES: RoundTimes = {}


class CostModel:
    """Round times of all shapes, measured at load and corrected by served rounds.

    A shape's time is its own time × the machine's slowdown, which all shapes share. An unexpected time of a
    round changes both: the slowdown at a constant rate, the own time less with each round. So a busy machine also slows
    shapes that do not run just then, and a wrong first measurement is corrected as soon as the shape runs.
    The time of a shape that was not measured is its estimate × the mean ratio of time to estimate of measured shapes.
    The first drafting round after rounds with K = 0 resumes drafting: it takes longer, because it waits for the draft
    kv that these rounds deferred.
    """

    def __init__(self, times: RoundTimes = NO_TIMES, estimates: RoundTimes = NO_TIMES):
        """times: measured seconds. estimates: seconds of shapes that are not measured yet, right in ratios."""
        self._estimates = {shape: log(seconds) for shape, seconds in estimates.items()}
        self._own: dict[RoundShape, float] = {}  # logarithms of seconds, without the slowdown
        self._rounds: dict[RoundShape, int] = {}  # served rounds
        # By batch, seconds: what resuming drafting cost the last time.
        self.resume: dict[int, float] = {}
        self._log_slowdown = self._log_scale = 0.0
        for shape, seconds in times.items():
            self.set_measured(shape, seconds)

    def __getitem__(self, shape: RoundShape) -> float:
        """Seconds of a round. KeyError for a shape without times."""
        own = self._own.get(shape)
        return exp(
            self._log_slowdown + (self._log_scale + self._estimates[shape] if own is None else own)
        )

    def is_measured(self, shape: RoundShape) -> bool:
        """Whether a round of this shape was measured or served."""
        return shape in self._own

    def is_served(self, shape: RoundShape) -> bool:
        """Whether a round of this shape was served after a time of it was known."""
        return shape in self._rounds

    def set_measured(self, shape: RoundShape, seconds: float) -> None:
        """Takes a time measured under the machine's present slowdown. Until a round is served, the shortest counts."""
        if self.is_served(shape):
            return
        self._own[shape] = min(log(seconds) - self._log_slowdown, self._own.get(shape, inf))
        scales = [
            own - self._estimates[measured]
            for measured, own in self._own.items()
            if measured in self._estimates
        ]
        self._log_scale = sum(scales) / len(scales) if scales else 0.0

    def note_served(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        """A served round of this shape took `seconds`, above 0. resumed: it resumed drafting."""
        if shape not in self._own:
            self.set_measured(shape, seconds)
        elif resumed and seconds > self[shape]:
            self.resume[shape[0].batch] = min(seconds - self[shape], self[shape])
        else:
            surprise = min(max(log(seconds / self[shape]), -MAX_SURPRISE), MAX_SURPRISE)
            self._rounds[shape] = rounds = min(self._rounds.get(shape, 0) + 1, OWN_ROUNDS)
            self._own[shape] += surprise / (1 + rounds)
            self._log_slowdown += surprise / SLOWDOWN_ROUNDS

    def count_burst_rounds(self, shape: RoundShape) -> int:
        """Rounds of this shape that fit into a burst, at least 1; 1 until a time is known."""
        return max(1, int(BURST_SECONDS / self[shape])) if self.is_measured(shape) else 1


# -- acceptance estimates and the choice of K

PRIOR = 0.75  # acceptance that an engine expects of its first request: drafting is tried at once where it costs little
# Decay of estimates: what older outcomes' weights are multiplied by per round; the expected rate's weight, in tokens.
OF_ALL = (0.98, 6.0)
OF_REQUEST = (0.99, 24.0)
RECENT = (0.9, 6.0)

SLOPE_CENTRE = 3  # position in the draft, from 0, at which acceptance is the request's rate
LEARNING_RATE = 0.00125  # of the slope, for a residual of 1 one position after SLOPE_CENTRE
MAX_SLOPE = 0.25  # log-odds per position

Why = Literal["worth", "trial", "request", "room", "loading"]


class PositionSlope:
    """How acceptance changes along the draft: log-odds per position, shared by all requests, refitted by each round.

    The log-odds of position i are those of the request's rate + slope · (i − SLOPE_CENTRE): a logistic regression
    with one coefficient, by stochastic gradient. Each position's own rate would mostly tell requests apart, because
    only easy requests reach the late positions.
    """

    def __init__(self) -> None:
        self._slope = 0.0
        self._factors: list[float] = []  # of the odds, by position

    def rates(self, rate: float, count: int) -> list[float]:
        """How often each of the first positions is accepted if all before it were, for a request with this rate."""
        while len(self._factors) < count:
            self._factors.append(exp(self._slope * (len(self._factors) - SLOPE_CENTRE)))
        refused = 1 - rate
        return [rate * one / (rate * one + refused) for one in self._factors[:count]]

    def update(self, rate: float, k: int, accepted: int) -> None:
        """Adds a round of a request with this rate, which accepted `accepted` of `k` drafted tokens."""
        expected = self.rates(rate, min(accepted + 1, k))
        residuals = [(at < accepted) - one for at, one in enumerate(expected)]
        gradient = sum([(at - SLOPE_CENTRE) * one for at, one in enumerate(residuals)])
        self._slope = min(max(self._slope + LEARNING_RATE * gradient, -MAX_SLOPE), MAX_SLOPE)
        self._factors.clear()


class AcceptanceEstimate:
    """Running acceptance of all requests, of a request, or of a request's latest rounds. Older outcomes weigh less.

    With few outcomes the rate is near an expected rate. For a request's latest rounds that is the request's rate, for a
    request the rate of all requests. So requests that start together learn from each other.
    """

    def __init__(
        self,
        expected: "AcceptanceEstimate | None" = None,
        decay: tuple[float, float] = OF_ALL,
        slope: PositionSlope | None = None,
    ):
        """expected: the estimate that gives the expected rate and is updated too; None for PRIOR.

        decay: OF_ALL, OF_REQUEST or RECENT. slope: updated too; None where all positions have the same rate.
        """
        self._expected = expected
        self._slope = slope
        self._keep, self._weight = decay
        # Drafted tokens with a known outcome, weighted by age.
        self._verified = self._accepted = 0.0

    @property
    def rate(self) -> float:
        """How often a drafted token is accepted if all drafted tokens before it were accepted."""
        expected = self._expected.rate if self._expected else PRIOR
        return (expected * self._weight + self._accepted) / (self._weight + self._verified)

    def update(self, k: int, accepted: int) -> None:
        """Adds a round that accepted `accepted` of `k` drafted tokens. Tokens after the first refused do not count."""
        if k and self._slope:
            self._slope.update(self.rate, k, accepted)
        self._accepted = self._accepted * self._keep + accepted
        self._verified = self._verified * self._keep + min(accepted + 1, k)
        if k and self._expected:
            self._expected.update(k, accepted)

    def expected_tokens(self, k: int) -> list[float]:
        """Tokens that a round is expected to commit, for each K from 0 to `k`: 1 + Σ of survivals."""
        rate = self.rate
        rates = self._slope.rates(rate, k) if self._slope else repeat(rate, k)
        return [*accumulate(accumulate(rates, mul), initial=1.0)]


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

    Attributes:
        round: the round it was made for, counted from 1.
        batch: rows of the round's bucket.
        before, after: K; `before` is None for the first decision.
        why: "worth": most expected tokens per second. "trial": a round to see what another K is
            worth. "request": a request's own K. "room": the K before needs more positions or kv
            pages than there are. "loading": a better K is not loaded yet.
    """

    round: int
    batch: int
    before: int | None
    after: int
    why: Why


class SpeculationController:
    """Chooses the bucket, and so the K, of every round."""

    decisions: Sequence[Decision] = ()  # the latest changes of K, newest last

    def start_request(self, masked: bool = False) -> AcceptanceEstimate:
        """The acceptance estimate of a new request. masked: some of its tokens are forced, and accepted for that."""
        return AcceptanceEstimate()

    def note_round_time(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        """A round that ran back to back with the previous one took `seconds`. resumed: see `RoundPlan.resumes`."""

    def choose_bucket(
        self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode
    ) -> Bucket:
        """One of `buckets`, which ascend by K and hold the next round of `members`.

        All requests of a round share its K: the largest of their own Ks and of the controller's choice for the rest;
        where there is no room for it, the next smaller K.
        """
        raise NotImplementedError

    def note_dispatch(self, rounds: int) -> None:
        """The bucket that was chosen last is dispatched for `rounds` rounds. Until then the choice may change."""


class KByBatchSize(SpeculationController):
    """K by the number of requests in the round (see `check_k_ranges`), for every request without its own K."""

    def __init__(self, ranges: KRanges):
        self._ends = [last for _, last, _ in ranges]
        self._ks = [k for *_, k in ranges]

    def choose_bucket(
        self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode
    ) -> Bucket:
        k = self._ks[min(bisect_left(self._ends, len(members)), len(self._ks) - 1)]
        return find_bucket(
            buckets, max([k if one.requested_k is None else one.requested_k for one in members])
        )


class FixedK(KByBatchSize):
    """The same K for every request without its own K."""

    def __init__(self, k: int):
        super().__init__(((1, 1, k),))


def find_bucket(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)


# How much of the time the trials of one request may lose; those of N requests may lose this divided by √N.
TRIAL_SHARE = 0.015
DECISIONS_KEPT = 512


class LoadedShapes(Protocol):
    """Tells which round shapes run without loading an executable first. `prepare` loads a shape in the background."""

    def holds(self, shape: RoundShape) -> bool: ...
    def prepare(self, shape: RoundShape) -> None: ...


class AdaptiveK(SpeculationController):
    """Chooses the K with the most expected tokens per second, in the geometric mean over the requests of a round.

    A round's time depends on its bucket alone. So every request verifies the same K, and the choice weighs what all of
    them gain: mean of log E(K) − log seconds(K). E is the number of tokens that a request's estimate expects, at
    most the tokens that the request still needs. Relative gains count: the sum of all tokens leaves hard requests
    behind, which then fill the batch, and the mean of 1 / E lets them rule it.

    Rounds with K = 0 show no acceptance, and a K that never ran was never timed. So single rounds, the trials, run
    another K: the first round, and later a round whenever TRIAL_SHARE of the time since the last trial covers the
    expected loss of a trial. The mean acceptance of N requests changes less than one request's, by √N.
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
        # of requests without masks, and with masks
        self._of_all = [(AcceptanceEstimate(), PositionSlope()) for _ in range(2)]
        self._round = 0
        self._pending: Sequence[Decision] = ()  # of a bucket that is not dispatched yet

    def start_request(self, masked: bool = False) -> AcceptanceEstimate:
        of_all, slope = self._of_all[masked]
        of_request = AcceptanceEstimate(of_all, OF_REQUEST)
        return AcceptanceEstimate(of_request, RECENT, slope)

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
        trial = self._find_trial(settled, loaded, seconds, TRIAL_SHARE / sqrt(len(members)))
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
        """Expected seconds per token, in the geometric mean over `members`, for each K."""
        most = max(shapes)
        tokens = [(one.acceptance.expected_tokens(most), one.tokens_outstanding) for one in members]
        power = 1 / len(tokens)
        return {
            k: self.costs[shape]
            / prod([min(expected[k], wanted) ** power for expected, wanted in tokens])
            for k, shape in shapes.items()
        }

    def _find_trial(
        self,
        settled: int,
        loaded: Mapping[int, RoundShape],
        seconds: Mapping[int, float],
        share: float,
    ) -> int | None:
        """The K whose trial loses the least; None where no trial is due.

        While K = 0, all other Ks are tried; otherwise only the Ks whose times are estimates. share: of the time, how
        much trials may lose.
        """
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
        paid = self.costs[loaded[settled]] * share * (self._round + 1 - last.round if last else inf)
        return trial if losses[trial] + resume <= paid else None
