"""Who mixes what: softmax attention over keys and values that lie in several places.

B rows · T positions of this call · S kv positions · G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash_aot.compile.models.kv_cache import KvContext

MASKED_SCORE = -1e30  # finite: a row that sees nothing must not become NaN
MAX_SCORE_BYTES = 16 * 2**20  # bytes of scores per row of the batch; more are never all in memory
KV_BLOCK = 512  # positions that are attended to at a time then

# keys and values [B, G, S, D] and who sees them, bool, broadcastable to [B, T, S]
MaskedKeyValues = tuple[jax.Array, jax.Array, jax.Array]
# positions [n] → who sees them, bool, broadcastable to [B, T, n]
MaskOfPositions = Callable[[jax.Array], jax.Array]


def attend_context(
    q: jax.Array, context: KvContext, seen: MaskOfPositions, reach: jax.Array, *near: MaskedKeyValues
) -> jax.Array:
    """Attention over what the kv arrays hold, and over `near` parts beside it: q and result [B, T, G, R, D].

    Nothing from position `reach` on, a scalar, is seen by anyone.
    """
    _, T, G, R, _ = q.shape
    if 4 * G * R * T * context.length <= MAX_SCORE_BYTES:
        return attend(q, (*context.read(0, context.length), seen(jnp.arange(context.length))), *near)
    return attend_blockwise(q, context, seen, reach, near, min(KV_BLOCK, context.length))


def attend(q: jax.Array, *parts: MaskedKeyValues) -> jax.Array:
    """Softmax attention over the union of `parts`, without copying their keys together: q and result [B, T, G, R, D].

    Scores and softmax in float32.
    """
    scale = q.shape[-1] ** -0.5
    scores = [
        jnp.where(
            seen[:, None, None],
            jnp.einsum("BTGRD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32) * scale,
            MASKED_SCORE,
        )
        for keys, _, seen in parts
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    start, mixed = 0, jnp.zeros((), q.dtype)
    for keys, values, _ in parts:
        part = jax.lax.slice_in_dim(weights, start, start + keys.shape[2], axis=-1)
        mixed = mixed + jnp.einsum("BGRTS,BGSD->BTGRD", part, values)
        start += keys.shape[2]
    return mixed


def attend_blockwise(
    q: jax.Array,
    context: KvContext,
    seen: MaskOfPositions,
    reach: jax.Array,
    near: Sequence[MaskedKeyValues],
    block: int,
) -> jax.Array:
    """`attend` without ever holding the scores of more than `block` positions (Milakov & Gimelshein 2018).

    Blocks behind `reach` are not looked at: a short prompt in a long bucket costs what it is long.
    """
    B, T, G, R, D = q.shape
    scale = D**-0.5

    def add(
        state: tuple[jax.Array, jax.Array, jax.Array], keys: jax.Array, values: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, mixed = state
        scores = jnp.einsum("BTGRD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(seen[:, None, None], scores, MASKED_SCORE)
        higher = jnp.maximum(peak, scores.max(axis=-1))
        faded, weights = jnp.exp(peak - higher), jnp.exp(scores - higher[..., None])
        news = jnp.einsum("BGRTS,BGSD->BGRTD", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return higher, total * faded + weights.sum(axis=-1), mixed * faded[..., None] + news

    def add_block(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        # The last block slides back to end where the context does; what it repeats is not seen twice.
        start = jnp.minimum(index * block, context.length - block)
        positions = start + jnp.arange(block)
        return add(state, *context.read(start, block), seen(positions) & (positions >= index * block))

    state = (jnp.full((B, G, R, T), MASKED_SCORE), jnp.zeros((B, G, R, T)), jnp.zeros((B, G, R, T, D)))
    for part in near:
        state = add(state, *part)
    blocks = (jnp.minimum(reach, context.length) + block - 1) // block
    _, total, mixed = jax.lax.fori_loop(0, blocks, add_block, state)
    return jnp.einsum("BGRTD->BTGRD", mixed / total[..., None]).astype(q.dtype)
