"""Figures from samples: medians, percentiles, and ratios of what was measured side by side.

Never a mean of means: every figure comes from the samples themselves. How far one could be off by chance is told by the
bootstrap (Efron, 1979): the same figure of many draws, with replacement, from the same samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 2000
CONFIDENCE = 95  # percent of the draws lie between `low` and `high`


@dataclass(frozen=True)
class Estimate:
    """A median, and where it would lie in 95 of 100 repetitions, as far as these samples tell."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def percentile(values: Sequence[float], share: float) -> float:
    """Between two values linearly, as NumPy does. `share` in percent. At least one value."""
    assert len(values), "no samples"
    return float(np.percentile(values, share))


def estimate_median(values: Sequence[float]) -> Estimate:
    """Always the same for the same values."""
    draws = np.random.default_rng(0).choice(np.asarray(values, np.float64), (DRAWS, len(values)))
    edge = (100 - CONFIDENCE) / 2
    low, high = np.percentile(np.median(draws, axis=1), [edge, 100 - edge])
    return Estimate(median(values), float(low), float(high))


def estimate_ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The median of the ratios, pair by pair: what disturbed the machine met both of a pair."""
    return estimate_median([one / other for one, other in zip(above, below, strict=True)])


def choose(samples: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    """Those that hold all the wanted values."""
    return [one for one in samples if all(one.get(key) == value for key, value in wanted.items())]


def pair_up(
    samples: Sequence[Mapping[str, Any]],
    value: str,
    keys: Sequence[str],
    above: Mapping[str, Any],
    below: Mapping[str, Any],
) -> tuple[list[float], list[float]]:
    """`value` of the samples that `above` and `below` choose, in pairs that share what `keys` name.

    For `estimate_ratio`. Raises KeyError where a pair lacks one side: a comparison of other work is none.
    """
    sides = []
    for wanted in (above, below):
        chosen = choose(samples, **wanted)
        sides.append({tuple(one[key] for key in keys): float(one[value]) for one in chosen})
        assert len(sides[-1]) == len(chosen), f"{dict(wanted)}: several samples have the same {', '.join(keys)}"
    first, second = sides
    if missing := first.keys() ^ second.keys():
        raise KeyError(f"no pair for {sorted(missing, key=str)} of {dict(above)} and {dict(below)}")
    return list(first.values()), [second[key] for key in first]
