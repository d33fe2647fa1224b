"""Estimates of samples, and tables and charts as data. A row of a table is a group of samples."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

# -- estimates: medians, percentiles and ratios of samples, with their confidence intervals
#
# Every figure is computed from the samples themselves, never from other means. The interval of a figure comes from the
# bootstrap (Efron, 1979): the same figure of many draws, with replacement, from the same samples.

DRAWS = 2000
Samples = Sequence[Mapping[str, Any]]


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between two values. Needs at least one value."""
    assert len(values), "no samples"
    return float(np.percentile(values, percent))


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def estimate_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of draws lie between these two. Deterministic: the draws are seeded."""
    draws = np.random.default_rng(0).choice(np.asarray(values, np.float64), (DRAWS, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


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
    samples: Samples, value: str, keys: Sequence[str], above: Mapping, below: Mapping
) -> tuple[list[float], list[float]]:
    """`value` of two choices of samples, in pairs that agree in `keys`. Raises KeyError for a sample without a pair."""
    first, second = (
        {tuple(one[key] for key in keys): float(one[value]) for one in choose(samples, **wanted)}
        for wanted in (above, below)
    )
    if missing := first.keys() ^ second.keys():
        raise KeyError(f"no pair for {sorted(missing, key=str)} of {dict(above)} and {dict(below)}")
    return list(first.values()), [second[key] for key in first]


# -- tables and charts


class Table(msgspec.Struct, frozen=True):
    """Cells as they are shown. note: what a reader needs to understand them."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Series(msgspec.Struct, frozen=True):
    """One line, or one part of stacked bars. bars: lengths of the error bars below the points, and above."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    bars: tuple[tuple[float, ...], tuple[float, ...]] | None = None


class Chart(msgspec.Struct, frozen=True):
    """kind: "line", or "stack" of bars. log: whether both axes are logarithmic."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "line"
    log: bool = False


class Findings(msgspec.Struct, frozen=True):
    """What a record shows. The names of its charts differ."""

    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


def format_figure(value: float) -> str:
    """At least three significant digits and no exponent: 0.0123, 2.28, 543, 12345."""
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def format_estimate(values: Sequence[float]) -> str:
    """The median, and its interval in brackets."""
    low, high = map(format_figure, estimate_interval(values))
    return f"{format_figure(median(values))} ({low}-{high})"


def format_ratio(
    samples: Samples, value: str, keys: Sequence[str], above: Mapping, below: Mapping
) -> str:
    """The median of the ratios of pairs, see `pair_up`: a disturbance of the machine affects both sides of a pair."""
    pairs = zip(*pair_up(samples, value, keys, above, below), strict=True)
    return format_estimate([one / other for one, other in pairs])


# The header of a column, with the unit, and the text of its cell in a row.
Column = tuple[str, Callable[[Samples], str]]


def label(header: str, key: str, show: Callable[[Any], str] = str) -> Column:
    """A column whose value all samples of a row share."""
    return header, lambda row: show(row[0][key])


def percentile_column(
    header: str, key: str, percent: float = 50, scale: float = 1, **wanted: Any
) -> Column:
    """A percentile, by default the median, of all values of a key in the samples that have the wanted values.

    scale: from the unit of the samples to that of the column. A percentile above the median needs a value above it,
    as the 99th of 50 values would be their maximum: otherwise the cell is empty.
    """
    least = 1 if percent <= 50 else math.ceil(100 / (100 - percent))

    def format_cell(row: Samples) -> str:
        values = [one * scale for one in collect(choose(row, **wanted), key)]
        return format_figure(percentile(values, percent)) if len(values) >= least else ""

    return header, format_cell


def collect(samples: Samples, key: str) -> list[Any]:
    """All values of a key, lists joined, None left out."""
    found = [one[key] for one in samples if key in one]
    flat = [value for one in found for value in (one if isinstance(one, list | tuple) else [one])]
    return [value for value in flat if value is not None]


def make_table(
    title: str, rows: Iterable[Samples], columns: Sequence[Column], note: str = ""
) -> Table:
    """A row for each group of samples."""
    header = tuple(name for name, _ in columns)
    cells = tuple(tuple(format_cell(samples) for _, format_cell in columns) for samples in rows)
    return Table(title, header, cells, note)


def make_series(label: str, points: Mapping[Any, Sequence[float]]) -> Series:
    """Medians of the values at each x; error bars reach to the least and the largest."""
    medians = {x: median(values) for x, values in points.items()}
    below = tuple(medians[x] - min(values) for x, values in points.items())
    above = tuple(max(values) - medians[x] for x, values in points.items())
    return Series(label, tuple(points), tuple(medians.values()), (below, above))


def format_markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in (table.header, *table.rows)
    ]
    rule = f"|{'---|' * len(table.header)}"
    return "\n".join([lines[0], rule, *lines[1:]])
