"""The compilation manager: every signature of a grid becomes an executable in a store, or a failure with a reason."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

import msgspec

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.manifest import Entry
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.builder import Built, explain


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
    """Where executables are built, up to `jobs` at a time: threads of this process, or processes of their own."""

    jobs: int

    def start(self, signature: Signature) -> Future[Built]: ...


def build(signatures: Sequence[Signature], site: Site, observe: Callable[[Progress], None]) -> Report:
    """Compiles what the store does not hold yet. `observe` is called from this thread.

    Every executable is published as soon as it is compiled: a build that is killed loses what is in flight.
    Raises BuildFailed with every failure, after the rest has been built.
    """
    began = time.monotonic()
    build_ = _Build(signatures, observe)
    build_.run(site)
    return build_.report(time.monotonic() - began)


class _Build:
    """One run: what is asked for, what is there, what failed."""

    def __init__(self, signatures: Sequence[Signature], observe: Callable[[Progress], None]):
        self._signatures, self._observe = signatures, observe
        self._built: dict[str, Built] = {}
        self._failures: dict[str, BaseException] = {}

    def run(self, site: Site) -> None:
        pending: dict[Future[Built], str] = {}
        for signature in self._signatures:
            self._say(signature.label, None)
            pending[site.start(signature)] = signature.label
            self._collect(pending, at_least=1 if len(pending) == site.jobs else 0)
        while pending:
            self._collect(pending, at_least=1)

    def report(self, seconds: float) -> Report:
        if self._failures:
            lines = "\n".join(f"  {label}: {explain(error)}" for label, error in self._failures.items())
            raise BuildFailed(
                f"{len(self._failures)} of {len(self._signatures)} executables could not be built, "
                f"the others are kept:\n{lines}"
            )
        built = [self._built[signature.label] for signature in self._signatures]
        compiled = frozenset(one.entry.key for one in built if one.compiled)
        return Report(tuple(one.entry for one in built), compiled, seconds)

    def _collect(self, pending: dict[Future[Built], str], at_least: int) -> None:
        """Everything that is done by now; waits for the first where one is needed."""
        done, _ = wait(pending, None if at_least else 0, FIRST_COMPLETED)
        for future in done:
            label = pending.pop(future)
            if error := future.exception():
                self._failures[label] = error
            else:
                self._built[label] = future.result()
                self._say(label, future.result())

    def _say(self, label: str, built: Built | None) -> None:
        done, compiled = len(self._built) + len(self._failures), built is not None and built.compiled
        self._observe(Progress(done, len(self._signatures), label, compiled, built.entry if built else None))
