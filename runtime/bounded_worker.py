"""A subprocess that calls named functions on JSON arguments, under limits of time, memory and size: both of its ends.

For work that a client or a checkpoint's author describes, such as rendering a chat template: nothing in the caller's
process interrupts a single operation in C, such as `10 ** 10 ** 9`. A call costs about 0.15 ms, the kernel ends it
whatever it does, and it has a GIL of its own.
"""

import json
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.json_process import JsonPipe, JsonProcess, ProcessEnded

REQUEST_LETTERS = 1 << 26
FAILURE_LETTERS = 300


class CallFailed(Exception):
    """A call gave no value: its function raised, it exceeded a limit, or its process ended. The message says why."""


class CallLimits(msgspec.Struct, frozen=True):
    """What one call may use.

    Attributes:
        seconds: processor time, so that a busy machine does not end a call.
        memory: bytes of address space beyond what the process has before.
        reply_letters: length of the value as JSON, in ASCII.
        wall_seconds: until the reply. Longer than `seconds`: a process may be stopped, or wait for a disk.
    """

    seconds: float = 5.0
    memory: int = 1 << 29
    reply_letters: int = 1 << 25
    wall_seconds: float = 120.0


class CallRequest(msgspec.Struct, frozen=True):
    """A call. arguments: JSON of the standard library, which can hold lone surrogates, NaN and long integers."""

    function: str
    arguments: str
    limits: CallLimits


class CallReply(msgspec.Struct, frozen=True):
    """The outcome of a call. value: JSON, as in the request; None after a failure."""

    value: str | None = None
    failure: str = ""


class BoundedWorker:
    """The parent's end. Threads may share it; they take turns.

    The process starts at the first call, and again at the call after its end, which takes a second or two. It ends with
    its parent, because its standard input ends then and because it limits itself.
    """

    def __init__(self, module: str):
        """module: dotted name; its `main` calls `serve_functions`."""
        self._module = module
        self._lock = threading.Lock()
        self._process: JsonProcess | None = None

    def call(self, function: str, arguments: Mapping[str, Any], limits: CallLimits) -> Any:
        """Returns the value of a function of the worker. Raises CallFailed; ValueError for what JSON cannot hold."""
        request = CallRequest(function, json.dumps(arguments), limits)
        if len(request.arguments) > REQUEST_LETTERS:
            raise CallFailed(
                f"its arguments have {len(request.arguments)} letters: the limit is {REQUEST_LETTERS}"
            )
        with self._lock:
            reply = self._exchange(request)
        if reply.value is None:
            raise CallFailed(reply.failure)
        return json.loads(reply.value)

    def close(self) -> None:
        """Ends the process, after the call in progress."""
        with self._lock:
            self._end_process()

    def _exchange(self, request: CallRequest) -> CallReply:
        process = self._process = self._process or JsonProcess(self._module)
        limits = request.limits
        began = time.monotonic()
        timer = threading.Timer(limits.wall_seconds, process.kill)
        timer.start()
        try:
            # JSON within JSON: each letter may become two.
            return process.ask(request, CallReply, 2 * (limits.reply_letters + FAILURE_LETTERS))
        except ProcessEnded as end:
            self._end_process()
            reason = ": ".join([str(end), *end.last_lines()])[:FAILURE_LETTERS]
            if end.returncode == -signal.SIGPROF:
                reason = f"it takes more than {limits.seconds:g} s of processor time"
            elif time.monotonic() - began >= limits.wall_seconds:
                reason = f"no reply within {limits.wall_seconds:g} s"
            raise CallFailed(reason) from end
        finally:
            timer.cancel()

    def _end_process(self) -> None:
        if self._process:
            self._process.close(kill=True)
        self._process = None


# -- the subprocess's end


def serve_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Calls the functions that the parent names, until standard input ends, or until a call takes too long."""
    # Ends the process, also in the middle of an operation in C.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    pipe = JsonPipe()
    while request := pipe.receive(CallRequest):
        pipe.send(_call(functions[request.function], json.loads(request.arguments), request.limits))


def _call(function: Callable[..., Any], arguments: dict[str, Any], limits: CallLimits) -> CallReply:
    try:
        with _hold_limits(limits):
            value = json.dumps(function(**arguments))
        if len(value) <= limits.reply_letters:
            return CallReply(value)
        failure = f"its result has {len(value)} letters: the limit is {limits.reply_letters}"
    except MemoryError:
        failure = f"it takes more than {limits.memory >> 20} MiB of memory"
    except Exception as error:  # of a template, or of a library
        failure = f"{type(error).__name__}: {error}"[:FAILURE_LETTERS]
    return CallReply(failure=failure.encode(errors="replace").decode())


@contextmanager
def _hold_limits(limits: CallLimits) -> Iterator[None]:
    """Limits processor time and memory of the process, see `serve_functions`. Raises MemoryError in the block."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_limit_memory(limits.memory, most), most))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_memory(more: int, most: int) -> int:
    """The address space of this process and `more` bytes, at most `most`."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return most
    wanted = pages * resource.getpagesize() + more
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)
