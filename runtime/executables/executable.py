"""One loaded executable, and the device state that executables pass on from one to the next."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.experimental import serialize_executable

from dflash_aot.cache.bundle.pickle_scan import scan_pickle
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.mesh import make_sharding
from dflash_aot.cache.signature import ArraySpec, Signature


class Executable:
    """A program at one bucket, ready to be called; its inputs are checked by JAX against the compiled ones.

    `called`: it has run, and was waited for.
    """

    def __init__(self, signature: Signature, compiled: jax.stages.Compiled, where: str = "", remedy: str = ""):
        """where, remedy: for messages, its file and what mends that."""
        self.signature, self.called = signature, False
        self._compiled, self._where, self._remedy = compiled, where or signature.label, remedy
        self._known: Mapping[str, jax.Array] = {}
        self._weights: tuple[jax.Array, ...] = ()

    def bind(self, weights: Mapping[str, jax.Array]) -> None:
        """All weights by name; they have to be there at the first call."""
        self._known, self.called = weights, False

    def __call__(self, state: "StateArrays", *arguments: jax.Array) -> Sequence[jax.Array]:
        """Enqueues one call on `state`, whose donated arrays it replaces. Returns the results.

        The first call is waited for: it shows whether this is what its signature says. Raises CorruptBundle if not.
        """
        inputs = state.read(self.signature.state)
        outputs = self._compiled(*self._weights, *inputs, *arguments) if self.called else self._try(inputs, arguments)
        donated = self.signature.donated
        state.replace(donated, outputs)
        return outputs[len(donated) :]

    def _try(self, inputs: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Weights never change: they are looked up once."""
        self._weights = tuple(self._known[name] for name in self.signature.weights)
        try:
            outputs = jax.block_until_ready(self._compiled(*self._weights, *inputs, *arguments))
        except (TypeError, ValueError) as error:  # what JAX says of inputs that are not the compiled ones
            raise self._refuse(f"does not take what its signature says: {error}") from error
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise self._refuse(f"does not run: {error}") from error
        self.called = True
        return outputs

    def _refuse(self, flaw: str) -> CorruptBundle:
        return CorruptBundle(f"{self._where}: {flaw}{self._remedy}")


class StateArrays(Protocol):
    """Arrays by name, some of which a call takes and gives back."""

    def read(self, names: Sequence[str]) -> list[jax.Array]: ...

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None: ...


class DeviceState:
    """All per-slot arrays. Donation spends them: only what the last call returned is valid."""

    def __init__(self, arrays: Sequence[ArraySpec], devices: Sequence[jax.Device]):
        self._devices = devices
        # To a device by itself `device_put` is a tenth faster than to the sharding that it means.
        self._everywhere = devices[0] if len(devices) == 1 else make_sharding((), devices)
        self._declared = tuple(arrays)
        self._arrays: dict[str, jax.Array] = {}
        self.reset()

    def reset(self) -> None:
        """All anew, all zero: a call that failed may have spent what it was given."""
        self._arrays.clear()  # first, so that there is never twice of it
        self._arrays.update((array.name, self.zeros(array)) for array in self._declared)

    def place(self, array: np.ndarray) -> jax.Array:
        """A small array of the host beside the state, whole on every device."""
        return jax.device_put(array, self._everywhere)

    def zeros(self, array: ArraySpec) -> jax.Array:
        """As its sharding says; no device's share is ever a part of something larger."""
        shape = array.shard_shape(len(self._devices))
        shards = [jax.device_put(np.zeros(shape, array.dtype), device) for device in self._devices]
        return jax.make_array_from_single_device_arrays(
            array.shape, make_sharding(array.sharding, self._devices), shards
        )

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        arrays = self._arrays
        return [arrays[name] for name in names]

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self._arrays.update(zip(names, outputs, strict=False))

    def wait(self) -> None:
        """Until everything enqueued so far has run."""
        jax.block_until_ready(self._arrays)


def load_executable(
    blob: bytes, signature: Signature, devices: Sequence[jax.Device], where: str, remedy: str = ""
) -> Executable:
    """A verified blob as an executable on `devices`, in their order. where, remedy: for messages, see `Executable`.

    Raises CorruptBundle if it is not what its signature says, IncompatibleBundle if it was made for other devices, and
    what says that memory is exhausted.
    """
    try:
        built = scan_pickle(blob)
    except CorruptBundle as error:
        raise CorruptBundle(f"{where}: {error}{remedy}") from error
    _check_devices(built, devices, where, remedy)
    inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
    outputs = len(signature.donated) + len(signature.results)
    flat_in, flat_out = jax.tree.structure(((0,) * inputs, {})), jax.tree.structure((0,) * outputs)
    try:
        compiled = serialize_executable.deserialize_and_load(blob, flat_in, flat_out, devices[0].client, devices)
    except Exception as error:  # whatever the library or the compiler raises: the blob is at fault
        if is_out_of_memory(error):
            raise
        raise CorruptBundle(f"{where}: does not load: {type(error).__name__}: {error}{remedy}") from error
    return Executable(signature, compiled, where, remedy)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory is what was missing: an executable is none the worse for it."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _check_devices(built: frozenset[int], devices: Sequence[jax.Device], where: str, remedy: str) -> None:
    """An executable for another number of devices would end the process, in C++."""
    here = [device.id for device in devices]
    if len(built) != len(here):
        words = f"made for {len(built)} devices, the manifest says {len(here)}. It was not loaded"
        raise CorruptBundle(f"{where}: {words}{remedy}")
    if built != set(here):
        raise IncompatibleBundle(f"{where}: made for devices {sorted(built)}, here they are called {here}")
