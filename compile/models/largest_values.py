"""The largest values of long rows: only short rows are sorted.

R any leading axes · V length of a row
"""

import math

import jax
import jax.numpy as jnp

LANES = 128  # of a TPU's vector register: the width of a tile
MIN_TILE = 16  # rows whose length has no larger common divisor with LANES are padded
Found = tuple[jax.Array, jax.Array]  # values and their indices, each [R, count]


def find_largest_values(values: jax.Array, count: int) -> Found:
    """The `count` largest of finite float32 [R, V] and their indices, each [R, count].

    In descending order; of equal values the lower index comes first. One pass finds the largest value of each tile of
    neighbours. All that is wanted lies in the `count` tiles with the largest of these; only they are searched.
    """
    *leading, length = values.shape
    if len(leading) != 1:  # the TPU compiler replaces the sort of `top_k` only in a matrix
        found, indices = find_largest_values(values.reshape(-1, length), count)
        return found.reshape(*leading, count), indices.reshape(*leading, count)
    tiles = split_tiles(values)
    if tiles.shape[-2] <= 2 * count:
        return jax.lax.top_k(values, count)
    _, chosen = jax.lax.top_k(tiles.max(axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # so that the places below have the order of the indices
    searched = jnp.take_along_axis(tiles, chosen[..., None], axis=-2, mode="promise_in_bounds")
    rows, _, width = searched.shape
    found, places = jax.lax.top_k(searched.reshape(rows, -1), count)
    # The tile of a place, by a sum with one term: gathers are slow on TPU. Widths are powers of two.
    bits = width.bit_length() - 1
    tile = jnp.where((places >> bits)[..., None] == jnp.arange(count), chosen[..., None, :], 0).sum(axis=-1)
    return found, (tile << bits) + (places & (width - 1))


def split_tiles(values: jax.Array) -> jax.Array:
    """[R, V] → [R, tiles, width]; a row is padded with -inf if no width from MIN_TILE to LANES divides it."""
    length = values.shape[-1]
    width = math.gcd(length, LANES)
    if width < MIN_TILE:
        width = LANES
        padding = [(0, 0)] * (values.ndim - 1) + [(0, -length % width)]
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], -1, width)
