"""dflash-bench: runs benchmarks, keeps every sample, renders pages. Tables: standard output; progress: standard error.

dflash-bench decode …               tokens per second and τ at every K, and PyTorch
dflash-bench load …                 throughput and latency with many callers, in closed and open loops
dflash-bench startup …              time from process start to first token, and that of jax.jit, cold and cached
dflash-bench host …                 work of the host per round
dflash-bench kflat …                time of a verification against its rows, PyTorch's, and the roofline
dflash-bench tpu …                  estimated times of executables on TPUs that are not attached, and their bounds
dflash-bench serve …                load on a running dflash-serve, by the published client aiperf
dflash-bench data …                 the prompts that --data stands for
dflash-bench render DIR [--check]   write DIR.md and the charts of the records in DIR

The command comes first; dflash-bench COMMAND --help lists its flags. A benchmark writes all samples to OUT/NAME.json
and its charts next to it as SVG. The exit code is 1, with a message, if the figures mean nothing.
"""

import dataclasses
import os
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

from dflash_aot.benchmarks.load_bench import ServeSettings, run_client
from dflash_aot.benchmarks.record import (
    Benchmark,
    Record,
    check_installed,
    draw_chart,
    render_page,
    setting,
    take_record,
    write_record,
)
from dflash_aot.benchmarks.tables import Chart, Findings
from dflash_aot.bin.command_line import format_table, print_lines, run_with_arguments
from dflash_aot.cache.errors import BadInput, VoidRecord
from dflash_aot.cache.files.atomic_files import write_atomically
from dflash_aot.cache.files.locations import user_cache_directory

FLAGS = flags.FlagValues()


@dataclass(frozen=True)
class OutputSettings:
    """Flags for the files of a benchmark."""

    out: str = setting("dflash-bench", "the directory of the record and its charts")
    name: str | None = setting(None, "their name there; default: the command's")
    scratch: str | None = setting(
        None,
        "the directory of bundles and checkpoints for the next run; default: in the user's cache directory",
    )


@dataclass(frozen=True)
class ClientOutput:
    """Flags for the files of `serve`."""

    out: str = setting("dflash-bench", "the directory of the client's files")


@dataclass(frozen=True)
class RenderSettings:
    """Flags of `render`."""

    check: bool = setting(
        False,
        "write nothing, name the files that would change; the exit code is 2 if there are any",
    )


@dataclass(frozen=True)
class BenchCommand:
    """A sub-command.

    Attributes:
        settings: returns the dataclasses of its flags; imports them.
        run: takes the arguments after the command, returns the exit code.
    """

    settings: Callable[[], Sequence[type]]
    run: Callable[[Sequence[str]], int]


def _load(name: str) -> Benchmark:
    from dflash_aot.benchmarks import (  # noqa: PLC0415  takes seconds
        decode_bench,
        host_bench,
        kflat_bench,
        load_bench,
        startup_bench,
        tpu_bench,
    )

    modules: dict[str, Benchmark] = {
        "decode": decode_bench,
        "load": load_bench,
        "startup": startup_bench,
        "host": host_bench,
        "kflat": kflat_bench,
        "tpu": tpu_bench,
    }
    return modules[name]


BENCHMARKS: dict[str, Callable[[], Benchmark]] = {
    name: partial(_load, name) for name in ("decode", "load", "startup", "host", "kflat", "tpu")
}


def main() -> None:
    """The console script `dflash-bench`."""
    if command := find_command(_command_name()):
        for settings in command.settings():
            define_settings(settings, FLAGS)
    sys.exit(run_with_arguments("dflash-bench", __doc__, FLAGS, run))


def run(arguments: Sequence[str]) -> int:
    """Runs the sub-command named first. Raises BadInput for arguments it does not take."""
    command = find_command(_command_name())
    if command is None:
        there = ", ".join((*BENCHMARKS, *OTHERS))
        given = f"{_command_name()}: no such command" if _command_name() else "no command given"
        raise BadInput(f"{given}; the commands are {there}, see --help")
    return command.run(arguments[1:])


