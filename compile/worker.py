"""A process that builds for a described TPU what its parent asks for: python -m dflash_aot.compile.worker v5e:2x2 LOG

JSON lines. In: an Order, then the label of an executable at a time. Out: the Environment, then an Answer to each.
It ends when its input does, at once, whatever it is doing, and takes its log with it; a log that stays tells why its
process died.
"""

import os
import queue
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from dflash_aot.cache.architecture import Draft, Target
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.sampling import Sampling
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.store import Store
from dflash_aot.cache.topology import parse_topology
from dflash_aot.compile.builder import Builder, Built, explain
from dflash_aot.compile.machine import describe
from dflash_aot.compile.programs import Programs


class Order(msgspec.Struct, frozen=True):
    """What is to be built, and the bundle directory in whose store it goes."""

    target: Target
    draft: Draft
    dtype: str
    grid: Grid
    bundle: str
    sampling: tuple[Sampling, ...] = ("greedy",)


class Answer(msgspec.Struct, frozen=True):
    """An executable, or why there is none; and the memory that this process holds by now."""

    built: Built | None
    failure: str
    resident_bytes: int


def main() -> None:
    answers, lines = _claim_output(), _follow_input(Path(sys.argv[2]))
    order = msgspec.json.decode(lines.get(), type=Order)
    machine = describe(parse_topology(sys.argv[1]))
    _send(answers, machine.environment)
    programs = Programs(
        order.target, order.draft, order.dtype, stacked=True, devices=len(machine.devices), sampling=order.sampling
    )
    signatures = {signature.label: signature for signature in programs.signatures(order.grid)}
    builder = Builder(programs, order.grid, machine, Store(Path(order.bundle)))
    while True:
        label = msgspec.json.decode(lines.get(), type=str)
        _send(answers, _build(builder, signatures[label]))


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


def _build(builder: Builder, signature: Signature) -> Answer:
    try:
        lowered, key = builder.lower(signature)
        built = builder.find(key) or builder.compile(signature, lowered, key)
    except Exception as error:
        return Answer(None, explain(error), _resident_bytes())
    return Answer(built, "", _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _send(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
