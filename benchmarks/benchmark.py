"""What every benchmark is made of, and how a record is taken with it."""

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dflash_aot.benchmarks.findings import Findings
from dflash_aot.benchmarks.record import SCHEMA, Record, describe_site, read_commit, read_load
from dflash_aot.cache.errors import DflashError
from dflash_aot.cache.locations import user_cache_directory

Note = Callable[[str], None]  # progress, for whoever waits
Sample = dict[str, Any]  # flat; "way", and whatever else it was taken under


def default_scratch() -> Path:
    """Where bundles and the like are kept from one run to the next, unless told otherwise."""
    return user_cache_directory() / "bench"


class Benchmark(Protocol):
    """A module NAME_bench: its settings, what it measures, and what that says."""

    @property
    def Settings(self) -> type:
        """A frozen dataclass, each field made by `setting`."""

    def measure(self, settings: Any, scratch: Path, note: Note) -> Iterable[Sample]:
        """Samples as they come. scratch: a directory that is kept for the next run, for bundles and the like."""

    def find_fault(self, samples: Sequence[Sample]) -> str:
        """Why the figures would mean nothing: ways that disagree on tokens, say. "" if nothing is wrong. Pure."""

    def describe(self, record: Record) -> Findings:
        """Pure; of a record without fault."""


def take_record(
    name: str, benchmark: Benchmark, settings: Any, command: str, scratch: Path, note: Note
) -> tuple[Record, DflashError | None]:
    """Samples taken now. An error of ours ends the run: it is returned beside the record of what came before, void."""
    began, load, started = time.perf_counter(), read_load(), datetime.datetime.now(datetime.UTC)
    samples: list[Sample] = []
    error = None
    try:
        for sample in benchmark.measure(settings, scratch, note):
            samples.append(sample)  # one by one: what came before an error is kept
    except DflashError as caught:
        error = caught
    record = Record(
        schema=SCHEMA,
        benchmark=name,
        command=command,
        commit=read_commit(),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began, 1),
        environment=describe_site(load),
        settings=msgspec.to_builtins(settings),
        samples=samples,
        void=f"it did not come to its end: {error}" if error else benchmark.find_fault(samples),
    )
    return record, error
