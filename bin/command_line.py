"""What all commands share: flag parsing, error messages, exit codes, default directories, output.

Commands print through `print_lines` and `print_json`, which escape what could deceive or control a terminal: reports
quote manifests, file names, stores and other processes. Only generated text is printed as it is.
"""

import errno
import importlib.metadata
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import msgspec
from absl import flags

from dflash_aot.cache.environment import jaxlib_version
from dflash_aot.cache.errors import BadInput, DflashError
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint, user_cache_directory
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.speculative_config import SpeculativeConfig
from dflash_aot.cache.model_config.speculators_draft import is_speculators, read_verifier
from dflash_aot.cache.printable import escape_json, escape_line

# Flags of files, directories, checkpoints and stores: an unset shell variable must not stand for the default.
PATH_FLAGS = frozenset(
    {"target", "draft", "bundle", "rebuild", "store", "golden", "record_golden", "emulated", "key"}
    | {"require_signature", "input", "output", "api_keys", "tls_certificate", "tls_key"}
)
INTERRUPTED = 130  # the exit code that shells report after Ctrl-C
QUOTED_BOOL = re.compile(r"\(default: '(true|false)'\)")


@contextmanager
def ended_by_interrupt(name: str) -> Iterator[None]:
    """Makes Ctrl-C end the process at once. Files are replaced atomically, so none is left half written.

    A KeyboardInterrupt does not serve: it may be lost, see `prepare_process` of console scripts, and the interpreter
    would wait for a compilation of minutes in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        # Not print: the signal may interrupt a buffered write.
        os.write(2, f"\n{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_command(
    name: str, usage: str, flag_values: flags.FlagValues, main: Callable[[], int | None]
) -> int:
    """Runs a command that takes no arguments besides flags; returns its exit code, see `run_with_arguments`.

    `main` returns its exit code, or None for 0.
    """

    def run(arguments: Sequence[str]) -> int:
        if arguments:
            raise BadInput(
                f"unexpected {' '.join(map(repr, arguments))}: all arguments are flags, see --help"
            )
        return main() or 0

    return run_with_arguments(name, usage, flag_values, run)


def run_with_arguments(
    name: str, usage: str, flag_values: flags.FlagValues, main: Callable[[Sequence[str]], int]
) -> int:
    """Parses the command line, calls `main` with the arguments that are not flags, and returns the exit code.

    Prints a DflashError as one message and returns its exit code. Configures the encoding of standard output, logging
    and the handler of SIGINT.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # generated text must not depend on the locale
    # Without this, transformers warns that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"{name}: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    try:
        with ended_by_interrupt(name):
            code = main(_parse(sys.argv, usage, flag_values))
            sys.stdout.flush()
        return code
    except _HelpShown:
        return 0
    except DflashError as error:
        _print_error(name, *error.args)
        return error.exit_code
    except flags.Error as error:
        _print_error(name, str(error))
        return BadInput.exit_code
    except ValueError as error:
        if not (message := explain_import(error)):
            raise
        _print_error(name, message)
        return BadInput.exit_code
    except BrokenPipeError:  # the reader has closed the pipe (| head)
        _drop_output()
        return 0
    except OSError as error:  # for example a full disk
        _print_error(name, _describe_os_error(error))
        _drop_output()
        return BadInput.exit_code


def explain_import(error: ValueError) -> str | None:
    """The message where JAX was not imported because one of its environment variables has an invalid value."""
    variables = sorted(name for name in os.environ if name.startswith("JAX_"))
    begun = any(module.startswith("jax.") for module in sys.modules)
    if "jax" in sys.modules or not begun or not variables:
        return None
    return f"JAX does not start: {error}. Its variables here: {', '.join(variables)}"


def _print_error(name: str, first: str = "", *more: str) -> None:
    print_lines(f"{name}: {first}", *more, file=sys.stderr)


