"""Records of benchmarks: all samples of one run, the machine and the way they were taken, the protocol of a benchmark.

Tables, charts and the page of results follow from records alone.
"""

import dataclasses
import datetime
import io
import itertools
import os
import platform
import re
import subprocess
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dflash_aot.benchmarks.messages import PeakRates
from dflash_aot.benchmarks.tables import Chart, Findings, format_markdown
from dflash_aot.cache.environment import installed_version, read_flags
from dflash_aot.cache.errors import MALFORMED, BadInput, DflashError
from dflash_aot.cache.files.atomic_files import write_atomically

# -- the machine of a benchmark (Linux): processor, versions and load, peak rates, files

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
READ_BYTES = 1 << 29  # far more than caches hold
SQUARE = 2048  # rows and columns of a matmul: far more operations than bytes


class MachineFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine and what is installed on it."""

    processor: str
    cores: int
    memory_bytes: int
    python: str
    versions: dict[str, str]  # of PACKAGES, "" for a package that is not installed
    xla_flags: str
    # Average of one minute, before the first sample and after the last sample.
    load: tuple[float, float]


def read_machine(load_before: float) -> MachineFacts:
    """This machine, now. load_before: the average of a minute."""
    return MachineFacts(
        processor=_read_processor(),
        cores=count_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        versions={package: installed_version(package) for package in PACKAGES},
        xla_flags=read_flags("XLA_FLAGS"),
        load=(load_before, round(os.getloadavg()[0], 2)),
    )


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _read_processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def measure_peaks(
    read: Callable[[], object], multiply: Callable[[], object], calls: int
) -> PeakRates:
    """Times `read`, which reads READ_BYTES, and `multiply`, a matmul of two SQUARE by SQUARE matrices.

    First calls are not counted. The best rate of several libraries is a lower bound of what the machine can do.
    """
    reading, multiplying = (
        timeit.repeat(call, number=1, repeat=calls + 1)[1:] for call in (read, multiply)
    )
    flops = [round(2 * SQUARE**3 / seconds) for seconds in multiplying]
    return PeakRates([round(READ_BYTES / seconds) for seconds in reading], flops)


def read_files(directories: Iterable[Path]) -> None:
    """Reads all files in directories and their subdirectories, so that the kernel keeps them."""
    paths = itertools.chain.from_iterable(directory.rglob("*") for directory in directories)
    for path in filter(Path.is_file, paths):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


# -- records

RECORD_SCHEMA = 1
ROOMS = ("bin", "cache", "compile", "runtime", "server", "benchmarks")
ProgressNote = Callable[[str], None]
GRID_FLAG = "the grid, as dflash-precompile takes it"
Sample = dict[str, Any]  # flat; "way" names the contender


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a benchmark."""

    schema: int
    benchmark: str
    command: str  # takes the same samples again
    commit: str  # see `read_commit`
    started: str  # UTC, ISO 8601
    seconds: float
    environment: MachineFacts
    settings: dict[str, Any]
    samples: list[dict[str, Any]]
    void: str  # why the figures mean nothing; "" for a valid record


def read_record(path: Path) -> Record:
    """Raises BadInput for a file that is not a record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, *MALFORMED) as error:
        raise BadInput(f"{path} is not a record of a benchmark: {error}") from error
    if record.schema != RECORD_SCHEMA:
        raise BadInput(
            f"{path} has schema {record.schema}; this version reads {RECORD_SCHEMA}: take the samples again"
        )
    return record


def write_record(record: Record, path: Path) -> None:
    """One sample per line, so that a changed sample is a changed line. Raises OSError."""
    facts = msgspec.to_builtins(record)
    samples = facts.pop("samples")
    head = msgspec.json.format(msgspec.json.encode(facts), indent=1).rstrip(b"\n}")
    lines = b",\n  ".join(map(msgspec.json.encode, samples))
    body = b"[\n  " + lines + b"\n ]" if samples else b"[]"
    write_atomically(path, head + b',\n "samples": ' + body + b"\n}\n")


def read_commit() -> str:
    """The commit of the running sources, with "-dirty" where they differ; "" where git does not track them."""
    here = Path(__file__).resolve()
    root = here.parents[1]
    try:
        # An installed package may lie in some repository.
        _git(root, "ls-files", "--error-unmatch", str(here))
        changed = _git(root, "status", "--porcelain", "--", *ROOMS)
        return _git(root, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def setting(
    default: Any, description: str, least: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """A field of a benchmark's frozen `Settings` dataclass, and a flag of the same name.

    The field's type says what the flag takes: int, float, bool, str, `str | None`, or numbers separated by commas for
    `tuple[int, ...]` and `tuple[float, ...]`. least: lower bound of a number, or of each of several.
    """
    facts = {"description": description, "least": least, "choices": choices}
    return dataclasses.field(default=default, metadata=facts)


class Benchmark(Protocol):
    """A module `NAME_bench`."""

    @property
    def Settings(self) -> type:
        """A frozen dataclass, each field made by `setting`."""

    def measure(self, settings: Any, scratch: Path, note: ProgressNote) -> Iterable[Sample]:
        """Yields samples. Raises DflashError. scratch: directory for bundles, kept for the next run."""

    def find_fault(self, samples: Sequence[Sample]) -> str:
        """Why the figures would mean nothing, for example contenders with different tokens; "" if nothing is wrong."""

    def make_findings(self, record: Record) -> Findings:
        """Tables, charts and figures of a valid record."""


def take_record(
    name: str, benchmark: Benchmark, settings: Any, command: str, scratch: Path, note: ProgressNote
) -> tuple[Record, DflashError | None]:
    """Takes samples now. A DflashError ends the run: it is returned with a void record of the samples before it."""
    began = time.perf_counter()
    load = round(os.getloadavg()[0], 2)
    started = datetime.datetime.now(datetime.UTC)
    samples: list[Sample] = []
    error = None
    try:
        for sample in benchmark.measure(settings, scratch, note):
            samples.append(sample)  # one by one: samples before an error are kept
    except DflashError as caught:
        error = caught
    record = Record(
        schema=RECORD_SCHEMA,
        benchmark=name,
        command=command,
        commit=read_commit(),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began, 1),
        environment=read_machine(load),
        settings=msgspec.to_builtins(settings),
        samples=samples,
        void=f"the run did not finish: {error}" if error else benchmark.find_fault(samples),
    )
    return record, error


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


def check_installed(package: str, needed_by: str) -> None:
    """Raises BadInput for a package that is not installed. needed_by: what needs it, for the message."""
    if find_spec(package) is None:
        raise BadInput(f"{needed_by} needs the package {package}: pip install 'dflash-aot[bench]'")


def draw_chart(chart: Chart) -> bytes:
    """The SVG file. Raises BadInput without matplotlib."""
    check_installed("matplotlib", "a chart")
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


# -- the page of results

PAGE_HEAD = """# Results

<!-- Written by dflash-bench render from the records next to this page. -->

Each section names its command; `dflash-bench COMMAND --help` explains the command. Compare only figures of one table.
Ratios are of measurements taken one after the other, with 95 % intervals.
"""
SHOWN_VERSIONS = ("jax", "torch")  # the record has all versions


def render_page(
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
