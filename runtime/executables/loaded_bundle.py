"""Loaded bundle: a compatible bundle's executables, verified, scanned and deserialized lazily or ahead of demand."""

import logging
import shlex
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import jax

from dflash_aot.cache.bundle.manifest import (
    Manifest,
    read_manifest,
    rebuild_command,
    verify_and_rebuild_commands,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.devices import attached_devices, ignore_jax_switches, read_environment
from dflash_aot.cache.environment import Environment, find_differences
from dflash_aot.cache.errors import CorruptBundle, DflashError, IncompatibleBundle
from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.cache.signature import VERIFY_PROGRAMS, ExecutableId
from dflash_aot.runtime.executables.executable import (
    DeviceState,
    Executable,
    is_out_of_memory,
    load_executable,
)
from dflash_aot.runtime.executables.required_executables import (
    RoundShape,
    list_chunk_executables,
    list_multi_round_executables,
    list_round_executables,
    list_shape_executables,
    order_loading,
)

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
        soon: int = 0,
    ):
        """load: returns an executable. A CorruptBundle is final; after another error the next look-up tries again.

        soon: how many of `order` are loaded although the thread is paused.
        """
        self.order = tuple(order)
        self._load = load
        self._all = frozenset(order)
        self._loaded: dict[ExecutableId, Executable] = {}
        # Executables that are loading, loaded, or corrupt.
        self._futures: dict[ExecutableId, Future[Executable]] = {}
        self._changed = threading.Condition()
        self._soon, self._ahead = deque(self.order[:soon]), deque(self.order)
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
            self._soon.extend(
                name for name in names if name not in self._futures and name not in self._soon
            )
            self._changed.notify_all()
        return False

    # -- the background thread

    def start(self) -> None:
        self._thread.start()

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

    @ignore_jax_switches()
    def _run(self) -> None:
        while (name := self._wait_for_next()) is not None:
            try:
                self[name]
            except (DflashError, MemoryError) as error:
                logger.error(error)
            self._on_loaded()
        self.has_ended = True
        self._on_loaded()

    def _wait_for_next(self) -> ExecutableId | None:
        """Returns what the thread loads next; None once everything is loaded or the loader is closed."""
        with self._changed:
            while not self._closed:
                for pending in (self._soon, self._ahead):
                    while pending and pending[0] in self._futures:
                        pending.popleft()
                if self._soon:
                    return self._soon.popleft()
                if not self._ahead:
                    return None
                if not self._paused:
                    return self._ahead.popleft()
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

    def prefill(self, chunk: Chunk, scored: bool = False) -> Executable:
        """Returns the prefill of a chunk; `scored`: the program that also scores the prompt's tokens."""
        return self.executables[
            "scored_prefill" if scored else "prefill", (chunk.prefill, chunk.length)
        ]

    def draft(self, bucket: Bucket) -> Executable:
        return self.executables["draft", (bucket.batch, bucket.length, bucket.k)]

    def verify(self, bucket: Bucket, mode: SamplingMode = "greedy") -> Executable:
        return self.executables[VERIFY_PROGRAMS[mode], (bucket.batch, bucket.length, bucket.k)]

    def admit(self) -> Executable:
        return self.executables["admit", ()]

    def kv_write(self, rows: int, width: int) -> Executable:
        return self.executables["kv_write", (rows, width)]

    def rounds(self, bucket: Bucket, mode: SamplingMode) -> Executable:
        """Returns the multi-round step of a mode that has one, only if the grid has `rounds`."""
        (name,) = list_multi_round_executables(bucket, mode, self.manifest.grid)
        return self.executables[name]

    def move(self) -> Executable:
        return self.executables["move", ()]

    def holds(self, shape: RoundShape) -> bool:
        """Whether all executables of such a round are loaded."""
        return all(self.executables.is_loaded(name) for name in self._list_executables(shape))

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

    def has_run_kv_write(self, rows: int, width: int) -> bool:
        """Whether the draft's kv of so many rows and positions was written before."""
        name: ExecutableId = ("kv_write", (rows, width))
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

    return LazyLoader(load, order, soon=len(groups[0]))


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
        ) from error


def warm_up_executable(executable: Executable, state: DeviceState) -> None:
    """Calls an executable for the first time, while no slot is active: a first call takes longer than later calls.

    Arguments are placed on the devices as in later calls, so that JAX prepares its dispatch for these.

    Raises CorruptBundle, and passes out-of-memory errors through.
    """
    executable(state, *map(state.zeros, executable.signature.arguments))


def _check_environment(path: Path, manifest: Manifest) -> None:
    """Raises IncompatibleBundle naming each field that differs, and the command that rebuilds."""
    built = manifest.environment
    command = manifest.build_command(path)
    try:
        here = read_environment(built.platform, built.device_count)
    except RuntimeError as error:  # no such devices
        raise IncompatibleBundle(
            f"{path} was built for {_format_target(built)}, but here {error}.",
            "Serve it on such a machine, or build a bundle for this machine (another --platform). It was built by "
            f"this command: {command}",
        ) from error
    if found := find_differences(built, here):
        raise IncompatibleBundle(
            f"{path} was built for another environment:",
            *(f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in found),
            f"Build it for this environment: {rebuild_command(path)}",
            f"or, from its checkpoints: {command}",
        )


def _format_target(environment: Environment) -> str:
    devices = f"{environment.device_count} x {environment.device_kind}"
    return f"{environment.topology} ({devices})" if environment.topology else devices
