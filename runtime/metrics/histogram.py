"""Durations counted by size: enough for percentiles of millions, in a few hundred bytes."""

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper bounds in seconds, about 2.5 apart: from a token on a fast chip to a long answer on a slow one.
BUCKET_BOUNDS_SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
)


@dataclass
class Histogram:
    """`counts[i]` values were at most SECONDS[i] and above the bound before; the last count is of all larger ones."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS_SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKET_BOUNDS_SECONDS, seconds)] += 1
        self.total += seconds

    def copy(self) -> "Histogram":
        return Histogram([*self.counts], self.total)
