"""Loaded bundle: a compatible bundle's executables, verified, scanned and deserialized lazily or ahead of demand."""

import logging
import shlex
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

import jax

from dflash_aot.cache.bundle.manifest import (
    Manifest,
    list_remedies,
    read_manifest,
    verify_and_rebuild_commands,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.devices import attached_devices, ignore_jax_switches, read_environment
from dflash_aot.cache.environment import (
    Environment,
    EnvironmentDifference,
    compare_with_host,
    find_differences,
)
from dflash_aot.cache.errors import CorruptBundle, DflashError, IncompatibleBundle
from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.sampling_state import SamplingKind, SamplingMode, list_modes
from dflash_aot.cache.signature import (
    KV_WRITE,
    MIXED,
    PACKED_PREFILL,
    VERIFY,
    ExecutableId,
    Mode,
    Program,
    RoundShape,
    Sizes,
    Step,
    chunk_step,
    list_executables,
    list_offload_steps,
    mixed_step,
    multi_round_step,
    packed_step,
    round_step,
)
from dflash_aot.runtime.bounded_worker import SYSTEM_STACK, start_with_stack
from dflash_aot.runtime.executables.executable import (
    DeviceState,
    Executable,
    is_out_of_memory,
    load_executable,
    return_memory,
)

# -- what a prefill chunk or a round calls, and in which order executables are loaded


def list_round_shapes(grid: Grid, sampling: Sequence[SamplingKind], k: int) -> list[RoundShape]:
    """All shapes of rounds that verify up to `k` drafted tokens."""
    return [
        (bucket, mode)
        for mode in list_modes(sampling)
        for bucket in grid.buckets()
        if bucket.k <= k
    ]


def list_chunk_executables(chunk: Chunk, drafts: bool, scored: bool = False) -> list[ExecutableId]:
    """The executables of a prefill chunk. drafts: whether the draft's kv is kept. scored: whether tokens get scores."""
    return list_executables(chunk_step(chunk, scored, drafts))


def list_packed_executables(sizes: Sizes, drafts: bool) -> list[ExecutableId]:
    """The executables of short chunks of several prompts. sizes: see `Grid.fit_packed`."""
    return list_executables(packed_step(sizes)._replace(drafts=drafts))


def list_round_executables(bucket: Bucket, mode: SamplingMode, drafts: bool) -> list[ExecutableId]:
    """The executables of a single round, without the write of sampling states."""
    return list_executables(round_step(bucket, mode, drafts))


def list_multi_round_executables(
    bucket: Bucket, mode: SamplingMode, grid: Grid
) -> list[ExecutableId]:
    """The executable of a multi-round step; empty where the grid has none for such rounds."""
    return list_executables(multi_round_step(bucket, mode, grid)) if grid.rounds > 1 else []


def list_shape_executables(shape: RoundShape, grid: Grid, drafts: bool) -> list[ExecutableId]:
    """The executables of a shape: of multi-round steps, single rounds, rounds with a chunk, and sampling states."""
    bucket, mode = shape
    written = [] if mode == "greedy" else list_executables(Step("admit"))
    together = list_multi_round_executables(bucket, mode, grid)
    mixed = list_executables(mixed_step(grid.fit_mixed(bucket), mode)) if grid.mixed else []
    return [*written, *together, *list_round_executables(bucket, mode, drafts), *mixed]


def _is_mixed(name: ExecutableId) -> bool:
    """Whether it is of the rounds with a chunk, which only other requests' prompts make."""
    program, _ = name
    return program in MIXED.names.values()


def order_loading(
    grid: Grid, sampling: Sequence[SamplingKind], ks: Sequence[int]
) -> Iterator[list[ExecutableId]]:
    """Groups of executables in loading order, each group of one chunk or round; executables may repeat.

    ks: in the order of their expected worth. First comes what a short prompt alone needs with the best K; then that K
    for longer prompts and more rows, then the next K. A greedy request alone needs no single rounds.
    """
    drafts = max(ks) > 0
    met = set()
    shapes = [
        (Bucket(batch, length, k), mode)
        for k in ks
        for mode in list_modes(sampling)
        for batch in grid.batch
        for length in grid.length
    ]
    alone = [
        name for name in list_shape_executables(shapes[0], grid, drafts) if not _is_mixed(name)
    ]
    if shapes[0][1] == "greedy":
        alone = list_multi_round_executables(*shapes[0], grid) or alone
    # Every prompt of a hybrid is saved by a copy.
    copies = list_executables(Step("move")) if grid.saved_states else []
    yield [*list_chunk_executables(grid.fit_chunk(0, 1), drafts), *alone, *copies]
    for shape in shapes:
        if (length := shape[0].length) not in met:
            met.add(length)
            yield from (
                list_chunk_executables(chunk, drafts)
                for chunk in grid.chunks()
                if chunk.length == length
            )
        yield list_shape_executables(shape, grid, drafts)
    yield from (list_packed_executables(sizes, drafts) for sizes in grid.list_packed())
    if "prompt_logprobs" in sampling:
        yield from (list_chunk_executables(chunk, drafts, scored=True) for chunk in grid.chunks())
    yield list_executables(Step("move"))
    yield from map(list_executables, list_offload_steps(grid))


# -- lazy loader: executables by id, each loaded once, on demand or ahead of demand by a background thread

logger = logging.getLogger(__name__)


class LazyLoader:
    """A mapping of executables. A look-up loads the executable, or waits for the thread that is loading it.

    Once started, a background thread loads the rest: first what was prefetched, then in `order`. While it is paused,
    it loads only prefetched executables and the first executables of `order`. An executable that cannot be loaded
    raises in each look-up of this executable only.

    Attributes:
        order: the ids of all executables, in the order in which the thread loads them.
    """

    def __init__(
        self,
        load: Callable[[ExecutableId], Executable],
        order: Sequence[ExecutableId],
        first: int = 0,
    ):
        """load: returns an executable. A CorruptBundle is final; after another error the next look-up tries again.

        first: how many of `order` are loaded even while the thread is paused.
        """
        self.order = tuple(order)
        self._load = load
        self._all = frozenset(order)
        self._loaded: dict[ExecutableId, Executable] = {}
        # Executables that are loading, loaded, or corrupt.
        self._futures: dict[ExecutableId, Future[Executable]] = {}
        self._changed = threading.Condition()
        self._urgent = deque(self.order[:first])
        self._rest = deque(self.order)
        self._paused = False
        self._closed = False
        self.has_ended = False  # whether the thread has nothing left to load
        self._on_loaded: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="dflash-loader", daemon=True)

    def __getitem__(self, name: ExecutableId) -> Executable:
        """Returns the executable, loading it if needed. Raises KeyError for an unknown id, and what `load` raises."""
        executable = self._loaded.get(name)
        return self._load_on_demand(name) if executable is None else executable

    def is_loaded(self, name: ExecutableId) -> bool:
        return name in self._loaded

    def list_loaded(self) -> list[Executable]:
        """The executables that are loaded so far."""
        return [*self._loaded.values()]

    def prefetch(self, names: Sequence[ExecutableId]) -> bool:
        """Lets the thread load these executables next. Returns whether all of them are loaded already."""
        if all(name in self._loaded for name in names):
            return True
        with self._changed:
            self._urgent.extend(
                name for name in names if name not in self._futures and name not in self._urgent
            )
            self._changed.notify_all()
        return False

    # -- the background thread

    def start(self) -> None:
        """Starts the thread. Raises MemoryError."""
        start_with_stack(self._thread, SYSTEM_STACK)

    def pause(self) -> None:
        """From now on the thread loads only prefetched executables and the first executables of `order`."""
        self._paused = True

    def resume(self, on_loaded: Callable[[], None]) -> None:
        """Lets the thread load everything. `on_loaded` is called in the thread after each executable."""
        with self._changed:
            self._paused = False
            self._on_loaded = on_loaded
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the executable that it is loading. Look-ups still work."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def release(self) -> None:
        """Drops every executable, and with them the weights. Look-ups raise KeyError from then on. Call it closed."""
        with self._changed:
            self._all = frozenset()
            self._loaded.clear()
            self._futures.clear()
            self._load = _refuse_load

    @ignore_jax_switches()
    def _run(self) -> None:
        while (name := self._wait_for_next()) is not None:
            try:
                self[name]
            except (DflashError, MemoryError) as error:
                logger.error(error)
            return_memory()  # loading frees as much as an executable takes
            self._on_loaded()
        self.has_ended = True
        self._on_loaded()

    def _wait_for_next(self) -> ExecutableId | None:
        """Returns what the thread loads next; None once everything is loaded or the loader is closed."""
        with self._changed:
            while not self._closed:
                for pending in (self._urgent, self._rest):
                    while pending and pending[0] in self._futures:
                        pending.popleft()
                if self._urgent:
                    return self._urgent.popleft()
                if not self._rest:
                    return None
                if not self._paused:
                    return self._rest.popleft()
                self._changed.wait()
        return None

    # -- loading

    def _load_on_demand(self, name: ExecutableId) -> Executable:
        if name not in self._all:
            raise KeyError(name)
        with self._changed:
            future = self._futures.get(name)
            mine = name not in self._futures
            if future is None:
                future = self._futures[name] = Future()
        if mine:
            self._complete(future, name)
        if error := future.exception():
            # A new exception for each look-up: an exception that is raised again keeps the frames of all callers.
            raise type(error)(*error.args) from error
        return future.result()

    def _complete(self, future: "Future[Executable]", name: ExecutableId) -> None:
        try:
            executable = self._load(name)
        except BaseException as error:
            if not isinstance(error, CorruptBundle):
                del self._futures[name]
            future.set_exception(error)
        else:
            self._loaded[name] = executable
            future.set_result(executable)


