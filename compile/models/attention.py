"""Softmax attention over the kv cache and over keys and values beside it, whole or blockwise.

B rows · T positions of this call · S kv positions · G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash_aot.compile.models.kv_cache import KvContext
from dflash_aot.compile.models.rounding import round_to

MASKED_SCORE = -1e30  # finite, so that a row whose mask is all False gives no NaN
MAX_SCORE_BYTES = 16 * 2**20  # of a row's scores, float32; calls with more attend blockwise
KV_BLOCK = 512  # kv positions per step of blockwise attention

# keys [B, G, S, D], values [B, G, S, D], mask: bool, broadcastable to [B, T, S]
MaskedKeyValues = tuple[jax.Array, jax.Array, jax.Array]
# kv positions [n] → mask: bool, broadcastable to [B, T, n]
MaskOfPositions = Callable[[jax.Array], jax.Array]
# softmax so far: largest score [B, G, R, T], sum of weights [B, G, R, T], weighted values [B, G, R, T, D]
SoftmaxState = tuple[jax.Array, jax.Array, jax.Array]


def attend_context(
    q: jax.Array, context: KvContext, mask: MaskOfPositions, end: jax.Array, *beside: MaskedKeyValues
) -> jax.Array:
    """Attention over a kv context and over the keys and values `beside` it: q and result [B, G, R, T, D].

    `end` is a scalar: `mask` is False for every kv position from `end` on.
    """
    _, G, R, T, _ = q.shape
    if 4 * G * R * T * context.length <= MAX_SCORE_BYTES:
        return attend(q, (*context.read(0, context.length), mask(jnp.arange(context.length))), *beside)
    return attend_blockwise(q, context, mask, end, beside, min(KV_BLOCK, context.length))


def attend(q: jax.Array, *parts: MaskedKeyValues) -> jax.Array:
    """Softmax attention over the union of `parts`, whose keys are not concatenated: q and result [B, G, R, T, D].

    Scores and softmax are float32.
    """
    scale = q.shape[-1] ** -0.5
    scores = [
        jnp.where(
            mask[:, None, None],
            jnp.einsum("BGRTD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32) * scale,
            MASKED_SCORE,
        )
        for keys, _, mask in parts
    ]
    weights = round_to(jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1), q.dtype)
    start, mixed = 0, jnp.zeros((), jnp.float32)
    for keys, values, _ in parts:
        part = jax.lax.slice_in_dim(weights, start, start + keys.shape[2], axis=-1)
        mixed = mixed + jnp.einsum("BGRTS,BGSD->BGRTD", part, values, preferred_element_type=jnp.float32)
        start += keys.shape[2]
    return round_to(mixed, q.dtype)


def attend_blockwise(
    q: jax.Array,
    context: KvContext,
    mask: MaskOfPositions,
    end: jax.Array,
    beside: Sequence[MaskedKeyValues],
    block: int,
) -> jax.Array:
    """`attend` with an online softmax (Milakov & Gimelshein 2018), which holds the scores of `block` positions only.

    Blocks from position `end` on are skipped, so the time depends on the prompt's length and not on the bucket's.
    """
    B, G, R, T, D = q.shape
    scale = D**-0.5

    def add(state: SoftmaxState, keys: jax.Array, values: jax.Array, mask: jax.Array) -> SoftmaxState:
        peak, total, mixed = state
        scores = jnp.einsum("BGRTD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(mask[:, None, None], scores, MASKED_SCORE)
        higher = jnp.maximum(peak, scores.max(axis=-1))
        faded, weights = jnp.exp(peak - higher), jnp.exp(scores - higher[..., None])
        news = jnp.einsum("BGRTS,BGSD->BGRTD", round_to(weights, q.dtype), values, preferred_element_type=jnp.float32)
        return higher, total * faded + weights.sum(axis=-1), mixed * faded[..., None] + news

    def add_block(index: jax.Array, state: SoftmaxState) -> SoftmaxState:
        # The last block is moved back to end with the context. Positions of the block before it are masked.
        start = jnp.minimum(index * block, context.length - block)
        positions = start + jnp.arange(block)
        return add(state, *context.read(start, block), mask(positions) & (positions >= index * block))

    state = (jnp.full((B, G, R, T), MASKED_SCORE), jnp.zeros((B, G, R, T)), jnp.zeros((B, G, R, T, D)))
    for part in beside:
        state = add(state, *part)
    blocks = (jnp.minimum(end, context.length) + block - 1) // block
    _, total, mixed = jax.lax.fori_loop(0, blocks, add_block, state)
    return round_to(mixed / total[..., None], q.dtype)
