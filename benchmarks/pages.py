"""Generates the page of results and its charts from records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.charts import draw_charts
from dflash_aot.benchmarks.record import Record, read_record
from dflash_aot.benchmarks.tables import Findings, format_markdown
from dflash_aot.cache.errors import BadInput

PAGE_HEAD = """# Results

<!-- Written by dflash-bench render from the records next to this page. -->

Each section names the command that measured it; `dflash-bench COMMAND --help` explains the command. The record has all
samples. Compare only the figures of one table: its contenders took turns on one machine.
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
        parts += [f"![{chart.title}]({charts}/{result.name}-{chart.name}.svg)\n" for chart in result.findings.charts]
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


def find_changed(written: Mapping[Path, bytes]) -> list[Path]:
    """Files that are missing or have other contents."""
    return [path for path, content in written.items() if not path.is_file() or path.read_bytes() != content]
