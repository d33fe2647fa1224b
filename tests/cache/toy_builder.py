"""Builders without a compiler, as processes: python -m tests.cache.toy_builder

A line in is a batch of orders; each gets a process of its own, all at the same time, and a line of outcomes comes out.
Whoever gets the lock goes on when all of the batch have tried to get it.
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

ROOM = Path(inspect.getfile(Store)).parent


class Order(msgspec.Struct, frozen=True):
    """A bundle to build. `blobs`: executable and program of each entry, packed, which are there to be found.

    `killed_at`: the process ends itself by SIGKILL at this line, counted as the store's code runs.
    """

    bundle: str
    manifest: Manifest
    blobs: list[tuple[bytes, bytes]]
    killed_at: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """How a process ended, the keys of what it built, what it was refused with, and how many lines it ran."""

    code: int
    built: list[str] = []
    words: str = ""
    lines: int = 0


class Lines:
    """Counts the lines of our code that run, and ends the process at one of them."""

    def __init__(self, last: int | None):
        self.count, self._last = 0, last

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        if Path(frame.f_code.co_filename).parent != ROOM:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def build(order: Order, tried: int, gate: int) -> Outcome:
    """As the compilation manager does it: found, or built and added; the manifest last."""
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
    """Those that were killed left no word."""
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
    """What a child does, and all it does: whatever happens, it does not go on as its parent would."""
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
