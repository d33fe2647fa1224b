"""Seconds of a round, as they are while serving. Pure: no arrays, no clock."""

from collections.abc import Mapping
from math import exp, log

from dflash_aot.cache.grid import Bucket

PACE_ROUNDS = 16  # that the pace is a mean of
OWN_ROUNDS = 64  # that a bucket's own factor is a mean of, at most
CLIP = 2.0  # what a round differs by beyond that, from what was expected, says something else

Kind = tuple[Bucket, bool]


class ServiceTimes:
    """Times of all kinds of rounds, from those measured at load and from the rounds that are served.

    times: seconds by bucket and whether it samples. A kind's seconds are those at load × a factor of its own × the
    pace, which all kinds share. A round that took other than expected moves both: the pace at a constant rate, the
    own factor by less the more rounds it has seen. So a busy machine slows kinds alike that are not run just then,
    and an error at load is mended as soon as a kind is run.
    """

    def __init__(self, times: Mapping[Kind, float]):
        self._at_load = times
        self._pace = 0.0  # logarithms, as the own factors are
        self._own = dict.fromkeys(times, 0.0)
        self._rounds = dict.fromkeys(times, 0)

    def note(self, kind: Kind, seconds: float) -> None:
        """A round of that kind took `seconds`. KeyError for a kind without times."""
        surprise = log(min(max(seconds / self[kind], 1 / CLIP), CLIP))
        self._rounds[kind] = rounds = min(self._rounds[kind] + 1, OWN_ROUNDS)
        self._own[kind] += surprise / (1 + rounds)
        self._pace += surprise / PACE_ROUNDS

    def __getitem__(self, kind: Kind) -> float:
        """Seconds of a round. KeyError for a kind without times."""
        return self._at_load[kind] * exp(self._pace + self._own[kind])
