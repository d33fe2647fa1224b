"""The speculation controller: how many drafted tokens (K) the next round verifies. No JAX and no clock."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.executables.required_executables import RoundShape
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate
from dflash_aot.runtime.speculation.cost_model import NO_TIMES, CostModel

SWITCH_MARGIN = 0.03  # by which another K must be faster per token to replace the present one
TRIAL_SHARE = 0.015  # of the time that trials of a larger K may take
MIN_ROUNDS_PER_PAID_TRIAL = 8  # rounds whose time share pays for one trial, at least
FREE_TRIAL_INTERVAL = 16  # rounds from one free trial to the next; doubles with each
MAX_TRIAL_DEBT = 3  # trials that may run before the time share has paid for them
FIRST_ROUNDS = 16  # rounds of each request that teach the engine's own acceptance estimate
ENGINE_WINDOW = 256  # rounds that the engine's own acceptance estimate averages over
REPLAN_ROUNDS = 3  # rounds between two plans
DECISIONS_KEPT = 512
OPTIMISM = 0.8  # of its estimated time, for a K whose time is a guess: so that the K is tried, and measured
OPTIMISTIC_PLANS = 8  # plans after which optimism about one round shape ends
ROUNDS_BEFORE_LOADING = 256  # rounds of an engine before a K is loaded only to be measured or tried

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
    why: "worth": fewest expected seconds per token. "trial": a round to see whether the text has become easier.
        "request": a request's own K. "room": too near the capacity for the K before. "loading": a better K is not
        loaded yet.
    seconds: expected seconds per token of the batch, for each K that there was room for; optimistic where the time is
        a guess; empty where every request had its own K.
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


class SpeculationController(Protocol):
    """Chooses the bucket, and so the K, of every round."""

    def start_request(self) -> AcceptanceEstimate:
        """The acceptance estimate that a new request starts with."""

    def note_outcome(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        """In one round of one request, `accepted` of `k` drafted tokens were accepted."""

    def note_round_time(self, shape: RoundShape, seconds: float) -> None:
        """A round that ran back to back with the previous one took `seconds`."""

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        """One of `buckets`, which ascend by K and hold the next round of `members`.

        All requests of a round share its K: the largest of their own Ks and of the controller's choice for the rest;
        where there is no room for it, the next smaller one.
        """

    def repeat_choice(self, rounds: int) -> None:
        """The last choice runs for so many rounds more before the next one."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The latest changes of K, newest last."""


