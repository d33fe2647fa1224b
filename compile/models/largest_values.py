"""The largest values of long rows, without sorting them.

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
        return _pick_one_by_one(values, jnp.arange(values.shape[-1], dtype=jnp.int32), count)
    places = jnp.arange(tiles.shape[-2], dtype=jnp.int32)
    _, chosen = _pick_one_by_one(tiles.max(axis=-1), places, count)
    searched = jnp.take_along_axis(tiles, chosen[..., None], axis=-2)
    width = tiles.shape[-1]
    indices = chosen[..., None] * width + jnp.arange(width, dtype=jnp.int32)
    row = searched.shape[:-2]
    return _pick_one_by_one(searched.reshape(*row, -1), indices.reshape(*row, -1), count)


def split_tiles(values: jax.Array) -> jax.Array:
    """[R, V] → [R, tiles, width]; a row is padded with -inf if no width from MIN_TILE to LANES divides it."""
    length = values.shape[-1]
    width = math.gcd(length, LANES)
    if width < MIN_TILE:
        width = LANES
        padding = [(0, 0)] * (values.ndim - 1) + [(0, -length % width)]
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], -1, width)


def _pick_one_by_one(values: jax.Array, indices: jax.Array, count: int) -> Found:
    """`find_largest_values` of short rows: takes the largest value, `count` times.

    indices int32, broadcast to values [R, n]: what stands for each value, of which no two are equal.
    """
    found = []
    for _ in range(count):
        best = values.max(axis=-1)
        index = jnp.where(values == best[..., None], indices, jnp.iinfo(jnp.int32).max).min(axis=-1)
        found.append((best, index))
        values = jnp.where(indices == index[..., None], -jnp.inf, values)
    return jnp.stack([best for best, _ in found], axis=-1), jnp.stack([index for _, index in found], axis=-1)
