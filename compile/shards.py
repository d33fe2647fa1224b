"""Tensor parallelism, spelled out: the model code runs on every device with its share of heads, MLP and vocabulary.

Megatron-LM's scheme (Shoeybi et al. 2019): of each pair of products the first is split by its outputs, the second by
its inputs, so a layer costs two sums over the devices, and nothing else is exchanged but the ends' few numbers. Said
explicitly, not left to a partitioner: what the devices exchange is what stands here.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dflash_aot.cache.architecture import Draft, Target
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.signature import AXIS
from dflash_aot.compile.multiply import multiply


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


ALONE = Shards()


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
