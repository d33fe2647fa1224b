"""Medians, percentiles and ratios of samples, with their confidence intervals.

Every figure is computed from the samples themselves, never from other means. The interval of a figure comes from the
bootstrap (Efron, 1979): the same figure of many draws, with replacement, from the same samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 2000
Samples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Estimate:
    """A median and its interval: 95 % of the draws lie between `low` and `high`."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between two values. Needs at least one value."""
    assert len(values), "no samples"
    return float(np.percentile(values, percent))


def estimate_median(values: Sequence[float]) -> Estimate:
    """Deterministic: the draws are seeded."""
    draws = np.random.default_rng(0).choice(np.asarray(values, np.float64), (DRAWS, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Estimate(median(values), float(low), float(high))


def estimate_ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The median of the ratios of pairs: a disturbance of the machine affects both sides of a pair."""
    return estimate_median([one / other for one, other in zip(above, below, strict=True)])


def choose(samples: Samples, **wanted: Any) -> list[Mapping[str, Any]]:
    """Samples that have all the wanted values."""
    return [one for one in samples if all(one.get(key) == value for key, value in wanted.items())]


def group_by(samples: Samples, *keys: str) -> dict[tuple, list[Mapping[str, Any]]]:
    """Samples by the values of `keys`, in the order of their first samples."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for one in samples:
        groups.setdefault(tuple(one[key] for key in keys), []).append(one)
    return groups


def pair_up(
    samples: Samples, value: str, keys: Sequence[str], above: Mapping[str, Any], below: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """`value` of the samples that `above` and `below` choose, in pairs that agree in `keys`; for `estimate_ratio`.

    Raises KeyError where one side of a pair is missing: different work cannot be compared.
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


def compare(samples: Samples, value: str, keys: Sequence[str], above: Mapping, below: Mapping) -> Estimate:
    """The ratio of `value` between two choices of samples, pair by pair; see `pair_up`."""
    return estimate_ratio(*pair_up(samples, value, keys, above, below))
