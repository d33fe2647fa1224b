"""From a bundle directory to loaded executables: verdict, hashes, scan, load; in this order."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax

from dflash_aot.cache.completeness import check_consistent, name_executable
from dflash_aot.cache.devices import attached_devices, read_environment
from dflash_aot.cache.environment import Environment, differences
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.manifest import Entry, Manifest, mend_command, read_manifest, replace_commands
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.store import Store
from dflash_aot.runtime.executable import DeviceState, Executable, is_exhausted, load_executable

LOADERS = 2  # loading releases the interpreter for the most part


class Bundle:
    """A manifest that fits this machine, and the executables that serve up to `k` verified tokens."""

    def __init__(self, path: Path, manifest: Manifest, k: int, executables: Iterable[Executable]):
        self.path, self.manifest, self.k = path, manifest, k
        self._executables = {name_executable(executable.signature): executable for executable in executables}

    def prefill(self, chunk: Chunk) -> Executable:
        return self._executables["prefill", (chunk.prefill, chunk.length)]

    def draft(self, bucket: Bucket) -> Executable:
        return self._executables["draft", (bucket.batch, bucket.length, bucket.k)]

    def verify(self, bucket: Bucket) -> Executable:
        return self._executables["verify", (bucket.batch, bucket.length, bucket.k)]

    def sampled_verify(self, bucket: Bucket) -> Executable:
        return self._executables["sampled_verify", (bucket.batch, bucket.length, bucket.k)]

    def admit(self) -> Executable:
        return self._executables["admit", ()]

    def kv_write(self, rows: int, width: int) -> Executable:
        return self._executables["kv_write", (rows, width)]

    def rounds(self, bucket: Bucket) -> Executable:
        """Several rounds in one call; only where the grid has `rounds`, and of a single row."""
        return self._executables["rounds", (bucket.batch, bucket.length, bucket.k, self.manifest.grid.rounds)]

    def move(self) -> Executable:
        return self._executables["move", ()]

    def limited(self, k: int) -> "Bundle":
        """The same executables, to verify at most `k` tokens."""
        return Bundle(self.path, self.manifest, k, self._executables.values())

    def __len__(self) -> int:
        return len(self._executables)


def bundle_devices(manifest: Manifest) -> Sequence[jax.Device]:
    """Those that serve a bundle whose environment is here, in the order of its mesh."""
    return attached_devices(manifest.environment.platform, manifest.environment.device_count)


def check_bundle(path: Path, signed_by: Path | None = None) -> Manifest:
    """The verdict, from the manifest alone. Raises MissingBundle, CorruptBundle or IncompatibleBundle."""
    manifest = read_manifest(path, signed_by)
    _check_environment(path, manifest)
    check_consistent(path, manifest)
    return manifest


@contextmanager
def load_executables(path: Path, manifest: Manifest, k: int) -> Iterator[Iterator[Executable]]:
    """Loads in the background what serves up to `k` verified tokens, in the manifest's order.

    A blob is verified before anything of it is deserialized. Iterating raises CorruptBundle.
    """
    devices, store = bundle_devices(manifest), Store(path)

    def load(entry: Entry) -> Executable:
        where = f"{store.path(entry)} ({entry.signature.label})"
        serialized = store.read(entry)
        try:
            return load_executable(serialized, entry.signature, devices, where)
        except CorruptBundle as error:
            raise CorruptBundle(f"{error}\nMend it: {replace_commands(path)}") from error

    with ThreadPoolExecutor(LOADERS, thread_name_prefix="load") as pool:
        loading: list[Future[Executable]] = [
            pool.submit(load, entry) for entry in manifest.entries if _serves(entry.signature, k)
        ]
        try:
            yield (future.result() for future in loading)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def call_once(executable: Executable, state: DeviceState) -> None:
    """The first call of an executable does what later ones don't: it is not a user's. No slot is active.

    Its arguments lie on the device as later ones will: JAX prepares the dispatch for just such a call. Raises
    CorruptBundle, or what says that memory is exhausted.
    """
    label = executable.signature.label
    try:
        executable(state, *map(state.zeros, executable.signature.arguments))
        state.wait()
    except (TypeError, ValueError) as error:  # what JAX says of inputs that are not the compiled ones
        raise CorruptBundle(f"{label} does not take what its signature says: {error}") from error
    except jax.errors.JaxRuntimeError as error:
        if is_exhausted(error):
            raise
        raise CorruptBundle(f"{label} does not run: {error}") from error


def _serves(signature: Signature, k: int) -> bool:
    """Whether an engine that verifies up to `k` tokens ever calls it; without drafts there is no draft kv."""
    match signature.program:
        case "draft" | "verify" | "sampled_verify" | "rounds":
            return signature.bucket["k"] <= k
        case "kv_write":
            return k > 0
        case _:
            return True


def _check_environment(path: Path, manifest: Manifest) -> None:
    """Raises IncompatibleBundle, field by field, with the command that rebuilds."""
    built, command = manifest.environment, manifest.rebuild_command(path)
    try:
        here = read_environment(built.platform, built.device_count)
    except RuntimeError as error:  # no such devices
        raise IncompatibleBundle(
            f"{path} was built for {_describe(built)}, and here: {error}.\n"
            f"Serve it on such a machine. What builds it anew: {command}"
        ) from error
    if found := differences(built, here):
        lines = "\n".join(f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in found)
        raise IncompatibleBundle(
            f"{path} was built for another environment:\n{lines}\n"
            f"Build it for this one: {mend_command(path)}\nor, from its checkpoints: {command}"
        )


def _describe(environment: Environment) -> str:
    devices = f"{environment.device_count} x {environment.device_kind}"
    return f"{environment.topology} ({devices})" if environment.topology else devices
