"""Generates pages from records: one page with everything, and the marked parts of other pages.

A mark in a page is replaced by a part of a record:

    <!-- dflash-bench: decode/speed -->the table or chart "speed" of decode.json<!-- end -->

`decode` alone stands for the line that says how decode.json was measured.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.charts import draw_charts
from dflash_aot.benchmarks.record import Record, read_record
from dflash_aot.benchmarks.tables import Chart, Findings, format_markdown
from dflash_aot.cache.errors import BadInput

MARK = re.compile(
    r"(<!-- dflash-bench: (?P<name>\S+) -->)(?P<content>(?:(?!<!-- dflash-bench:).)*?)(<!-- end -->)", re.DOTALL
)
OPENING = "<!-- dflash-bench:"
PAGE_HEAD = """# Results

<!-- Written by dflash-bench render from the records beside it. -->

Each section starts with the command that measured it, which `dflash-bench --help` explains. The record has all samples.
Compare only within a table: its contenders took turns on one machine. Run the commands on your machine.
"""


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
        raise BadInput(f"{directory} has no records: dflash-bench decode --out {directory} writes one")
    results = {}
    for path in paths:
        record = read_record(path)
        results[path.stem] = NamedRecord(path.stem, record, make_findings(record))
    return results


def render(directory: Path, results: Mapping[str, NamedRecord]) -> dict[Path, bytes]:
    """Contents of every generated file: charts, DIRECTORY.md, and the pages near it that have marks.

    directory: absolute. Raises BadInput for a mark with an unknown name or without an end.
    """
    written = {
        directory / name: content
        for result in results.values()
        for name, content in draw_charts(result.findings.charts, result.name).items()
    }
    page = directory.with_suffix(".md")
    written[page] = format_page(results, directory.name).encode()
    for path in find_pages(page):
        written[path] = fill_marks(path, path.read_text(encoding="utf-8"), results, directory).encode()
    return written


def find_pages(page: Path) -> list[Path]:
    """Pages with marks, in the directory of `page` and the directory above."""
    around = [*sorted(page.parent.glob("*.md")), *sorted(page.parent.parent.glob("*.md"))]
    return [path for path in around if path != page and OPENING in path.read_text(encoding="utf-8")]


def fill_marks(page: Path, text: str, results: Mapping[str, NamedRecord], directory: Path) -> str:
    """The text of a page with its marks filled. Raises BadInput."""
    charts = directory.relative_to(page.parent).as_posix()

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}{format_item(found['name'], results, page, charts)}{found[4]}"

    filled = MARK.sub(fill, text)
    if text.count(OPENING) != len(MARK.findall(text)):
        raise BadInput(f"{page}: a mark of dflash-bench without its <!-- end -->")
    return filled


def format_item(name: str, results: Mapping[str, NamedRecord], page: Path, charts: str) -> str:
    """The replacement of a mark RECORD or RECORD/NAME. Raises BadInput for an unknown name."""
    result = results.get(name.partition("/")[0])
    if result is None:
        raise BadInput(f"{page} has a mark {name}: there are records {', '.join(results)}")
    wanted = name.partition("/")[2]
    if not wanted:
        return f"\n{format_provenance(result)}\n"
    items = {table.name: format_markdown(table) for table in result.findings.tables}
    items |= {chart.name: format_chart(chart, result.name, charts) for chart in result.findings.charts}
    if wanted not in items:
        raise BadInput(f"{page} has a mark {name}: {result.name} has {', '.join(items)}")
    return f"\n{items[wanted]}\n"


def format_page(results: Mapping[str, NamedRecord], charts: str) -> str:
    """The page with everything. charts: their directory, relative to the page."""
    parts = [PAGE_HEAD]
    for result in results.values():
        parts += [f"## {result.name}\n", f"{format_provenance(result)}\n"]
        for table in result.findings.tables:
            parts.append(f"**{table.title}**\n\n{format_markdown(table)}\n")
            parts += [f"{table.note}\n"] if table.note else []
        parts += [f"{format_chart(chart, result.name, charts)}\n" for chart in result.findings.charts]
    return "\n".join(parts)


def format_provenance(result: NamedRecord) -> str:
    """The line that says how, when and where a record was measured."""
    record, site = result.record, result.record.environment
    versions = ", ".join(f"{package} {version}" for package, version in site.versions.items() if version)
    commit = f", at {record.commit[:10]}{'-dirty' * record.commit.endswith('-dirty')}" if record.commit else ""
    return (
        f"`{record.command}`, {record.started[:10]}{commit}: {site.processor}, {site.cores} cores, "
        f"{site.memory_bytes / 1e9:.0f} GB, load {site.load[0]:g} before; {versions}."
    )


def format_chart(chart: Chart, record: str, charts: str) -> str:
    """The chart as a Markdown image."""
    return f"![{chart.title}]({charts}/{record}-{chart.name}.svg)"


def find_changed(written: Mapping[Path, bytes]) -> list[Path]:
    """Files that are missing or have other contents."""
    return [path for path, content in written.items() if not path.is_file() or path.read_bytes() != content]
