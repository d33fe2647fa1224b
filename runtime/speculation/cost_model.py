"""The cost model: seconds of a round of every shape while serving, and how many rounds one dispatch runs."""

from collections.abc import Mapping
from math import exp, inf, log

from dflash_aot.runtime.executables.required_executables import RoundShape

SLOWDOWN_ROUNDS = 16  # rounds that the machine's slowdown is a mean of
OWN_ROUNDS = 128  # rounds that a shape's own time is a mean of, at most
MAX_SURPRISE = log(2.0)  # a larger difference from the expected time has another cause
BURST_SECONDS = 0.05  # between two deltas at most; a request that arrives meanwhile waits for two bursts at most
NEW_TIME_WEIGHT = 0.25  # of the latest time in the running mean
NO_TIMES: Mapping[RoundShape, float] = {}


class CostModel:
    """Round times of all shapes, from those measured at load and from the rounds that are served.

    A shape's time is its own time × the machine's slowdown, which all shapes share. A round that took other than
    expected moves both: the slowdown at a constant rate, the own time by less the more rounds it has seen. So a busy
    machine also slows shapes that do not run just then, and a wrong first measurement is corrected as soon as the shape
    runs. A shape that was not measured takes as much longer than its estimate as the measured ones do on average.

    A round that resumes drafting, the first after rounds with K = 0, takes longer: it waits for the draft kv that those
    deferred.
    """

    def __init__(self, times: Mapping[RoundShape, float], estimates: Mapping[RoundShape, float] = NO_TIMES):
        """times: measured seconds. estimates: seconds of shapes that are not measured yet, right in ratios."""
        self._estimates = {shape: log(seconds) for shape, seconds in estimates.items()}
        self._own: dict[RoundShape, float] = {}  # logarithms of seconds, without the slowdown
        self._measured: dict[RoundShape, float] = {}  # seconds, as measured
        self._rounds: dict[RoundShape, int] = {}
        self._resume: dict[int, float] = {}  # by batch, seconds: what resuming costs in the mean
        self._log_slowdown = self._log_scale = 0.0
        for shape, seconds in times.items():
            self.set_measured(shape, seconds)

    def __getitem__(self, shape: RoundShape) -> float:
        """Seconds of a round. KeyError for a shape without times."""
        own = self._own.get(shape)
        return exp(self._log_slowdown + (self._log_scale + self._estimates[shape] if own is None else own))

    def is_measured(self, shape: RoundShape) -> bool:
        """Whether a round of this shape was measured or served."""
        return shape in self._own

    def is_served(self, shape: RoundShape) -> bool:
        """Whether a round of this shape was served after a time of it was known."""
        return self._rounds.get(shape, 0) > 0

    def set_measured(self, shape: RoundShape, seconds: float) -> None:
        """A shape was measured, under the machine's present slowdown: the shortest time counts, until one is served."""
        if self.is_served(shape) or seconds >= self._measured.get(shape, inf):
            return
        self._measured[shape], self._rounds[shape] = seconds, 0
        self._own[shape] = log(seconds) - self._log_slowdown
        scales = [own - self._estimates[measured] for measured, own in self._own.items() if measured in self._estimates]
        self._log_scale = sum(scales) / len(scales) if scales else 0.0

    def estimate_resume(self, batch: int) -> float:
        """Seconds that a round of so many rows takes longer where it resumes drafting; 0 until one did."""
        return self._resume.get(batch, 0.0)

    def note_resumed(self, shape: RoundShape, seconds: float) -> None:
        """A served round of this shape that resumed drafting took `seconds`. KeyError for a shape without times."""
        extra, batch = seconds - self[shape], shape[0].batch
        if extra <= 0 or shape not in self._own:
            self.note_served(shape, seconds)
            return
        before = self._resume.get(batch, extra)
        self._resume[batch] = before + NEW_TIME_WEIGHT * (min(extra, self[shape]) - before)

    def note_served(self, shape: RoundShape, seconds: float) -> None:
        """A served round of this shape took `seconds`, above 0. KeyError for a shape without times."""
        surprise = log(seconds / self[shape])
        if shape not in self._own:
            self.set_measured(shape, seconds)
            return
        surprise = min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
        self._rounds[shape] = rounds = min(self._rounds[shape] + 1, OWN_ROUNDS)
        self._own[shape] += surprise / (1 + rounds)
        self._log_slowdown += surprise / SLOWDOWN_ROUNDS


class BurstLength:
    """As many rounds as fit into a burst, by the shape's round times so far; one round until a time is known."""

    def __init__(self, max_rounds: int, burst_seconds: float = BURST_SECONDS):
        self._max_rounds, self._burst_seconds = max_rounds, burst_seconds
        self._seconds: dict[RoundShape, float] = {}

    def note_round_time(self, shape: RoundShape, seconds: float) -> None:
        """A round of this shape took `seconds`, back to back with the previous one."""
        before = self._seconds.get(shape, seconds)
        self._seconds[shape] = before + NEW_TIME_WEIGHT * (seconds - before)

    def choose(self, shape: RoundShape, room: int) -> int:
        """Rounds, at least 1, and at most `room`, for which there are positions."""
        seconds = self._seconds.get(shape)
        if seconds is None:
            return 1
        return max(1, min(self._max_rounds, room, int(self._burst_seconds / seconds)))
