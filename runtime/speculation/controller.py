"""How many drafted tokens a round verifies: K, fixed or chosen while running. Pure: no arrays, no clock."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.executables.execution_plan import RoundShape
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate
from dflash_aot.runtime.speculation.cost_model import NO_TIMES, CostModel

SWITCH_MARGIN = 0.03  # by which another K must be better per token
TRIAL_SHARE = 0.015  # of the time, for rounds with a K that is not expected to pay
TRIAL_SPACING = 8  # rounds between two of these at least
TRIAL_DISTANCE = 16  # rounds from one trial of a text to the next, which double with each
MAX_TRIAL_DEBT = 3  # trials that may run before time has paid for them
FIRST_ROUNDS = 16  # of each request, which new requests are judged by
ENGINE_WINDOW = 256  # such rounds
REPLAN_ROUNDS = 3  # between two decisions
DECISIONS_KEPT = 512  # decisions
OPTIMISM = 0.8  # of its estimate, at which a K is taken whose time is a guess, so that it is measured
OPTIMISTIC_PLANS = 8  # looks for which that may go on, where nothing comes of it
ROUNDS_BEFORE_LOADING = 256  # rounds of an engine, before a K is loaded to be measured, or for trials

Why = Literal["worth", "trial", "request", "room", "loading"]


class RoundMember(Protocol):
    """A row of the next round. `wanted_k`: its own K, None where that is left to the engine."""

    @property
    def acceptance(self) -> AcceptanceEstimate: ...

    @property
    def wanted_k(self) -> int | None: ...


@dataclass(frozen=True)
class Decision:
    """One change of K, from `before` (None at first) to `after`, at a round counted from 1.

    batch, length: of the bucket. seconds: expected per token of the batch, for each K that there was room for, in good
    hope where that is a guess; empty where every row had its own K. why: "worth" the least seconds; "trial" to see if
    text has become easier; "request" some row's own K; "room" too near the capacity for the K before; "loading" what
    is better is not loaded yet.
    """

    round: int
    batch: int
    length: int
    before: int | None
    after: int
    why: Why
    seconds: Mapping[int, float]


class LoadedShapes(Protocol):
    """Which rounds need not wait for their executables."""

    def holds(self, kind: RoundShape) -> bool: ...

    def prepare(self, kind: RoundShape) -> None:
        """It will be wanted: whatever it needs is loaded meanwhile."""


class _Everything:
    """All is loaded."""

    def holds(self, kind: RoundShape) -> bool:
        return True

    def prepare(self, kind: RoundShape) -> None:
        """It is."""


class SpeculationController(Protocol):
    """What the loop asks, round by round."""

    def start(self) -> AcceptanceEstimate:
        """For a new request."""

    def note(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        """One row of one round was read: `accepted` of `k` drafted tokens stood."""

    def note_round(self, bucket: Bucket, sampled: bool, seconds: float) -> None:
        """A round took `seconds`: of those only that ran right behind another one."""

    def choose(self, buckets: Sequence[Bucket], rows: Sequence[RoundMember], sampled: bool) -> Bucket:
        """One of `buckets`, which ascend by K and hold the next round of `rows`.

        All rows of a round share its K: the largest over each row's own and the pick for the rows without one; where
        there is no room for it, the largest below it.
        """

    def repeat(self, rounds: int) -> None:
        """What was chosen runs so many rounds more before the next choice."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last few hundred changes of K that were made here, newest last."""


