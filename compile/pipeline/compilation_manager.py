"""Compilation manager: finds or compiles every executable of a grid, and reports every failure with its reason."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.pipeline.compiler_pool import CompilerPool
from dflash_aot.compile.pipeline.executable_builder import CompileJob, explain_failure
from dflash_aot.compile.pipeline.observer import BuildObserver, Progress
from dflash_aot.compile.programs.program_source import ProgramSource


class Compilation(msgspec.Struct, frozen=True):
    """The executables of a build.

    Attributes:
        entries: all, in the grid's order.
        compiled: keys of those that this build compiled; the others were reused.
        seconds: how long the build took.
    """

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
    return run.summarize(time.monotonic() - began)


class _CompilationRun:
    """One run: what is requested, what is found, what failed."""

    def __init__(self, source: ProgramSource, store: Store, observer: BuildObserver, shared: SharedStore | None):
        self._source, self._store, self._observer, self._shared = source, store, observer, shared
        self._built: dict[str, Entry] = {}
        self._compiled: set[str] = set()
        self._failures: dict[str, BaseException] = {}

    def compile(self, pool: CompilerPool) -> None:
        pending: dict[Future[Entry], str] = {}
        for signature in self._source.signatures:
            self._report_progress(signature.label)
            try:
                job = self._prepare_job(signature, pool.environment)
                if entry := self._store.find(job.key, job.signature, job.program) or self._find_shared(job):
                    self._finish(signature.label, entry)
                else:
                    self._store.check_writable()
                    pending[pool.start(job)] = signature.label
            except Exception as error:
                self._failures[signature.label] = error
            self._collect(pending, at_least=1 if len(pending) == pool.jobs else 0)
        while pending:
            self._collect(pending, at_least=1)

    def summarize(self, seconds: float) -> Compilation:
        labels = [signature.label for signature in self._source.signatures]
        if self._failures:
            raise BuildFailed(
                f"{len(self._failures)} of {len(labels)} executables could not be built, the others are kept:",
                *(f"  {label}: {explain_failure(error)}" for label, error in self._failures.items()),
            )
        compiled = frozenset(self._built[label].key for label in self._compiled)
        return Compilation(tuple(self._built[label] for label in labels), compiled, seconds)

    def _prepare_job(self, signature: Signature, environment: Environment) -> CompileJob:
        program, known = self._source.export(signature), self._source.known
        named = {name: known[name] for name in (*signature.weights, *signature.state)}
        return CompileJob(signature, named, program, executable_key(program, signature, environment))

    def _find_shared(self, job: CompileJob) -> Entry | None:
        """The entry of an executable from the shared store, copied into the bundle."""
        if self._shared is None or (found := self._shared.find(job.key, job.signature, job.program)) is None:
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
        done, compiled = len(self._built) + len(self._failures), label in self._compiled
        self._observer.on_executable(Progress(done, len(self._source.signatures), label, compiled, entry))
