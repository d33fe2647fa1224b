"""The largest values of long rows: only short rows are sorted.

R any leading axes · V length of a row
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

LANES = 128  # of a TPU's vector register: the width of a tile
MIN_TILE = 16  # rows whose length has no larger common divisor with LANES are padded
Found = tuple[jax.Array, jax.Array]  # values and their indices, each [R, count]


def find_largest(values: jax.Array) -> jax.Array:
    """`jnp.argmax` of float32 [R, V] over V: int32 [R], the lowest index of equal values.

    The tile that holds it is found first. A CPU computes the maxima in vectors, of rows that its products write side by
    side: 16 rows of 151,936 values take a tenth of the time.
    """
    *leading, length = values.shape
    if length < LANES**2:
        return jnp.argmax(values, axis=-1).astype(jnp.int32)
    tiles = jnp.moveaxis(split_tiles(values.reshape(-1, length)), 0, -1)  # [tiles, width, rows]
    chosen = jnp.argmax(tiles.max(axis=1), axis=0)
    searched = tiles[chosen, :, jnp.arange(len(chosen))]
    return (chosen * tiles.shape[1] + jnp.argmax(searched, axis=1)).astype(jnp.int32).reshape(leading)


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
    return _search_tiles(searched.reshape(len(chosen), -1), chosen)


def find_largest_in_tiles(tiles: jax.Array, rows: int, count: int) -> Found:
    """As `find_largest_values`, of the first rows: each [rows, count].

    Values [V / width, at least rows, width] lie in tiles of neighbours.
    """
    largest = tiles.max(axis=-1)[:, :rows]
    # Without the constraints the small arrays that follow stay transposed, and each is copied on v5p.
    _, chosen = jax.lax.top_k(with_layout_constraint(largest.T, Layout((0, 1))), count)
    chosen = _sort_few(chosen)  # as in `find_largest_values`
    searched = tiles.at[chosen, np.arange(rows)[:, None]].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return _search_tiles(with_layout_constraint(searched.reshape(rows, -1), Layout((0, 1))), chosen)


def _sort_few(numbers: jax.Array) -> jax.Array:
    """Sorts rows of different int32 [R, n] by comparing all pairs: a sort on TPU takes its operands transposed."""
    place = (numbers[..., None, :] < numbers[..., None]).sum(axis=-1)
    at = place[..., None, :] == jnp.arange(numbers.shape[-1])[:, None]
    return jnp.where(at, numbers[..., None, :], 0).sum(axis=-1)


def _search_tiles(searched: jax.Array, chosen: jax.Array) -> Found:
    """The largest values of tiles [R, count · width], width a power of two, whose numbers are `chosen` [R, count]."""
    count = chosen.shape[1]
    found, places = jax.lax.top_k(searched, count)
    # The tile of a place, by a sum with one term: gathers are slow on TPU.
    width = searched.shape[1] // count
    bits = width.bit_length() - 1
    first = chosen[:, None] << bits
    inside = (places & (width - 1))[..., None]
    return found, jnp.where((places >> bits)[..., None] == jnp.arange(count), first + inside, 0).sum(axis=-1)


def split_tiles(values: jax.Array) -> jax.Array:
    """[R, V] → [R, tiles, width]; a row is padded with -inf if no width from MIN_TILE to LANES divides it."""
    length = values.shape[-1]
    width = math.gcd(length, LANES)
    if width < MIN_TILE:
        width = LANES
        padding = [(0, 0)] * (values.ndim - 1) + [(0, -length % width)]
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], -1, width)
