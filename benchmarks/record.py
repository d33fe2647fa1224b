"""Records of benchmarks: all samples of one run, the machine and the way they were taken, the protocol of a benchmark.

Tables and charts follow from a record alone.
"""

import dataclasses
import datetime
import importlib.metadata
import itertools
import os
import platform
import subprocess
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dflash_aot.benchmarks.messages import PeakRates
from dflash_aot.benchmarks.tables import Findings
from dflash_aot.cache.environment import read_flags
from dflash_aot.cache.errors import BadInput, DflashError
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
    versions = dict.fromkeys(PACKAGES, "")
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return MachineFacts(
        processor=_read_processor(),
        cores=count_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        versions=versions,
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
    except (OSError, ValueError) as error:
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
