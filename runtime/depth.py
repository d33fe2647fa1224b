"""How many drafted tokens a round verifies: K, fixed or chosen while running. Pure: no arrays, no clock."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.acceptance import Acceptance
from dflash_aot.runtime.service_times import ServiceTimes

MARGIN = 0.03  # by which another K must be better per token
TRIAL_SHARE = 0.015  # of the time, for rounds with a K that is not expected to pay
TRIAL_SPACING = 8  # rounds between two of these at least
FIRST_TRIALS = 3  # of a row, on credit: one miss says little
FIRST_ROUNDS = 16  # of each request, which new requests are judged by
ENGINE_WINDOW = 256  # such rounds
MOST_ROUNDS = 4  # between two decisions
KEPT = 512  # decisions

Why = Literal["worth", "trial", "request", "room"]


class Voter(Protocol):
    """A row of the next round. `wanted_k`: its own K, None where that is left to the engine."""

    @property
    def acceptance(self) -> Acceptance: ...

    @property
    def wanted_k(self) -> int | None: ...


@dataclass(frozen=True)
class Decision:
    """One change of K, from `before` (None at first) to `after`, at a round counted from 1.

    batch, length: of the bucket. seconds: expected per token of the batch, for each K that there was room for; empty
    where every row had its own K. why: "worth" the least seconds; "trial" to see if text has become easier; "request"
    some row's own K; "room" too near the capacity for the K before.
    """

    round: int
    batch: int
    length: int
    before: int | None
    after: int
    why: Why
    seconds: Mapping[int, float]


class Depth(Protocol):
    """What the loop asks, round by round."""

    def start(self) -> Acceptance:
        """For a new request."""

    def note(self, acceptance: Acceptance, k: int, accepted: int) -> None:
        """One row of one round was read: `accepted` of `k` drafted tokens stood."""

    def note_round(self, bucket: Bucket, sampled: bool, seconds: float) -> None:
        """A round took `seconds`: of those only that ran right behind another one."""

    def choose(self, buckets: Sequence[Bucket], rows: Sequence[Voter], sampled: bool) -> Bucket:
        """One of `buckets`, which ascend by K and hold the next round of `rows`.

        All rows of a round share its K: the largest over each row's own and the pick for the rows without one; where
        there is no room for it, the largest below it.
        """

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last few hundred changes of K that were made here, newest last."""


class FixedDepth:
    """The same K for every row without one of its own."""

    def __init__(self, k: int):
        self._k = k

    def start(self) -> Acceptance:
        return Acceptance()

    def note(self, acceptance: Acceptance, k: int, accepted: int) -> None:
        """Nothing depends on it."""

    def note_round(self, bucket: Bucket, sampled: bool, seconds: float) -> None:
        """Nor on this."""

    def choose(self, buckets: Sequence[Bucket], rows: Sequence[Voter], sampled: bool) -> Bucket:
        return _hold(buckets, max(self._k if row.wanted_k is None else row.wanted_k for row in rows))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return ()


class _Plan(NamedTuple):
    """What to do until the next look; times in seconds.

    `earned`: what a round of the pick adds to the credit for trials. `trial`: a larger K, run as soon as the credit
    is `trial_at`, at `trial_cost`: what it is expected to take above its tokens at the pick's rate.
    """

    pick: Bucket
    why: Why
    seconds: Mapping[int, float]
    earned: float = 0.0
    trial: Bucket | None = None
    trial_at: float = 0.0
    trial_cost: float = 0.0


