"""Tensor parallelism: every device runs the model code on its own part of the heads, the MLP and the vocabulary.

Megatron-LM's scheme (Shoeybi et al. 2019). Of each pair of matrices the first is split by its outputs (column parallel)
and the second by its inputs (row parallel), so a layer needs two sums over the devices. The ends of the model exchange
only a few numbers for each row. All collectives are written out in this file, and none is left to a partitioner. This
includes the search for the largest values of long rows.

B rows · T positions of this call · V vocabulary · H hidden · W any width that the devices share
".." stands for any leading axes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from dflash_aot.cache.arrays import MESH_AXIS
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.compile.kernels.kernel_device import LANES
from dflash_aot.compile.models.matmul import matmul, matmul_by_tile, round_to

# -- the largest values of long rows, found without sorting whole rows
#
# R any leading axes · V length of a row

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


# -- tensor parallelism

ValuesAndIndices = tuple[jax.Array, jax.Array]
Search = Callable[..., ValuesAndIndices]  # as `search_outputs`


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The collectives of the model code, as one device calls them inside `shard_map`.

    With one device no method communicates.

    Attributes:
        count: devices that share every layer.
    """

    count: int = 1

    def row_parallel_matmul(
        self, weight: jax.Array, x: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """W · x where weight and x are split by inputs: the devices' products summed in float32, then x's dtype.

        `scale` is that of `matmul`. It is the same on all devices, and scales the sum.
        """
        if self.count == 1:
            return matmul(weight, x, scale)
        total = jax.lax.psum(matmul(weight, x, dtype=jnp.float32), MESH_AXIS)
        return round_to(total if scale is None else total * scale, x.dtype)

    def sum(self, parts: jax.Array) -> jax.Array:
        """Sums one array over the devices."""
        return parts if self.count == 1 else jax.lax.psum(parts, MESH_AXIS)

    def sum_each(self, parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Sums each of several arrays of one shape over the devices, in one exchange."""
        return parts if self.count == 1 else list(jax.lax.psum(jnp.stack(parts), MESH_AXIS))

    def max(self, parts: jax.Array) -> jax.Array:
        """Takes the elementwise maximum over the devices."""
        return parts if self.count == 1 else jax.lax.pmax(parts, MESH_AXIS)

    def order_after(self, x: jax.Array, exchanged: jax.Array) -> jax.Array:
        """x [..] unchanged, as data that depends on `exchanged` [..], finite results of an earlier collective.

        A collective inside a conditional or a loop needs this if no other data connects it with collectives outside.
        XLA:CPU (jaxlib 0.10.2 and 0.12.0.1) starts the collectives of a computation in order, but does not wait for
        the collectives of a conditional that is still running. In a loaded executable these have their own communicator
        resource and no order at all. One device then runs two collectives at a time, and each is matched with the wrong
        collective of the other device: a null pointer is read, or wrong numbers are summed. XLA:CPU waits only for data
        dependencies.
        An optimization barrier does not help: XLA removes barriers before it schedules.
        """
        return x if self.count == 1 else jnp.where(exchanged > -jnp.inf, x, 0)

    def own_slice(self, x: jax.Array) -> jax.Array:
        """[.., W], equal on all devices → the part of this device [.., W/count]."""
        if self.count == 1:
            return x
        width = x.shape[-1] // self.count
        return jax.lax.dynamic_slice_in_dim(
            x, jax.lax.axis_index(MESH_AXIS) * width, width, axis=-1
        )

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Embedding look-up: table [V/count, H] split by tokens, ids [..] of the whole vocabulary → [.., H]."""
        return (
            table[ids] if self.count == 1 else jax.lax.psum(self._own_rows(table, ids), MESH_AXIS)
        )

    def look_up_each(self, *asked: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        """`look_up` of several tables of one width, each with its ids [B, n], in one exchange."""
        if self.count == 1:
            return [
                table.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
                for table, ids in asked
            ]
        rows = jnp.concatenate([self._own_rows(*one) for one in asked], axis=1)
        ends = np.cumsum([ids.shape[1] for _, ids in asked])[:-1]
        return jnp.split(jax.lax.psum(rows, MESH_AXIS), ends, axis=1)

    def _own_rows(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """The rows that this device holds, zeros for the others: their sum over the devices is exact."""
        own = ids - jax.lax.axis_index(MESH_AXIS) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        return jnp.where(held[..., None], table[jnp.where(held, own, 0)], 0)

    def argmax(self, logits: jax.Array) -> jax.Array:
        """float32 [.., V/count] split by tokens → the token of the largest logit, int32 [..]; the lowest of equals."""
        return self.choose_best(self.find_best(logits))

    def find_best(self, logits: jax.Array) -> ValuesAndIndices:
        """This device's part of `argmax`: float32 [.., V/count] → its largest logit and that token, each [..]."""
        best = jax.lax.platform_dependent(logits, cpu=find_largest, default=_find_index)
        values = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
        first = (
            0
            if self.count == 1
            else jax.lax.axis_index(MESH_AXIS).astype(jnp.int32) * logits.shape[-1]
        )
        return values, best + first

    def choose_best(self, found: ValuesAndIndices) -> jax.Array:
        """The token of the largest of all devices' values, int32 [..], of what `find_best` returned on each."""
        value, token = found
        if self.count == 1:
            return token
        # One exchange instead of two. The values travel as integers, because a device may flush a token's small integer
        # to zero when its bits are read as a float32.
        packed = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), token])
        bits, tokens = jnp.moveaxis(jax.lax.all_gather(packed, MESH_AXIS), 0, -1)
        winner = jnp.argmax(jax.lax.bitcast_convert_type(bits, jnp.float32), axis=-1)
        return jnp.take_along_axis(tokens, winner[..., None], axis=-1)[..., 0]

    def own_tokens(self, width: int) -> jax.Array:
        """The token ids of this device's part of a vocabulary, int32 [width]."""
        own = jnp.arange(width, dtype=jnp.int32)
        return (
            own
            if self.count == 1
            else own + jax.lax.axis_index(MESH_AXIS).astype(jnp.int32) * width
        )

    def own_values(self, values: jax.Array, tokens: jax.Array) -> jax.Array:
        """values [.., V/count] split by tokens, at tokens int32 [.., n] of the whole vocabulary → [.., n].

        Zeros for the tokens of other devices, so the sum over the devices is exact.
        """
        if self.count == 1:
            return jnp.take_along_axis(values, tokens, axis=-1)
        own = tokens - jax.lax.axis_index(MESH_AXIS) * values.shape[-1]
        held = (own >= 0) & (own < values.shape[-1])
        return jnp.where(held, jnp.take_along_axis(values, jnp.where(held, own, 0), axis=-1), 0)

    def logsumexp_and_logits(
        self, logits: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The logarithm of the sum of exp(logits) of each row, and the logit of one token per row: both float32 [..].

        float32 [.., V/count] split by tokens; tokens int32 [..] of the whole vocabulary. Logits are finite.
        """
        top = logits.max(axis=-1)
        odds = jnp.exp(logits - top[..., None]).sum(axis=-1)
        found = self.own_values(logits, tokens[..., None])[..., 0]
        if self.count == 1:
            return top + jnp.log(odds), found
        # One exchange instead of three: each device sums relative to its own maximum.
        parts = jax.lax.all_gather(jnp.stack([top, odds, found]), MESH_AXIS)
        tops = parts[:, 0]
        sums = parts[:, 1]
        founds = parts[:, 2]
        top = tops.max(axis=0)
        # The sum of the logits is exact: all terms but one are zero.
        return top + jnp.log((sums * jnp.exp(tops - top)).sum(axis=0)), founds.sum(axis=0)

    def top_values(self, logits: jax.Array, count: int) -> ValuesAndIndices:
        """float32 [.., V/devices] split by tokens → the `count` largest logits and their tokens, each [.., count].

        In descending order; of equal logits the lower token comes first.
        """
        return self.merge(
            find_largest_values(logits, min(count, logits.shape[-1])), logits.shape[-1], count
        )

    def top_outputs(
        self, weight: jax.Array, x: jax.Array, scale: jax.Array | None, count: int
    ) -> ValuesAndIndices:
        """`top_values` of W · x, x [B, T, H]: each [B, T, count].

        weight [V/devices, H] is split by tokens; `scale` is that of `matmul`.
        """
        own = weight.shape[0]
        most = min(count, own)
        find = {
            platform: partial(search, scale=scale, count=most)
            for platform, search in choose_searches(own, most).items()
        }
        return self.merge(jax.lax.platform_dependent(weight, x, **find), own, count)

    def merge(self, found: ValuesAndIndices, width: int, count: int) -> ValuesAndIndices:
        """The `count` largest of what each device found in its part of the vocabulary, of `width` tokens."""
        if self.count == 1:
            return found
        values, tokens = found
        tokens += jax.lax.axis_index(MESH_AXIS).astype(jnp.int32) * width
        # One exchange instead of two, see `argmax`.
        packed = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), tokens])
        bits, tokens = jax.lax.all_gather(packed, MESH_AXIS, axis=packed.ndim - 1, tiled=True)
        values, places = find_largest_values(jax.lax.bitcast_convert_type(bits, jnp.float32), count)
        return values, jnp.take_along_axis(tokens, places, axis=-1)


ONE_DEVICE = TensorParallel()


def _find_index(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def choose_searches(vocab: int, count: int) -> dict[str, Search]:
    """The search for the `count` largest of `vocab` outputs on each platform.

    Tiles are searched on TPU, where they save reading all outputs again, if fewer than half of them are chosen.
    """
    tiled = vocab % LANES == 0 and vocab // LANES > 2 * count
    return {"tpu": search_tiles if tiled else search_outputs, "default": search_outputs}


def search_outputs(
    weight: jax.Array, x: jax.Array, scale: jax.Array | None, count: int
) -> ValuesAndIndices:
    """`TensorParallel.top_outputs` of all positions of x [B, T, H] and the outputs of one device."""
    return find_largest_values(matmul(weight, x, scale, dtype=jnp.float32), count)


def search_tiles(
    weight: jax.Array, x: jax.Array, scale: jax.Array | None, count: int
) -> ValuesAndIndices:
    """As `search_outputs`, by tile: LANES divides the number of outputs."""
    B, T, width = x.shape
    tiles = matmul_by_tile(weight, x.reshape(-1, width), scale, LANES)
    values, tokens = find_largest_in_tiles(tiles, B * T, count)
    return values.reshape(B, T, count), tokens.reshape(B, T, count)


def check_divisible(target: Target, draft: Draft, devices: int) -> None:
    """Raises BadInput unless `devices` divides every size that the devices share."""
    if uneven := [
        f"{what} {size}" for what, size in _list_shared_sizes(target, draft) if size % devices
    ]:
        raise BadInput(
            f"{devices} devices cannot share {', '.join(uneven)} evenly; "
            f"{', '.join(str(one) for one in _list_degrees(target, draft))} can (--topology, --tensor_parallel)"
        )


def _list_shared_sizes(target: Target, draft: Draft) -> list[tuple[str, int]]:
    """Name and size of every dimension that the devices share."""
    shared = [("the draft's features", len(draft.target_layer_ids) * draft.target_hidden)]
    for model, decoder in (("target", target.decoder), ("draft", draft.decoder)):
        shared += [
            (f"the {model}'s kv heads", decoder.attention.kv_heads),
            (f"the {model}'s MLP width", decoder.mlp.width),
        ]
    if target.recurrent:  # their value heads follow
        shared.append(("the target's linear key heads", target.recurrent.key_heads))
    shared.append(("the vocabulary", target.decoder.vocab))
    return shared if draft.vocab is None else [*shared, ("the draft's own vocabulary", draft.vocab)]


def _list_degrees(target: Target, draft: Draft) -> list[int]:
    """Every number of devices that can share the pair."""
    common = math.gcd(*(size for _, size in _list_shared_sizes(target, draft)))
    return [degree for degree in range(1, common + 1) if common % degree == 0]
