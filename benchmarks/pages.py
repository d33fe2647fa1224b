"""Records as pages: one with everything that a directory of them says, and the marked parts of other pages.

A page asks for something of a record between two comments, and gets what the record says now:

    <!-- dflash-bench: decode/speed -->the table, chart or figure of that name of decode.json<!-- end -->

`decode` alone is the line that says how decode.json was measured.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.findings import Chart, Findings, format_figure, format_table
from dflash_aot.benchmarks.pictures import draw_pictures
from dflash_aot.benchmarks.record import Record, read_record
from dflash_aot.cache.errors import BadInput

MARK = re.compile(r"(<!-- dflash-bench: (?P<name>\S+) -->)(?P<content>.*?)(<!-- end -->)", re.DOTALL)
OPENING = "<!-- dflash-bench:"
HEAD = """# Results

<!-- Written by dflash-bench render from the records beside it. -->

Each was measured by the command above it, which `dflash-bench --help` explains; all samples are in the record. Compare
within a table, whose ways ran in turn on the same machine, and run the commands on yours.
"""


@dataclass(frozen=True)
class Result:
    """A record, what it says, and its name: its file is NAME.json, its charts NAME-*.svg."""

    name: str
    record: Record
    findings: Findings


Describe = Callable[[Record], Findings]


def read_results(directory: Path, describe: Describe) -> dict[str, Result]:
    """By name, in the order of names. Raises BadInput for what is no record, and what `describe` raises."""
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise BadInput(f"{directory} holds no records: dflash-bench decode --out {directory} writes one")
    results = {}
    for path in paths:
        record = read_record(path)
        results[path.stem] = Result(path.stem, record, describe(record))
    return results


def render(directory: Path, results: Mapping[str, Result]) -> dict[Path, bytes]:
    """Every file that follows from the records: charts, DIRECTORY.md, and the pages around it that have marks.

    directory: absolute. Raises BadInput for a mark that asks for what is not there, or has no end.
    """
    written = {
        directory / name: content
        for result in results.values()
        for name, content in draw_pictures(result.findings.charts, result.name).items()
    }
    page = directory.with_suffix(".md")
    written[page] = format_page(results, directory.name).encode()
    for path in find_pages(page):
        written[path] = fill_marks(path, path.read_text(encoding="utf-8"), results, directory).encode()
    return written


def find_pages(page: Path) -> list[Path]:
    """Those with marks, beside the page and in the directory above."""
    around = [*sorted(page.parent.glob("*.md")), *sorted(page.parent.parent.glob("*.md"))]
    return [path for path in around if path != page and OPENING in path.read_text(encoding="utf-8")]


def fill_marks(page: Path, text: str, results: Mapping[str, Result], directory: Path) -> str:
    """The text with what the records say now. Raises BadInput."""
    pictures = directory.relative_to(page.parent).as_posix()

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}{format_item(found['name'], results, page, pictures)}{found[4]}"

    filled = MARK.sub(fill, text)
    if text.count(OPENING) != len(MARK.findall(text)):
        raise BadInput(f"{page}: a mark of dflash-bench without its <!-- end -->")
    return filled


def format_item(name: str, results: Mapping[str, Result], page: Path, pictures: str) -> str:
    """What RECORD or RECORD/NAME stands for. Raises BadInput for what is not there."""
    result = results.get(name.partition("/")[0])
    if result is None:
        raise BadInput(f"{page} asks for {name}: there are records of {', '.join(results)}")
    wanted = name.partition("/")[2]
    if not wanted:
        return f"\n{format_provenance(result)}\n"
    if wanted in result.findings.figures:
        return format_figure(result.findings.figures[wanted])
    for table in result.findings.tables:
        if table.name == wanted:
            return f"\n{format_table(table)}\n"
    for chart in result.findings.charts:
        if chart.name == wanted:
            return f"\n{format_chart(chart, result.name, pictures)}\n"
    raise BadInput(f"{page} asks for {name}: {result.name} has {', '.join(result.findings.names)}")


def format_page(results: Mapping[str, Result], pictures: str) -> str:
    """Everything that the records say. pictures: the directory, as the page sees it."""
    parts = [HEAD]
    for result in results.values():
        parts += [f"## {result.name}\n", f"{format_provenance(result)}\n"]
        for table in result.findings.tables:
            parts.append(f"**{table.title}**\n\n{format_table(table)}\n")
            parts += [f"{table.note}\n"] if table.note else []
        parts += [f"{format_chart(chart, result.name, pictures)}\n" for chart in result.findings.charts]
    return "\n".join(parts)


def format_provenance(result: Result) -> str:
    """How, when and where a record was measured."""
    record, site = result.record, result.record.environment
    versions = ", ".join(f"{package} {version}" for package, version in site.versions.items() if version)
    commit = f", at {record.commit[:10]}{'-dirty' * record.commit.endswith('-dirty')}" if record.commit else ""
    return (
        f"`{record.command}`, {record.started[:10]}{commit}: {site.processor}, {site.cores} cores, "
        f"{site.memory_bytes / 1e9:.0f} GB, load {site.load[0]:g} before; {versions}."
    )


def format_chart(chart: Chart, record: str, pictures: str) -> str:
    """As Markdown."""
    return f"![{chart.title}]({pictures}/{record}-{chart.name}.svg)"


def find_changed(written: Mapping[Path, bytes]) -> list[Path]:
    """Files that are missing or have other contents."""
    return [path for path, content in written.items() if not path.is_file() or path.read_bytes() != content]
