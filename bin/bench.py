"""dflash-bench: measures, and keeps every sample. Tables go to standard output, progress to standard error.

dflash-bench decode …               tokens per second, τ and the parts of a round at every K, beside PyTorch
dflash-bench load …                 throughput and latency under callers, in closed loops and by arrivals
dflash-bench startup …              process start to first token, beside jax.jit cold and with its cache warm
dflash-bench host …                 what a round costs the host: time, dispatches, transfers, waits
dflash-bench kflat …                time of a verification against its rows, beside PyTorch and the roofline
dflash-bench data …                 the prompts that --data means
dflash-bench render DIR [--check]   from the records in DIR: their charts, DIR.md, and the marked parts of pages around

The command comes first; dflash-bench COMMAND --help lists its flags. A record with all samples is written to
OUT/NAME.json, and its charts beside it as SVG. Ends with 1, and says why, if the figures mean nothing.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from dflash_aot.benchmarks import pages
from dflash_aot.benchmarks.benchmark import Benchmark, default_scratch, take_record
from dflash_aot.benchmarks.findings import Findings
from dflash_aot.benchmarks.pictures import check_matplotlib, write_pictures
from dflash_aot.benchmarks.record import Record, write_record
from dflash_aot.benchmarks.settings import setting
from dflash_aot.bin.bench_flags import define_settings, read_settings, spell_command
from dflash_aot.bin.command_line import format_table, run_with_arguments
from dflash_aot.cache.bundle.atomic_files import write_atomically
from dflash_aot.cache.errors import BadInput, VoidRecord

FLAGS = flags.FlagValues()


@dataclass(frozen=True)
class Output:
    """Where what a benchmark measures goes."""

    out: str = setting("dflash-bench", "the directory that the record and its charts are written to")
    name: str | None = setting(None, "what they are called there; default: as the command")
    scratch: str | None = setting(
        None, "where bundles and the like are kept for the next run; default: in the user's cache directory"
    )


@dataclass(frozen=True)
class Rendering:
    """What `render` may be told."""

    check: bool = setting(False, "writes nothing, says what would change, and ends with 2 if anything would")


@dataclass(frozen=True)
class Command:
    """One of the sub-commands: what its flags set, imported when it is asked for, and what it does."""

    settings: Callable[[], Sequence[type]]
    run: Callable[[Sequence[str]], int]


# Each is imported when it is asked for: what it measures with takes seconds to load.


def _load_decode() -> Benchmark:
    from dflash_aot.benchmarks import decode_bench  # noqa: PLC0415

    return decode_bench


def _load_load() -> Benchmark:
    from dflash_aot.benchmarks import load_bench  # noqa: PLC0415

    return load_bench


def _load_startup() -> Benchmark:
    from dflash_aot.benchmarks import startup_bench  # noqa: PLC0415

    return startup_bench


def _load_host() -> Benchmark:
    from dflash_aot.benchmarks import host_bench  # noqa: PLC0415

    return host_bench


def _load_kflat() -> Benchmark:
    from dflash_aot.benchmarks import kflat_bench  # noqa: PLC0415

    return kflat_bench


BENCHMARKS: dict[str, Callable[[], Benchmark]] = {
    "decode": _load_decode,
    "load": _load_load,
    "startup": _load_startup,
    "host": _load_host,
    "kflat": _load_kflat,
}


def main() -> None:
    """The console script."""
    if command := find_command(_name()):
        for settings in command.settings():
            define_settings(settings, FLAGS)
    sys.exit(run_with_arguments("dflash-bench", __doc__, FLAGS, run))


def run(arguments: Sequence[str]) -> int:
    """The sub-command that comes first. Raises BadInput for what it does not take."""
    command = find_command(_name())
    if command is None:
        there = ", ".join((*BENCHMARKS, *OTHERS))
        raise BadInput(f"{_name() or 'nothing'}: no such command; it comes first, and there are {there}, see --help")
    return command.run(arguments[1:])


def find_command(name: str) -> Command | None:
    """A benchmark, or one of the others."""
    if name in BENCHMARKS:
        return Command(lambda: (BENCHMARKS[name]().Settings, Output), lambda arguments: measure(name, arguments))
    return OTHERS.get(name)


def _name() -> str:
    return sys.argv[1] if len(sys.argv) > 1 else ""


def measure(name: str, arguments: Sequence[str]) -> int:
    """The benchmark of that name. Raises VoidRecord, once the record is written, and what measuring raises."""
    _expect_no_more(name, arguments)
    check_matplotlib()  # before anything is measured
    benchmark, output = BENCHMARKS[name](), read_settings(Output, FLAGS)
    settings = read_settings(benchmark.Settings, FLAGS)
    scratch = Path(output.scratch) if output.scratch else default_scratch()
    directory, called = Path(output.out), output.name or name
    for place in (directory, scratch):
        place.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["dflash-bench", *spell_command(name, settings)])
    record, error = take_record(name, benchmark, settings, command, scratch, note)
    path = directory / f"{called}.json"
    write_record(record, path)
    if error:
        raise error
    if record.void:
        raise VoidRecord(f"void: {record.void}. The samples are in {path}")
    findings = benchmark.describe(record)
    print(format_findings(record, findings))
    write_pictures(findings.charts, directory, called)
    note(f"the record is {path}, its charts are beside it")
    return 0


def _expect_no_more(name: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise BadInput(f"unexpected {' '.join(map(repr, arguments))}: all arguments of {name} are flags, see --help")


def note(message: str) -> None:
    """Progress, for whoever waits."""
    print(f"dflash-bench: {message}", file=sys.stderr, flush=True)


def format_findings(record: Record, findings: Findings) -> str:
    """The tables, for a terminal."""
    site = record.environment
    parts = [f"{record.command}\n{site.processor}, {site.cores} cores, load {site.load[0]:.2f} before"]
    for table in findings.tables:
        lines = (table.title, format_table(table.header, table.rows), table.note)
        parts.append("\n".join(filter(None, lines)))
    return "\n\n".join(parts)


def show_data(arguments: Sequence[str]) -> int:
    """What --data means. Raises BadInput, BadCheckpoint."""
    from dflash_aot.benchmarks import data  # noqa: PLC0415

    _expect_no_more("data", arguments)
    print(data.show(read_settings(data.Settings, FLAGS)))
    return 0


def _data_settings() -> Sequence[type]:
    from dflash_aot.benchmarks.data import Settings  # noqa: PLC0415

    return (Settings,)


def render(arguments: Sequence[str]) -> int:
    """Writes, or compares, what follows from the records of a directory. Raises BadInput."""
    if len(arguments) != 1:
        raise BadInput(f"render takes one directory of records; given: {' '.join(arguments) or 'none'}")
    directory = Path(arguments[0]).resolve()
    rendered = pages.render(directory, pages.read_results(directory, describe))
    changed = pages.find_changed(rendered)
    if read_settings(Rendering, FLAGS).check:
        if changed:
            names = ", ".join(map(os.path.relpath, changed))
            raise BadInput(f"not what the records say: {names}. Write them: dflash-bench render {arguments[0]}")
        return 0
    for path in changed:
        write_atomically(path, rendered[path])
        note(f"wrote {os.path.relpath(path)}")
    return 0


def describe(record: Record) -> Findings:
    """What a record says, by its own benchmark. Raises BadInput for one of no benchmark, and for a void one."""
    if record.benchmark not in BENCHMARKS:
        raise BadInput(f"a record of {record.benchmark}, and there are benchmarks {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[record.benchmark]()
    if fault := record.void or benchmark.find_fault(record.samples):
        raise BadInput(f"the record of {record.command} is void: {fault}")
    return benchmark.describe(record)


OTHERS = {"data": Command(_data_settings, show_data), "render": Command(lambda: (Rendering,), render)}


if __name__ == "__main__":
    main()
