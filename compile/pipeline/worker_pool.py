"""Worker pool: compiles for a described TPU in worker processes, whose compiler logs, leaks memory and may crash."""

import os
import re
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.chips import Topology
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.json_process import JsonProcess, ProcessEnded
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY, check_compiler
from dflash_aot.compile.pipeline.executable_builder import CompileJob, CompileResult

# A process of one thread forks safely; numpy would start more.
WORKER_VARIABLES = {**COMPILE_ONLY, "OPENBLAS_NUM_THREADS": "1"}
# workers that crash before any has answered: the fault is not in what they compile
MAX_EARLY_CRASHES = 2
# libtpu's log: a failed check, and what its signal handler adds after the line that names the signal.
FATAL = re.compile(r"F\d{4} ")
AFTERMATH = re.compile(r"(PC: )?@ |E\d{4} .* RAW: |https://symbolize")


class WorkerPool:
    """Up to `jobs` processes, each with a fork for each executable. Leaving the context ends them all.

    Attributes:
        jobs: the number of executables compiled at a time.
        environment: that of the described devices.
    """

    def __init__(self, topology: Topology, bundle: Path, jobs: int, emulates: bool = False):
        """Starts one worker. Raises BadInput where there is no compiler, BuildFailed where no worker starts.

        emulates: whether jobs ask for emulated programs.
        """
        check_compiler()
        self.jobs = jobs
        self._topology = topology
        self._bundle = bundle
        self._emulates = emulates
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="worker")
        self._lock = threading.Lock()  # guards the following
        self._closed = False
        self._running: set[_Worker] = set()
        self._crashes: (
            list[str] | None
        ) = []  # labels of what crashed workers compiled; None once any has answered
        first = self._start_worker()
        self._idle = [first]
        self.environment = first.environment

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:  # every started worker is in `_running`, and none is started from here on
            self._closed, running = True, list(self._running)
        for worker in running:
            self._end_worker(worker)

    def start(self, job: CompileJob) -> Future[Entry]:
        return self._threads.submit(lambda: self.compile(job)[0])

    def compile(self, job: CompileJob) -> tuple[Entry, bytes]:
        """Returns the entry, and the emulated program if the job asks for it.

        Raises BuildFailed with the worker's reason, or with the last words of its log.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or self._start_worker()
        try:
            result = self._ask(worker, job)
        except BaseException:
            self._end_worker(worker)
            raise
        with self._lock:
            self._crashes = None
            self._idle.append(worker)
        if result.entry is None:
            raise BuildFailed(result.failure)
        return result.entry, result.emulated

    def _ask(self, worker: "_Worker", job: CompileJob) -> CompileResult:
        try:
            return worker.compile(job)
        except BuildFailed:
            self._record_crash(worker, job.signature.label)
            raise

    def _start_worker(self) -> "_Worker":
        """Raises BuildFailed where it does not start, would crash as others have, or the pool is closed."""
        with self._lock:
            if self._closed:
                raise BuildFailed("the build was cancelled")
            self._check_crashes()
            worker = _Worker(self._topology, self._bundle, self._emulates)
            self._running.add(worker)
        try:
            worker.wait_until_ready()
        except BuildFailed:
            self._end_worker(worker)
            raise
        return worker

    def _end_worker(self, worker: "_Worker") -> None:
        worker.close()
        with self._lock:
            self._running.discard(worker)

    def _record_crash(self, worker: "_Worker", label: str) -> None:
        """Beyond MAX_EARLY_CRASHES, removes the log and raises BuildFailed."""
        with self._lock:
            if self._crashes is None:
                return
            if len(self._crashes) == MAX_EARLY_CRASHES:
                worker.log.unlink(missing_ok=True)
            self._check_crashes()
            self._crashes.append(label)

    def _check_crashes(self) -> None:
        """Call it with the lock held. Raises BuildFailed."""
        if self._crashes and len(self._crashes) == MAX_EARLY_CRASHES:
            raise BuildFailed(
                f"not tried: the first {MAX_EARLY_CRASHES} compiler processes crashed. The reason is given at "
                f"{self._crashes[0]}"
            )


class _Worker:
    """One worker process and its log, a file that stays if the process crashes."""

    def __init__(self, topology: Topology, bundle: Path, emulates: bool):
        descriptor, name = tempfile.mkstemp(prefix="dflash-worker-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        self._process = JsonProcess(
            "dflash_aot.compile.pipeline.worker_process",
            [topology.name, str(bundle), name, *(["emulate"] if emulates else [])],
            variables=WORKER_VARIABLES,
            log=self.log,
        )
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Waits until the process can compile. Raises BuildFailed if the process ends before that."""
        try:
            self.environment = self._process.receive(Environment)
        except ProcessEnded as end:
            raise BuildFailed(self._explain_end(end)) from end
        self._process.skip_log()  # what libtpu always logs at its start explains no crash
        self._is_ready = True

    def compile(self, job: CompileJob) -> CompileResult:
        """Compiles an executable in the process. Raises BuildFailed if the process ends before it answers."""
        self._process.send(job)
        if not self._is_ready:
            self.wait_until_ready()
        self._is_ready = False  # the next job has a fork of its own
        try:
            return self._process.receive(CompileResult)
        except ProcessEnded as end:
            raise BuildFailed(self._explain_end(end)) from end

    def close(self) -> None:
        self._process.close()

    def _explain_end(self, end: ProcessEnded) -> str:
        hint = ", probably because memory ran out: try --jobs 1" if end.was_killed else ""
        # a killed process cannot log why
        words = "" if end.was_killed else find_last_words(end.log)
        return f"the compiler process {end.how}{hint}. " + (
            f"{self.log}: {words}" if words else f"Log: {self.log}"
        )


def find_last_words(log: str) -> str:
    """The line that best explains why a process crashed: a failed check, or the last line before a stack trace."""
    lines = [
        line for line in map(str.strip, log.splitlines()) if line and not AFTERMATH.match(line)
    ]
    fatal = [line for line in lines if FATAL.match(line)]
    return (fatal or lines or [""])[-1]
