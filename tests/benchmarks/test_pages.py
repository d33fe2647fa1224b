"""Pages generated from records, and the check that they are up to date."""

from pathlib import Path

import pytest

from dflash_aot.benchmarks.machine import MachineFacts
from dflash_aot.benchmarks.pages import find_changed, read_results, render
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record, write_record
from dflash_aot.benchmarks.tables import Chart, Findings, Series, Table
from dflash_aot.cache.errors import BadInput

MACHINE = MachineFacts("A processor", 2, 8_000_000_000, "3.11.7", {"jax": "0.10.2", "torch": ""}, "", (0.25, 1.5))
STARTED, COMMIT = "2026-01-02T03:04:05+00:00", "0123456789abcdef0123456789abcdef01234567-dirty"
README = """# A project

<!-- dflash-bench: decode/speed -->
| stale |
<!-- end -->

<!-- dflash-bench: decode -->
<!-- end -->

<!-- dflash-bench: decode/rates --><!-- end -->
"""


def make_findings(record: Record) -> Findings:
    rates = [sample["rate"] for sample in record.samples]
    series = Series("engine", (0, 7), tuple(rates))
    return Findings(
        (Table("speed", "Decoding", ("K", "tokens|s"), (("0", f"{rates[0]}"), ("7", f"{rates[1]}")), "Of a toy."),),
        (Chart("rates", "Rates", "K", "tokens per second", (series,), "bar"),),
    )


@pytest.fixture
def house(tmp_path) -> Path:
    """A README, and a directory docs/results with one record."""
    results = tmp_path / "docs/results"
    results.mkdir(parents=True)
    samples = [{"rate": 100}, {"rate": 250}]
    command = "dflash-bench decode --prompts=2"
    record = Record(RECORD_SCHEMA, "decode", command, COMMIT, STARTED, 1.0, MACHINE, {"prompts": 2}, samples, "")
    write_record(record, results / "decode.json")
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs/other.md").write_text("# Nothing is marked here\n")
    return tmp_path


def render_house(house: Path) -> dict[Path, bytes]:
    directory = house / "docs/results"
    return render(directory, read_results(directory, make_findings))


def write(rendered: dict[Path, bytes]) -> None:
    for path, content in rendered.items():
        path.write_bytes(content)


def test_marks_are_replaced_by_parts_of_the_record(house):
    rendered = render_house(house)
    table = "| K | tokens\\|s |\n| --- | --- |\n| 0 | 100 |\n| 7 | 250 |"
    readme = rendered[house / "README.md"].decode()
    assert f"<!-- dflash-bench: decode/speed -->\n{table}\n<!-- end -->" in readme
    assert "\n![Rates](docs/results/decode-rates.svg)\n" in readme
    assert "`dflash-bench decode --prompts=2`, 2026-01-02, at 0123456789-dirty: A processor, 2 cores, 8 GB" in readme
    assert "jax 0.10.2" in readme and "torch" not in readme
    assert "stale" not in readme


def test_page_has_every_table_and_chart(house):
    page = render_house(house)[house / "docs/results.md"].decode()
    for part in ("## decode", "**Decoding**", "| 7 | 250 |", "Of a toy.", "![Rates](results/decode-rates.svg)"):
        assert part in page


def test_only_generated_files_are_written(house):
    names = {path.relative_to(house).as_posix() for path in render_house(house)}
    assert names == {"README.md", "docs/results.md", "docs/results/decode-rates.svg"}


def test_second_rendering_changes_nothing(house):
    first = render_house(house)
    assert set(find_changed(first)) == set(first)
    write(first)
    assert find_changed(render_house(house)) == []


def test_changed_or_missing_file_is_found(house):
    rendered = render_house(house)
    for name, old in (("README.md", "250"), ("docs/results.md", "250"), ("docs/results/decode-rates.svg", "Rates")):
        write(rendered)
        path = house / name
        path.write_text(path.read_text().replace(old, "260"))
        assert find_changed(rendered) == [path]
        path.unlink()
        assert find_changed(rendered) == [path]


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ("<!-- dflash-bench: encode/speed --><!-- end -->", "encode/speed: there are records decode"),
        ("<!-- dflash-bench: decode/colour --><!-- end -->", "decode has speed, rates"),
        ("<!-- dflash-bench: decode/speed -->", "without its <!-- end -->"),
        ("<!-- dflash-bench: decode/speed --> <!-- dflash-bench: decode --> <!-- end -->", "without its <!-- end -->"),
    ],
)
def test_mark_with_an_unknown_name_is_refused(house, mark, complaint):
    (house / "docs/other.md").write_text(f"# A page\n\n{mark}\n")
    with pytest.raises(BadInput, match=complaint) as refused:
        render_house(house)
    assert "other.md" in str(refused.value)


def test_directory_without_records_is_refused(tmp_path):
    with pytest.raises(BadInput, match="has no records"):
        read_results(tmp_path, make_findings)
