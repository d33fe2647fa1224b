"""The compilation manager: every signature of a grid becomes an executable in a store, or a failure with a reason."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.pipeline.executable_builder import Order, explain
from dflash_aot.compile.programs.program_source import ProgramSource


class Progress(msgspec.Struct, frozen=True):
    """One executable is done, or about to be: `done` of `total` are; `entry` is None at its start."""

    done: int
    total: int
    label: str
    compiled: bool
    entry: Entry | None


class Report(msgspec.Struct, frozen=True):
    """What a build came to: all entries in the grid's order, and the keys of those that had to be compiled."""

    entries: tuple[Entry, ...]
    compiled: frozenset[str]
    seconds: float


class Site(Protocol):
    """Where executables are compiled, up to `jobs` at a time: threads of this process, or processes of their own."""

    jobs: int
    environment: Environment

    def start(self, order: Order) -> Future[Entry]: ...


def build(
    source: ProgramSource,
    site: Site,
    store: Store,
    observe: Callable[[Progress], None],
    shared: SharedStore | None = None,
) -> Report:
    """Compiles what neither store holds yet. `observe` is called from this thread, and programs are traced here.

    Every executable is published as soon as it is compiled: a build that is killed loses what is in flight.
    Raises BuildFailed with every failure, after the rest has been built.
    """
    began = time.monotonic()
    build_ = _Build(source, store, observe, shared)
    build_.run(site)
    return build_.report(time.monotonic() - began)


class _Build:
    """One run: what is asked for, what is there, what failed."""

    def __init__(
        self, source: ProgramSource, store: Store, observe: Callable[[Progress], None], shared: SharedStore | None
    ):
        self._source, self._store, self._observe, self._shared = source, store, observe, shared
        self._built: dict[str, Entry] = {}
        self._compiled: set[str] = set()
        self._failures: dict[str, BaseException] = {}

    def run(self, site: Site) -> None:
        pending: dict[Future[Entry], str] = {}
        for signature in self._source.signatures:
            self._say(signature.label)
            try:
                order = self._prepare(signature, site.environment)
                if entry := self._store.find(order.key, order.signature, order.program) or self._take_shared(order):
                    self._note(signature.label, entry)
                else:
                    pending[site.start(order)] = signature.label
            except Exception as error:
                self._failures[signature.label] = error
            self._collect(pending, at_least=1 if len(pending) == site.jobs else 0)
        while pending:
            self._collect(pending, at_least=1)

    def report(self, seconds: float) -> Report:
        labels = [signature.label for signature in self._source.signatures]
        if self._failures:
            lines = "\n".join(f"  {label}: {explain(error)}" for label, error in self._failures.items())
            raise BuildFailed(
                f"{len(self._failures)} of {len(labels)} executables could not be built, the others are kept:\n{lines}"
            )
        compiled = frozenset(self._built[label].key for label in self._compiled)
        return Report(tuple(self._built[label] for label in labels), compiled, seconds)

    def _prepare(self, signature: Signature, environment: Environment) -> Order:
        program, known = self._source.export(signature), self._source.known
        named = {name: known[name] for name in (*signature.weights, *signature.state)}
        return Order(signature, named, program, executable_key(program, signature, environment))

    def _take_shared(self, order: Order) -> Entry | None:
        """What somebody else built, put into the bundle."""
        if self._shared is None or (found := self._shared.find(order.key, order.signature, order.program)) is None:
            return None
        try:
            self._store.add(found.entry, found.executable, found.program)
        except BuildFailed as error:  # it was set aside here
            self._shared.reject(found, str(error))
            return None
        return found.entry

    def _collect(self, pending: dict[Future[Entry], str], at_least: int) -> None:
        """Everything that is done by now; waits for the first where one is needed."""
        done, _ = wait(pending, None if at_least else 0, FIRST_COMPLETED)
        for future in done:
            label = pending.pop(future)
            if error := future.exception():
                self._failures[label] = error
            else:
                self._compiled.add(label)
                self._note(label, future.result())

    def _note(self, label: str, entry: Entry) -> None:
        self._built[label] = entry
        self._say(label, entry)

    def _say(self, label: str, entry: Entry | None = None) -> None:
        done, compiled = len(self._built) + len(self._failures), label in self._compiled
        self._observe(Progress(done, len(self._source.signatures), label, compiled, entry))
