"""Keys and values as the device keeps them: arrays [L, N, G, C, D], written and read by layer, slot and position.

L layers · N slots · G kv heads · C capacity + slack · D head width
"""

from dataclasses import dataclass

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from dflash_aot.compile.models.layer_loop import LayerIndex


def write_rows(array: jax.Array, layer: LayerIndex, rows: jax.Array, slots: jax.Array, starts: jax.Array) -> jax.Array:
    """rows [B, G, T, D] into an array: row b at slot b's position. A slice per row: no scatter."""
    array = _keep_order(array)
    for row in range(rows.shape[0]):
        at = (layer, slots[row], 0, starts[row], 0)
        array = jax.lax.dynamic_update_slice(array, rows[None, row : row + 1], at)
    return array


def copy_slot(array: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """One slot over another. A layer at a time: no more than that is held besides the array."""
    layers, _, *shape = array.shape

    def copy_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        array = _keep_order(array)
        row = jax.lax.dynamic_slice(array, (layer, source, 0, 0, 0), (1, 1, *shape))
        return jax.lax.dynamic_update_slice(array, row, (layer, destination, 0, 0, 0))

    return jax.lax.fori_loop(0, layers, copy_layer, array)


def _keep_order(array: jax.Array) -> jax.Array:
    """Dimensions in memory as they are in the arguments. Experimental in JAX, and not to be done without.

    In a loop XLA gives what it carries the order that suits the body, and copies all of it on the way in and out: the
    keys for a long prefill with positions last (Qwen3-4B, batch 8 on v5e: 2.6 GB), the draft's for a write of 8 rows
    with positions first.
    """
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


@dataclass(frozen=True)
class KvContext:
    """The first `length` positions of `batch` neighbouring slots, from `slot` on, in one layer."""

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
