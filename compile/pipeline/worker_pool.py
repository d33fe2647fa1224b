"""Building for a described TPU: in processes of their own, for its compiler is loud, grows, and may take one down."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.topology import Topology
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY, check_compiler
from dflash_aot.compile.pipeline.executable_builder import Order
from dflash_aot.compile.pipeline.worker_process import Answer

EARLY_DEATHS = 2  # so many workers died and none has ever answered: the fault is not in what they were asked for
PATIENCE = 10  # seconds for a process to end when its input has
# libtpu's log: a failed check, and what its signal handler adds behind the line that tells of the signal.
FATAL, AFTERMATH = re.compile(r"F\d{4} "), re.compile(r"(PC: )?@ |E\d{4} .* RAW: |https://symbolize")


class Workers:
    """Up to `jobs` processes, a new one for each executable; `environment` is the described machine's.

    Leaving the context ends them all.
    """

    def __init__(self, topology: Topology, bundle: Path, jobs: int):
        """Starts one. Raises BadInput where there is no compiler, BuildFailed where it does not start."""
        check_compiler()
        self.jobs, self._topology, self._bundle = jobs, topology, bundle
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="worker")
        self._lock = threading.Lock()  # of what follows
        self._left = False
        self._living: set[_Worker] = set()
        self._deaths: list[str] | None = []  # what workers were asked for that died; None as soon as one has answered
        self._first: _Worker | None = self._begin()  # the first to be given something to do
        self.environment = self._first.environment

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:  # whatever a thread has started is among the living, and nothing is started any more
            self._left, living = True, list(self._living)
        for worker in living:
            self._end(worker)

    def start(self, order: Order) -> Future[Entry]:
        return self._pool.submit(self._compile, order)

    def _compile(self, order: Order) -> Entry:
        """Raises BuildFailed with the worker's words, or with its last ones."""
        with self._lock:
            worker, self._first = self._first, None
        worker = worker or self._begin()
        try:
            answer = worker.ask(order)
        except BuildFailed:
            self._note_death(worker, order.signature.label)
            raise
        finally:
            self._end(worker)
        with self._lock:
            self._deaths = None
        if answer.entry is None:
            raise BuildFailed(answer.failure)
        return answer.entry

    def _begin(self) -> "_Worker":
        """Raises BuildFailed where it does not start, would die as others have, or the context was left."""
        with self._lock:
            if self._left:
                raise BuildFailed("the build was left")
            self._check_deaths()
            worker = _Worker(self._topology, self._bundle)
            self._living.add(worker)
        try:
            worker.greet()
        except BuildFailed:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: "_Worker") -> None:
        worker.end()
        with self._lock:
            self._living.discard(worker)

    def _note_death(self, worker: "_Worker", label: str) -> None:
        """One more than enough leaves no log and raises BuildFailed."""
        with self._lock:
            if self._deaths is None:
                return
            if len(self._deaths) == EARLY_DEATHS:
                worker.log.unlink(missing_ok=True)
            self._check_deaths()
            self._deaths.append(label)

    def _check_deaths(self) -> None:
        """With the lock held. Raises BuildFailed."""
        if self._deaths and len(self._deaths) == EARLY_DEATHS:
            raise BuildFailed(
                f"given up: the first {EARLY_DEATHS} of the compiler's processes died, see {self._deaths[0]}"
            )


class _Worker:
    """One process."""

    def __init__(self, topology: Topology, bundle: Path):
        descriptor, log_name = tempfile.mkstemp(prefix="dflash-worker-", suffix=".log")
        self.log = Path(log_name)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                # -P: the folder that the user is in is no place to import from.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "dflash_aot.compile.pipeline.worker_process",
                    topology.name,
                    str(bundle),
                    log_name,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **COMPILE_ONLY},
                process_group=0,  # Ctrl-C is for the parent: it ends, and with it this process's input
            )
        self._startup_bytes = 0  # of the log

    def greet(self) -> None:
        """Waits until it is ready. Raises BuildFailed if the process dies before that."""
        self.environment = msgspec.json.decode(self._read_answer(), type=Environment)
        self._startup_bytes = self.log.stat().st_size

    def ask(self, order: Order) -> Answer:
        """Waits for the answer. Raises BuildFailed if the process dies before it."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        return msgspec.json.decode(self._read_answer(), type=Answer)

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

    def _read_answer(self) -> bytes:
        assert self._process.stdout
        answer = self._process.stdout.readline()
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
