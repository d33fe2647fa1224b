"""Arithmetic of all layers: where sums are rounded, products in several orders, the largest values of long rows.

A backend (`backend`) chooses among the products and searches.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from dflash_aot.compile.kernels.kernel_device import LANES, SUBLANES

# -- sums and products, rounded once to the dtype of the activations, in the same way in every program
#
# XLA for TPU computes bfloat16 sums and products in float32, and leaves out the roundings between operations that it
# fuses. Which operations it fuses depends on the number of rows: verify with K = 0 and with K = 7 computed different
# numbers for 82 of the 128 features of a position (v5e, the golden pair, as `dflash-bundle verify --execute` runs
# them). Here the float32 and the rounding are written out. By the compiler's estimate that costs 1 % of Qwen3-4B's
# verification, and 8 % of a kv_write. XLA promises to keep `reduce_precision`; it may remove a conversion to bfloat16
# and back.


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 x in `dtype`, rounded to nearest even. A float32 stays as it is."""
    if jnp.dtype(dtype) == jnp.float32:
        return x
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y in the dtype of x."""
    return round_to(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """x · y in the dtype of x."""
    return round_to(x.astype(jnp.float32) * y.astype(jnp.float32), x.dtype)


def sigmoid(x: jax.Array) -> jax.Array:
    """sigmoid(x) in the dtype of x, computed in float32."""
    return round_to(jax.nn.sigmoid(x.astype(jnp.float32)), x.dtype)


def silu(x: jax.Array) -> jax.Array:
    """x · sigmoid(x) in the dtype of x, computed in float32."""
    return round_to(jax.nn.silu(x.astype(jnp.float32)), x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation in the dtype of x, computed in float32."""
    return round_to(jax.nn.gelu(x.astype(jnp.float32), approximate=True), x.dtype)


ACTIVATIONS = {"silu": silu, "gelu": gelu}

# -- matmuls

# So many bytes of floats, and of larger weights at most so many rows, are converted at a time on a CPU. A loop has at
# least two tiles, because XLA unrolls a loop of a single trip.
CONVERTED_OUTPUTS = 1536
CONVERTED_BYTES = 5 * 2**20
LEAST_TILES = 2
# JAX 0.10 converts bfloat16 well in a whole product, and takes 13 times as long by tile. JAX 0.12 takes 5 to 10 times
# as long for 4 to 64 rows of a layer's weight if it is whole.
TILED = {"bfloat16", "int8"} if jax.__version_info__ >= (0, 11) else {"int8"}
# Up to how many rows a CPU multiplies one by one, by the dtype of the weight, and of how many inputs at most: XLA does
# not convert a wider weight while it multiplies, which takes 20 times as long as converted tiles.
ROW_BY_ROW = {"bfloat16": 2 if "bfloat16" in TILED else 0, "int8": 4}
ROW_BY_ROW_INPUTS = 4095
LEAST_OUTPUTS = 16  # tiles with fewer take up to twice as long at 64 rows
# see `count_padded_rows`
FEW_ROWS = 4
CPU_ROWS = (8, 16)


