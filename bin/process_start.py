"""Start of a command's process: Ctrl-C from the first import on, and standard streams that the caller has closed.

Imports the standard library only, so that it runs before everything else.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code that shells report after Ctrl-C
STREAMS = ("stdin", "stdout", "stderr")  # by their file descriptors


def prepare_process() -> None:
    """Makes Ctrl-C end the process while modules are imported, and opens closed standard streams.

    A KeyboardInterrupt while jaxlib is imported crashes it (seen on 0.10.2: SIGSEGV), or is lost: raised inside JAX's
    callback of the garbage collector it is printed and forgotten. `ended_by_interrupt` installs a handler that says
    so later.
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


@contextmanager
def ended_by_interrupt(name: str) -> Iterator[None]:
    """Makes Ctrl-C end the process at once. Files are replaced atomically, so none is left half written.

    A KeyboardInterrupt does not serve: it may be lost, see `prepare_process`, and the interpreter would wait for a
    compilation of minutes in another thread.
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
