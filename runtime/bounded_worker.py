"""A subprocess that calls named functions on JSON arguments, under limits of time, memory and size: both of its ends.

For work that a client or a checkpoint's author describes, such as rendering a chat template: nothing in the caller's
process interrupts a single operation in C, such as `10 ** 10 ** 9`. A call costs about 0.15 ms, the kernel ends it
whatever it does, and it has a GIL of its own. A call with a stack of its own runs in a fork of the subprocess: what
ends it, such as an overflow of that stack, leaves the subprocess as it was.
"""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from dflash_aot.cache.json_process import JsonPipe, JsonProcess, ProcessEnded

GUARD_STACK = 64 << 20  # for a grammar's compilation
# Of threads of the server: more, so that nothing passes in the guard and overflows there.
SPARE_STACK = 96 << 20
SYSTEM_STACK = 0  # as large as the system makes it
REQUEST_CHARACTERS = 1 << 28  # a tokenizer.json has up to 2^27 bytes
FAILURE_CHARACTERS = 1000
# Raised by Rust libraries; a BaseException, so `except Exception` misses it.
PANIC = "PanicException"
END_CALL = signal.SIGUSR1  # to the subprocess: ends the fork that makes a call
EXCEEDED = "it takes more than"
FORK_NICENESS = 3  # what is served goes first
T = TypeVar("T")


class CallFailed(Exception):
    """A call gave no value: its function raised, it exceeded a limit, or its process ended. The message says why."""


class CallExceeded(CallFailed):
    """A call exceeded its processor time, memory or stack."""


class CallLimits(msgspec.Struct, frozen=True):
    """What one call may use.

    Attributes:
        seconds: processor time, so that a busy machine does not end a call.
        memory: bytes of address space beyond what the process has before.
        reply_characters: length of the value as JSON, in ASCII.
        wall_seconds: until the reply. Longer than `seconds`: a process may be stopped, or wait for a disk.
        stack: bytes of stack, in a fork of the subprocess; 0 for the subprocess's own.
    """

    seconds: float = 5.0
    memory: int = 1 << 29
    reply_characters: int = 1 << 25
    wall_seconds: float = 120.0
    stack: int = 0


class CallRequest(msgspec.Struct, frozen=True):
    """A call. arguments: JSON of the standard library, which can hold lone surrogates, NaN and long integers."""

    function: str
    arguments: str
    limits: CallLimits


class CallReply(msgspec.Struct, frozen=True):
    """The outcome of a call. value: JSON, as in the request; None after a failure."""

    value: str | None = None
    failure: str = ""


class Leaving:
    """Ends a call when its caller no longer waits for it: `leave` is called by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._has_left = False

    def leave(self) -> None:
        """Ends the call in progress, and those to come."""
        with self._lock:
            self._has_left = True
            if self._end:
                self._end()

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Calls `end` if the caller leaves within the block. Raises CallFailed where it has left already."""
        with self._lock:
            if self._has_left:
                raise CallFailed("its caller has left")
            self._end = end
        try:
            yield
        finally:
            with self._lock:
                self._end = None


class BoundedWorker:
    """The parent's end. Threads may share it; they take turns.

    The process starts at the first call, and again at the call after its end, which takes a second or two. It ends with
    its parent, because its standard input ends then and because it limits itself.

    Attributes:
        failures: how often a call ended the process.
    """

    def __init__(self, module: str):
        """module: dotted name; its `main` calls `serve_functions`."""
        self._module = module
        self._lock = threading.Lock()
        self._process: JsonProcess | None = None
        self.failures = 0
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def call(
        self,
        function: str,
        arguments: Mapping[str, Any],
        limits: CallLimits,
        leaving: Leaving | None = None,
    ) -> Any:
        """Returns the value of a function of the worker. Raises CallFailed; ValueError for what JSON cannot hold.

        leaving: ends the call, if it has a stack of its own.
        """
        request = CallRequest(function, json.dumps(arguments), limits)
        if len(request.arguments) > REQUEST_CHARACTERS:
            raise CallFailed(
                f"its arguments have {len(request.arguments)} characters: the limit is {REQUEST_CHARACTERS}"
            )
        with self._lock:
            reply = self._exchange(request, leaving or Leaving())
        if reply.value is None:
            kind = CallExceeded if reply.failure.startswith(EXCEEDED) else CallFailed
            raise kind(reply.failure)
        return json.loads(reply.value)

    def close(self) -> None:
        """Ends the process, after the call in progress."""
        with self._lock:
            self._end_process()

    def _leave_to_parent(self) -> None:
        """In a fork: the process, and perhaps the lock, are the parent's."""
        self._lock = threading.Lock()
        self._process = None

    def _exchange(self, request: CallRequest, leaving: Leaving) -> CallReply:
        process = self._process = self._process or JsonProcess(self._module)
        limits = request.limits
        end = partial(process.send_signal, END_CALL) if limits.stack else process.kill
        began = time.monotonic()
        timer = threading.Timer(limits.wall_seconds, end)
        try:
            start_with_stack(timer, SYSTEM_STACK)
            with leaving.ending(end if limits.stack else _go_on):
                # JSON within JSON: each character may become two.
                most = 2 * (limits.reply_characters + FAILURE_CHARACTERS)
                return process.ask(request, CallReply, most)
        except ProcessEnded as ended:
            self.failures += 1
            self._end_process()
            reason = ": ".join([str(ended), *ended.last_lines()])[:FAILURE_CHARACTERS]
            if ended.returncode == -signal.SIGPROF:
                reason = _describe_end(signal.SIGPROF, limits)
            elif time.monotonic() - began >= limits.wall_seconds:
                reason = f"no reply within {limits.wall_seconds:g} s"
            raise CallFailed(reason) from ended
        except CallFailed:  # the caller had left: nothing was sent
            raise
        except BaseException:  # an interrupted caller: the next one would get its reply
            self._end_process()
            raise
        finally:
            timer.cancel()

    def _end_process(self) -> None:
        process, self._process = self._process, None  # before it may be interrupted
        if process:
            process.close(kill=True)