def matmul_rows_first(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """rows · Wᵀ: weight [out, in], rows [n, in] → float32 [n, out]."""
    return jnp.matmul(rows, weight.astype(rows.dtype).T, preferred_element_type=jnp.float32)


def matmul_padded_rows(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """`matmul_rows_first`, with rows of zeros up to a multiple of a TPU's SUBLANES.

    The compiler turns the product of a single row into multiplications and sums on the vector unit. By its own
    estimate that takes 11.4 instead of 3.3 ms for the gate matrices of Qwen3-4B on v5e.
    """
    padding = -rows.shape[0] % SUBLANES
    return matmul_rows_first(weight, jnp.pad(rows, ((0, padding), (0, 0))))[: rows.shape[0]]


def matmul_by_tile(
    weight: jax.Array, rows: jax.Array, scale: jax.Array | None, width: int
) -> jax.Array:
    """W · x with outputs in tiles of neighbours: rows [n, in] → float32 [out / width, at least n, width].

    Arguments are those of `Backend.matmul`. Rows after the first n are padding. On TPU the largest value of each tile
    is found while the product is in registers, and a tile of a row can be taken without moving the others.
    """
    rows = jnp.pad(rows, ((0, -rows.shape[0] % SUBLANES), (0, 0)))
    tiles = weight.astype(rows.dtype).reshape(-1, width, weight.shape[1])
    product = jnp.einsum("nh,twh->tnw", rows, tiles, preferred_element_type=jnp.float32)
    return product if scale is None else product * scale.reshape(-1, 1, width)


def matmul_weight_first(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """(W · rowsᵀ)ᵀ, the same product in the order that is faster on CPU: weight [out, in], rows [n, in] → [n, out].

    It takes half of the time for 2 … 32 rows of floats. Large weights of TILED dtypes are converted to float32 tile by
    tile, and few rows are multiplied one by one: see ROW_BY_ROW. With JAX 0.10 one row of bfloat16 is multiplied in the
    other order. The barrier keeps XLA from reordering the transposed product.
    """
    count = rows.shape[0]
    if count <= ROW_BY_ROW.get(weight.dtype.name, 0) and weight.shape[1] <= ROW_BY_ROW_INPUTS:
        return matmul_row_by_row(weight, rows)
    if count == 1 and weight.dtype == jnp.bfloat16 and "bfloat16" not in TILED:
        return matmul_rows_first(weight, rows)
    rows = jnp.pad(rows, ((0, count_padded_rows(count) - count), (0, 0)))
    if weight.dtype.name in TILED:
        columns = _multiply_converted(weight, _compute_once(rows.astype(jnp.float32)))
    else:
        columns = _multiply_columns(weight, rows)
    return jax.lax.optimization_barrier(columns).T[:count]


def _multiply_converted(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """W · rowsᵀ of an int8 or bfloat16 weight [out, in] and float32 rows [n, in] → float32 [out, n].

    A weight of few bytes is converted as a whole, after `rows` are known: otherwise XLA converts the weights of all
    layers first, each into memory of its own, which takes ten times as long. For 8 rows and 1536 · 576 int8 weights a
    whole conversion and product take 0.24 ms, and two tiles in a loop 0.30 ms.
    """
    if 4 * weight.size <= CONVERTED_BYTES:
        return _multiply_columns(weight.astype(jnp.float32) * _find_ones(rows[0, 0]), rows)
    size = count_converted_outputs(weight.shape[0], 4 * weight.shape[1])
    return _map_tiles(weight, size, lambda tile: _multiply_columns(tile.astype(jnp.float32), rows))


def matmul_row_by_row(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """`matmul_weight_first` for few rows and a bfloat16 or int8 weight: [out, in], [n, in] → float32 [n, out].

    Each row by itself: XLA then converts the weight while it multiplies, on all cores, and in vectors because
    `REORDER_SUMS` lets it reorder the sums.
    """
    floats = weight.astype(jnp.float32).T
    wide = jnp.split(_compute_once(rows.astype(jnp.float32)), rows.shape[0])
    return jnp.concatenate([row @ floats for row in wide])


def _compute_once(rows: jax.Array) -> jax.Array:
    """`rows`, divided by ones: XLA would compute a cheaper last operation again for each output of a product."""
    return rows / _find_ones(rows)


def _find_ones(x: jax.Array) -> jax.Array:
    """A 1 for each number of x, which XLA does not know before it knows x."""
    never = jnp.isinf(x) & jnp.isnan(x)
    return 1 - never.astype(jnp.float32)


def count_padded_rows(count: int) -> int:
    """With how many rows a CPU multiplies `count` rows: one of few, of 8, or a multiple of 16.

    XLA's library computes a remainder apart: 15 rows take 1.5 times as long as 16, 120 rows 1.3 times as long as 128.
    """
    if count <= FEW_ROWS:
        return count
    small, large = CPU_ROWS
    return small if count <= small else -(-count // large) * large


def _multiply_columns(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """W · rowsᵀ: [out, in], [n, in] → float32 [out, n]."""
    return jax.lax.dot_general(
        weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _map_tiles(
    weight: jax.Array, size: int, multiply: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Products of a weight [out, in], tile by tile: `multiply` takes `size` rows of it, or fewer at the end.

    XLA for CPU converts a whole weight before its product, which takes four to six times as long.
    """
    even = len(weight) // size * size

    def multiply_from(start: jax.Array) -> jax.Array:
        return multiply(jax.lax.dynamic_slice_in_dim(weight, start, size))

    products = jax.lax.map(multiply_from, jnp.arange(0, even, size))
    products = products.reshape(even, *products.shape[2:])
    return products if even == len(weight) else jnp.concatenate([products, multiply(weight[even:])])


def count_converted_outputs(outputs: int, row_bytes: int) -> int:
    """How many rows of a weight are converted at a time: `outputs` rows, each `row_bytes` as floats.

    At most a LEAST_TILES-th of `outputs`. A divisor of it, unless all are below LEAST_OUTPUTS: then the last tile is
    smaller.
    """
    most = max(1, min(outputs // LEAST_TILES, CONVERTED_OUTPUTS, CONVERTED_BYTES // row_bytes))
    even = max(size for size in range(1, most + 1) if outputs % size == 0)
    return (
        even if even >= min(most, LEAST_OUTPUTS) else math.ceil(outputs / math.ceil(outputs / most))
    )


# -- the largest values of long rows, found without sorting whole rows
#
# R any leading axes · V length of a row

MIN_TILE = 16  # rows whose length has no larger common divisor with LANES are padded
Found = tuple[jax.Array, jax.Array]  # values and their indices, each [R, count]


def find_index(values: jax.Array) -> jax.Array:
    """The index of the largest of [.., V], int32 [..]; the lowest of equals."""
    return jnp.argmax(values, axis=-1).astype(jnp.int32)


def find_largest(values: jax.Array) -> jax.Array:
    """`find_index` of float32 [R, V] over V: int32 [R], the lowest index of equal values.

    The tile that holds it is found first. A CPU computes the maxima in vectors, of rows that its products write side by
    side: 16 rows of 151,936 values take a tenth of the time.
    """
    *leading, length = values.shape
    if length < LANES**2:
        return find_index(values)
    tiles = jnp.moveaxis(split_tiles(values.reshape(-1, length)), 0, -1)  # [tiles, width, rows]
    chosen = jnp.argmax(tiles.max(axis=1), axis=0)
    searched = tiles[chosen, :, jnp.arange(len(chosen))]
    return (
        (chosen * tiles.shape[1] + jnp.argmax(searched, axis=1)).astype(jnp.int32).reshape(leading)
    )


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
    searched = tiles.at[chosen, np.arange(rows)[:, None]].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
    return _search_tiles(with_layout_constraint(searched.reshape(rows, -1), Layout((0, 1))), chosen)


def find_best_in_tiles(tiles: jax.Array, rows: int) -> Found:
    """The largest of the first rows of `tiles`, as `find_largest_in_tiles` takes them, and its index, each [rows].

    Of equal values the lower index.
    """
    chosen = jnp.argmax(tiles.max(axis=-1)[:, :rows], axis=0).astype(jnp.int32)
    searched = tiles.at[chosen, np.arange(rows)].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
    return searched.max(axis=-1), chosen * tiles.shape[-1] + find_index(searched)


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
    return found, jnp.where(
        (places >> bits)[..., None] == jnp.arange(count), first + inside, 0
    ).sum(axis=-1)


def split_tiles(values: jax.Array) -> jax.Array:
    """[R, V] → [R, tiles, width]; a row is padded with -inf if no width from MIN_TILE to LANES divides it."""
    length = values.shape[-1]
    width = math.gcd(length, LANES)
    if width < MIN_TILE:
        width = LANES
        padding = [(0, 0)] * (values.ndim - 1) + [(0, -length % width)]
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], -1, width)
