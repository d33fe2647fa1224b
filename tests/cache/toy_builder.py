"""Builds without a compiler, as processes: python -m tests.cache.toy_builder

Reads a batch of orders per line, runs each in its own process at the same time, and writes a line of outcomes. The
process that gets the lock continues when all processes of the batch have tried to get it.
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
from dflash_aot.cache.errors import DflashError

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
    """The end of a process: exit code, keys of the built executables, error message, lines that ran."""

    code: int
    built: list[str] = []
    words: str = ""
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


def build(order: Order, tried: int, gate: int) -> Outcome:
    """Finds or adds each executable and publishes the manifest, as the compilation manager does."""
    lines, store, built = Lines(order.killed_at), Store(Path(order.bundle)), []
    sys.settrace(lines.trace)
    try:
        with store.open_for_building():
            os.write(tried, b".")
            os.read(gate, 1)
            for entry, (executable, program) in zip(order.manifest.entries, order.blobs, strict=True):
                if store.find(entry.key, entry.signature, unpack_blob(entry.program, program)) is None:
                    store.add(entry, executable, program)
                    built.append(entry.key)
            store.publish(order.manifest)
    except DflashError as error:
        os.write(tried, b".")
        return Outcome(error.exit_code, built, str(error))
    finally:
        sys.settrace(None)
    return Outcome(0, built, lines=lines.count)


def run_batch(orders: list[Order]) -> list[Outcome]:
    """Runs all orders at the same time. A killed process has an outcome without a message."""
    (tried, tell), (gate, opener) = os.pipe(), os.pipe()
    answers = {}
    for order in orders:
        answer, say = os.pipe()
        if (child := os.fork()) == 0:
            os.close(tried)
            os.close(opener)
            _end(order, tell, gate, say)
        os.close(say)
        answers[child] = answer
    os.close(tell)
    waiting = len(orders)
    while waiting and (told := os.read(tried, waiting)):
        waiting -= len(told)
    os.close(opener)
    outcomes = []
    for child, answer in answers.items():
        with os.fdopen(answer, "rb") as file:
            content = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes.append(msgspec.json.decode(content, type=Outcome) if content else Outcome(code))
    os.close(tried)
    os.close(gate)
    return outcomes


def _end(order: Order, tell: int, gate: int, say: int) -> NoReturn:
    """Runs one order in a child process and exits, whatever happens."""
    try:
        os.write(say, msgspec.json.encode(build(order, tell, gate)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    for line in sys.stdin.buffer:
        outcomes = run_batch(msgspec.json.decode(line, type=list[Order]))
        sys.stdout.buffer.write(msgspec.json.encode(outcomes) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
