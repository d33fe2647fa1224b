"""Tensor parallelism, spelled out: the model code runs on every device with its share of heads, MLP and vocabulary.

Megatron-LM's scheme (Shoeybi et al. 2019): of each pair of products the first is split by its outputs, the second by
its inputs, so a layer costs two sums over the devices, and nothing else is exchanged but the ends' few numbers. Said
explicitly, not left to a partitioner: what the devices exchange is what stands here.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.signature import AXIS
from dflash_aot.compile.models.matmul import multiply

Ranked = tuple[jax.Array, jax.Array]  # values and where they are


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices, seen from one of them; with `count` 1 there is nobody to talk to."""

    count: int = 1

    def multiply(self, weight: jax.Array, x: jax.Array) -> jax.Array:
        """W · x as `multiply`, where both are split by inputs: every device's part summed, in float32."""
        if self.count == 1:
            return multiply(weight, x)
        return jax.lax.psum(multiply(weight, x, dtype=jnp.float32), AXIS).astype(x.dtype)

    def sum(self, parts: jax.Array) -> jax.Array:
        """One part per device → their sum."""
        return parts if self.count == 1 else jax.lax.psum(parts, AXIS)

    def sum_all(self, parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The sums of several of one shape, in one exchange."""
        return parts if self.count == 1 else list(jax.lax.psum(jnp.stack(parts), AXIS))

    def max(self, parts: jax.Array) -> jax.Array:
        """One part per device → their largest, element by element."""
        return parts if self.count == 1 else jax.lax.pmax(parts, AXIS)

    def share(self, x: jax.Array) -> jax.Array:
        """[.., W], the same on all devices → [.., W/count], this device's."""
        if self.count == 1:
            return x
        width = x.shape[-1] // self.count
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * width, width, axis=-1)

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows of a table [V/count, H] split by tokens; ids [..] of the whole → [.., H]."""
        if self.count == 1:
            return table[ids]
        own = ids - jax.lax.axis_index(AXIS) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        rows = table[jnp.where(held, own, 0)]
        return jax.lax.psum(jnp.where(held[..., None], rows, 0), AXIS)  # all but one are zero: exact

    def choose(self, logits: jax.Array) -> jax.Array:
        """float32 [.., V/count], split by tokens → the first of the largest of all, int32 [..]."""
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.count == 1:
            return best
        value = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
        token = best + jax.lax.axis_index(AXIS).astype(jnp.int32) * logits.shape[-1]
        # One exchange instead of two. As integers: small ones would be flushed to zero as floating point numbers.
        packed = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), token])
        bits, tokens = jnp.moveaxis(jax.lax.all_gather(packed, AXIS), 0, -1)
        winner = jnp.argmax(jax.lax.bitcast_convert_type(bits, jnp.float32), axis=-1)
        return jnp.take_along_axis(tokens, winner[..., None], axis=-1)[..., 0]

    def tokens(self, width: int) -> jax.Array:
        """The tokens of this device's share of a vocabulary, `width` of them, int32."""
        own = jnp.arange(width, dtype=jnp.int32)
        return own if self.count == 1 else own + jax.lax.axis_index(AXIS).astype(jnp.int32) * width

    def pick(self, logits: jax.Array, tokens: jax.Array) -> jax.Array:
        """float32 [.., V/count], split by tokens; one token of the whole for each row, [..] → its logit [..]."""
        if self.count == 1:
            return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        own = tokens - jax.lax.axis_index(AXIS) * logits.shape[-1]
        held = (own >= 0) & (own < logits.shape[-1])
        found = jnp.take_along_axis(logits, jnp.where(held, own, 0)[..., None], axis=-1)[..., 0]
        return jax.lax.psum(jnp.where(held, found, 0), AXIS)  # all but one are zero: exact

    def largest(self, logits: jax.Array, count: int) -> Ranked:
        """float32 [.., V/devices], split by tokens → the largest `count` of all and their tokens, each [.., count].

        Descending, the first token first among equal ones.
        """
        values, tokens = find_largest(logits, min(count, logits.shape[-1]))
        if self.count == 1:
            return values, tokens
        tokens += jax.lax.axis_index(AXIS).astype(jnp.int32) * logits.shape[-1]
        # One exchange instead of two, see `choose`.
        packed = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), tokens])
        bits, tokens = jax.lax.all_gather(packed, AXIS, axis=packed.ndim - 1, tiled=True)
        values, places = find_largest(jax.lax.bitcast_convert_type(bits, jnp.float32), count)
        return values, jnp.take_along_axis(tokens, places, axis=-1)


ALONE = Shards()


def find_largest(values: jax.Array, count: int) -> Ranked:
    """The largest `count` of finite float32 [.., V] and their places, each [.., count]: the first ones of equal ones.

    One after the other, each a pass over the values: `top_k` is a sort on TPU, which takes as much memory again.
    """
    places = jnp.arange(values.shape[-1], dtype=jnp.int32)

    def find_next(last: Ranked, _: None) -> tuple[Ranked, Ranked]:
        value, place = (one[..., None] for one in last)
        left = jnp.where((values < value) | ((values == value) & (places > place)), values, -jnp.inf)
        found = left.max(axis=-1), jnp.argmax(left, axis=-1).astype(jnp.int32)
        return found, found

    beyond = jnp.full(values.shape[:-1], jnp.inf), jnp.zeros(values.shape[:-1], jnp.int32)
    _, found = jax.lax.scan(find_next, beyond, length=count)
    return jnp.moveaxis(found[0], 0, -1), jnp.moveaxis(found[1], 0, -1)


def check_shares(target: Target, draft: Draft, devices: int) -> None:
    """All that is split can be split evenly. Raises BadInput."""
    if uneven := [f"{what} {size}" for what, size in _list_shared(target, draft) if size % devices]:
        raise BadInput(
            f"{devices} devices cannot share {', '.join(uneven)} evenly; "
            f"{', '.join(str(one) for one in _list_degrees(target, draft))} can (--topology, --tensor_parallel)"
        )


def _list_shared(target: Target, draft: Draft) -> list[tuple[str, int]]:
    """What every device gets its share of, and how much there is."""
    shared = [("the draft's features", len(draft.taps) * draft.target_hidden)]
    for model, decoder in (("target", target.decoder), ("draft", draft.decoder)):
        shared += [
            (f"the {model}'s kv heads", decoder.attention.kv_heads),
            (f"the {model}'s MLP width", decoder.mlp.width),
        ]
    shared.append(("the vocabulary", target.decoder.vocab))
    return shared if draft.vocab is None else [*shared, ("the draft's own vocabulary", draft.vocab)]


def _list_degrees(target: Target, draft: Draft) -> list[int]:
    common = math.gcd(*(size for _, size in _list_shared(target, draft)))
    return [degree for degree in range(1, common + 1) if common % degree == 0]
