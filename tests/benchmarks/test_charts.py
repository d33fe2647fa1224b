"""Charts: valid SVG with all labels, and the same bytes for the same data."""

import subprocess
import sys
from xml.etree import ElementTree

import msgspec
import pytest

from dflash_aot.benchmarks.charts import COLOURS, HATCHES, MARKS, draw_chart, draw_charts
from dflash_aot.benchmarks.tables import Chart, Series

RANGED = Series("engine", (1, 16, 256), (1.0, 2.0, 8.0), low=(0.9, 1.5, 7.0), high=(1.1, 2.5, 9.0))
PLAIN = Series("PyTorch & co", (1, 16), (2.0, 4.0))


def make_chart(kind: str, **changes: object) -> Chart:
    return Chart("rows", "Time of a verification", "rows", "milliseconds", (RANGED, PLAIN), kind, **changes)


def read_texts(svg: bytes) -> set[str]:
    return {"".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize("kind", ["line", "bar", "stack"])
def test_chart_has_its_title_axes_and_labels(kind):
    texts = read_texts(draw_chart(make_chart(kind)))
    assert {"Time of a verification", "rows", "milliseconds", "engine", "PyTorch & co"} <= texts


@pytest.mark.parametrize("kind", ["line", "bar"])
def test_ticks_are_the_x_values_of_the_data(kind):
    assert {"1", "16", "256"} <= read_texts(draw_chart(make_chart(kind, log_x=True, log_y=True)))


def test_x_axis_may_have_names():
    ways = Series("imports", ("bundle", "jax.jit, cold"), (1.0, 2.0))
    other = Series("compilation", ("jax.jit, cold",), (9.0,))
    for kind in ("bar", "stack"):
        chart = Chart("phases", "Start-up", "", "seconds", (ways, other), kind)
        assert {"bundle", "jax.jit, cold", "imports", "compilation"} <= read_texts(draw_chart(chart))


def test_long_names_are_rotated():
    names = tuple(f"a rather long name, number {number}" for number in range(8))
    many, few = (
        draw_chart(Chart("c", "", "", "", (Series("s", some, (1.0,) * len(some)),), "bar"))
        for some in (names, names[:2])
    )
    assert b"rotate(-25" in many and b"rotate(-25" not in few
    assert set(names) <= read_texts(many)


def test_stacked_bars_start_on_top_of_each_other():
    """The axis reaches 11, the sum, where bars side by side would reach 9."""
    below, above = Series("a", ("x",), (2.0,)), Series("b", ("x",), (9.0,))
    texts = {kind: read_texts(draw_chart(Chart("c", "", "", "", (below, above), kind))) for kind in ("bar", "stack")}
    assert "10" in texts["stack"] and "10" not in texts["bar"]


DRAW = """
import sys, msgspec
from dflash_aot.benchmarks.tables import Chart
from dflash_aot.benchmarks.charts import draw_chart
sys.stdout.buffer.write(draw_chart(msgspec.json.decode(sys.argv[1], type=Chart)))
"""


def test_same_data_gives_the_same_file_in_another_process():
    chart = make_chart("bar")
    command = [sys.executable, "-c", DRAW, msgspec.json.encode(chart).decode()]
    charts = draw_charts([chart], "kflat")
    assert list(charts) == ["kflat-rows.svg"]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"".join(charts.values())


def test_other_data_gives_another_file():
    moved = msgspec.structs.replace(PLAIN, y=(2.0, 4.5))
    other = msgspec.structs.replace(make_chart("line"), series=(RANGED, moved))
    assert draw_chart(other) != draw_chart(make_chart("line"))


def test_series_differ_without_colours():
    assert len(set(COLOURS)) == len(set(MARKS)) == len(set(HATCHES)) == 8


@pytest.mark.parametrize("kind", ["line", "bar", "stack"])
def test_more_series_than_colours_are_told_apart(kind):
    names = [f"contender {number}" for number in range(2 * len(COLOURS) + 2)]
    chart = Chart("many", "Many", "", "ms", tuple(Series(name, (1, 2), (1.0, 2.0)) for name in names), kind)
    assert set(names) <= read_texts(draw_chart(chart))