class FixedK:
    """The same K for every request without its own."""

    def __init__(self, k: int):
        self._k = k

    def start_request(self) -> AcceptanceEstimate:
        return AcceptanceEstimate()

    def note_outcome(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        """Ignored."""

    def note_round_time(self, shape: RoundShape, seconds: float) -> None:
        """Ignored."""

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        return _find_bucket(buckets, max(self._k if one.requested_k is None else one.requested_k for one in members))

    def repeat_choice(self, rounds: int) -> None:
        """No-op: the choice never changes."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return ()


class _Plan(NamedTuple):
    """What to run until the next plan. Times are in seconds.

    bucket: of the chosen K. why, seconds: see `Decision`.
    seconds_per_token: at the chosen K.
    credit_per_round: what one round of it adds to the credit for trials.
    trial: the bucket of a larger K to try; None where there is none.
    trial_price: seconds of a trial round, less the time in which the chosen K yields one token per request.
    trial_loss: seconds of a trial round, less the time in which the chosen K yields the tokens expected of the trial.
    """

    bucket: Bucket
    why: Why
    seconds: Mapping[int, float]
    seconds_per_token: float = 0.0
    credit_per_round: float = 0.0
    trial: Bucket | None = None
    trial_price: float = 0.0
    trial_loss: float = 0.0


class AdaptiveK:
    """Chooses the K with the fewest expected seconds per token, from round times and running acceptance.

    1. Expected seconds per token are seconds(K) / Σ_requests E(K), where E is the number of tokens that a request's
       acceptance estimate expects of a round. They are computed every REPLAN_ROUNDS rounds, and when requests or
       buckets change. K stays unless another K is better by SWITCH_MARGIN.
    2. Verifying K tokens shows the acceptance of smaller Ks, and nothing of larger ones. So single rounds, the trials,
       run with a larger K: the one that is expected to lose the least time.
    3. Free trials: one at once for a new request, the next after FREE_TRIAL_INTERVAL rounds, then at doubling
       intervals. When K falls, the intervals start over, without the immediate trial. Paid trials: whenever
       TRIAL_SHARE of the time since the last one has paid for one.
    4. The time budget of trials (`credit`) may go into debt by at most MAX_TRIAL_DEBT free trials; a new request clears
       the debt. Time that a trial gains is added to the budget, and a trial that paid for itself is repeated at once.
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
        self._costs, self._loaded = CostModel(times, estimates), loaded or _AllLoaded()
        self._optimistic_plans: Counter[RoundShape] = Counter()
        self._largest_k = max((bucket.k for bucket, _ in self._costs), default=0)
        self._engine_acceptance = AcceptanceEstimate(window=ENGINE_WINDOW)
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._round, self._next_plan = 0, 0
        self._credit, self._trial_due, self._trial_distance = 0.0, FREE_TRIAL_INTERVAL, FREE_TRIAL_INTERVAL
        self._unpaid = 0.0  # seconds of the last trial that its tokens have not paid back so far
        self._awaited = 0  # requests of the last trial whose outcome has not been read
        self._buckets: Sequence[Bucket] = ()
        self._mode: SamplingMode = "greedy"
        self._members: list[AcceptanceEstimate] = []
        self._plan: _Plan | None = None
        self._settled_k: int | None = None
        self._last_k: int | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def start_request(self) -> AcceptanceEstimate:
        """Starts with the acceptance of the first rounds of earlier requests."""
        return AcceptanceEstimate([*self._engine_acceptance.rates])

    def note_outcome(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        acceptance.update(k, accepted)
        if k and acceptance.rounds <= FIRST_ROUNDS:
            self._engine_acceptance.update(k, accepted)
        # A larger K that was dispatched before K fell is read a round late, and belongs to no trial.
        if self._awaited and self._plan and k > self._plan.bucket.k:
            self._awaited -= 1
            self._credit_gain(accepted * self._plan.seconds_per_token)

    def note_round_time(self, shape: RoundShape, seconds: float) -> None:
        """As `SpeculationController.note_round_time`. KeyError for a shape without times."""
        self._costs.note_served(shape, seconds)

    def set_measured_time(self, shape: RoundShape, seconds: float) -> None:
        """A round of this shape took `seconds` while nothing was served."""
        self._costs.set_measured(shape, seconds)

    def is_measured(self, shape: RoundShape) -> bool:
        """Whether a round of this shape was measured or served."""
        return self._costs.is_measured(shape)

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        """As `SpeculationController.choose_bucket`. KeyError for a bucket without times."""
        self._round += 1
        plan = self._update_plan(buckets, members, mode)
        self._credit = min(self._credit + plan.credit_per_round, plan.trial_loss)
        if plan.trial is None or not self._may_try(plan.trial_loss):
            return self._decide(plan.bucket, plan.why, plan.seconds)
        self._credit -= plan.trial_price
        self._unpaid, self._awaited = plan.trial_price, len(members)
        self._trial_due, self._trial_distance = self._round + self._trial_distance, 2 * self._trial_distance
        return self._decide(plan.trial, "trial", plan.seconds)

    def repeat_choice(self, rounds: int) -> None:
        assert self._plan is not None, "nothing was chosen"
        self._round += rounds
        self._credit = min(self._credit + rounds * self._plan.credit_per_round, self._plan.trial_loss)

    # -- plans

    def _update_plan(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> _Plan:
        """The present plan, or a new one where requests or buckets changed, or REPLAN_ROUNDS have passed."""
        estimates = [one.acceptance for one in members]
        new_members, new_shapes = estimates != self._members, buckets != self._buckets or mode != self._mode
        if self._plan and not new_members and not new_shapes and self._round < self._next_plan:
            return self._plan
        if new_members and not all(one.rounds for one in estimates):
            self._schedule_trials(0)
            self._credit = max(self._credit, 0.0)
        self._buckets, self._mode, self._members = buckets, mode, estimates
        self._next_plan = self._round + REPLAN_ROUNDS
        self._plan = self._make_plan(members)
        return self._plan

    def _make_plan(self, members: Sequence[RoundMember]) -> _Plan:
        requested = max((one.requested_k for one in members if one.requested_k is not None), default=0)
        free = [one.acceptance for one in members if one.requested_k is None]
        if not free:
            return _Plan(_find_bucket(self._buckets, requested), "request", {})
        tokens = self._expect_tokens(free)
        times = {bucket: self._costs[bucket, self._mode] for bucket in self._buckets}
        seconds = {
            bucket.k: self._optimism_factor((bucket, self._mode)) * time / tokens[bucket.k]
            for bucket, time in times.items()
        }
        before, self._settled_k = self._settled_k, self._settle_loaded(seconds)
        if before is not None and self._settled_k < before:
            self._schedule_trials(FREE_TRIAL_INTERVAL)
        bucket = _find_bucket(self._buckets, max(requested, self._settled_k))
        rate = seconds[bucket.k]
        credit = TRIAL_SHARE * tokens[bucket.k] * rate
        plan = _Plan(bucket, self._explain(before, bucket, seconds), seconds, rate, credit)
        losses = {larger: time - tokens[larger.k] * rate for larger, time in times.items() if larger.k > bucket.k}
        trial = self._find_trial(losses)
        if trial is None:
            return plan
        # Where a larger K costs next to nothing, trials keep their distance all the same.
        least = MIN_ROUNDS_PER_PAID_TRIAL * credit
        price, loss = max(times[trial] - len(free) * rate, least), max(losses[trial], least)
        return plan._replace(trial=trial, trial_price=price, trial_loss=loss)

    def _settle_loaded(self, seconds: Mapping[int, float]) -> int:
        """The best K; while that K is not loaded, the best loaded one, if there is any."""
        shapes = {bucket.k: (bucket, self._mode) for bucket in self._buckets}
        best = _settle(self._settled_k, seconds)
        if not self._loaded.holds(shapes[best]):
            self._loaded.prepare(shapes[best])
            loaded = {k: time for k, time in seconds.items() if self._loaded.holds(shapes[k])}
            best = _settle(self._settled_k, loaded) if loaded else best
        if self._costs.is_guess(shapes[best]):
            self._optimistic_plans[shapes[best]] += 1
        return best

    def _optimism_factor(self, shape: RoundShape) -> float:
        """The factor on a shape's expected time: OPTIMISM if the time is a guess that may soon be measured, else 1."""
        if not self._costs.is_guess(shape) or self._optimistic_plans[shape] >= OPTIMISTIC_PLANS:
            return 1.0
        return OPTIMISM if self._round > ROUNDS_BEFORE_LOADING or self._loaded.holds(shape) else 1.0

    def _explain(self, before: int | None, bucket: Bucket, seconds: Mapping[int, float]) -> Why:
        assert self._settled_k is not None
        if bucket.k > self._settled_k:
            return "request"
        if before is not None and before not in seconds:
            return "room"
        return "worth" if self._settled_k == _settle(before, seconds) else "loading"

    def _expect_tokens(self, estimates: Sequence[AcceptanceEstimate]) -> list[float]:
        """Expected tokens of a round by K, summed over requests."""
        each = [one.expected_tokens(self._largest_k) for one in estimates]
        return each[0] if len(each) == 1 else [*map(sum, zip(*each, strict=True))]

    # -- trials

    def _find_trial(self, losses: Mapping[Bucket, float]) -> Bucket | None:
        """The loaded bucket that loses the fewest seconds. Has one loaded for a later trial where none is."""
        loaded = [bucket for bucket in losses if self._loaded.holds((bucket, self._mode))]
        if losses and not loaded and self._round > ROUNDS_BEFORE_LOADING:
            self._loaded.prepare((min(losses, key=losses.__getitem__), self._mode))
        return min(loaded, key=losses.__getitem__, default=None)

    def _may_try(self, loss: float) -> bool:
        is_due = self._round >= self._trial_due
        return self._credit >= ((1 - MAX_TRIAL_DEBT) * loss if is_due else loss)

    def _schedule_trials(self, distance: int) -> None:
        """The next trial is due after `distance` rounds; later ones at doubling distances."""
        self._trial_due, self._trial_distance = self._round + distance, FREE_TRIAL_INTERVAL

    def _credit_gain(self, seconds: float) -> None:
        """Time that the accepted tokens of one request in a trial have saved."""
        self._credit += seconds
        self._unpaid -= seconds
        if seconds and self._unpaid <= 0:
            self._schedule_trials(0)

    def _decide(self, bucket: Bucket, why: Why, seconds: Mapping[int, float]) -> Bucket:
        """The bucket; a change of K is recorded as a decision."""
        if bucket.k != self._last_k:
            decision = Decision(self._round, bucket.batch, bucket.length, self._last_k, bucket.k, why, seconds)
            self._decisions.append(decision)
            self._last_k = bucket.k
        return bucket


def _settle(before: int | None, seconds: Mapping[int, float]) -> int:
    """The best K; the one before where it is there and no other is better by the margin."""
    best = min(seconds, key=seconds.__getitem__)
    if before is not None and before in seconds and seconds[before] <= (1 + SWITCH_MARGIN) * seconds[best]:
        return before
    return best


def _find_bucket(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)