def _refuse_load(name: ExecutableId) -> Executable:
    raise KeyError(name)


# -- the bundle


class LoadedBundle:
    """The executables of a bundle that is compatible with this machine, looked up by program and sizes.

    A look-up loads the executable if it is not loaded yet. It raises CorruptBundle for a corrupt executable, and
    IncompatibleBundle if memory is short.

    Attributes:
        path: the bundle's directory.
        manifest: its manifest.
        k: the largest number of drafted tokens that a round verifies.
        executables: all executables that serve up to `k`, loaded or not.
    """

    def __init__(self, path: Path, manifest: Manifest, k: int, executables: LazyLoader):
        self.path = path
        self.manifest = manifest
        self.k = k
        self.executables = executables
        self._drafts = k > 0  # without drafts the draft's kv cache is not written
        self._called: set[Hashable] = set()

    def find(self, program: Program, sizes: Sizes = (), mode: Mode = None) -> Executable:
        """Returns the executable of a program in a mode, for a bucket of these sizes. Raises KeyError."""
        return self.executables[program.name(mode), sizes]

    def holds(self, shape: RoundShape) -> bool:
        """Whether all executables of such a round are loaded."""
        names = self._list_executables(shape)
        return all(self.executables.is_loaded(name) for name in names if not _is_mixed(name))

    def prepare(self, shape: RoundShape) -> None:
        """Loads the executables of such a round in the background."""
        self.executables.prefetch(self._list_executables(shape))

    def has_run(self, shape: RoundShape, multi_round: bool) -> bool:
        """Whether all executables of such a round were called before. multi_round: those of a multi-round step."""
        return (*shape, multi_round) in self._called or self._check_run(
            (*shape, multi_round),
            list_multi_round_executables(*shape, self.manifest.grid)
            if multi_round
            else list_round_executables(*shape, self._drafts),
        )

    def has_run_chunk(self, chunk: Chunk, scored: bool = False) -> bool:
        """Whether all executables of such a prefill chunk have been called."""
        key = (chunk, scored)
        names = list_chunk_executables(chunk, self._drafts, scored)
        return key in self._called or self._check_run(key, names)

    def has_run_packed(self, sizes: Sizes) -> bool:
        """Whether all executables of short chunks of several prompts were called before."""
        key = (PACKED_PREFILL.name(), sizes)
        return key in self._called or self._check_run(
            key, list_packed_executables(sizes, self._drafts)
        )

    def has_run_mixed(self, sizes: Sizes, shape: RoundShape) -> bool:
        """Whether all executables of a round with a chunk were called before. sizes: those of the mixed call."""
        bucket, mode = shape
        others = list_round_executables(bucket, mode, self._drafts)
        others = [name for name in others if name[0] != VERIFY.name(mode)]
        others += [(KV_WRITE.name(), (1, sizes[-1]))] if self._drafts else []
        name = (MIXED.name(mode), sizes)
        key = (name, bucket.length)
        return key in self._called or self._check_run(key, [name, *others])

    def has_run_kv_write(self, rows: int, width: int) -> bool:
        """Whether the draft's kv of so many rows and positions was written before."""
        name = (KV_WRITE.name(), (rows, width))
        return name in self._called or self._check_run(name, [name])

    def _check_run(self, key: Hashable, names: Sequence[ExecutableId]) -> bool:
        """Remembers under `key` that all of these executables have been called, once they have."""
        if has_run := all(
            self.executables.is_loaded(name) and self.executables[name].called for name in names
        ):
            self._called.add(key)
        return has_run

    def _list_executables(self, shape: RoundShape) -> Sequence[ExecutableId]:
        return list_shape_executables(shape, self.manifest.grid, self._drafts)


