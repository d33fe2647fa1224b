"""Compilation manager: finds or compiles every executable of a grid, in one of several pools; reports every failure."""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.chips import Topology
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.pipeline.build_target import BuildTarget, TargetDevices
from dflash_aot.compile.pipeline.deployment import Deployment
from dflash_aot.compile.pipeline.executable_builder import (
    CompileJob,
    build_executable,
    explain_failure,
    pinned_compiler_settings,
)
from dflash_aot.compile.pipeline.ray_pool import open_ray_pool
from dflash_aot.compile.pipeline.worker_pool import WorkerPool
from dflash_aot.compile.programs.programs import ProgramSource, choose_options

# -- what a build reports to its caller while it runs

BuildPhase = Literal["compile", "self-test"]


class Progress(msgspec.Struct, frozen=True):
    """An executable that a phase has begun or finished.

    Attributes:
        done: executables that the phase has finished, failures included.
        total: executables of the phase.
        label: the executable's program and sizes.
        compiled: whether this build compiled the executable; False for one that was found.
        entry: the executable's entry; None when it begins, and in the self-test phase.
    """

    done: int
    total: int
    label: str
    compiled: bool = False
    entry: Entry | None = None


class BuildObserver:
    """Receives a build's progress, in the thread that called the build. Does nothing: subclasses override methods.

    An exception that a method raises ends the build.
    """

    def on_plan(self, deployment: Deployment) -> None:
        """The pair, grid and devices are known; nothing is compiled yet."""

    def on_phase(self, phase: BuildPhase, total: int) -> None:
        """A phase begins, with this number of executables."""

    def on_executable(self, progress: Progress) -> None:
        """An executable of the current phase begins or is finished."""

    def on_phase_end(self, phase: BuildPhase) -> None:
        """The phase has ended, possibly by an error."""

    def on_info(self, message: str) -> None:
        """Where executables are compiled, or why self-tests were left out."""

    def on_warning(self, message: str) -> None:
        """The build goes on, with a doubt: memory that may not suffice, a read-only store."""


# -- compiler pools: executables are compiled in this process, in worker processes, or on a Ray cluster

ATTACHED_JOBS = 2  # each compilation for an attached device has threads of its own
MAX_WORKERS = 8


class CompilerPool(Protocol):
    """Compiles executables and adds them to a store.

    Attributes:
        jobs: the number of executables compiled at a time.
        environment: what executables for the build target depend on.
    """

    jobs: int
    environment: Environment

    def start(self, job: CompileJob) -> Future[Entry]: ...


class InProcessPool:
    """Compiles for attached devices, in threads of this process, which holds the devices."""

    def __init__(self, devices: TargetDevices, store: Store, jobs: int):
        self.jobs = jobs
        self.environment = devices.environment
        self._devices = devices
        self._store = store
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="compile")
        self._settings = ExitStack()

    def __enter__(self) -> "InProcessPool":
        self._settings.enter_context(pinned_compiler_settings())
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._settings.close()

    def start(self, job: CompileJob) -> Future[Entry]:
        return self._threads.submit(build_executable, self._devices, self._store, job)


def choose_jobs(target: BuildTarget, jobs: int | None) -> int:
    """The number of executables compiled at a time; `jobs` if given.

    A worker process for a TPU starts on one core and compiles on 1.6: on two cores, two at a time took 105 s for what
    one at a time took 142 s for (Qwen3-4B, 43 executables).
    """
    if jobs or isinstance(target, TargetDevices):
        return jobs or ATTACHED_JOBS
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def check_ray_target(target: BuildTarget) -> None:
    """Raises BadInput for devices that only the process that holds them can compile for."""
    if isinstance(target, TargetDevices) and target.environment.platform != "cpu":
        raise BadInput(
            f"--executor ray: a {target.environment.device_kind} is attached, and compiling for it needs the device "
            "itself. Build here with --executor local, or where none is attached with --topology or --platform cpu"
        )


def open_compiler_pool(
    target: BuildTarget,
    store: Store,
    jobs: int | None,
    ray_address: str | None,
    observer: BuildObserver,
) -> AbstractContextManager[CompilerPool]:
    """The pool for a build target: on the Ray cluster at `ray_address`, or on this machine if None."""
    if ray_address is not None:
        return _open_ray_pool(target, store, jobs, ray_address, observer)
    count = choose_jobs(target, jobs)
    if isinstance(target, Topology):
        return WorkerPool(target, store.bundle, count)
    return InProcessPool(target, store, count)


