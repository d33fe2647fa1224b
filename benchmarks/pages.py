"""Generates the page of results and its charts from records."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_aot.benchmarks.record import Record, read_record
from dflash_aot.benchmarks.tables import Chart, Findings, Series, format_markdown
from dflash_aot.cache.errors import BadInput

# -- charts
#
# SVG files, drawn with matplotlib: the same bytes for the same data, on a white background, also in dark pages.

# Okabe and Ito (2008): colours for every kind of colour vision. Each also has its own mark and hatching.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LINES = ("-", "--", ":")  # of the first eight series, of the next
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Lines: dots make an SVG ten times as long.
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//")
STYLE = {
    "svg.hashsalt": "dflash-bench",  # or names inside of the SVG are random
    "svg.fonttype": "none",  # text stays text
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 10,
    "hatch.linewidth": 0.5,
}
FIGURE_INCHES = (7.0, 4.2)
# Without date and version, which would change the file.
METADATA = {"Date": None, "Creator": None}


def check_matplotlib() -> None:
    """Checks that matplotlib is installed. Raises BadInput."""
    if find_spec("matplotlib") is None:
        raise BadInput("charts need the package matplotlib: pip install 'dflash-aot[bench]'")


def draw_charts(charts: Sequence[Chart], record: str) -> dict[str, bytes]:
    """SVG files by name. Raises BadInput without matplotlib."""
    return {f"{record}-{chart.name}.svg": draw_chart(chart) for chart in charts}


def draw_chart(chart: Chart) -> bytes:
    """The SVG file. Raises BadInput without matplotlib."""
    check_matplotlib()
    import matplotlib  # noqa: PLC0415  an extra
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(FIGURE_INCHES, layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        (_draw_lines if chart.kind == "line" else _draw_bars)(axes, chart)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if len(chart.series) > 1:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata=METADATA)
        return written.getvalue()


def _draw_lines(axes: Any, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        look = {
            "color": COLOURS[place % 8],
            "marker": MARKS[place % 8],
            "linestyle": LINES[place // 8 % 3],
        }
        axes.errorbar(
            series.x,
            series.y,
            _error_bars(series),
            capsize=3,
            markersize=5,
            label=series.label,
            **look,
        )
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for series in chart.series for x in series.x}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Any, chart: Chart) -> None:
    """Each series on top of the series before."""
    names = list(dict.fromkeys(x for series in chart.series for x in series.x))
    tops = dict.fromkeys(names, 0.0)
    for place, series in enumerate(chart.series):
        look = {
            "color": COLOURS[place % 8],
            "hatch": HATCHES[(place + place // 8) % 8],
            "edgecolor": "white",
        }
        bottom = [tops[x] for x in series.x]
        axes.bar(
            [names.index(x) for x in series.x],
            series.y,
            0.6,
            bottom=bottom,
            label=series.label,
            **look,
        )
        tops |= {x: tops[x] + y for x, y in zip(series.x, series.y, strict=True)}
    axes.set_xticks(range(len(names)), map(str, names))


def _error_bars(series: Series) -> list[list[float]] | None:
    """Length of each error bar below and above its point."""
    if series.low is None or series.high is None:
        return None
    below = [y - low for y, low in zip(series.y, series.low, strict=True)]
    return [below, [high - y for y, high in zip(series.y, series.high, strict=True)]]


# -- the page

PAGE_HEAD = """# Results

<!-- Written by dflash-bench render from the records next to this page. -->

Each section names its command; `dflash-bench COMMAND --help` explains the command. Compare only figures of one table.
Ratios are of measurements taken one after the other, with 95 % intervals.
"""


SHOWN_VERSIONS = ("jax", "torch")  # the record has all versions


@dataclass(frozen=True)
class NamedRecord:
    """A record and its findings. The record's file is NAME.json, its charts are NAME-*.svg."""

    name: str
    record: Record
    findings: Findings


MakeFindings = Callable[[Record], Findings]


def read_results(directory: Path, make_findings: MakeFindings) -> dict[str, NamedRecord]:
    """Records by name, sorted. Raises BadInput for a file that is not a record, and what `make_findings` raises."""
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise BadInput(
            f"{directory} has no records: dflash-bench decode --out {directory} writes one"
        )
    results = {}
    for path in paths:
        record = read_record(path)
        results[path.stem] = NamedRecord(path.stem, record, make_findings(record))
    return results


def render(directory: Path, results: Mapping[str, NamedRecord]) -> dict[Path, bytes]:
    """Contents of every generated file: charts, and DIRECTORY.md."""
    written = {
        directory / name: content
        for result in results.values()
        for name, content in draw_charts(result.findings.charts, result.name).items()
    }
    written[directory.with_suffix(".md")] = format_page(results, directory.name).encode()
    return written


def format_page(results: Mapping[str, NamedRecord], charts: str) -> str:
    """The page with everything. charts: their directory, relative to the page."""
    parts = [PAGE_HEAD]
    for result in results.values():
        parts += [f"## {result.name}\n", f"{format_provenance(result)}\n"]
        for table in result.findings.tables:
            parts.append(f"**{table.title}**\n\n{format_markdown(table)}\n")
            parts += [f"{table.note}\n"] if table.note else []
        parts += [
            f"![{chart.title}]({charts}/{result.name}-{chart.name}.svg)\n"
            for chart in result.findings.charts
        ]
    return "\n".join(parts)


def format_provenance(result: NamedRecord) -> str:
    """The line that says how, when and where a record was measured."""
    record = result.record
    site = result.record.environment
    versions = ", ".join(
        f"{package} {site.versions[package]}"
        for package in SHOWN_VERSIONS
        if site.versions.get(package)
    )
    commit = (
        f", at {record.commit[:10]}{'-dirty' * record.commit.endswith('-dirty')}"
        if record.commit
        else ""
    )
    return (
        f"`{record.command}`, {record.started[:10]}{commit}: {site.processor}, {site.cores} cores, "
        f"{site.memory_bytes / 1e9:.0f} GB, load {site.load[0]:g} before; {versions}."
    )


def find_changed(written: Mapping[Path, bytes]) -> list[Path]:
    """Files that are missing or have other contents."""
    return [
        path
        for path, content in written.items()
        if not path.is_file() or path.read_bytes() != content
    ]