class FixedK:
    """The same K for every row without one of its own."""

    def __init__(self, k: int):
        self._k = k

    def start(self) -> AcceptanceEstimate:
        return AcceptanceEstimate()

    def note(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        """Nothing depends on it."""

    def note_round(self, bucket: Bucket, sampled: bool, seconds: float) -> None:
        """Nor on this."""

    def choose(self, buckets: Sequence[Bucket], rows: Sequence[RoundMember], sampled: bool) -> Bucket:
        return _hold(buckets, max(self._k if row.wanted_k is None else row.wanted_k for row in rows))

    def repeat(self, rounds: int) -> None:
        """Once chosen, always chosen."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return ()


class _Plan(NamedTuple):
    """What to do until the next look; times in seconds.

    `rate`: of a token at the pick. `earned`: what a round of the pick adds to the credit for trials. `trial`: a larger
    K. `trial_price`: what a round of it takes above one token per row at the pick's rate, `trial_cost` above those
    that are expected.
    """

    pick: Bucket
    why: Why
    seconds: Mapping[int, float]
    rate: float = 0.0
    earned: float = 0.0
    trial: Bucket | None = None
    trial_price: float = 0.0
    trial_cost: float = 0.0


class AdaptiveK:
    """The K with the least expected seconds per token, from times of rounds and running acceptance.

    times: seconds of a whole round of a bucket, sampled or not, as measured at load; rounds that are served correct
    them. estimates: of what was not measured, see `ServiceTimes`. stock: what is loaded; where the best K is not, the
    best one that is has its place for a while.

    Expected are seconds(K) / Σ_rows E(K), E being the tokens that a row's acceptance lets expect. They are looked at
    anew every few rounds, and when rows or buckets change. Hysteresis: the K stays unless another one is better by
    MARGIN; so Ks of nearly equal worth don't alternate, at a price below MARGIN.

    Verifying K says all about smaller Ks and nothing about larger ones. So now and then one round, a trial, runs with
    the larger K that is cheapest to try: at once where a row is new, then after TRIAL_DISTANCE rounds and at distances
    that double, as after each fall of K; and whenever TRIAL_SHARE of the time has paid for one. The former may run on
    debt, at most TRIAL_DEBT of them, which no new row inherits. What a trial gains is credit again, and one that paid
    for itself is repeated at once.
    """

    def __init__(
        self,
        times: Mapping[RoundShape, float],
        estimates: Mapping[RoundShape, float] = NO_TIMES,
        stock: LoadedShapes | None = None,
    ):
        self._times, self._stock = CostModel(times, estimates), stock or _Everything()
        self._hopes: Counter[RoundShape] = Counter()
        self._deepest = max((bucket.k for bucket, _ in self._times), default=0)
        self._seen = AcceptanceEstimate(window=ENGINE_WINDOW)
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._round, self._next_look = 0, 0
        self._credit, self._trial_due, self._trial_distance = 0.0, TRIAL_DISTANCE, TRIAL_DISTANCE
        self._unpaid, self._awaited = 0.0, 0  # of the last trial, so far: seconds, and rows without a verdict
        self._buckets: Sequence[Bucket] = ()
        self._sampled = False
        self._voters: list[AcceptanceEstimate] = []
        self._plan: _Plan | None = None
        self._settled: int | None = None
        self._last: int | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def start(self) -> AcceptanceEstimate:
        """Begins with what the engine has seen of the first rounds of other requests."""
        return AcceptanceEstimate([*self._seen.shares])

    def note(self, acceptance: AcceptanceEstimate, k: int, accepted: int) -> None:
        acceptance.note(k, accepted)
        if k and acceptance.rounds <= FIRST_ROUNDS:
            self._seen.note(k, accepted)
        # What a larger K verified before it fell comes in a round late, and is no trial's.
        if self._awaited and self._plan and k > self._plan.pick.k:
            self._awaited -= 1
            self._note_gain(accepted * self._plan.rate)

    def _note_gain(self, seconds: float) -> None:
        """Of one row of a trial, by the drafted tokens that stood."""
        self._credit += seconds
        self._unpaid -= seconds
        if seconds and self._unpaid <= 0:
            self._begin_trials(0)

    def note_round(self, bucket: Bucket, sampled: bool, seconds: float) -> None:
        """As `Depth.note_round`. KeyError for a bucket without times."""
        self._times.note((bucket, sampled), seconds)

    def measure(self, kind: RoundShape, seconds: float) -> None:
        """A round of it took `seconds` while nothing was served."""
        self._times.measure(kind, seconds)

    def is_measured(self, kind: RoundShape) -> bool:
        """Or served."""
        return self._times.is_measured(kind)

    def choose(self, buckets: Sequence[Bucket], rows: Sequence[RoundMember], sampled: bool) -> Bucket:
        """As `Depth.choose`. KeyError for a bucket without times."""
        self._round += 1
        voters = [row.acceptance for row in rows]
        moved = buckets != self._buckets or sampled != self._sampled
        if self._plan is None or moved or self._round >= self._next_look or voters != self._voters:
            if voters != self._voters and not all(one.rounds for one in voters):
                self._begin_trials(0)
                self._credit = max(self._credit, 0.0)
            self._buckets, self._sampled, self._voters = buckets, sampled, voters
            self._plan = self._look(rows)
            self._next_look = self._round + REPLAN_ROUNDS
        plan = self._plan
        self._credit = min(self._credit + plan.earned, plan.trial_cost)
        if plan.trial is None or not self._may_try(plan.trial_cost):
            return self._turn(plan.pick, plan.why, plan.seconds)
        self._credit -= plan.trial_price
        self._unpaid, self._awaited = plan.trial_price, len(rows)
        self._trial_due, self._trial_distance = self._round + self._trial_distance, 2 * self._trial_distance
        return self._turn(plan.trial, "trial", plan.seconds)

    def repeat(self, rounds: int) -> None:
        assert self._plan is not None, "nothing was chosen"
        self._round += rounds
        self._credit = min(self._credit + rounds * self._plan.earned, self._plan.trial_cost)

    def _may_try(self, cost: float) -> bool:
        due = self._round >= self._trial_due
        return self._credit >= ((1 - MAX_TRIAL_DEBT) * cost if due else cost)

    def _begin_trials(self, wait: int) -> None:
        self._trial_due, self._trial_distance = self._round + wait, TRIAL_DISTANCE

    def _look(self, rows: Sequence[RoundMember]) -> _Plan:
        wanted = max((row.wanted_k for row in rows if row.wanted_k is not None), default=0)
        free = [row.acceptance for row in rows if row.wanted_k is None]
        if not free:
            return _Plan(_hold(self._buckets, wanted), "request", {})
        tokens = self._expect(free)
        times = [self._times[bucket, self._sampled] for bucket in self._buckets]
        hopes = [self._hope((bucket, self._sampled)) for bucket in self._buckets]
        seconds = {
            bucket.k: hope * time / tokens[bucket.k]
            for bucket, time, hope in zip(self._buckets, times, hopes, strict=True)
        }
        before, self._settled = self._settled, self._settle(seconds)
        if before is not None and self._settled < before:
            self._begin_trials(TRIAL_DISTANCE)
        pick = _hold(self._buckets, max(wanted, self._settled))
        rate = seconds[pick.k]
        earned = TRIAL_SHARE * tokens[pick.k] * rate
        why = self._explain(before, pick, seconds)
        larger = {bucket: time for bucket, time in zip(self._buckets, times, strict=True) if bucket.k > pick.k}
        trial = self._find_trial({bucket: time - tokens[bucket.k] * rate for bucket, time in larger.items()})
        if trial is None:
            return _Plan(pick, why, seconds, rate, earned)
        # Where a larger K costs next to nothing, trials keep their distance all the same.
        time, least = larger[trial], TRIAL_SPACING * earned
        price, cost = max(time - len(free) * rate, least), max(time - tokens[trial.k] * rate, least)
        return _Plan(pick, why, seconds, rate, earned, trial, price, cost)

    def _settle(self, seconds: Mapping[int, float]) -> int:
        """The best K; while that is not loaded, the best of those that are, if any is."""
        kinds = {bucket.k: (bucket, self._sampled) for bucket in self._buckets}
        best = _settle(self._settled, seconds)
        if not self._stock.holds(kinds[best]):
            self._stock.prepare(kinds[best])
            held = {k: time for k, time in seconds.items() if self._stock.holds(kinds[k])}
            best = _settle(self._settled, held) if held else best
        if self._times.is_guess(kinds[best]):
            self._hopes[kinds[best]] += 1
        return best

    def _hope(self, kind: RoundShape) -> float:
        if not self._times.is_guess(kind) or self._hopes[kind] >= OPTIMISTIC_PLANS:
            return 1.0
        return OPTIMISM if self._round > ROUNDS_BEFORE_LOADING or self._stock.holds(kind) else 1.0

    def _explain(self, before: int | None, pick: Bucket, seconds: Mapping[int, float]) -> Why:
        assert self._settled is not None
        if pick.k > self._settled:
            return "request"
        if before is not None and before not in seconds:
            return "room"
        return "worth" if self._settled == _settle(before, seconds) else "loading"

    def _find_trial(self, losses: Mapping[Bucket, float]) -> Bucket | None:
        """The one with which the least seconds are lost; what is not loaded may be another time."""
        held = [bucket for bucket in losses if self._stock.holds((bucket, self._sampled))]
        if losses and not held and self._round > ROUNDS_BEFORE_LOADING:
            self._stock.prepare((min(losses, key=losses.__getitem__), self._sampled))
        return min(held, key=losses.__getitem__, default=None)

    def _expect(self, rows: Sequence[AcceptanceEstimate]) -> list[float]:
        """Tokens of a round by K, summed over rows."""
        each = [one.expected_tokens(self._deepest) for one in rows]
        return each[0] if len(each) == 1 else [*map(sum, zip(*each, strict=True))]

    def _turn(self, bucket: Bucket, why: Why, seconds: Mapping[int, float]) -> Bucket:
        if bucket.k != self._last:
            decision = Decision(self._round, bucket.batch, bucket.length, self._last, bucket.k, why, seconds)
            self._decisions.append(decision)
            self._last = bucket.k
        return bucket


def _settle(before: int | None, seconds: Mapping[int, float]) -> int:
    """The K before, if it is there and none is better by the margin."""
    best = min(seconds, key=seconds.__getitem__)
    if before is not None and before in seconds and seconds[before] <= (1 + SWITCH_MARGIN) * seconds[best]:
        return before
    return best


def _hold(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)
