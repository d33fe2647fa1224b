"""From a bundle directory to loaded executables: verdict, hashes, scan, load; in this order."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from dflash_aot.cache.environment import Difference, differences, read_environment
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.manifest import Entry, Manifest, read_manifest
from dflash_aot.cache.store import Store
from dflash_aot.runtime.executable import DeviceState, Executable, load_executable

Name = tuple[str, tuple[int, ...]]
LOADERS = 2  # deserialization releases the interpreter; more threads did not help on two cores


class Bundle:
    """A manifest whose executables fit this machine, loaded."""

    def __init__(self, path: Path, manifest: Manifest, device: jax.Device, executables: dict[Name, Executable]):
        self.path, self.manifest, self.device = path, manifest, device
        self._executables = executables

    def prefill(self, chunk: Chunk) -> Executable:
        return self._executables["prefill", (chunk.prefill, chunk.length)]

    def draft(self, bucket: Bucket) -> Executable:
        return self._executables["draft", (bucket.batch, bucket.length, bucket.k)]

    def verify(self, bucket: Bucket) -> Executable:
        return self._executables["verify", (bucket.batch, bucket.length, bucket.k)]

    def kv_write(self, rows: int, width: int) -> Executable:
        return self._executables["kv_write", (rows, width)]

    def move(self) -> Executable:
        return self._executables["move", ()]

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._executables.values())

    def __len__(self) -> int:
        return len(self._executables)

    def call_each_once(self, state: DeviceState) -> None:
        """The first call of an executable does what later ones don't: it is not a user's. No slot is active."""
        for executable in self:
            executable(state, *(np.zeros(array.shape, array.dtype) for array in executable.signature.arguments))
        state.wait()


def open_bundle(path: Path) -> Bundle:
    """Raises MissingBundle, CorruptBundle or IncompatibleBundle, before anything unverified is deserialized."""
    manifest = read_manifest(path)
    check_environment(path, manifest)
    device, store = jax.devices(manifest.environment.platform)[0], Store(path)

    def load(entry: Entry) -> Executable:
        signature = entry.signature
        inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
        outputs = len(signature.donated) + len(signature.results)
        where = f"{path}/executables/{entry.sha256} ({signature.label})"
        return load_executable(store.read(entry), signature, inputs, outputs, device, where)

    with ThreadPoolExecutor(LOADERS, thread_name_prefix="load") as pool:
        loaded = list(pool.map(load, manifest.entries))
    executables = {(item.signature.program, tuple(item.signature.bucket.values())): item for item in loaded}
    _check_complete(path, manifest, executables)
    return Bundle(path, manifest, device, executables)


def check_environment(path: Path, manifest: Manifest) -> None:
    """Raises IncompatibleBundle, field by field, with the command that rebuilds."""
    built = manifest.environment
    try:
        found = differences(built, read_environment(built.platform))
    except RuntimeError:
        found = [Difference("platform", built.platform, f"only {jax.default_backend()}")]
    if found:
        lines = "\n".join(f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in found)
        raise IncompatibleBundle(
            f"{path} was built for another environment:\n{lines}\nBuild it for this one: {manifest.rebuild_command(path)}"
        )


def _check_complete(path: Path, manifest: Manifest, executables: dict[Name, Executable]) -> None:
    """Every bucket of the grid has its executables."""
    grid = manifest.grid
    needed = {("prefill", (chunk.prefill, chunk.length)) for chunk in grid.chunks()}
    for bucket in grid.buckets():
        shape = (bucket.batch, bucket.length, bucket.k)
        needed |= {("verify", shape), ("kv_write", (bucket.batch, bucket.k + 1))}
        needed |= {("draft", shape)} if bucket.k else set()
    if missing := needed - executables.keys():
        raise CorruptBundle(
            f"{path}/manifest.json promises the grid {grid} but has no entry for {sorted(missing)}. "
            f"Build it again: {manifest.rebuild_command(path)}"
        )
