"""KV cache layout: keys and values as arrays [L, N, G, C, D], written and read by layer, slot and position.

L layers · N slots · G kv heads · C capacity and the slack of the widest write · D head width
B rows of a call · T positions of a call
"""

from dataclasses import dataclass

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from dflash_aot.compile.models.layer_loop import LayerIndex


def write_rows(array: jax.Array, layer: LayerIndex, rows: jax.Array, slots: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes rows [B, G, T, D]: row b to slot `slots[b]` from position `starts[b]` on.

    One slice update per row, because a scatter copies.
    """
    array = keep_layout(array)
    for row in range(rows.shape[0]):
        at = (layer, slots[row], 0, starts[row], 0)
        array = jax.lax.dynamic_update_slice(array, rows[None, row : row + 1], at)
    return array


def copy_slot(array: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Copies one slot of an array [L, N, ..] over another.

    One layer at a time, so that only one layer is held besides the array.
    """
    layers, _, *shape = array.shape
    origin = (0,) * len(shape)

    def copy_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        array = keep_layout(array)
        row = jax.lax.dynamic_slice(array, (layer, source, *origin), (1, 1, *shape))
        return jax.lax.dynamic_update_slice(array, row, (layer, destination, *origin))

    return jax.lax.fori_loop(0, layers, copy_layer, array)


def keep_layout(array: jax.Array) -> jax.Array:
    """Constrains the array to the memory layout of the arguments: major to minor. The API is experimental in JAX.

    Without it XLA gives an array that a loop carries the layout that suits the loop's body, and copies the whole array
    before and after the loop. For Qwen3-4B on v5e at batch 8 a long prefill and a verification with K = 0 copied the
    keys (2.6 GB).
    """
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


@dataclass(frozen=True)
class KvContext:
    """The first positions of neighbouring slots in one layer of the kv arrays.

    Attributes:
        keys: array [L, N, G, C, D].
        values: array [L, N, G, C, D].
        layer: the layer that is read.
        slot: the first slot.
        batch: number of slots.
        length: number of positions.
    """

    keys: jax.Array
    values: jax.Array
    layer: LayerIndex
    slot: jax.Array | int
    batch: int
    length: int

    def read(self, start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of `size` positions from `start` on, each [B, G, size, D]."""
        return self._read(self.keys, start, size), self._read(self.values, start, size)

    def _read(self, array: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
        _, _, G, _, D = array.shape
        return jax.lax.dynamic_slice(array, (self.layer, self.slot, 0, start, 0), (1, self.batch, G, size, D))[0]
