"""Building for a described TPU: in processes of their own, for its compiler is loud, grows, and may take one down."""

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
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
        self._living: set[_Worker] = set()
        first = self._begin()
        self.environment = first.environment
        self._idle.put(first)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        while self._living:
            self._end(next(iter(self._living)))

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
            raise
        if answer.resident_bytes > RESIDENT_BYTES or worker.asked >= EXECUTABLES:
            self._end(worker)
        else:
            self._idle.put(worker)
        if answer.built is None:
            raise BuildFailed(answer.failure)
        return answer.built

    def _begin(self) -> "_Worker":
        worker = _Worker(self._topology, self._order)
        self._living.add(worker)
        return worker

    def _end(self, worker: "_Worker") -> None:
        worker.end()
        self._living.discard(worker)


class _Worker:
    """One process, and how many executables it was asked for."""

    def __init__(self, topology: Topology, order: Order):
        descriptor, self._log = tempfile.mkstemp(prefix="dflash-worker-", suffix=".log")
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                # -P: the folder that the user is in is no place to import from.
                [sys.executable, "-P", "-m", "dflash_aot.compile.worker", topology.name, self._log],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **COMPILE_ONLY},
                process_group=0,  # Ctrl-C is for the parent: it ends, and with it this process's input
            )
        self.asked = 0
        self.environment = msgspec.json.decode(self._exchange(order), type=Environment)

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
        words = find_last_words(Path(self._log).read_text(errors="replace"))
        return f"the compiler's process {how}{hint}. {self._log} " + (f"says: {words}" if words else "is empty")


def find_last_words(log: str) -> str:
    """The line that tells most of why a process died: a failed check, or the last that is not of a stack."""
    lines = [line for line in map(str.strip, log.splitlines()) if line and not AFTERMATH.match(line)]
    fatal = [line for line in lines if FATAL.match(line)]
    return (fatal or lines or [""])[-1]
