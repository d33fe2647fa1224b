"""The cost model: seconds of a round of every shape, measured at load and corrected while serving."""

from collections.abc import Mapping
from math import exp, inf, log

from dflash_aot.runtime.executables.required_executables import RoundShape

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
        self.resume: dict[int, float] = {}  # by batch, seconds: what resuming drafting cost the last time
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
        return shape in self._rounds

    def set_measured(self, shape: RoundShape, seconds: float) -> None:
        """Takes a time measured under the machine's present slowdown. Until a round is served, the shortest counts."""
        if self.is_served(shape):
            return
        self._own[shape] = min(log(seconds) - self._log_slowdown, self._own.get(shape, inf))
        scales = [own - self._estimates[measured] for measured, own in self._own.items() if measured in self._estimates]
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
