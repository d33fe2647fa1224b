"""Entry points of the console scripts. Each checks the names of its flags, prepares its process, runs its command.

Imports the standard library only, so that it runs before everything else.
"""

import difflib
import gc
import os
import re
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# -- flag names of the commands that import JAX
#
# A misspelt flag is refused before that import, which takes seconds. The commands' modules define the flags: names are
# read from the source of a module that defines each flag by name. A test compares all names with the modules' flags.

DEFINITION = re.compile(r'\bDEFINE_\w+\(\s*"(\w+)"')
PAIR = "bundle target target_revision draft draft_revision require_signature"
FLAG_NAMES = {
    command: frozenset(f"{PAIR} {names}".split())
    for command, names in {
        "dflash-precompile": " ".join(
            DEFINITION.findall(Path(__file__).with_name("precompile.py").read_text("utf-8"))
        ),
        "dflash-run": """
            cache_salt chat frequency_penalty ignore_eos input json k logprobs max_tokens min_p min_tokens output
            prefix_caching presence_penalty prompt prompt_logprobs repetition_penalty resume seed speculative_config
            stats stop temperature thinking top_k top_p trace hosts host_rank leader
        """,
        "dflash-serve": """
            access_log api_keys drain_seconds host host_rank hosts k kv_offloading_size leader max_body_bytes
            max_per_key max_prompt_tokens max_waiting port prefix_caching prefix_salt preload request_seconds
            served_model_name speculative_config temperature tls_certificate tls_key
        """,
    }.items()
}
HELP = frozenset({"help", "helpfull", "helpshort", "helpxml", "version", "flagfile", "undefok"})


def find_unknown_flag(arguments: Sequence[str], names: Collection[str]) -> str | None:
    """The message for the first argument that cannot be a flag of the command; None if there is none.

    An argument after a flag without `=` may be that flag's value, and is left to the command.
    """
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument == "--":
            return None
        name = re.match(r"--([^=]+)", argument)
        if not name or (before.startswith("-") and "=" not in before):
            continue
        if name[1] not in {*names, *HELP} and name[1].removeprefix("no") not in names:
            near = difflib.get_close_matches(name[1], names, cutoff=0.8)
            hint = f". Did you mean: {', '.join(near)} ?" if near else ""
            return f"Unknown command line flag '{name[1]}'{hint}"
    return None


# -- the start of a process: Ctrl-C from the first import on, and standard streams that the caller has closed

STREAMS = ("stdin", "stdout", "stderr")  # by their file descriptors


def prepare_process() -> None:
    """Makes Ctrl-C end the process while modules are imported, and opens closed standard streams.

    A KeyboardInterrupt while jaxlib is imported crashes it (seen on 0.10.2: SIGSEGV), or is lost: raised inside JAX's
    callback of the garbage collector it is printed and forgotten. `ended_by_interrupt` of the command line installs a
    handler that says so later.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for descriptor in range(len(STREAMS)):
        _open_closed_stream(descriptor)


def _open_closed_stream(descriptor: int) -> None:
    """Opens a null device where a standard stream is closed: the next file would take its descriptor.

    Standard output is opened for reading, so that writing fails instead of losing text; what would go to standard error
    is dropped.
    """
    try:
        os.fstat(descriptor)
        return
    except OSError:
        # The lowest free descriptor.
        opened = os.open(os.devnull, os.O_RDONLY if descriptor < 2 else os.O_WRONLY)
    assert opened == descriptor
    mode = "r" if descriptor == 0 else "w"
    stream = open(descriptor, mode, encoding="utf-8")  # noqa: SIM115  open as long as the process
    setattr(sys, STREAMS[descriptor], stream)


# -- entry points


@contextmanager
def _import_safely(name: str) -> Iterator[None]:
    """Prepares the process, refuses unknown flags of a command, and imports it with the garbage collector off.

    JAX brings half a million objects that live as long as the process: searching them for garbage takes a sixth of the
    import time, so they are frozen.
    """
    prepare_process()
    if name in FLAG_NAMES and (message := find_unknown_flag(sys.argv[1:], FLAG_NAMES[name])):
        sys.exit(_refuse(name, message))
    gc.disable()
    try:
        yield
    except ValueError as error:
        sys.exit(_refuse_import(name, error))
    gc.freeze()
    gc.enable()


def _refuse(name: str, message: str) -> int:
    from dflash_aot.bin.command_line import print_lines  # noqa: PLC0415
    from dflash_aot.cache.errors import BadInput  # noqa: PLC0415

    print_lines(f"{name}: {message}", file=sys.stderr)
    return BadInput.exit_code


def _refuse_import(name: str, error: ValueError) -> int:
    from dflash_aot.bin.command_line import explain_import  # noqa: PLC0415

    if not (message := explain_import(error)):
        raise error
    return _refuse(name, message)


def precompile() -> None:
    """The console script `dflash-precompile`."""
    with _import_safely("dflash-precompile"):
        from dflash_aot.bin.precompile import main  # noqa: PLC0415
    main()


def run() -> None:
    """The console script `dflash-run`."""
    with _import_safely("dflash-run"):
        from dflash_aot.bin.run import main  # noqa: PLC0415
    main()


def serve() -> None:
    """The console script `dflash-serve`."""
    with _import_safely("dflash-serve"):
        from dflash_aot.bin.serve import main  # noqa: PLC0415
    main()


def bundle() -> None:
    """The console script `dflash-bundle`."""
    with _import_safely("dflash-bundle"):
        from dflash_aot.bin.bundle import main  # noqa: PLC0415
    main()


def bench() -> None:
    """The console script `dflash-bench`."""
    with _import_safely("dflash-bench"):
        from dflash_aot.bin.bench import main  # noqa: PLC0415
    main()
