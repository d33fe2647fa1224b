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
    tiles = split_tiles(values)
    if tiles.shape[-2] <= 2 * count:
        return jax.lax.top_k(values, count)
    _, chosen = jax.lax.top_k(tiles.max(axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # so that the places below have the order of the indices
    width, row = tiles.shape[-1], tiles.shape[:-2]
    indices = chosen[..., None] * width + jnp.arange(width, dtype=jnp.int32)
    searched = jnp.take_along_axis(tiles, chosen[..., None], axis=-2)
    found, places = jax.lax.top_k(searched.reshape(*row, -1), count)
    return found, jnp.take_along_axis(indices.reshape(*row, -1), places, axis=-1)


def split_tiles(values: jax.Array) -> jax.Array:
    """[R, V] → [R, tiles, width]; a row is padded with -inf if no width from MIN_TILE to LANES divides it."""
    length = values.shape[-1]
    width = math.gcd(length, LANES)
    if width < MIN_TILE:
        width = LANES
        padding = [(0, 0)] * (values.ndim - 1) + [(0, -length % width)]
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], -1, width)
