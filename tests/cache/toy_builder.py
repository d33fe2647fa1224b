"""Builds without a compiler, as processes: python -m tests.cache.toy_builder

Reads an order per line, runs it in a process of its own, and writes a line with its outcome.
"""

import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from dflash_aot.cache.bundle.blob import unpack_blob
from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle.store import Store

PACKAGE = Path(inspect.getfile(Store)).parent


class Order(msgspec.Struct, frozen=True):
    """A bundle to build.

    blobs: packed executable and program of each entry.
    killed_at: the process sends itself SIGKILL at this line, counted in `cache.bundle` without the pickle scan.
    """

    bundle: str
    manifest: Manifest
    blobs: list[tuple[bytes, bytes]]
    killed_at: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The end of a process: exit code, keys of the built executables, lines that ran."""

    code: int
    built: list[str] = []
    lines: int = 0


class Lines:
    """Counts the lines of `cache.bundle` that run, and kills the process at one of them."""

    def __init__(self, last: int | None):
        self.count, self._last = 0, last

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        file = Path(frame.f_code.co_filename)
        if file.parent != PACKAGE or file.stem.startswith("pickle_"):  # the scan writes nothing, in thousands of lines
            return None
        if event == "line":
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def build(order: Order) -> Outcome:
    """Finds or adds each executable and publishes the manifest, as the compilation manager does."""
    lines, store, built = Lines(order.killed_at), Store(Path(order.bundle)), []
    sys.settrace(lines.trace)
    try:
        with store.open_for_building():
            for entry, (executable, program) in zip(order.manifest.entries, order.blobs, strict=True):
                if store.find(entry.key, entry.signature, unpack_blob(entry.program, program)) is None:
                    store.add(entry, executable, program)
                    built.append(entry.key)
            store.publish(order.manifest)
    finally:
        sys.settrace(None)
    return Outcome(0, built, lines=lines.count)


def run(order: Order) -> Outcome:
    """Runs an order. A killed process has an outcome without keys."""
    answer, say = os.pipe()
    if (child := os.fork()) == 0:
        _end(order, say)
    os.close(say)
    with os.fdopen(answer, "rb") as file:
        content = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return msgspec.json.decode(content, type=Outcome) if content else Outcome(code)


def _end(order: Order, say: int) -> NoReturn:
    """Runs an order in a child process and exits, whatever happens."""
    try:
        os.write(say, msgspec.json.encode(build(order)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(run(msgspec.json.decode(line, type=Order))) + b"\n")
        sys.stdout.buffer.flush()
