"""One loaded executable, and the device state that executables pass on from one to the next."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import serialize_executable

from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.signature import Array, Signature
from dflash_aot.runtime.pickle_scan import scan_pickle


class Executable:
    """A program at one bucket, ready to be called; its inputs are checked by JAX against the compiled ones."""

    def __init__(self, signature: Signature, compiled: jax.stages.Compiled):
        self.signature = signature
        self._compiled = compiled
        self._weights: tuple[jax.Array, ...] = ()

    def bind(self, weights: Mapping[str, jax.Array]) -> None:
        """The weights never change: they are looked up once."""
        self._weights = tuple(weights[name] for name in self.signature.weights)

    def __call__(self, state: "DeviceState", *arguments: jax.Array) -> Sequence[jax.Array]:
        """Enqueues one call on `state`, whose donated arrays it replaces. Returns the results."""
        outputs = self._compiled(*self._weights, *state.read(self.signature.state), *arguments)
        donated = self.signature.donated
        state.replace(donated, outputs)
        return outputs[len(donated) :]


class DeviceState:
    """All per-slot arrays. Donation spends them: only what the last call returned is valid."""

    def __init__(self, arrays: Sequence[Array], device: jax.Device):
        self._device = device
        self._arrays = {array.name: self.place(np.zeros(array.shape, array.dtype)) for array in arrays}

    def place(self, array: np.ndarray) -> jax.Array:
        """A small array of the host beside the state."""
        return jax.device_put(array, self._device)

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        arrays = self._arrays
        return [arrays[name] for name in names]

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self._arrays.update(zip(names, outputs, strict=False))

    def wait(self) -> None:
        """Until everything enqueued so far has run."""
        jax.block_until_ready(self._arrays)


def load_executable(blob: bytes, signature: Signature, device: jax.Device, where: str) -> Executable:
    """A verified blob as an executable on `device`. Raises CorruptBundle if it is not what its signature says."""
    scan_pickle(blob, where)
    inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
    outputs = len(signature.donated) + len(signature.results)
    flat_in, flat_out = jax.tree.structure(((0,) * inputs, {})), jax.tree.structure((0,) * outputs)
    try:
        compiled = serialize_executable.deserialize_and_load(blob, flat_in, flat_out, device.client, [device])
    except Exception as error:  # whatever the library or the compiler raises: the blob is at fault
        raise CorruptBundle(f"{where}: does not load: {type(error).__name__}: {error}") from error
    return Executable(signature, compiled)
