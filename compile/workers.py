"""Building for a described TPU: in processes of their own, for its compiler is loud, grows, and may take one down."""

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import msgspec

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.topology import Topology
from dflash_aot.compile.builder import Built
from dflash_aot.compile.machine import COMPILE_ONLY, check_compiler
from dflash_aot.compile.worker import Answer, Order

# A worker that held more, or built so many, makes room for a new one. Qwen3-4B's 43 executables took one to 1.1 GB.
RESIDENT_BYTES, EXECUTABLES = 2 * 10**9, 100
EARLY_DEATHS = 2  # so many workers in a row on their first executable, and the fault is not in what they were asked for
PATIENCE = 10  # seconds for a process to end when its input has
# libtpu's log: a failed check, and what its signal handler adds behind the line that tells of the signal.
FATAL, AFTERMATH = re.compile(r"F\d{4} "), re.compile(r"(PC: )?@ |E\d{4} .* RAW: |https://symbolize")


class Workers:
    """Up to `jobs` processes; `environment` is the described machine's. Leaving the context ends them all."""

    def __init__(self, topology: Topology, order: Order, jobs: int):
        """Starts one. Raises BadInput where there is no compiler, BuildFailed where it does not start."""
        check_compiler()
        self.jobs, self._topology, self._order = jobs, topology, order
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="worker")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows
        self._left = False
        self._living: set[_Worker] = set()
        self._early_deaths: list[str] = []  # what the workers were asked for
        first = self._begin()
        self.environment = first.environment
        self._idle.put(first)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:  # whatever a thread has started is among the living, and nothing is started any more
            self._left, living = True, list(self._living)
        for worker in living:
            self._end(worker)

    def start(self, signature: Signature) -> Future[Built]:
        return self._pool.submit(self._build, signature.label)

    def _build(self, label: str) -> Built:
        """Raises BuildFailed with the worker's words, or with its last ones."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._begin()
        try:
            answer = worker.ask(label)
        except BuildFailed:
            self._end(worker)
            if worker.asked == 1:
                self._note_early_death(worker, label)
            raise
        with self._lock:
            self._early_deaths.clear()
        if answer.resident_bytes > RESIDENT_BYTES or worker.asked >= EXECUTABLES:
            self._end(worker)
        else:
            self._idle.put(worker)
        if answer.built is None:
            raise BuildFailed(answer.failure)
        return answer.built

    def _begin(self) -> "_Worker":
        """Raises BuildFailed where it does not start, would die as others have, or the context was left."""
        with self._lock:
            if self._left:
                raise BuildFailed("the build was left")
            self._check_early_deaths()
            worker = _Worker(self._topology)
            self._living.add(worker)
        try:
            worker.greet(self._order)
        except BuildFailed:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: "_Worker") -> None:
        worker.end()
        with self._lock:
            self._living.discard(worker)

    def _note_early_death(self, worker: "_Worker", label: str) -> None:
        """One more than enough leaves no log and raises BuildFailed."""
        with self._lock:
            if len(self._early_deaths) == EARLY_DEATHS:
                worker.log.unlink(missing_ok=True)
            self._check_early_deaths()
            self._early_deaths.append(label)

    def _check_early_deaths(self) -> None:
        """With the lock held. Raises BuildFailed."""
        if len(self._early_deaths) == EARLY_DEATHS:
            raise BuildFailed(
                f"given up: {EARLY_DEATHS} of the compiler's processes in a row died on their first executable, "
                f"see {self._early_deaths[0]}"
            )


class _Worker:
    """One process, and how many executables it was asked for."""

    def __init__(self, topology: Topology):
        descriptor, log_name = tempfile.mkstemp(prefix="dflash-worker-", suffix=".log")
        self.log = Path(log_name)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                # -P: the folder that the user is in is no place to import from.
                [sys.executable, "-P", "-m", "dflash_aot.compile.worker", topology.name, log_name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **COMPILE_ONLY},
                process_group=0,  # Ctrl-C is for the parent: it ends, and with it this process's input
            )
        self.asked = 0
        self._startup_bytes = 0  # of the log

    def greet(self, order: Order) -> None:
        """Waits until it is ready. Raises BuildFailed if the process dies before that."""
        self.environment = msgspec.json.decode(self._exchange(order), type=Environment)
        self._startup_bytes = self.log.stat().st_size

    def ask(self, label: str) -> Answer:
        """Waits for the answer. Raises BuildFailed if the process dies before it."""
        self.asked += 1
        return msgspec.json.decode(self._exchange(label), type=Answer)

    def end(self) -> None:
        """Its input ends, so it does, whatever it is doing."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _exchange(self, message: object) -> bytes:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise BuildFailed(self._describe_death())
        return answer

    def _describe_death(self) -> str:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        hint = ": where nobody did that, memory was short, and --jobs 1 takes less" if code == -signal.SIGKILL else ""
        words = "" if code == -signal.SIGKILL else find_last_words(self._read_log())  # who is killed cannot say why
        return f"the compiler's process {how}{hint}. " + (f"{self.log} says: {words}" if words else f"Log: {self.log}")

    def _read_log(self) -> str:
        """What came after the start: what libtpu always says there tells nothing of an end."""
        return self.log.read_bytes()[self._startup_bytes :].decode(errors="replace")


def find_last_words(log: str) -> str:
    """The line that tells most of why a process died: a failed check, or the last that is not of a stack."""
    lines = [line for line in map(str.strip, log.splitlines()) if line and not AFTERMATH.match(line)]
    fatal = [line for line in lines if FATAL.match(line)]
    return (fatal or lines or [""])[-1]