def _describe_os_error(error: OSError) -> str:
    """The message of an error; without a file's name it is standard output's: other files are opened by name."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if error.errno == errno.EBADF:
        return "standard output is closed: open it, or redirect it to a file"
    return f"standard output: {error.strerror}" if error.errno == errno.ENOSPC else str(error)


def _drop_output() -> None:
    """Redirects standard output to nowhere. Otherwise Python reports the error again when it flushes at exit."""
    # Not a file: the caller is a program that collects the output.
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HelpShown(Exception):
    """--help or --version was given, and its text is printed."""


def _parse(argv: Sequence[str], usage: str, flag_values: flags.FlagValues) -> Sequence[str]:
    if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
        listed = QUOTED_BOOL.sub(r"(default: \1)", flag_values.get_help())
        print(f"{usage}\nflags:\n{listed}")  # no text from outside
        raise _HelpShown
    if "--version" in argv[1:]:
        print(f"dflash-aot {importlib.metadata.version('dflash-aot')}, jaxlib {jaxlib_version()}")
        raise _HelpShown
    arguments = flag_values(argv)[1:]
    if empty := sorted(
        name for name in PATH_FLAGS.intersection(flag_values) if flag_values[name].value == ""
    ):
        raise BadInput(
            f"--{empty[0]} is empty: name something, or leave the flag out. Is a shell variable unset?"
        )
    return arguments


def decode_text(content: bytes, source: str) -> str:
    """Decodes UTF-8. Raises BadInput, which names the source, for other bytes."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{source} is not UTF-8: {error}") from error


def default_bundle(target: str, draft: str, topology: str | None = None) -> Path:
    """The directory of a pair's bundle when --bundle is not given, in the user's cache directory.

    A bundle for a described `topology` has another directory than the one for the attached devices.
    """
    base = user_cache_directory()
    if topology:
        base /= topology.replace(":", "-")
    if target == EMBEDDED:
        return base / EMBEDDED
    return base / "--".join(
        str(Path(name).absolute() if Path(name).is_dir() else name).strip("/").replace("/", "-")
        for name in (target, draft)
    )


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str]:
    """Completes --target and --draft: without both it is the embedded pair, and a draft may name its target.

    Raises BadInput, BadCheckpoint.
    """
    if target is None and draft is not None:
        target = _read_verifier(draft)
    if (target is None) != (draft is None):
        given, missing = ("--target", "--draft") if target else ("--draft", "--target")
        hint = "" if target else f", and the config of {draft} names no target"
        raise BadInput(
            f"{given} without {missing}{hint}: give both, or neither to use the embedded pair"
        )
    return target or EMBEDDED, draft or EMBEDDED


def choose_draft(draft: str | None, speculative: SpeculativeConfig) -> str | None:
    """The draft that --draft or --speculative_config names. Raises BadInput if both do, and differ."""
    if None not in (draft, speculative.model) and draft != speculative.model:
        raise BadInput(
            f"--draft is {draft}, the model of --speculative_config is {speculative.model}"
        )
    return draft or speculative.model


def define_revisions(flag_values: flags.FlagValues) -> dict[str, flags.FlagHolder[str | None]]:
    """Defines --target_revision and --draft_revision; returns them by role."""
    return {
        role: flags.DEFINE_string(
            f"{role}_revision",
            None,
            f"a commit, branch or tag of the hub id --{role}; the same as ID@REVISION",
            flag_values=flag_values,
        )
        for role in ("target", "draft")
    }


def add_revision(role: str, reference: str | None, revision: str | None) -> str | None:
    """A hub id with the revision of --target_revision or --draft_revision. Raises BadInput where there is no hub id."""
    if revision is None:
        return reference
    if reference is None or "@" in reference or Path(reference).exists():
        raise BadInput(
            f"--{role}_revision {revision}: --{role} is {reference or 'not given'}, and a hub id without @ is needed"
        )
    return f"{reference}@{revision}"


def _read_verifier(draft: str) -> str | None:
    """The target that a draft in the speculators format names, if any."""
    config = read_config(locate_checkpoint(draft, "draft"))
    return read_verifier(config) if is_speculators(config) else None


# -- output


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines to standard output or `file`; a line break or control character within a line is escaped."""
    print(*map(escape_line, lines), sep="\n", file=file, flush=True)


def print_json(value: Any, file: TextIO | None = None) -> None:
    """Prints a value as one line of JSON in ASCII. Structs become objects, paths texts."""
    fields = msgspec.to_builtins(value, enc_hook=str, str_keys=True)
    print(escape_json(json.dumps(fields)), file=file, flush=True)


class LineFormatter(logging.Formatter):
    """Formats each record as one line, without control characters; the lines of a traceback follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(
            f"  {escape_line(line)}" for line in super().formatException(ei).splitlines()
        )


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns: the first to the left, the others to the right."""
    shown = [[escape_line(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    lines = []
    for row in shown:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def name_phase(phase: str) -> str:
    """The name of a start-up phase for people; --json keeps the names of the fields."""
    return phase.replace("_", " ")


def seconds_since_process_start() -> float:
    """Returns the seconds since the kernel started this process, including the interpreter's own start."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):  # not Linux
        return time.process_time()
