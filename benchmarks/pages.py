"""Generates the page of results and its charts from records."""

import io
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_aot.benchmarks.record import Record, read_record
from dflash_aot.benchmarks.tables import Chart, Findings, format_markdown
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
# Processors round the last digits of coordinates in different ways.
LONG_NUMBER = re.compile(rb"(?<!\d)\d+\.\d{4,}")
METADATA = {"Date": None, "Creator": None}  # left out: they would change the file


def check_matplotlib() -> None:
    """Checks that matplotlib is installed. Raises BadInput."""
    if find_spec("matplotlib") is None:
        raise BadInput("charts need the package matplotlib: pip install 'dflash-aot[bench]'")


def draw_chart(chart: Chart) -> bytes:
    """The SVG file. Raises BadInput without matplotlib."""
    check_matplotlib()
    import matplotlib  # noqa: PLC0415  an extra
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure((7.0, 4.2), layout="constrained", facecolor="white")
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
    return LONG_NUMBER.sub(lambda number: b"%.3f" % float(number[0]), written.getvalue())


def _draw_lines(axes: Any, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        look = {
            "color": COLOURS[place % 8],
            "marker": MARKS[place % 8],
            "linestyle": LINES[place // 8 % 3],
            "label": series.label,
        }
        axes.errorbar(series.x, series.y, series.bars, capsize=3, markersize=5, **look)
    if chart.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for series in chart.series for x in series.x}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
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
            "label": series.label,
        }
        bottom = [tops[x] for x in series.x]
        axes.bar([names.index(x) for x in series.x], series.y, 0.6, bottom, **look)
        tops |= {x: tops[x] + y for x, y in zip(series.x, series.y, strict=True)}
    axes.set_xticks(range(len(names)), map(str, names))


# -- the page

PAGE_HEAD = """# Results

<!-- Written by dflash-bench render from the records next to this page. -->

Each section names its command; `dflash-bench COMMAND --help` explains the command. Compare only figures of one table.
Ratios are of measurements taken one after the other, with 95 % intervals.
"""
SHOWN_VERSIONS = ("jax", "torch")  # the record has all versions


def render(
    directory: Path, make_findings: Callable[[Record], Findings]
) -> Iterator[tuple[Path, bytes]]:
    """Generated files: the charts NAME-*.svg of each record NAME.json of a directory, then DIRECTORY.md.

    Raises BadInput for a file that is not a record, and what `make_findings` raises.
    """
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise BadInput(
            f"{directory} has no records: dflash-bench decode --out {directory} writes one"
        )
    sections: list[str] = []
    for path in paths:
        record = read_record(path)
        findings = make_findings(record)
        for chart in findings.charts:
            yield directory / f"{path.stem}-{chart.name}.svg", draw_chart(chart)
        sections += format_section(path.stem, record, findings, directory.name)
    yield directory.with_suffix(".md"), "\n".join([PAGE_HEAD, *sections]).encode()


def format_section(name: str, record: Record, findings: Findings, charts: str) -> Iterator[str]:
    """The parts of a record's section. charts: their directory, relative to the page."""
    yield f"## {name}\n"
    yield f"{format_provenance(record)}\n"
    for table in findings.tables:
        yield f"**{table.title}**\n\n{format_markdown(table)}\n"
        if table.note:
            yield f"{table.note}\n"
    for chart in findings.charts:
        yield f"![{chart.title}]({charts}/{name}-{chart.name}.svg)\n"


def format_provenance(record: Record) -> str:
    """The line that says how, when and where a record was measured."""
    site = record.environment
    shown = [package for package in SHOWN_VERSIONS if site.versions.get(package)]
    versions = ", ".join(f"{package} {site.versions[package]}" for package in shown)
    commit = ""
    if record.commit:
        commit = f", at {record.commit[:10]}{'-dirty' * record.commit.endswith('-dirty')}"
    return (
        f"`{record.command}`, {record.started[:10]}{commit}: {site.processor}, {site.cores} cores, "
        f"{site.memory_bytes / 1e9:.0f} GB, load {site.load[0]:g} before; {versions}."
    )
