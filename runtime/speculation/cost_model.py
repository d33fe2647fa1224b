"""Seconds of a round, as they are while serving. Pure: no arrays, no clock."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, log, log2

from dflash_aot.runtime.executables.execution_plan import RoundShape

PACE_ROUNDS = 16  # that the pace is a mean of
OWN_ROUNDS = 128  # that a bucket's own factor is a mean of, at most
CLIP = log(2.0)  # what a round differs by beyond that, from what was expected, says something else
OTHERWISE = 4.0  # doublings that a kind is away from one that drafts, or samples, where it does not
NO_TIMES: Mapping[RoundShape, float] = {}


@dataclass(slots=True)
class _Own:
    """Of one kind: seconds at load, and the logarithm of its own factor after so many rounds."""

    at_load: float
    factor: float = 0.0
    rounds: int = 0


class CostModel:
    """Times of all kinds of rounds, from those measured at load and from the rounds that are served.

    times: seconds by bucket and whether it samples. A kind's seconds are those at load × a factor of its own × the
    pace, which all kinds share. A round that took other than expected moves both: the pace at a constant rate, the
    own factor by less the more rounds it has seen. So a busy machine slows kinds alike that are not run just then,
    and an error at load is mended as soon as a kind is run.

    estimates: of kinds that are not measured yet, right in ratios at most. Such a kind takes as much longer than the
    nearest measured one as the estimates say, until it is measured, or served twice: the first round may be an
    executable's first, which takes longer.
    """

    def __init__(self, times: Mapping[RoundShape, float], estimates: Mapping[RoundShape, float] = NO_TIMES):
        self._own = {kind: _Own(seconds) for kind, seconds in times.items()}
        self._estimates = estimates
        self._nearest: dict[RoundShape, RoundShape | None] = {}
        self._met: set[RoundShape] = set()
        self._pace = 0.0  # a logarithm

    def __iter__(self) -> Iterator[RoundShape]:
        return iter(self._own.keys() | self._estimates.keys())

    def note(self, kind: RoundShape, seconds: float) -> None:
        """A round of that kind took `seconds`, above 0. KeyError for a kind without times."""
        if kind not in self._own and kind in self._estimates:
            if kind in self._met:
                self.measure(kind, seconds)
            self._met.add(kind)
            return
        own = self._own[kind]
        surprise = log(seconds / own.at_load) - self._pace - own.factor
        surprise = min(max(surprise, -CLIP), CLIP)
        own.rounds = min(own.rounds + 1, OWN_ROUNDS)
        own.factor += surprise / (1 + own.rounds)
        self._pace += surprise / PACE_ROUNDS

    def measure(self, kind: RoundShape, seconds: float) -> None:
        """What an estimated kind takes just now; one that was measured or served before knows better."""
        if kind not in self._own:
            self._own[kind] = _Own(seconds * exp(-self._pace))
            self._nearest.clear()

    def is_measured(self, kind: RoundShape) -> bool:
        return kind in self._own

    def is_guess(self, kind: RoundShape) -> bool:
        """Neither this kind was measured nor one that differs in length alone."""
        if kind in self._own:
            return False
        near = self._find_nearest(kind)
        return near is None or (near[0].batch, near[0].k, near[1]) != (kind[0].batch, kind[0].k, kind[1])

    def __getitem__(self, kind: RoundShape) -> float:
        """Seconds of a round. KeyError for a kind without times."""
        own = self._own.get(kind)
        if own is not None:
            return own.at_load * exp(self._pace + own.factor)
        estimate, near = self._estimates[kind], self._find_nearest(kind)
        return estimate if near is None else self[near] * estimate / self._estimates[near]

    def _find_nearest(self, kind: RoundShape) -> RoundShape | None:
        """Of the measured kinds."""
        if kind not in self._nearest:
            measured = (one for one in self._own if one in self._estimates)
            self._nearest[kind] = min(measured, key=lambda one: _find_distance(kind, one), default=None)
        return self._nearest[kind]


def _find_distance(one: RoundShape, other: RoundShape) -> float:
    """In doublings of rows, positions and tokens."""
    (less, sampled), (more, samples) = one, other
    sizes = ((less.batch, more.batch), (less.length, more.length), (less.k + 1, more.k + 1))
    apart = sum(abs(log2(size / another)) for size, another in sizes)
    return apart + OTHERWISE * ((sampled != samples) + (bool(less.k) != bool(more.k)))