def find_command(name: str) -> BenchCommand | None:
    """The sub-command of that name."""
    if name in BENCHMARKS:
        return BenchCommand(
            lambda: (BENCHMARKS[name]().Settings, OutputSettings),
            lambda arguments: run_benchmark(name, arguments),
        )
    return OTHERS.get(name)


def _command_name() -> str:
    return sys.argv[1] if len(sys.argv) > 1 else ""


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """Takes a record and prints its tables. Raises VoidRecord after writing a void record, and errors of measuring."""
    _expect_no_arguments(name, arguments)
    benchmark = BENCHMARKS[name]()
    output = read_settings(OutputSettings, FLAGS)
    settings = read_settings(benchmark.Settings, FLAGS)
    scratch = Path(output.scratch) if output.scratch else user_cache_directory() / "bench"
    directory = Path(output.out)
    record_name = output.name or name
    for place in (directory, scratch):
        place.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["dflash-bench", *format_arguments(name, settings)])
    record, error = take_record(name, benchmark, settings, command, scratch, print_progress)
    path = directory / f"{record_name}.json"
    write_record(record, path)
    if error:
        raise error
    if record.void:
        raise VoidRecord(f"void: {record.void}. The samples are in {path}")
    findings = benchmark.make_findings(record)
    print_lines(*format_findings(record, findings))
    print_progress(f"the record is {path}, {_write_charts(findings.charts, path)}")
    return 0


def _write_charts(charts: Sequence[Chart], record: Path) -> str:
    """Draws charts next to their record, where matplotlib is installed. Returns where they are, as text."""
    try:
        check_installed("matplotlib", "a chart")
    except BadInput as missing:
        again = shlex.join(["dflash-bench", "render", str(record.parent)])
        return f"without charts: {missing}; then {again} draws them"
    for chart in charts:
        name = f"{record.stem}-{chart.name}.svg"
        write_atomically(record.with_name(name), draw_chart(chart))
    return "its charts are next to it"


