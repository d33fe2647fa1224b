"""Seconds of a round, as they are while serving. Pure: no arrays, no clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

from dflash_aot.cache.grid import Bucket

PACE_ROUNDS = 16  # that the pace is a mean of
OWN_ROUNDS = 128  # that a bucket's own factor is a mean of, at most
CLIP = log(2.0)  # what a round differs by beyond that, from what was expected, says something else

Kind = tuple[Bucket, bool]


@dataclass(slots=True)
class _Own:
    """Of one kind: seconds at load, and the logarithm of its own factor after so many rounds."""

    at_load: float
    factor: float = 0.0
    rounds: int = 0


class ServiceTimes:
    """Times of all kinds of rounds, from those measured at load and from the rounds that are served.

    times: seconds by bucket and whether it samples. A kind's seconds are those at load × a factor of its own × the
    pace, which all kinds share. A round that took other than expected moves both: the pace at a constant rate, the
    own factor by less the more rounds it has seen. So a busy machine slows kinds alike that are not run just then,
    and an error at load is mended as soon as a kind is run.
    """

    def __init__(self, times: Mapping[Kind, float]):
        self._own = {kind: _Own(seconds) for kind, seconds in times.items()}
        self._pace = 0.0  # a logarithm

    def note(self, kind: Kind, seconds: float) -> None:
        """A round of that kind took `seconds`, above 0. KeyError for a kind without times."""
        own = self._own[kind]
        surprise = log(seconds / own.at_load) - self._pace - own.factor
        surprise = min(max(surprise, -CLIP), CLIP)
        own.rounds = min(own.rounds + 1, OWN_ROUNDS)
        own.factor += surprise / (1 + own.rounds)
        self._pace += surprise / PACE_ROUNDS

    def __getitem__(self, kind: Kind) -> float:
        """Seconds of a round. KeyError for a kind without times."""
        own = self._own[kind]
        return own.at_load * exp(self._pace + own.factor)
