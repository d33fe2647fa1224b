"""Entry points of the console scripts. Each prepares its process, imports its command and runs it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_aot.bin.flag_names import FLAG_NAMES, find_unknown_flag
from dflash_aot.bin.process_start import prepare_process


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
    yield
    gc.freeze()
    gc.enable()


def _refuse(name: str, message: str) -> int:
    from dflash_aot.bin.command_line import print_lines  # noqa: PLC0415
    from dflash_aot.cache.errors import BadInput  # noqa: PLC0415

    print_lines(f"{name}: {message}", file=sys.stderr)
    return BadInput.exit_code


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