def _expect_no_arguments(name: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise BadInput(
            f"unexpected {' '.join(map(repr, arguments))}: all arguments of {name} are flags, see --help"
        )


def print_progress(message: str) -> None:
    """Prints to standard error."""
    print_lines(f"dflash-bench: {message}", file=sys.stderr)


def format_findings(record: Record, findings: Findings) -> list[str]:
    """The tables as lines for a terminal."""
    machine = record.environment
    lines = [
        record.command,
        f"{machine.processor}, {machine.cores} cores, load {machine.load[0]:.2f} before",
    ]
    for table in findings.tables:
        note = [table.note] if table.note else []
        lines += ["", table.title, *format_table(table.header, table.rows), *note]
    return lines


# -- data


def print_data(arguments: Sequence[str]) -> int:
    """Prints the prompts that --data stands for. Raises BadInput, BadCheckpoint."""
    from dflash_aot.benchmarks.prompts import DataSettings, format_data  # noqa: PLC0415

    _expect_no_arguments("data", arguments)
    print_lines(*format_data(read_settings(DataSettings, FLAGS)))
    return 0


def _data_settings() -> Sequence[type]:
    from dflash_aot.benchmarks.prompts import DataSettings  # noqa: PLC0415

    return (DataSettings,)


# -- serve


def load_server(arguments: Sequence[str]) -> int:
    """Runs the load client. Raises BadInput, PeerFailed."""
    _expect_no_arguments("serve", arguments)
    run_client(
        read_settings(ServeSettings, FLAGS), read_settings(ClientOutput, FLAGS).out, print_progress
    )
    return 0


# -- render


def render(arguments: Sequence[str]) -> int:
    """Writes, or compares, what follows from the records of a directory. Raises BadInput."""
    if len(arguments) != 1:
        raise BadInput(
            f"render takes one directory of records; given: {' '.join(arguments) or 'none'}"
        )
    rendered = render_page(Path(arguments[0]).resolve(), find_findings)
    changed = {
        path: content
        for path, content in rendered
        if not path.is_file() or path.read_bytes() != content
    }
    if read_settings(RenderSettings, FLAGS).check:
        if changed:
            names = ", ".join(map(os.path.relpath, changed))
            raise BadInput(
                f"not up to date with the records: {names}. Run: dflash-bench render {arguments[0]}"
            )
        return 0
    for path, content in changed.items():
        write_atomically(path, content)
        print_progress(f"wrote {os.path.relpath(path)}")
    return 0


def find_findings(record: Record) -> Findings:
    """The findings of a record by its benchmark.

    Raises BadInput for an unknown benchmark, a void record, and samples that the benchmark does not take.
    """
    if record.benchmark not in BENCHMARKS:
        raise BadInput(
            f"a record of {record.benchmark}; there are benchmarks {', '.join(BENCHMARKS)}"
        )
    benchmark = BENCHMARKS[record.benchmark]()
    try:
        fault = record.void or benchmark.find_fault(record.samples)
        findings = None if fault else benchmark.make_findings(record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(
            f"the record of {record.command} has samples that {record.benchmark} does not take: {reason}. "
            "Take the samples again"
        ) from error
    if findings is None:
        raise BadInput(f"the record of {record.command} is void: {fault}")
    return findings


OTHERS = {
    "serve": BenchCommand(lambda: (ServeSettings, ClientOutput), load_server),
    "data": BenchCommand(_data_settings, print_data),
    "render": BenchCommand(lambda: (RenderSettings,), render),
}


DEFINE: dict[type, Callable[..., Any]] = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    str: flags.DEFINE_string,
}


class NumberListParser(flags.ArgumentParser):
    """Parses "1,2,4" to (1, 2, 4)."""

    def __init__(self, kind: type):
        self._kind = kind
        self.syntactic_help = "numbers separated by commas"

    def parse(self, argument: Any) -> tuple:
        if isinstance(argument, tuple):  # the default
            return argument
        return tuple(self._kind(one) for one in argument.split(",") if one.strip())

    def flag_type(self) -> str:
        return f"{self._kind.__name__}s separated by commas"


class NumberListSerializer(flags.ArgumentSerializer):
    """Formats (1, 2, 4) as "1,2,4"."""

    def serialize(self, value: Any) -> str:
        return ",".join(map(str, value))


def define_settings(settings: type, flag_values: flags.FlagValues) -> None:
    """Defines a flag of the same name for each field."""
    kinds = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        kind = kinds[field.name]
        text = field.metadata["description"]
        default: Any = field.default
        if field.metadata["choices"]:
            flags.DEFINE_enum(field.name, default, field.metadata["choices"], text, flag_values)
        elif typing.get_origin(kind) is tuple:
            parser = NumberListParser(typing.get_args(kind)[0])
            serializer = NumberListSerializer()
            flags.DEFINE(parser, field.name, default, text, flag_values, serializer)
        else:
            (plain,) = {*(typing.get_args(kind) or (kind,))} - {type(None)}
            DEFINE[plain](field.name, default, text, flag_values=flag_values)


def read_settings(settings: type, flag_values: flags.FlagValues) -> Any:
    """Makes the settings from the flags. Raises BadInput for a number that is too small."""
    given = {}
    for field in dataclasses.fields(settings):
        value = given[field.name] = flag_values[field.name].value
        least = field.metadata["least"]
        numbers = value if isinstance(value, tuple) else (value,)
        if value == field.default or least is None:
            continue
        if not numbers or min(numbers) < least:
            raise BadInput(f"--{field.name} {format_value(value)}: at least {least:g}")
    return settings(**given)


def format_arguments(name: str, settings: Any) -> list[str]:
    """The arguments for these settings, without defaults."""
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }
    return [name, *(_format_flag(name, value) for name, value in changed.items())]


def _format_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={format_value(value)}"


def format_value(value: Any) -> str:
    """The text that a flag takes."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    main()