@contextmanager
def _open_ray_pool(
    target: BuildTarget, store: Store, jobs: int | None, address: str, observer: BuildObserver
) -> Iterator[CompilerPool]:
    with open_ray_pool(target, store, jobs, address) as pool:
        observer.on_info(pool.location)
        yield pool


# -- compilations


class Compilation(msgspec.Struct, frozen=True):
    """The executables of a build.

    Attributes:
        environment: what the executables were built for.
        entries: all, in the grid's order.
        compiled: keys of those that this build compiled; the others were reused.
        seconds: how long the build took.
    """

    environment: Environment
    entries: tuple[Entry, ...]
    compiled: frozenset[str]
    seconds: float


def compile_all(
    source: ProgramSource,
    pool: CompilerPool,
    store: Store,
    observer: BuildObserver | None = None,
    shared: SharedStore | None = None,
) -> Compilation:
    """Compiles what neither store holds. Calls the observer and traces programs in this thread.

    Every executable is stored as soon as it is compiled: a build that is killed loses only what is in flight.
    Raises BuildFailed with every failure, after the rest has been built.
    """
    began = time.monotonic()
    run = _CompilationRun(source, store, observer or BuildObserver(), shared)
    run.compile(pool)
    return run.summarize(pool.environment, time.monotonic() - began)


class _CompilationRun:
    """One run: what is requested, what is found, what failed."""

    def __init__(
        self,
        source: ProgramSource,
        store: Store,
        observer: BuildObserver,
        shared: SharedStore | None,
    ):
        self._source = source
        self._store = store
        self._observer = observer
        self._shared = shared
        self._built: dict[str, Entry] = {}
        self._compiled: set[str] = set()
        self._failures: dict[str, BaseException] = {}

    def compile(self, pool: CompilerPool) -> None:
        pending: dict[Future[Entry], str] = {}
        for signature in self._source.signatures:
            self._report_progress(signature.label)
            try:
                job = self._prepare_job(signature, pool.environment)
                if entry := self._store.find(
                    job.key, job.signature, job.program
                ) or self._find_shared(job):
                    self._finish(signature.label, entry)
                else:
                    self._store.check_writable()
                    pending[pool.start(job)] = signature.label
            except Exception as error:
                self._failures[signature.label] = error
            self._collect(pending, at_least=1 if len(pending) == pool.jobs else 0)
        while pending:
            self._collect(pending, at_least=1)

    def summarize(self, environment: Environment, seconds: float) -> Compilation:
        labels = [signature.label for signature in self._source.signatures]
        if self._failures:
            raise BuildFailed(
                f"{len(self._failures)} of {len(labels)} executables could not be built, the others are kept:",
                *(
                    f"  {label}: {explain_failure(error)}"
                    for label, error in self._failures.items()
                ),
            )
        compiled = frozenset(self._built[label].key for label in self._compiled)
        entries = tuple(self._built[label] for label in labels)
        return Compilation(environment, entries, compiled, seconds)

    def _prepare_job(self, signature: Signature, environment: Environment) -> CompileJob:
        program = self._source.export(signature)
        known = self._source.known
        named = {name: known[name] for name in (*signature.weights, *signature.state)}
        options = choose_options(self._source, signature, environment)
        key = executable_key(program, signature, environment, options)
        return CompileJob(signature, named, program, key, options)

    def _find_shared(self, job: CompileJob) -> Entry | None:
        """The entry of an executable from the shared store, copied into the bundle."""
        if (
            self._shared is None
            or (found := self._shared.find(job.key, job.signature, job.program)) is None
        ):
            return None
        try:
            self._store.add(found.entry, found.executable, found.program)
        except BuildFailed as error:  # it is quarantined here
            self._shared.reject(found, str(error))
            return None
        return found.entry

    def _collect(self, pending: dict[Future[Entry], str], at_least: int) -> None:
        """Takes all finished compilations; waits for the first if `at_least` is 1."""
        done, _ = wait(pending, None if at_least else 0, FIRST_COMPLETED)
        for future in done:
            label = pending.pop(future)
            if error := future.exception():
                self._failures[label] = error
            else:
                self._compiled.add(label)
                self._finish(label, future.result())

    def _finish(self, label: str, entry: Entry) -> None:
        self._built[label] = entry
        self._report_progress(label, entry)

    def _report_progress(self, label: str, entry: Entry | None = None) -> None:
        done = len(self._built) + len(self._failures)
        compiled = label in self._compiled
        self._observer.on_executable(
            Progress(done, len(self._source.signatures), label, compiled, entry)
        )
