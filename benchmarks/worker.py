"""Worker processes of benchmarks: each contender is a process that stays up, so that contenders can take turns.

A worker answers when it has come to rest, so that it does not disturb the next contender.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, Union

import msgspec

from dflash_aot.cache.errors import DflashError, PeerFailed
from dflash_aot.cache.json_process import JsonPipe, JsonProcess, ProcessEnded

LAST_LINES = 5
# Seconds: of one look at the processor time, of work in it that still counts as rest, of all looks.
REST, REST_WORK, MAX_REST = 0.02, 0.002, 1.0
T = TypeVar("T")
# The function that answers each type of question.
Handlers = Mapping[type[msgspec.Struct], Callable[[Any], Any]]


class WorkerReady(msgspec.Struct, frozen=True):
    """Answer to the first message."""


class Worker:
    """The benchmark's end of one worker."""

    def __init__(self, name: str, module: str, spec: msgspec.Struct):
        """Starts `python -m module`, which calls `run_worker`, and waits until it is ready. Raises PeerFailed."""
        self.name = name
        self._process = JsonProcess(module)
        try:
            self.ask(spec, WorkerReady)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def ask(self, question: msgspec.Struct, kind: type[T]) -> T:
        """Waits for the answer. Raises PeerFailed if the worker ends first or sends something else."""
        return ask_process(self._process, question, kind, self.name)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def ask_process(process: JsonProcess, question: msgspec.Struct, kind: type[T], name: str) -> T:
    """Raises PeerFailed, with the last lines of a process that ended."""
    try:
        return process.ask(question, kind)
    except msgspec.DecodeError as error:
        raise PeerFailed(f"{name} sent an invalid reply: {error}") from error
    except ProcessEnded as ended:
        hint = ", probably because memory ran out" if ended.was_killed else ""
        last = [f"  {line}" for line in ended.last_lines(LAST_LINES)]
        log = "Its last lines:" if last else "It wrote nothing"
        raise PeerFailed(f"the process of {name} {ended.how}{hint}. {log}", *last) from ended


def run_worker(spec: Any, open_contender: Callable[[Any], AbstractContextManager[Handlers]]) -> None:
    """The worker's end, until its input ends. A DflashError ends the process with its message.

    spec: type of the first message. open_contender: gets that message; its handlers answer until the context ends.
    """
    pipe = JsonPipe()
    try:
        first = pipe.receive(spec)
        if first is None:
            return
        with open_contender(first) as handlers:
            questions: Any = Union[tuple(handlers)]  # noqa: UP007  the number of types varies
            answer: msgspec.Struct = WorkerReady()
            while True:
                wait_for_rest()
                pipe.send(answer)
                if (question := pipe.receive(questions)) is None:
                    return
                answer = handlers[type(question)](question)
    except DflashError as error:
        sys.exit(str(error))


def wait_for_rest() -> None:
    """Waits until no thread of this process works: thread pools spin for a while after a matmul."""
    give_up = time.perf_counter() + MAX_REST
    while time.perf_counter() < give_up:
        worked = time.process_time()
        time.sleep(REST)
        if time.process_time() - worked < REST_WORK:
            return
