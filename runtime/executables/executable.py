"""One loaded executable, and the device state that executables take and return."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.experimental import serialize_executable

from dflash_aot.cache.bundle.pickle_scan import scan_pickle
from dflash_aot.cache.devices import make_sharding
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.signature import ArraySpec, Signature
from dflash_aot.runtime.executables.host_memory import estimate_loading_bytes, require_host_memory, require_mappings


class Executable:
    """A compiled program of one bucket, ready to be called. JAX checks its inputs against the compiled inputs.

    Attributes:
        signature: the names, shapes and dtypes of its inputs and outputs.
        called: whether a call has completed.
    """

    def __init__(self, signature: Signature, compiled: jax.stages.Compiled, where: str = "", remedy: str = ""):
        """where, remedy: for messages, the executable's file and the command that replaces the file."""
        self.signature, self.called = signature, False
        self._compiled, self._where, self._remedy = compiled, where or signature.label, remedy
        self._known: Mapping[str, jax.Array] = {}
        self._weights: tuple[jax.Array, ...] = ()

    def bind(self, weights: Mapping[str, jax.Array]) -> None:
        """Sets the mapping in which weights are looked up by name at the first call."""
        self._known, self.called = weights, False

    def __call__(self, state: "StateArrays", *arguments: jax.Array) -> Sequence[jax.Array]:
        """Enqueues one call, replaces the donated arrays of `state`, and returns the results.

        The first call blocks until it is done: it shows whether the executable matches its signature. Raises
        CorruptBundle if it does not.
        """
        inputs = state.read(self.signature.state)
        if self.called:
            outputs = self._compiled(*self._weights, *inputs, *arguments)
        else:
            outputs = self._call_first(inputs, arguments)
        donated = self.signature.donated
        state.replace(donated, outputs)
        return outputs[len(donated) :]

    def _call_first(self, inputs: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Looks up the weights, once because they never change, and waits for the outputs. Raises CorruptBundle."""
        self._weights = tuple(self._known[name] for name in self.signature.weights)
        try:
            outputs = jax.block_until_ready(self._compiled(*self._weights, *inputs, *arguments))
        except (TypeError, ValueError) as error:  # JAX's errors for inputs of other shapes or dtypes
            raise self._corrupt(f"does not accept the inputs of its signature: {error}") from error
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise self._corrupt(f"does not run: {error}") from error
        self.called = True
        return outputs

    def _corrupt(self, flaw: str) -> CorruptBundle:
        return CorruptBundle(f"{self._where}: {flaw}{self._remedy}")


class StateArrays(Protocol):
    """Arrays by name: a call reads some, and replaces those that are donated to it."""

    def read(self, names: Sequence[str]) -> list[jax.Array]: ...

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None: ...


class DeviceState:
    """All per-slot arrays on the devices. A call consumes donated arrays: only those of the latest call are valid."""

    def __init__(self, arrays: Sequence[ArraySpec], devices: Sequence[jax.Device]):
        """Allocates all arrays, filled with zeros."""
        self._devices = devices
        # `device_put` to a device is a tenth faster than to an equivalent sharding of one device.
        self._everywhere = devices[0] if len(devices) == 1 else make_sharding((), devices)
        self._declared = tuple(arrays)
        self._arrays: dict[str, jax.Array] = {}
        self._allocate()

    def reset(self) -> None:
        """Replaces all arrays by zeros, after a failed call that may have consumed its donated inputs.

        Where memory is short, that is left to the next `read`.
        """
        self._arrays.clear()  # first, so that old and new arrays are never in memory at the same time
        try:
            self._allocate()
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise

    def to_device(self, array: np.ndarray) -> jax.Array:
        """Copies a small host array, an argument of a call, to every device."""
        return jax.device_put(array, self._everywhere)

    def zeros(self, array: ArraySpec) -> jax.Array:
        """Returns zeros of the declared shape and sharding, allocated shard by shard."""
        shape = array.shard_shape(len(self._devices))
        shards = [jax.device_put(np.zeros(shape, array.dtype), device) for device in self._devices]
        return jax.make_array_from_single_device_arrays(
            array.shape, make_sharding(array.sharding, self._devices), shards
        )

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        arrays = self._arrays
        if not arrays:
            self._allocate()
        return [arrays[name] for name in names]

    def _allocate(self) -> None:
        """All arrays or, where an error is raised, none."""
        self._arrays.update({array.name: self.zeros(array) for array in self._declared})

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self._arrays.update(zip(names, outputs, strict=False))

    def wait(self) -> None:
        """Blocks until all enqueued calls are done."""
        jax.block_until_ready(self._arrays)


def load_executable(
    blob: bytes, signature: Signature, devices: Sequence[jax.Device], where: str, remedy: str = ""
) -> Executable:
    """Deserializes a verified blob into an executable on `devices`, in their order.

    where, remedy: for messages, see `Executable`.

    Raises CorruptBundle if the blob is not an executable of the signature, IncompatibleBundle if it was compiled for
    other devices, and passes out-of-memory errors through.
    """
    try:
        built = scan_pickle(blob, signature)
    except CorruptBundle as error:
        raise CorruptBundle(f"{where}: {error}. It was not loaded{remedy}") from error
    _check_devices(built, devices, where, remedy)
    inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
    outputs = len(signature.donated) + len(signature.results)
    flat_in, flat_out = jax.tree.structure(((0,) * inputs, {})), jax.tree.structure((0,) * outputs)
    require_host_memory(estimate_loading_bytes(len(blob)))
    if devices[0].platform == "cpu":
        require_mappings(blob)
    try:
        compiled = serialize_executable.deserialize_and_load(blob, flat_in, flat_out, devices[0].client, devices)
    except Exception as error:  # a corrupt blob can make the library or the compiler raise anything
        if is_out_of_memory(error):
            raise
        raise CorruptBundle(f"{where}: does not load: {type(error).__name__}: {error}{remedy}") from error
    return Executable(signature, compiled, where, remedy)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error reports a lack of memory, which is no fault of an executable.

    XLA:CPU reports what a thread of a running call could not allocate as INTERNAL, "Out of memory allocating N bytes".
    """
    return isinstance(error, MemoryError) or any(one in str(error) for one in ("RESOURCE_EXHAUSTED", "Out of memory"))


def _check_devices(built: frozenset[int], devices: Sequence[jax.Device], where: str, remedy: str) -> None:
    """Checks the ids of the devices in a blob: loading it for another number of devices would abort the process.

    Raises CorruptBundle, IncompatibleBundle.
    """
    here = [device.id for device in devices]
    if len(built) != len(here):
        counts = f"compiled for {len(built)} devices, but the manifest says {len(here)}. It was not loaded"
        raise CorruptBundle(f"{where}: {counts}{remedy}")
    if built != set(here):
        raise IncompatibleBundle(f"{where}: compiled for the devices {sorted(built)}, but the devices here are {here}")