class AdaptiveDepth:
    """The K with the least expected seconds per token, from measured rounds and running acceptance.

    times: seconds of a whole round of a bucket, sampled or not.

    Expected are seconds(K) / Σ_rows E(K), E being the tokens that a row's acceptance lets expect. They are looked at
    anew every few rounds, and when rows or buckets change. Hysteresis: the K stays unless another one is better by
    MARGIN; so Ks of nearly equal worth don't alternate, at a price below MARGIN.

    Verifying K says all about smaller Ks and nothing about larger ones. So now and then one round runs with the
    larger K that is cheapest to try: what these rounds are expected to lose stays within TRIAL_SHARE of the time. A
    new row is tried at once, up to FIRST_TRIALS times on credit; nothing else is until time has paid for it.
    """

    def __init__(self, times: Mapping[tuple[Bucket, bool], float]):
        self._times = ServiceTimes(times)
        self._deepest = max((bucket.k for bucket, _ in times), default=0)
        self._seen = Acceptance(window=ENGINE_WINDOW)
        self._decisions: deque[Decision] = deque(maxlen=KEPT)
        self._round, self._next_look, self._credit = 0, 0, 0.0
        self._buckets: Sequence[Bucket] = ()
        self._sampled = False
        self._voters: list[Acceptance] = []
        self._plan: _Plan | None = None
        self._settled: int | None = None
        self._last: int | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def start(self) -> Acceptance:
        """Begins with what the engine has seen of the first rounds of other requests."""
        return Acceptance([*self._seen.shares])

    def note(self, acceptance: Acceptance, k: int, accepted: int) -> None:
        acceptance.note(k, accepted)
        if k and acceptance.rounds <= FIRST_ROUNDS:
            self._seen.note(k, accepted)

    def note_round(self, bucket: Bucket, sampled: bool, seconds: float) -> None:
        """As `Depth.note_round`. KeyError for a bucket without times."""
        self._times.note((bucket, sampled), seconds)

    def choose(self, buckets: Sequence[Bucket], rows: Sequence[Voter], sampled: bool) -> Bucket:
        """As `Depth.choose`. KeyError for a bucket without times."""
        self._round += 1
        voters = [row.acceptance for row in rows]
        moved = buckets != self._buckets or sampled != self._sampled
        if moved:
            self._buckets, self._sampled = buckets, sampled
        if self._plan is None or moved or self._round >= self._next_look or voters != self._voters:
            self._plan, self._voters = self._look(rows), voters
            self._next_look = self._round + min(1 + len(rows), MOST_ROUNDS)
        plan = self._plan
        self._credit = min(self._credit + plan.earned, plan.trial_cost)
        if plan.trial is None or self._credit < plan.trial_at:
            return self._turn(plan.pick, plan.why, plan.seconds)
        self._credit -= plan.trial_cost
        return self._turn(plan.trial, "trial", plan.seconds)

    def _look(self, rows: Sequence[Voter]) -> _Plan:
        wanted = max((row.wanted_k for row in rows if row.wanted_k is not None), default=0)
        free = [row.acceptance for row in rows if row.wanted_k is None]
        if not free:
            return _Plan(_hold(self._buckets, wanted), "request", {})
        tokens = self._expect(free)
        choices = [(bucket, self._times[bucket, self._sampled]) for bucket in self._buckets]
        seconds = {bucket.k: time / tokens[bucket.k] for bucket, time in choices}
        why: Why = "worth" if self._settled is None or self._settled in seconds else "room"
        self._settled = _settle(self._settled, seconds)
        pick = _hold(self._buckets, max(wanted, self._settled))
        if pick.k > self._settled:
            why = "request"
        new = any(one.rounds < FIRST_TRIALS for one in free)
        return _plan_trial(_Plan(pick, why, seconds), choices, tokens, new)

    def _expect(self, rows: Sequence[Acceptance]) -> list[float]:
        """Tokens of a round by K, summed over rows."""
        return [*map(sum, zip(*(one.expected_tokens(self._deepest) for one in rows), strict=True))]

    def _turn(self, bucket: Bucket, why: Why, seconds: Mapping[int, float]) -> Bucket:
        if bucket.k != self._last:
            decision = Decision(self._round, bucket.batch, bucket.length, self._last, bucket.k, why, seconds)
            self._decisions.append(decision)
            self._last = bucket.k
        return bucket


def _plan_trial(plan: _Plan, choices: Sequence[tuple[Bucket, float]], tokens: Sequence[float], new: bool) -> _Plan:
    """The plan with a trial of the larger K that loses least; without one where there is no larger K."""
    rate = plan.seconds[plan.pick.k]
    earned = TRIAL_SHARE * tokens[plan.pick.k] * rate
    losses = [(time - tokens[bucket.k] * rate, bucket) for bucket, time in choices if bucket.k > plan.pick.k]
    if not losses:
        return plan._replace(earned=earned)
    loss, trial = min(losses)
    cost = max(loss, TRIAL_SPACING * earned)
    least_credit = (1 - FIRST_TRIALS) * cost if new else cost
    return plan._replace(earned=earned, trial=trial, trial_at=least_credit, trial_cost=cost)


def _settle(before: int | None, seconds: Mapping[int, float]) -> int:
    """The K before, if it is there and none is better by the margin."""
    best = min(seconds, key=seconds.__getitem__)
    if before is not None and before in seconds and seconds[before] <= (1 + MARGIN) * seconds[best]:
        return before
    return best


def _hold(buckets: Sequence[Bucket], k: int) -> Bucket:
    """The bucket of `k`, or of the largest K below it."""
    return next(bucket for bucket in reversed(buckets) if bucket.k <= k)
