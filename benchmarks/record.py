"""Records of benchmarks: all samples of one run, where and how they were taken, and the protocol of a benchmark.

Tables and charts follow from a record alone.
"""

import dataclasses
import datetime
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dflash_aot.benchmarks.machine import MachineFacts, read_load, read_machine
from dflash_aot.benchmarks.tables import Findings
from dflash_aot.cache.bundle.atomic_files import write_atomically
from dflash_aot.cache.errors import BadInput, DflashError

RECORD_SCHEMA = 1
ROOMS = ("bin", "cache", "compile", "runtime", "server", "benchmarks")
ProgressNote = Callable[[str], None]
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
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a record of a benchmark: {error}") from error
    if record.schema != RECORD_SCHEMA:
        raise BadInput(f"{path} has schema {record.schema}; this version reads {RECORD_SCHEMA}: take the samples again")
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
        _git(root, "ls-files", "--error-unmatch", str(here))  # an installed package may lie in some repository
        changed = _git(root, "status", "--porcelain", "--", *ROOMS)
        return _git(root, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def setting(default: Any, description: str, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of a benchmark's frozen `Settings` dataclass, and a flag of the same name.

    The field's type says what the flag takes: int, float, bool, str, `str | None`, or numbers separated by commas for
    `tuple[int, ...]` and `tuple[float, ...]`. least: lower bound of a number, or of each of several.
    """
    return dataclasses.field(default=default, metadata={"description": description, "least": least, "choices": choices})


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
    began, load, started = time.perf_counter(), read_load(), datetime.datetime.now(datetime.UTC)
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
