"""The compilation manager: grid × programs → executables in a store, then a manifest."""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import jax
import msgspec
from jax.experimental import serialize_executable

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.manifest import Entry, Memory
from dflash_aot.cache.signature import Array, Signature, state_arrays
from dflash_aot.cache.store import Store
from dflash_aot.compile.inspection import inspect, read_cost
from dflash_aot.compile.lowering import check_donation, executable_key, input_arrays, lower
from dflash_aot.compile.programs import Programs


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


def build(
    programs: Programs,
    grid: Grid,
    environment: Environment,
    store: Store,
    observe: Callable[[Progress], None],
    jobs: int = 1,
) -> Report:
    """Compiles what the store does not hold yet. `observe` is called from this thread.

    Every executable is published as soon as it is compiled: a build that is killed loses what is in flight.
    Raises BuildFailed with every failure, after the rest has been built.
    """
    began = time.monotonic()
    build_ = _Build(programs, grid, environment, store, observe)
    with ThreadPoolExecutor(jobs, thread_name_prefix="compile") as pool:
        try:
            build_.run(pool, jobs)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return build_.report(time.monotonic() - began)


class _Build:
    """One run: what is asked for, what is there, what failed."""

    def __init__(
        self,
        programs: Programs,
        grid: Grid,
        environment: Environment,
        store: Store,
        observe: Callable[[Progress], None],
    ):
        self._programs, self._environment, self._store, self._observe = programs, environment, store, observe
        self._signatures = programs.signatures(grid)
        self._device = jax.devices(environment.platform)[0]
        self._known = known_arrays(programs, grid)
        self._entries: dict[str, Entry] = {}
        self._compiled: set[str] = set()
        self._failures: dict[str, BaseException] = {}

    def run(self, pool: ThreadPoolExecutor, jobs: int) -> None:
        """Lowers here, compiles in the pool, never more than `jobs` lowered programs ahead."""
        pending: dict[Future[Entry], str] = {}
        for signature in self._signatures:
            self._say(signature.label, None)
            try:
                lowered = lower(signature, self._programs.function(signature), self._known, [self._device])
                key = executable_key(lowered, signature, self._environment)
            except Exception as error:  # reported with all others at the end
                self._failures[signature.label] = error
                continue
            if entry := self._store.find(key):
                self._finish(signature.label, entry, compiled=False)
                continue
            pending[pool.submit(_compile, lowered, signature, key, self._known, self._store)] = signature.label
            while len(pending) >= jobs:
                self._collect(pending)
        while pending:
            self._collect(pending)

    def report(self, seconds: float) -> Report:
        if self._failures:
            lines = "\n".join(f"  {label}: {_first_line(error)}" for label, error in self._failures.items())
            raise BuildFailed(
                f"{len(self._failures)} of {len(self._signatures)} executables could not be built, "
                f"the others are kept:\n{lines}"
            )
        entries = tuple(self._entries[signature.label] for signature in self._signatures)
        return Report(entries, frozenset(self._compiled), seconds)

    def _collect(self, pending: dict[Future[Entry], str]) -> None:
        future = next(as_completed(pending))
        label = pending.pop(future)
        if error := future.exception():
            self._failures[label] = error
        else:
            self._finish(label, future.result(), compiled=True)

    def _finish(self, label: str, entry: Entry, compiled: bool) -> None:
        self._entries[label] = entry
        if compiled:
            self._compiled.add(entry.key)
        self._say(label, entry, compiled)

    def _say(self, label: str, entry: Entry | None, compiled: bool = False) -> None:
        done = len(self._entries) + len(self._failures)
        self._observe(Progress(done, len(self._signatures), label, compiled, entry))


def known_arrays(programs: Programs, grid: Grid) -> Mapping[str, Array]:
    """State and weights by name, as signatures refer to them."""
    weights = (Array(recipe.name, recipe.shape, recipe.dtype, recipe.sharding) for recipe in programs.recipes())
    return {array.name: array for array in (*state_arrays(programs.pair, grid), *weights)}


def _compile(
    lowered: jax.stages.Lowered, signature: Signature, key: str, known: Mapping[str, Array], store: Store
) -> Entry:
    """Compiles, checks, serializes and publishes one executable."""
    began = time.monotonic()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    if memory is None:
        raise BuildFailed("the compiler does not tell what memory this takes")
    check_donation(signature, known, memory.alias_size_in_bytes, devices=1)
    blob, _, _ = serialize_executable.serialize(compiled)  # the trees are the signature's: flat in, flat out
    entry = Entry(
        signature=signature,
        key=key,
        sha256=hashlib.sha256(blob).hexdigest(),
        bytes=len(blob),
        seconds=time.monotonic() - began,
        memory=Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
        ),
        cost=read_cost(compiled),
        inspection=inspect(compiled, [array.name for array in input_arrays(signature, known)]),
    )
    store.add(entry, blob)
    return entry


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
