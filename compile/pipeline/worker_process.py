"""A process that compiles one executable for a described TPU.

    python -m dflash_aot.compile.pipeline.worker_process v5e:2x2 BUNDLE LOG

JSON lines. Out: the Environment; in: an Order; out: an Answer. It ends when its input does, at once, whatever it is
doing, and takes its log with it; a log that stays tells why its process died.

One, for the compiler numbers what it makes: what came before would show in the bytes.
"""

import os
import queue
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.topology import parse_topology
from dflash_aot.compile.pipeline.build_target import describe
from dflash_aot.compile.pipeline.executable_builder import Builder, Order, explain


class Answer(msgspec.Struct, frozen=True):
    """An executable, or why there is none."""

    entry: Entry | None
    failure: str = ""


def main() -> None:
    topology, bundle, log = sys.argv[1:]
    answers, lines = _claim_output(), _follow_input(Path(log))
    machine = describe(parse_topology(topology))
    _send(answers, machine.environment)
    order = msgspec.json.decode(lines.get(), type=Order)
    _send(answers, _compile(Builder(machine, Store(Path(bundle))), order))
    threading.Event().wait()  # for the input's end


def _claim_output() -> BinaryIO:
    """What libraries print goes to the log; standard output is for answers only."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _follow_input(log: Path) -> "queue.SimpleQueue[bytes]":
    """The lines of standard input, read in a thread: it sees the end while the compiler is at work."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def follow() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        log.unlink(missing_ok=True)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    return lines


def _compile(builder: Builder, order: Order) -> Answer:
    try:
        return Answer(builder.compile(order))
    except Exception as error:
        return Answer(None, explain(error))


def _send(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
