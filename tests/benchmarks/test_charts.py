"""Charts: valid SVG with all labels, and the same bytes for the same data."""

import subprocess
import sys
from xml.etree import ElementTree

import msgspec
import pytest

from dflash_aot.benchmarks.pages import COLOURS, draw_chart, draw_charts
from dflash_aot.benchmarks.tables import Chart, Series

RANGED = Series("engine", (1, 16, 256), (1.0, 2.0, 8.0), low=(0.9, 1.5, 7.0), high=(1.1, 2.5, 9.0))
PLAIN = Series("PyTorch & co", (1, 16), (2.0, 4.0))


def make_chart(kind: str, **changes: object) -> Chart:
    return Chart("rows", "Time of a verification", "rows", "milliseconds", (RANGED, PLAIN), kind, **changes)


def read_texts(svg: bytes) -> set[str]:
    return {"".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize("kind", ["line", "stack"])
def test_chart_has_its_title_axes_labels_and_ticks(kind):
    texts = read_texts(draw_chart(make_chart(kind, log_x=kind == "line", log_y=kind == "line")))
    assert {"Time of a verification", "rows", "milliseconds", "engine", "PyTorch & co", "1", "16", "256"} <= texts
    names = [f"contender {number}" for number in range(2 * len(COLOURS) + 2)]
    many = Chart("many", "Many", "", "ms", tuple(Series(name, (1, 2), (1.0, 2.0)) for name in names), kind)
    assert set(names) <= read_texts(draw_chart(many))


def test_stacked_bars_start_on_top_of_each_other():
    """The axis reaches 11, the sum."""
    below, above = Series("a", ("x",), (2.0,)), Series("b", ("x", "y"), (9.0, 1.0))
    assert {"10", "x", "y"} <= read_texts(draw_chart(Chart("c", "", "", "", (below, above), "stack")))


DRAW = """
import sys, msgspec
from dflash_aot.benchmarks.tables import Chart
from dflash_aot.benchmarks.pages import draw_chart
sys.stdout.buffer.write(draw_chart(msgspec.json.decode(sys.argv[1], type=Chart)))
"""


def test_same_data_gives_the_same_file_in_another_process():
    chart = make_chart("line")
    command = [sys.executable, "-c", DRAW, msgspec.json.encode(chart).decode()]
    (name, drawn), *others = draw_charts([chart], "kflat").items()
    assert (name, others) == ("kflat-rows.svg", [])
    assert subprocess.run(command, check=True, capture_output=True).stdout == drawn
    moved = msgspec.structs.replace(chart, series=(RANGED, msgspec.structs.replace(PLAIN, y=(2.0, 4.5))))
    assert draw_chart(moved) != drawn
