"""Entry points of the console scripts. Each prepares its process, imports its command and runs it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_aot.bin.process_start import prepare_process


@contextmanager
def _import_safely() -> Iterator[None]:
    """Prepares the process; the garbage collector is off while a command is imported.

    JAX brings half a million objects that live as long as the process: searching them for garbage takes a sixth of the
    import time, so they are frozen.
    """
    prepare_process()
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def precompile() -> None:
    """The console script `dflash-precompile`."""
    with _import_safely():
        from dflash_aot.bin.precompile import main  # noqa: PLC0415
    main()


def run() -> None:
    """The console script `dflash-run`."""
    with _import_safely():
        from dflash_aot.bin.run import main  # noqa: PLC0415
    main()


def serve() -> None:
    """The console script `dflash-serve`."""
    with _import_safely():
        from dflash_aot.bin.serve import main  # noqa: PLC0415
    main()


def bundle() -> None:
    """The console script `dflash-bundle`."""
    with _import_safely():
        from dflash_aot.bin.bundle import main  # noqa: PLC0415
    main()


def bench() -> None:
    """The console script `dflash-bench`."""
    with _import_safely():
        from dflash_aot.bin.bench import main  # noqa: PLC0415
    main()
