"""What a record says, for people: tables, charts and single figures. Made from a record alone."""

import msgspec


class Table(msgspec.Struct, frozen=True):
    """Cells as they are shown. note: what a reader must know to understand them."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Series(msgspec.Struct, frozen=True):
    """One line, or one group of bars. low, high: the ends of each point's range."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


class Chart(msgspec.Struct, frozen=True):
    """kind: "line", "bar" (side by side at each x), "stack" (on top of each other) or "points"."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "line"
    log_x: bool = False
    log_y: bool = False


class Findings(msgspec.Struct, frozen=True):
    """Names of tables, charts and figures are of one space: pages refer to them as BENCHMARK/NAME."""

    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    figures: dict[str, float] = {}

    def __post_init__(self) -> None:
        names = self.names
        assert len(set(names)) == len(names), f"a name is used twice: {sorted(names)}"
        for table in self.tables:
            assert all(len(row) == len(table.header) for row in table.rows), f"{table.name}: rows of other lengths"

    @property
    def names(self) -> list[str]:
        """Everything that a page may ask for."""
        return [*(table.name for table in self.tables), *(chart.name for chart in self.charts), *self.figures]


def format_figure(value: float) -> str:
    """Three significant digits at least, and no exponent: 0.0123, 2.28, 543, 12345."""
    digits = max(0, 2 - _exponent(value))
    return f"{value:.{digits}f}"


def _exponent(value: float) -> int:
    return int(f"{value:.2e}".partition("e")[2])


def format_range(low: float, high: float) -> str:
    return f"{format_figure(low)}-{format_figure(high)}"


def format_table(table: Table) -> str:
    """As Markdown."""
    rows = (table.header, ("---",) * len(table.header), *table.rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
