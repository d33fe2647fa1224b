"""The cost model: seconds of a round of every shape while serving, and how many rounds one dispatch runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, log, log2

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.executables.required_executables import RoundShape

SLOWDOWN_ROUNDS = 16  # rounds that the machine's slowdown is a mean of
FACTOR_ROUNDS = 128  # rounds that a shape's own factor is a mean of, at most
MAX_SURPRISE = log(2.0)  # a larger difference from the expected time has another cause
OTHER_PROGRAM_DISTANCE = 4.0  # doublings of distance between shapes that draft, or sample, and shapes that do not
BURST_SECONDS = 0.05  # between two deltas at most; a request that arrives meanwhile waits for two bursts at most
NEW_TIME_WEIGHT = 0.25  # of the latest time in the running mean
NO_TIMES: Mapping[RoundShape, float] = {}


@dataclass(slots=True)
class _MeasuredShape:
    """seconds: as first measured, corrected for the machine's slowdown then. log_factor: logarithm of the shape's own
    factor, after so many served `rounds`.
    """

    seconds: float
    log_factor: float = 0.0
    rounds: int = 0


class CostModel:
    """Round times of all shapes, from those measured at load and from the rounds that are served.

    A shape's time is its first measured time × a factor of its own × the machine's slowdown, which all shapes share. A
    round that took other than expected moves both: the slowdown at a constant rate, the own factor by less the more
    rounds it has seen. So a busy machine also slows shapes that do not run just then, and a wrong first measurement is
    corrected as soon as the shape runs.

    A shape that was not measured has an estimate, right in ratios at most. Such a shape takes as much longer than the
    nearest measured one as the estimates say, until it is measured, or served twice: the first round may be an
    executable's first call, which takes longer.
    """

    def __init__(self, times: Mapping[RoundShape, float], estimates: Mapping[RoundShape, float] = NO_TIMES):
        """times: measured seconds. estimates: seconds of shapes that are not measured yet."""
        self._measured = {shape: _MeasuredShape(seconds) for shape, seconds in times.items()}
        self._estimates = estimates
        self._nearest: dict[RoundShape, RoundShape | None] = {}
        self._served_once: set[RoundShape] = set()
        self._log_slowdown = 0.0

    def __iter__(self) -> Iterator[RoundShape]:
        return iter(self._measured.keys() | self._estimates.keys())

    def note_served(self, shape: RoundShape, seconds: float) -> None:
        """A served round of this shape took `seconds`, above 0. KeyError for a shape without times."""
        if shape not in self._measured and shape in self._estimates:
            if shape in self._served_once:
                self.set_measured(shape, seconds)
            self._served_once.add(shape)
            return
        measured = self._measured[shape]
        surprise = log(seconds / measured.seconds) - self._log_slowdown - measured.log_factor
        surprise = min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
        measured.rounds = min(measured.rounds + 1, FACTOR_ROUNDS)
        measured.log_factor += surprise / (1 + measured.rounds)
        self._log_slowdown += surprise / SLOWDOWN_ROUNDS

    def set_measured(self, shape: RoundShape, seconds: float) -> None:
        """An estimated shape was measured, under the machine's present slowdown. Ignored for a measured shape."""
        if shape not in self._measured:
            self._measured[shape] = _MeasuredShape(seconds * exp(-self._log_slowdown))
            self._nearest.clear()

    def is_measured(self, shape: RoundShape) -> bool:
        return shape in self._measured

    def is_guess(self, shape: RoundShape) -> bool:
        """Whether neither this shape was measured nor one that differs in length alone."""
        if shape in self._measured:
            return False
        near = self._find_nearest(shape)
        return near is None or (near[0].batch, near[0].k, near[1]) != (shape[0].batch, shape[0].k, shape[1])

    def __getitem__(self, shape: RoundShape) -> float:
        """Seconds of a round. KeyError for a shape without times."""
        measured = self._measured.get(shape)
        if measured is not None:
            return measured.seconds * exp(self._log_slowdown + measured.log_factor)
        estimate, near = self._estimates[shape], self._find_nearest(shape)
        return estimate if near is None else self[near] * estimate / self._estimates[near]

    def _find_nearest(self, shape: RoundShape) -> RoundShape | None:
        """The nearest measured shape that has an estimate too."""
        if shape not in self._nearest:
            measured = (one for one in self._measured if one in self._estimates)
            self._nearest[shape] = min(measured, key=lambda one: _find_distance(shape, one), default=None)
        return self._nearest[shape]


def _find_distance(one: RoundShape, other: RoundShape) -> float:
    """In doublings of rows, positions and tokens."""
    (bucket, mode), (other_bucket, other_mode) = one, other
    sizes = (
        (bucket.batch, other_bucket.batch),
        (bucket.length, other_bucket.length),
        (bucket.k + 1, other_bucket.k + 1),
    )
    doublings = sum(abs(log2(size / other_size)) for size, other_size in sizes)
    return doublings + OTHER_PROGRAM_DISTANCE * ((mode != other_mode) + (bool(bucket.k) != bool(other_bucket.k)))


class BurstLength:
    """As many rounds as fit into a burst, by the bucket's round times so far; one round until a time is known."""

    def __init__(self, max_rounds: int, burst_seconds: float = BURST_SECONDS):
        self._max_rounds, self._burst_seconds = max_rounds, burst_seconds
        self._seconds: dict[Bucket, float] = {}

    def note_round_time(self, bucket: Bucket, seconds: float) -> None:
        """A round of this bucket took `seconds`, back to back with the previous one."""
        before = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = before + NEW_TIME_WEIGHT * (seconds - before)

    def choose(self, bucket: Bucket, room: int) -> int:
        """Rounds, at least 1, and at most `room`, for which there are positions."""
        seconds = self._seconds.get(bucket)
        if seconds is None:
            return 1
        return max(1, min(self._max_rounds, room, int(self._burst_seconds / seconds)))
