"""Charts as SVG files, the same bytes for the same data. On white, so that they can be read on a dark page, too."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_aot.benchmarks.findings import Chart, Series
from dflash_aot.cache.bundle.atomic_files import write_atomically
from dflash_aot.cache.errors import BadInput

# Okabe and Ito (2008): told apart by every kind of eye; and each has a mark or a hatching of its own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//")  # of lines: dots make an SVG ten times as long
STYLE = {
    "svg.hashsalt": "dflash-bench",  # names inside of an SVG are random otherwise
    "svg.fonttype": "none",  # text stays text
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 10,
    "hatch.linewidth": 0.5,
}
SIZE = (7.0, 4.2)  # inches
LEVEL = 70  # letters that fit below the x axis
# What else is in a file: when it was made, and with which version.
METADATA = {"Date": None, "Creator": None}


def check_matplotlib() -> None:
    """Raises BadInput where it is not installed."""
    if find_spec("matplotlib") is None:
        raise BadInput("charts need the package matplotlib: pip install 'dflash-aot[bench]'")


def write_pictures(charts: Sequence[Chart], directory: Path, record: str) -> None:
    """Each as `directory/RECORD-CHART.svg`. Raises BadInput, OSError."""
    for name, content in draw_pictures(charts, record).items():
        write_atomically(directory / name, content)


def draw_pictures(charts: Sequence[Chart], record: str) -> dict[str, bytes]:
    """By file name. Raises BadInput without matplotlib."""
    return {f"{record}-{chart.name}.svg": draw(chart) for chart in charts}


def draw(chart: Chart) -> bytes:
    """The SVG file. Raises BadInput without matplotlib."""
    check_matplotlib()
    import matplotlib  # noqa: PLC0415  an extra
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(SIZE, layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        {"bar": _draw_bars, "stack": _draw_stack}.get(chart.kind, _draw_lines)(axes, chart)
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
        look = {"color": COLOURS[place], "marker": MARKS[place], "markersize": 5, "label": series.label}
        line = "none" if chart.kind == "points" else "solid"
        axes.errorbar(series.x, series.y, yerr=_ranges(series), linestyle=line, capsize=3, **look)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for series in chart.series for x in series.x}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Any, chart: Chart) -> None:
    names = _name_places(chart)
    width = 0.8 / len(chart.series)
    for place, series in enumerate(chart.series):
        centres = [names.index(x) + (place - (len(chart.series) - 1) / 2) * width for x in series.x]
        look = {"color": COLOURS[place], "hatch": HATCHES[place], "edgecolor": "white", "label": series.label}
        axes.bar(centres, series.y, width, yerr=_ranges(series), capsize=3, **look)
    _name_ticks(axes, names)
    if chart.log_y:
        axes.set_yscale("log")


def _draw_stack(axes: Any, chart: Chart) -> None:
    names = _name_places(chart)
    tops = dict.fromkeys(names, 0.0)
    for place, series in enumerate(chart.series):
        look = {"color": COLOURS[place], "hatch": HATCHES[place], "edgecolor": "white", "label": series.label}
        axes.bar([names.index(x) for x in series.x], series.y, 0.6, bottom=[tops[x] for x in series.x], **look)
        tops |= {x: tops[x] + y for x, y in zip(series.x, series.y, strict=True)}
    _name_ticks(axes, names)


def _name_places(chart: Chart) -> list[float | str]:
    """What stands on the x axis, in the order in which it comes first."""
    return list(dict.fromkeys(x for series in chart.series for x in series.x))


def _name_ticks(axes: Any, names: Sequence[float | str]) -> None:
    texts = [name if isinstance(name, str) else f"{name:g}" for name in names]
    slanted = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if len("".join(texts)) > LEVEL else {}
    axes.set_xticks(range(len(names)), texts, **slanted)


def _ranges(series: Series) -> list[list[float]] | None:
    """How far each point's range goes below and above it."""
    if series.low is None or series.high is None:
        return None
    below = [y - low for y, low in zip(series.y, series.low, strict=True)]
    return [below, [high - y for y, high in zip(series.y, series.high, strict=True)]]
