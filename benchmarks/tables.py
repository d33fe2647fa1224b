"""Estimates of samples, and tables and charts as data: header, sample key, unit and reduction of each column.

A row of a table is a group of samples. `make_table` computes the cells, `Column` says how.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

# -- estimates: medians, percentiles and ratios of samples, with their confidence intervals
#
# Every figure is computed from the samples themselves, never from other means. The interval of a figure comes from the
# bootstrap (Efron, 1979): the same figure of many draws, with replacement, from the same samples.

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
    samples: Samples,
    value: str,
    keys: Sequence[str],
    above: Mapping[str, Any],
    below: Mapping[str, Any],
) -> tuple[list[float], list[float]]:
    """`value` of the samples that `above` and `below` choose, in pairs that agree in `keys`; for `estimate_ratio`.

    Raises KeyError where one side of a pair is missing: different work cannot be compared.
    """
    sides = []
    for wanted in (above, below):
        chosen = choose(samples, **wanted)
        sides.append({tuple(one[key] for key in keys): float(one[value]) for one in chosen})
        assert len(sides[-1]) == len(chosen), (
            f"{dict(wanted)}: several samples have the same {', '.join(keys)}"
        )
    first, second = sides
    if missing := first.keys() ^ second.keys():
        raise KeyError(f"no pair for {sorted(missing, key=str)} of {dict(above)} and {dict(below)}")
    return list(first.values()), [second[key] for key in first]


def compare(
    samples: Samples, value: str, keys: Sequence[str], above: Mapping, below: Mapping
) -> Estimate:
    """The ratio of `value` between two choices of samples, pair by pair; see `pair_up`."""
    return estimate_ratio(*pair_up(samples, value, keys, above, below))


# -- tables and charts


class Table(msgspec.Struct, frozen=True):
    """Cells as they are shown. note: what a reader needs to understand them."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Series(msgspec.Struct, frozen=True):
    """One line, or one part of stacked bars. low, high: the ends of each point's range."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


class Chart(msgspec.Struct, frozen=True):
    """kind: "line", or "stack" of bars."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "line"
    log_x: bool = False
    log_y: bool = False


class Findings(msgspec.Struct, frozen=True):
    """What a record shows. Tables and charts share one name space."""

    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables] + [chart.name for chart in self.charts]
        assert len(set(names)) == len(names), f"a name is used twice: {sorted(names)}"
        for table in self.tables:
            assert all(len(row) == len(table.header) for row in table.rows), (
                f"{table.name}: rows of other lengths"
            )


def format_figure(value: float) -> str:
    """At least three significant digits and no exponent: 0.0123, 2.28, 543, 12345."""
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def format_range(low: float, high: float) -> str:
    return f"{format_figure(low)}-{format_figure(high)}"


def format_estimate(one: Estimate) -> str:
    """The value, and its interval in brackets."""
    return f"{format_figure(one.value)} ({format_range(one.low, one.high)})"


def first(values: Sequence[Any]) -> Any:
    """Reduction for values that all samples of a row share."""
    return values[0]


def at_percent(percent: float) -> Callable[[Sequence[float]], float]:
    """Reduction to a percentile."""
    return partial(percentile, percent=percent)


@dataclass(frozen=True)
class Column:
    """One column of a table. A cell with fewer values than `least` is empty."""

    header: str  # with the unit
    # Key of the samples, see `collect`; or from them to the values.
    value: str | Callable[[Samples], Sequence[Any]]
    reduce: Callable[[Sequence[Any]], Any] = median  # from the values to the value that is shown
    scale: float | None = None  # from the unit of the samples to that of the column
    show: Callable[[Any], str] = format_figure  # from the reduced value to text
    least: int = 1

    def format_cell(self, samples: Samples) -> str:
        """The cell of a row."""
        values = (
            collect(samples, self.value)
            if isinstance(self.value, str)
            else list(self.value(samples))
        )
        if self.scale is not None:
            values = [one * self.scale for one in values]
        return self.show(self.reduce(values)) if len(values) >= self.least else ""


def label(header: str, key: str, show: Callable[[Any], str] = str) -> Column:
    """A column whose value all samples of a row share."""
    return Column(header, key, first, show=show)


def percentile_columns(
    header: str,
    value: str | Callable[[Samples], Sequence[float]],
    percents: Sequence[float],
    scale: float | None = None,
) -> list[Column]:
    """A column for each percentile; the first one has the whole header, the others only "p95".

    A percentile above the median needs a value above it: the 99th of 50 values would be their maximum.
    """
    names = [f"p{percent:g}" for percent in percents]
    names[0] = f"{header} {names[0]}"
    least = [1 if one <= 50 else math.ceil(100 / (100 - one)) for one in percents]
    return [
        Column(name, value, at_percent(one), scale, least=count)
        for name, one, count in zip(names, percents, least, strict=True)
    ]


def ratio_column(header: str, compare_row: Callable[[Samples], Estimate | None]) -> Column:
    """An estimate per row, in the form "1.24 (1.20-1.31)"; None for an empty cell."""
    return Column(
        header, lambda samples: [*filter(None, [compare_row(samples)])], first, show=format_estimate
    )


def collect(samples: Samples, key: str) -> list[Any]:
    """All values of a key, lists joined, None left out."""
    found = [one[key] for one in samples if key in one]
    flat = [value for one in found for value in (one if isinstance(one, list | tuple) else [one])]
    return [value for value in flat if value is not None]


def pick(key: str, **wanted: Any) -> Callable[[Samples], list[Any]]:
    """Values of a key, of the samples of a row that have all the wanted values."""
    return lambda samples: collect(choose(samples, **wanted), key)


def make_table(
    name: str, title: str, rows: Iterable[Samples], columns: Sequence[Column], note: str = ""
) -> Table:
    """A row for each group of samples."""
    header = tuple(column.header for column in columns)
    cells = tuple(tuple(column.format_cell(samples) for column in columns) for samples in rows)
    return Table(name, title, header, cells, note)


def make_series(label: str, points: Mapping[Any, Sequence[float]]) -> Series:
    """Medians of the values at each x, with the least and the largest."""
    values = points.values()
    medians = tuple(map(median, values))
    least = tuple(map(min, values))
    most = tuple(map(max, values))
    return Series(label, tuple(points), medians, least, most)


def format_markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in (table.header, *table.rows)
    ]
    rule = f"|{'---|' * len(table.header)}"
    return "\n".join([lines[0], rule, *lines[1:]])