def bundle_devices(manifest: Manifest) -> Sequence[jax.Device]:
    """Returns the attached devices that serve a compatible bundle, in the order of its mesh."""
    return attached_devices(manifest.environment.platform, manifest.environment.device_count)


def read_compatible_manifest(path: Path, signed_by: Path | None = None) -> Manifest:
    """Reads the manifest, and checks that it is consistent and was built for the environment of this process.

    signed_by: the public key that must have signed the bundle.

    Raises MissingBundle, CorruptBundle, IncompatibleBundle. Executables are not looked at.
    """
    manifest = read_manifest(path, signed_by)
    _check_environment(path, manifest)
    check_consistent(path, manifest)
    return manifest


def make_lazy_loader(
    path: Path, manifest: Manifest, ks: Sequence[int], weights: Mapping[str, jax.Array]
) -> LazyLoader:
    """Returns a loader of all executables that serve `ks`, in the order in which they are probably needed.

    Reads every file and verifies its size and sha256. The contents stay in memory until they are loaded, so that the
    directory may be moved or deleted from then on.

    weights: by name; must be complete when an executable is called first.

    Raises CorruptBundle.
    """
    devices = bundle_devices(manifest)
    store = Store(path)
    entries = {entry.signature.executable_id: entry for entry in manifest.entries}
    groups = [
        [name for name in group if name in entries]
        for group in order_loading(manifest.grid, manifest.sampling, ks)
    ]
    order = list(dict.fromkeys(name for group in groups for name in group))
    packed = {name: store.read_packed(entries[name]) for name in order}

    def load(name: ExecutableId) -> Executable:
        entry = entries[name]
        where = f"{store.executable_path(entry)} ({entry.signature.label})"
        remedy = f". Rebuild it: {verify_and_rebuild_commands(path)}"
        with report_out_of_memory(path, manifest):
            serialized = store.unpack_executable(entry, packed[name])
            executable = load_executable(serialized, entry.signature, devices, where, remedy)
        executable.bind(weights)
        del packed[name]
        return executable

    return LazyLoader(load, order, first=len(groups[0]))


