"""Ways to do a thing, each in a process of its own that stays up: they are asked in turn, and share the machine alone.

JSON lines. In: what the process is to be, then a question at a time. Out: a Reply to each line. A peer replies when it
has come to rest, and says what it used of the processor since the reply before: while another one works, that is to be
nothing.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, TypeVar, Union

import msgspec

from dflash_aot.cache.errors import DflashError, PeerFailed

PATIENCE = 10  # seconds for a process to end when its input has
LAST_LINES = 5
REST, RESTLESS, MOST_REST = 0.02, 0.002, 1.0  # seconds: of a look, of work in one that is no rest, of all looks
T = TypeVar("T")
# What answers each type of question.
Handlers = Mapping[type[msgspec.Struct], Callable[[Any], Any]]


class Reply(msgspec.Struct, frozen=True):
    """idle_seconds: from the reply before to the question; idle_cpu_seconds: work of all threads meanwhile."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    idle_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0


class Peer:
    """One process, until the context is left. idle_seconds, idle_cpu_seconds: sums over all replies, see `Reply`."""

    def __init__(self, name: str, command: Sequence[str], opening: msgspec.Struct):
        """Starts it and waits until it can be asked. Raises PeerFailed if it ends before that.

        command: runs a module that calls `run_peer`, see `python_module`.
        """
        self.name = name
        self.idle_seconds = self.idle_cpu_seconds = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  until the context is left
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,  # Ctrl-C is for the parent: it ends, and with it this process's input
        )
        try:
            self.ask(opening, type(None))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def ask(self, question: msgspec.Struct, kind: type[T]) -> T:
        """Waits for the answer. Raises PeerFailed if the process ends before it, or says something else."""
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise PeerFailed(self._describe_end())
        try:
            reply = msgspec.json.decode(line, type=Reply)
            answer = msgspec.json.decode(reply.answer, type=kind)
        except msgspec.DecodeError as error:
            raise PeerFailed(f"{self.name} answers what is none: {error}") from error
        self.idle_seconds += reply.idle_seconds
        self.idle_cpu_seconds += reply.idle_cpu_seconds
        return answer

    def close(self) -> None:
        """Its input ends, so it does."""
        assert self._process.stdin and self._process.stdout
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _describe_end(self) -> str:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        hint = ": where nobody did that, memory was short" if code == -signal.SIGKILL else ""
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        words = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
        return f"the process of {self.name} {how}{hint}. " + (f"Its last lines:{words}" if words else "It said nothing")


def python_module(name: str) -> list[str]:
    """The command that runs one, as this interpreter would."""
    return [sys.executable, "-P", "-m", name]  # -P: the folder that the user is in is no place to import from


def run_peer(opening: type[T], open_way: Callable[[T], AbstractContextManager[Handlers]]) -> None:
    """The process's side, from its first line to the end of its input; an error of ours ends it with its message.

    open_way: what the process is, once it is told; it answers as long as the context lasts.
    """
    answers, lines = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        with open_way(msgspec.json.decode(lines.readline(), type=opening)) as handlers:
            questions = msgspec.json.Decoder(Union[tuple(handlers)])  # noqa: UP007  of as many as there are
            reply = Reply()
            while True:
                rest()
                answers.write(msgspec.json.encode(reply) + b"\n")
                answers.flush()
                began, worked = time.perf_counter(), time.process_time()
                line = lines.readline()
                idle = time.perf_counter() - began, time.process_time() - worked
                if not line:
                    return
                question = questions.decode(line)
                answer = handlers[type(question)](question)
                reply = Reply(msgspec.Raw(msgspec.json.encode(answer)), *idle)
    except DflashError as error:
        sys.exit(str(error))


def rest() -> None:
    """Until no thread of this process works: those that share a product wait for the next one at full speed first."""
    give_up = time.perf_counter() + MOST_REST
    while time.perf_counter() < give_up:
        worked = time.process_time()
        time.sleep(REST)
        if time.process_time() - worked < RESTLESS:
            return
