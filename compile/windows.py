"""Which positions a layer of the draft sees: the readings of a sliding window (see `Window`)."""

import jax
import jax.numpy as jnp

from dflash_aot.cache.architecture import Window


def context_seen(window: Window | None, block: jax.Array, context: jax.Array) -> jax.Array:
    """What the rows of a block at positions [B, T] see of context positions [B, S]: bool [B, T, S]."""
    if window is None:
        return jnp.ones((1, 1, context.shape[1]), bool)
    rows = jnp.broadcast_to(block[:, :1], block.shape) if window.anchored else block
    oldest = rows - window.size + (0 if window.anchored else 1)
    return context[:, None, :] >= oldest[:, :, None]


def block_seen(window: Window | None, block: jax.Array) -> jax.Array:
    """What the rows of a block at positions [B, T] see of each other: bool [B, T, T]."""
    distance = block[:, :, None] - block[:, None, :]
    if window is None:
        return jnp.ones_like(distance, bool)
    near = jnp.ones_like(distance, bool) if window.anchored else jnp.abs(distance) < window.size
    return near & (distance >= 0) if window.causal else near