# The open engines of this process: they take memory that another one may need.
OPEN_ENGINES: WeakSet[Hashable] = WeakSet()


@contextmanager
def report_out_of_memory(path: Path, manifest: Manifest) -> Iterator[None]:
    """Raises IncompatibleBundle if the memory does not hold the weights, the state, or what executables need."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise IncompatibleBundle(
            f"{path} needs more memory than is free here: {quote_first_line(str(error)) or 'none is left'}",
            f"To see what it needs: dflash-bundle inspect {shlex.quote(str(path))}. Free memory, or build a "
            f"grid with smaller --buckets than in this command: {manifest.build_command(path)}",
            *(
                f"Open in this process, close it if it is not needed: {one!r}"
                for one in OPEN_ENGINES
            ),
        ) from error


def warm_up_executable(executable: Executable, state: DeviceState) -> None:
    """Calls an executable for the first time, while no slot is active: a first call takes longer than later calls.

    Arguments are placed on the devices as in later calls, so that JAX prepares its dispatch for these.

    Raises CorruptBundle, and passes out-of-memory errors through.
    """
    arguments = executable.signature.arguments
    executable(state, **{array.name: state.zeros(array) for array in arguments})


def _check_environment(path: Path, manifest: Manifest) -> None:
    """Raises IncompatibleBundle naming each field that differs, and the command that rebuilds."""
    built = manifest.environment
    command = manifest.build_command(path)
    try:
        here = read_environment(built.platform, built.device_count)
    except RuntimeError as error:  # no such devices
        missing = EnvironmentDifference("platform", built.platform, str(error))
        raise IncompatibleBundle(
            f"{path} was built for {_format_target(built)}, but here {error}.",
            *list_remedies(path, built, [missing, *compare_with_host(built)[0]], command),
        ) from error
    if found := find_differences(built, here):
        raise IncompatibleBundle(
            f"{path} was built for another environment:",
            *(f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in found),
            *list_remedies(path, built, found, command),
        )


def _format_target(environment: Environment) -> str:
    devices = f"{environment.device_count} x {environment.device_kind}"
    return f"{environment.topology} ({devices})" if environment.topology else devices
