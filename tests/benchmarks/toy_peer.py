"""A way to decode in a process of its own, whose answers can be worked out by hand; not collected by pytest."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.benchmarks.peer import Handlers, Peer, run_peer
from dflash_aot.benchmarks.traffic import Answer, Serve, Served, Work
from dflash_aot.cache.errors import BadInput

COMMAND = [sys.executable, "-P", str(Path(__file__))]


class ToyOrder(msgspec.Struct, frozen=True):
    """What is wrong with it. burns: a thread works all the time, asked or not."""

    lies: bool = False
    refuses: bool = False
    burns: bool = False
    compile_events: int = 0


class Die(msgspec.Struct, frozen=True, tag=True):
    """Instead of an answer: by a signal, or by an exception."""

    signal: int | None = None


class Who(msgspec.Struct, frozen=True, tag=True):
    """Answered by the process's id."""


def open_toy(name: str = "a toy", **wrong: Any) -> Peer:
    """wrong: fields of its order."""
    return Peer(name, COMMAND, ToyOrder(**wrong))


def say(prompt: list[int], tokens: int) -> list[int]:
    """The toy's words: one more each time."""
    return [prompt[-1] + place for place in range(1, tokens + 1)]


@contextmanager
def open_way(order: ToyOrder) -> Iterator[Handlers]:
    if order.refuses:
        raise BadInput("no such toy")
    if order.burns:
        threading.Thread(target=burn, daemon=True).start()

    def serve(question: Serve) -> Served:
        print("this is no answer")
        answers = [[answer(prompt, question.max_tokens) for prompt in prompts] for prompts in question.lists]
        rounds = sum(len(one.accepted) for row in answers for one in row)
        work = Work(rounds=rounds, rows=rounds, row_rounds=rounds, compile_events=order.compile_events)
        return Served(answers, 0.5 * question.max_tokens, work)

    def answer(prompt: list[int], tokens: int) -> Answer:
        words = say(prompt, tokens)
        if order.lies and prompt[-1] == 5:
            words[-1] = 0
        return Answer(words, [0.5 * place for place in range(1, tokens + 1)], [0] * (tokens - 1))

    yield {Serve: serve, Die: die, Who: lambda question: os.getpid()}


def die(question: Die) -> None:
    print("first\n\nsecond", file=sys.stderr, flush=True)
    if question.signal is not None:
        signal.raise_signal(question.signal)
    raise RuntimeError("the toy is broken")


def burn() -> None:
    while True:
        sum(range(1000))


if __name__ == "__main__":
    run_peer(ToyOrder, open_way)
