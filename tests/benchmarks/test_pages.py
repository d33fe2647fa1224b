"""The page and the charts generated from records."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dflash_aot.benchmarks.record import (
    COLOURS,
    RECORD_SCHEMA,
    MachineFacts,
    Record,
    draw_chart,
    render_page,
    write_record,
)
from dflash_aot.benchmarks.tables import Chart, Findings, Series, Table

MACHINE = MachineFacts("A processor", 2, 8_000_000_000, "3.11.7", {"jax": "0.10.2", "torch": ""}, "", (0.25, 1.5))
STARTED, COMMIT = "2026-01-02T03:04:05+00:00", "0123456789abcdef0123456789abcdef01234567-dirty"


def make_findings(record: Record) -> Findings:
    rates = [sample["rate"] for sample in record.samples]
    series = Series("engine", (0, 7), tuple(rates))
    return Findings(
        (Table("Decoding", ("K", "tokens|s"), (("0", f"{rates[0]}"), ("7", f"{rates[1]}")), "Of a toy."),),
        (Chart("rates", "Rates", "K", "tokens per second", (series,)),),
    )


@pytest.fixture
def rendered(tmp_path) -> dict[Path, bytes]:
    """What follows from docs/results with one record."""
    results = tmp_path / "docs/results"
    results.mkdir(parents=True)
    samples = [{"rate": 100}, {"rate": 250}]
    command = "dflash-bench decode --prompts=2"
    record = Record(RECORD_SCHEMA, "decode", command, COMMIT, STARTED, 1.0, MACHINE, {"prompts": 2}, samples, "")
    write_record(record, results / "decode.json")
    return dict(render_page(results, make_findings))


def test_page_has_every_table_and_chart_and_says_how_it_was_measured(rendered, tmp_path):
    assert list(rendered) == [tmp_path / "docs/results/decode-rates.svg", tmp_path / "docs/results.md"]
    page = rendered[tmp_path / "docs/results.md"].decode()
    assert "| K | tokens\\|s |\n|---|---|\n| 0 | 100 |\n| 7 | 250 |" in page
    for part in ("## decode", "**Decoding**", "Of a toy.", "![Rates](results/decode-rates.svg)", "jax 0.10.2"):
        assert part in page
    assert "`dflash-bench decode --prompts=2`, 2026-01-02, at 0123456789-dirty: A processor, 2 cores, 8 GB" in page
    assert "torch" not in page


def read_texts(kind: str, *series: Series, **changes: object) -> set[str]:
    svg = draw_chart(Chart("rows", "Time of a verification", "rows", "milliseconds", series, kind, **changes))
    return {"".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize("kind", ["line", "stack"])
def test_chart_has_its_title_axes_labels_and_ticks(kind):
    names = ["PyTorch & co", *(f"contender {number}" for number in range(2 * len(COLOURS) + 2))]
    ranged = Series("engine", (1, 16, 256), (1.0, 2.0, 8.0), ((0.1, 0.5, 1.0), (0.1, 0.5, 1.0)))
    plain = (Series(name, (1, 16), (2.0, 4.0)) for name in names)
    texts = read_texts(kind, ranged, *plain, log=kind == "line")
    assert {"Time of a verification", "rows", "milliseconds", "engine", "1", "16", "256", *names} <= texts
