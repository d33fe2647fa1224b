"""Who mixes what: softmax attention over keys and values that lie in several places.

B rows · T positions of this call · S kv positions · G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash_aot.compile.models.kv_cache import Context

MASKED = -1e30  # finite: a row that sees nothing must not become NaN
AT_ONCE = 16 * 2**20  # bytes of scores per row of the batch; more are never all in memory
BLOCK = 512  # positions that are attended to at a time then

# keys and values [B, G, S, D] and who sees them, bool, broadcastable to [B, T, S]
Part = tuple[jax.Array, jax.Array, jax.Array]
# positions [n] → who sees them, bool, broadcastable to [B, T, n]
Seen = Callable[[jax.Array], jax.Array]


def attend_context(q: jax.Array, context: Context, seen: Seen, reach: jax.Array, *near: Part) -> jax.Array:
    """Attention over what the kv arrays hold, and over `near` parts beside it: q and result [B, T, G, R, D].

    Nothing from position `reach` on, a scalar, is seen by anyone.
    """
    _, T, G, R, _ = q.shape
    if 4 * G * R * T * context.length <= AT_ONCE:
        return attend(q, (*context.read(0, context.length), seen(jnp.arange(context.length))), *near)
    return attend_by_blocks(q, context, seen, reach, near, min(BLOCK, context.length))


def attend(q: jax.Array, *parts: Part) -> jax.Array:
    """Softmax attention over the union of `parts`, without copying their keys together: q and result [B, T, G, R, D].

    Scores and softmax in float32.
    """
    scale = q.shape[-1] ** -0.5
    scores = [
        jnp.where(
            seen[:, None, None],
            jnp.einsum("BTGRD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32) * scale,
            MASKED,
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


def attend_by_blocks(
    q: jax.Array, context: Context, seen: Seen, reach: jax.Array, near: Sequence[Part], block: int
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
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        higher = jnp.maximum(peak, scores.max(axis=-1))
        faded, weights = jnp.exp(peak - higher), jnp.exp(scores - higher[..., None])
        news = jnp.einsum("BGRTS,BGSD->BGRTD", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return higher, total * faded + weights.sum(axis=-1), mixed * faded[..., None] + news

    def add_block(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        # The last block slides back to end where the context does; what it repeats is not seen twice.
        start = jnp.minimum(index * block, context.length - block)
        positions = start + jnp.arange(block)
        return add(state, *context.read(start, block), seen(positions) & (positions >= index * block))

    state = (jnp.full((B, G, R, T), MASKED), jnp.zeros((B, G, R, T)), jnp.zeros((B, G, R, T, D)))
    for part in near:
        state = add(state, *part)
    blocks = (jnp.minimum(reach, context.length) + block - 1) // block
    _, total, mixed = jax.lax.fori_loop(0, blocks, add_block, state)
    return jnp.einsum("BGRTD->BTGRD", mixed / total[..., None]).astype(q.dtype)
