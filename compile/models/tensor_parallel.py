"""Tensor parallelism: every device runs the model code on its own part of the heads, the MLP and the vocabulary.

Megatron-LM's scheme (Shoeybi et al. 2019). Of each pair of matrices the first is split by its outputs (column parallel)
and the second by its inputs (row parallel), so a layer needs two sums over the devices. The ends of the model exchange
only a few numbers for each row. All collectives are written out in this file, and none is left to a partitioner.

B rows · T positions of this call · V vocabulary · H hidden · W any width that the devices share
".." stands for any leading axes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dflash_aot.cache.arrays import MESH_AXIS
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.compile.models.backend import CPU, Backend
from dflash_aot.compile.models.matmul import find_largest_values, round_to

ValuesAndIndices = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The collectives of the model code, as one device calls them inside `shard_map`.

    With one device no method communicates.

    Attributes:
        count: devices that share every layer.
        backend: of each of them.
    """

    count: int = 1
    backend: Backend = CPU

    def row_parallel_matmul(
        self, weight: jax.Array, x: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """W · x where weight and x are split by inputs: the devices' products summed in float32, then x's dtype.

        `scale` is that of `Backend.matmul`. It is the same on all devices, and scales the sum.
        """
        if self.count == 1:
            return self.backend.matmul(weight, x, scale)
        total = jax.lax.psum(self.backend.matmul(weight, x, dtype=jnp.float32), MESH_AXIS)
        return round_to(total if scale is None else total * scale, x.dtype)

    def sum(self, parts: jax.Array) -> jax.Array:
        """Sums one array over the devices."""
        return parts if self.count == 1 else jax.lax.psum(parts, MESH_AXIS)

    def sum_each(self, parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Sums each of several arrays of one shape over the devices, in one exchange."""
        return parts if self.count == 1 else list(jax.lax.psum(jnp.stack(parts), MESH_AXIS))

    def sum_rounded(self, parts: Sequence[jax.Array], dtype: DTypeLike) -> Sequence[jax.Array]:
        """Sums each of several float32 arrays of one shape over the devices, and rounds it.

        In one exchange; where the backend sums apart, if the compiler joins them.
        """
        if not self.backend.sums_apart:
            return [*round_to(self.sum(jnp.stack(parts)), dtype)]
        totals = parts if self.count == 1 else jax.lax.psum(tuple(parts), MESH_AXIS)
        return [round_to(one, dtype) for one in totals]

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
        if self.count == 1:
            return self.backend.look_up(table, ids)
        return jax.lax.psum(self._own_rows(table, ids), MESH_AXIS)

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
        found = held[..., None]
        return jnp.where(found, self.backend.look_up(table, jnp.where(held, own, 0)), 0)

    def argmax(self, logits: jax.Array) -> jax.Array:
        """float32 [.., V/count] split by tokens → the token of the largest logit, int32 [..]; the lowest of equals."""
        return self.choose_best(self.find_best(logits))

    def find_best(self, logits: jax.Array) -> ValuesAndIndices:
        """This device's part of `argmax`: float32 [.., V/count] → its largest logit and that token, each [..]."""
        values, best = self.backend.find_largest(logits)
        return values, best + self._first_token(logits.shape[-1])

    def _first_token(self, width: int) -> jax.Array | int:
        """The first token of this device's part of a vocabulary, of `width` tokens."""
        return 0 if self.count == 1 else jax.lax.axis_index(MESH_AXIS).astype(jnp.int32) * width

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

        Zeros for the tokens of other devices, so the sum over the devices is exact. Of values [slots, V/count] the
        first rows are those of the tokens [B, n].
        """
        if self.count == 1:
            return _take(values, tokens)
        own = tokens - jax.lax.axis_index(MESH_AXIS) * values.shape[-1]
        held = (own >= 0) & (own < values.shape[-1])
        return jnp.where(held, _take(values, jnp.where(held, own, 0)), 0)

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

    def top_scores(self, scores: jax.Array, width: int, rows: int, count: int) -> ValuesAndIndices:
        """`top_values` of what `Backend.score_outputs` made of `width` tokens and of `rows`: each [rows, count]."""
        found = self.backend.find_count_largest(scores, rows, min(count, width))
        return self.merge(found, width, count)

    def best_score(self, scores: jax.Array, width: int, rows: int) -> jax.Array:
        """`argmax` of what `Backend.score_outputs` made of `width` tokens and of `rows`: int32 [rows]."""
        values, best = self.backend.find_best(scores, rows)
        return self.choose_best((values, best + self._first_token(width)))

    def top_outputs(
        self, weight: jax.Array, x: jax.Array, scale: jax.Array | None, count: int
    ) -> ValuesAndIndices:
        """`top_values` of W · x, x [B, T, H]: each [B, T, count].

        weight [V/devices, H] is split by tokens; `scale` is that of `Backend.matmul`.
        """
        own = weight.shape[0]
        return self.merge(
            self.backend.search_outputs(weight, x, scale, min(count, own)), own, count
        )

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


def _take(values: jax.Array, places: jax.Array) -> jax.Array:
    """values [.., V] at places [.., n]. Of more rows than those of the places, the others are not copied."""
    if len(values) == len(places):
        return jnp.take_along_axis(values, places, axis=-1)
    return values[jnp.arange(len(places))[:, None], places]


ONE_DEVICE = TensorParallel()


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
    kinds = [
        *(("target", kind) for kind in target.kinds),
        *(("draft", kind) for kind in draft.kinds),
    ]
    for model, kind in kinds:
        name, size = kind.mixer.divided
        shared.append((f"the {model}'s {name}", size))
        shared.extend((f"the {model}'s MLP width", width) for width in kind.mlp.widths)
    shared.append(("the vocabulary", target.decoder.vocab))
    if draft.heads.vocab is not None:
        shared.append(("the draft's own vocabulary", draft.heads.vocab))
    return list(dict.fromkeys(shared))


def _list_degrees(target: Target, draft: Draft) -> list[int]:
    """Every number of devices that can share the pair."""
    common = math.gcd(*(size for _, size in _list_shared_sizes(target, draft)))
    return [degree for degree in range(1, common + 1) if common % degree == 0]