def _go_on() -> None:
    """No-op: ends no call that runs in the subprocess itself, because the subprocess serves later calls too."""


def _describe_end(number: int, limits: CallLimits) -> str:
    """Why a signal ended a call."""
    match number:
        case signal.SIGPROF:
            return f"{EXCEEDED} {limits.seconds:g} s of processor time"
        case signal.SIGSEGV | signal.SIGBUS:
            return f"{EXCEEDED} {limits.stack >> 20} MiB of stack"
        case signal.SIGABRT:
            return f"{EXCEEDED} {limits.memory >> 20} MiB of memory"
    return f"no reply within {limits.wall_seconds:g} s"


# Two processes of one module: a chat does not wait for a grammar, which may take seconds.
TRIES = 5  # of a call, where other engines use the process at the same time
CHAT_GUARD = BoundedWorker("dflash_aot.runtime.guard")
GRAMMAR_GUARD = BoundedWorker("dflash_aot.runtime.guard")


# -- the subprocess's end


def serve_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Calls the functions that the parent names, until standard input ends, or until a call takes too long.

    A call with a stack of its own, see `CallLimits`, runs in a fork. The process must have no threads then.
    """
    # Ends the process, also in the middle of an operation in C.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    fork = _Fork()
    signal.signal(END_CALL, lambda *_: fork.kill())
    pipe = JsonPipe()
    while request := pipe.receive(CallRequest):
        call = partial(
            _call, functions[request.function], json.loads(request.arguments), request.limits
        )
        pipe.send(fork.run(call, request.limits) if request.limits.stack else call())


class _Fork:
    """A fork of this process that makes one call."""

    def __init__(self) -> None:
        self._pid = 0
        self._is_ended = False

    def kill(self) -> None:
        """Ends the call, also one that is about to fork."""
        self._is_ended = True
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def run(self, call: Callable[[], CallReply], limits: CallLimits) -> CallReply:
        reading, writing = os.pipe()
        self._is_ended = False
        self._pid = os.fork()
        if not self._pid:
            os.close(reading)
            os.nice(FORK_NICENESS)
            _reply_and_exit(partial(run_with_stack, limits.stack, call), writing)
        if self._is_ended:  # before the number of the fork was known
            self.kill()
        os.close(writing)
        with os.fdopen(reading, "rb") as output:
            sent = output.read()
        pid, self._pid = self._pid, 0  # a number that was waited for may be another process's
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and status:
            return CallReply(failure=f"its process ended with {os.WEXITSTATUS(status)}")
        if status:
            return CallReply(failure=_describe_end(os.WTERMSIG(status), limits))
        return msgspec.json.decode(sent, type=CallReply)


def _reply_and_exit(call: Callable[[], CallReply], writing: int) -> NoReturn:
    """Ends this process without what interpreters do at their end: its files are its parent's."""
    code = 1
    try:
        with os.fdopen(writing, "wb") as output:
            output.write(msgspec.json.encode(call()))
        code = 0
    finally:
        os._exit(code)


_STACK_LOCK = threading.Lock()


def run_with_stack(size: int, function: Callable[[], T]) -> T:
    """Runs a function on a thread with `size` bytes of stack: libraries follow nested texts by recursion.

    Raises what the function raises.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # a panic of a Rust library
            outcome.set_exception(error)

    start_with_stack(threading.Thread(target=run, daemon=True), size)
    return outcome.result()


def start_with_stack(thread: threading.Thread, size: int = SPARE_STACK) -> None:
    """Starts a thread with `size` bytes of stack, of which only what is used takes memory. Raises MemoryError."""
    with _STACK_LOCK:
        before = threading.stack_size(size)
        try:
            thread.start()
        except RuntimeError as error:  # of the threading module
            raise MemoryError(f"no thread can be started: {error}") from error
        finally:
            threading.stack_size(before)


def _call(function: Callable[..., Any], arguments: dict[str, Any], limits: CallLimits) -> CallReply:
    try:
        with _hold_limits(limits):
            value = json.dumps(function(**arguments))
        if len(value) <= limits.reply_characters:
            return CallReply(value)
        failure = f"its result has {len(value)} characters: the limit is {limits.reply_characters}"
    except MemoryError:
        failure = f"{EXCEEDED} {limits.memory >> 20} MiB of memory"
    except BaseException as error:  # of a template, or of a library
        if not (isinstance(error, Exception) or type(error).__name__ == PANIC):
            raise
        failure = f"{type(error).__name__}: {error}"[:FAILURE_CHARACTERS]
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
