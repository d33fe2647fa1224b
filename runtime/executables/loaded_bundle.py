"""From a bundle directory to loaded executables: verdict, hashes, scan, load; in this order."""

import shlex
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

from dflash_aot.cache.bundle.manifest import Manifest, read_manifest, rebuild_command, verify_and_rebuild_commands
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import attached_devices, read_environment
from dflash_aot.cache.environment import Environment, find_differences
from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.signature import ExecutableId
from dflash_aot.runtime.executables.executable import DeviceState, Executable, is_out_of_memory, load_executable
from dflash_aot.runtime.executables.execution_plan import (
    RoundShape,
    list_chunk_executables,
    list_round_executables,
    list_shape_executables,
    order_loading,
)
from dflash_aot.runtime.executables.lazy_loader import LazyLoader


class LoadedBundle:
    """A manifest that fits this machine, and the executables that serve up to `k` verified tokens.

    Each is loaded when it is asked for, unless it was before: all methods that return one may take as long as that, and
    raise CorruptBundle for what is not an executable, or IncompatibleBundle where memory is short.
    """

    def __init__(self, path: Path, manifest: Manifest, k: int, executables: LazyLoader):
        self.path, self.manifest, self.k = path, manifest, k
        self.executables = executables
        self._drafts = k > 0  # without drafts there is no draft kv
        self._run: set[Hashable] = set()

    def prefill(self, chunk: Chunk) -> Executable:
        return self.executables["prefill", (chunk.prefill, chunk.length)]

    def draft(self, bucket: Bucket) -> Executable:
        return self.executables["draft", (bucket.batch, bucket.length, bucket.k)]

    def verify(self, bucket: Bucket) -> Executable:
        return self.executables["verify", (bucket.batch, bucket.length, bucket.k)]

    def sampled_verify(self, bucket: Bucket) -> Executable:
        return self.executables["sampled_verify", (bucket.batch, bucket.length, bucket.k)]

    def admit(self) -> Executable:
        return self.executables["admit", ()]

    def kv_write(self, rows: int, width: int) -> Executable:
        return self.executables["kv_write", (rows, width)]

    def rounds(self, bucket: Bucket) -> Executable:
        """Several rounds in one call; only where the grid has `rounds`, and of a single row."""
        return self.executables["rounds", (bucket.batch, bucket.length, bucket.k, self.manifest.grid.rounds)]

    def move(self) -> Executable:
        return self.executables["move", ()]

    def holds(self, kind: RoundShape) -> bool:
        """Whether a round of it finds all that it calls loaded."""
        return all(name in self.executables for name in self._name(kind))

    def prepare(self, kind: RoundShape) -> None:
        """What a round of it calls is loaded meanwhile."""
        self.executables.prepare(self._name(kind))

    def has_run(self, bucket: Bucket, sampled: bool, alone: bool) -> bool:
        """Whether all was called before that a round of it calls; `alone`: one that several in one call suit."""
        return (bucket, sampled, alone) in self._run or self._note_run(
            (bucket, sampled, alone),
            self._name((bucket, sampled)) if alone else list_round_executables(bucket, sampled, self._drafts),
        )

    def has_run_chunk(self, chunk: Chunk) -> bool:
        return chunk in self._run or self._note_run(chunk, list_chunk_executables(chunk, self._drafts))

    def _note_run(self, what: Hashable, names: Sequence[ExecutableId]) -> bool:
        if has_run := all(name in self.executables and self.executables[name].called for name in names):
            self._run.add(what)
        return has_run

    def _name(self, kind: RoundShape) -> Sequence[ExecutableId]:
        return list_shape_executables(kind, self.manifest.grid, self._drafts)

    def limited(self, k: int) -> "LoadedBundle":
        """The same executables, to verify at most `k` tokens."""
        return LoadedBundle(self.path, self.manifest, k, self.executables)


def bundle_devices(manifest: Manifest) -> Sequence[jax.Device]:
    """Those that serve a bundle whose environment is here, in the order of its mesh."""
    return attached_devices(manifest.environment.platform, manifest.environment.device_count)


def read_compatible_manifest(path: Path, signed_by: Path | None = None) -> Manifest:
    """The verdict, from the manifest alone. Raises MissingBundle, CorruptBundle or IncompatibleBundle."""
    manifest = read_manifest(path, signed_by)
    _check_environment(path, manifest)
    check_consistent(path, manifest)
    return manifest


def make_lazy_loader(path: Path, manifest: Manifest, ks: Sequence[int], weights: Mapping[str, jax.Array]) -> LazyLoader:
    """For all that serves `ks`, in the order in which it will be needed, most likely: see `list_needs`.

    Size and sha256 of every file are verified here, and it is kept: from then on the directory may be moved, or go.
    weights: by name; they have to be there when an executable is called first. Raises CorruptBundle.
    """
    devices, store = bundle_devices(manifest), Store(path)
    entries = {entry.signature.executable_id: entry for entry in manifest.entries}
    needs = [
        [name for name in group if name in entries] for group in order_loading(manifest.grid, manifest.sampling, ks)
    ]
    order = list(dict.fromkeys(name for group in needs for name in group))
    packed = {name: store.read_packed(entries[name]) for name in order}

    def load(name: ExecutableId) -> Executable:
        entry = entries[name]
        where, remedy = (
            f"{store.executable_path(entry)} ({entry.signature.label})",
            f"\nMend it: {verify_and_rebuild_commands(path)}",
        )
        with report_out_of_memory(path, manifest):
            serialized = store.unpack_executable(entry, packed[name])
            executable = load_executable(serialized, entry.signature, devices, where, remedy)
        executable.bind(weights)
        del packed[name]
        return executable

    return LazyLoader(load, order, soon=len(needs[0]))


@contextmanager
def report_out_of_memory(path: Path, manifest: Manifest) -> Iterator[None]:
    """Raises IncompatibleBundle where weights, state or what executables need besides find no room."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise IncompatibleBundle(
            f"{path} needs more memory than is free here: {next(iter(str(error).splitlines()), 'none is left')}\n"
            f"What it takes: dflash-bundle inspect {shlex.quote(str(path))}. Make room, or build a smaller grid: "
            f"{manifest.build_command(path)}"
        ) from error


def warm_up_executable(executable: Executable, state: DeviceState) -> None:
    """The first call of an executable does what later ones don't: it is not a user's. No slot is active.

    Its arguments lie on the device as later ones will: JAX prepares the dispatch for just such a call. Raises
    CorruptBundle, or what says that memory is exhausted.
    """
    executable(state, *map(state.zeros, executable.signature.arguments))


def _check_environment(path: Path, manifest: Manifest) -> None:
    """Raises IncompatibleBundle, field by field, with the command that rebuilds."""
    built, command = manifest.environment, manifest.build_command(path)
    try:
        here = read_environment(built.platform, built.device_count)
    except RuntimeError as error:  # no such devices
        raise IncompatibleBundle(
            f"{path} was built for {_describe(built)}, and here: {error}.\n"
            f"Serve it on such a machine. What builds it anew: {command}"
        ) from error
    if found := find_differences(built, here):
        lines = "\n".join(f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in found)
        raise IncompatibleBundle(
            f"{path} was built for another environment:\n{lines}\n"
            f"Build it for this one: {rebuild_command(path)}\nor, from its checkpoints: {command}"
        )


def _describe(environment: Environment) -> str:
    devices = f"{environment.device_count} x {environment.device_kind}"
    return f"{environment.topology} ({devices})" if environment.topology else devices
