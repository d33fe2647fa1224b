"""Which context and block positions a layer attends to: all, those of a window, or causally (see `SlidingWindow`).

B rows · T positions of a block · S context positions
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash_aot.cache.model_config.architecture import UNLIMITED_WINDOW, SlidingWindow
from dflash_aot.compile.models.layer_loop import LayerIndex

CAUSAL = SlidingWindow(UNLIMITED_WINDOW, causal=True)  # of every layer of a target


def context_mask(window: SlidingWindow | None, block: jax.Array, context: jax.Array) -> jax.Array:
    """Which context positions [B, S] the block at positions [B, T] attends to: bool [B, T, S]."""
    if window is None or not window.slides:
        return jnp.ones((1, 1, context.shape[1]), bool)
    rows = jnp.broadcast_to(block[:, :1], block.shape) if window.anchored else block
    oldest = rows - window.size + (0 if window.anchored else 1)
    return context[:, None, :] >= oldest[:, :, None]


def block_mask(window: SlidingWindow | None, block: jax.Array) -> jax.Array:
    """Which positions of the block each position of the block [B, T] attends to: bool [B, T, T]."""
    distance = block[:, :, None] - block[:, None, :]
    if window is None:
        return jnp.ones_like(distance, bool)
    near = jnp.ones_like(distance, bool) if window.anchored else jnp.abs(distance) < window.size
    return near & (distance >= 0) if window.causal else near


def window_limits(window: SlidingWindow | None) -> tuple[int, int, int, int]:
    """The same masks as `limits` of `kernels.kv_attention.attend_kv`: reach, slope, behind, ahead."""
    if window is None:
        return UNLIMITED_WINDOW, 0, UNLIMITED_WINDOW, UNLIMITED_WINDOW
    reach, slope = (window.size, 0) if window.anchored else (window.size - 1, 1)
    near = UNLIMITED_WINDOW if window.anchored else window.size - 1
    return reach, slope, near, 0 if window.causal else near


class LayerWindows:
    """The masks of one layer. In a loop over layers the index is traced, and the mask is selected on the device.

    Attributes:
        slides: whether the window of any layer hides context.
    """

    def __init__(self, windows: Sequence[SlidingWindow | None], layer: LayerIndex):
        """`windows` has one entry per layer, None for full attention."""
        self.slides = any(window is not None and window.slides for window in windows)
        self._kinds = [windows[layer]] if isinstance(layer, int) else list(dict.fromkeys(windows))
        self._kind_of_layer = None
        if len(self._kinds) > 1:
            self._kind_of_layer = jnp.array([self._kinds.index(window) for window in windows], jnp.int32)[layer]

    def context_mask(self, block: jax.Array, context: jax.Array) -> jax.Array:
        """`context_mask` of this layer."""
        return self._select(lambda window: context_mask(window, block, context))

    def block_mask(self, block: jax.Array) -> jax.Array:
        """`block_mask` of this layer."""
        return self._select(lambda window: block_mask(window, block))

    def limits(self) -> jax.Array:
        """`window_limits` of this layer, int32 [4]."""
        limits = jnp.array([window_limits(window) for window in self._kinds], jnp.int32)
        return limits[0 if self._kind_of_layer is None else self._kind_of_layer]

    def _select(self, make_mask: Callable[[SlidingWindow | None], jax.Array]) -> jax.Array:
        masks = jnp.broadcast_arrays(*map(make_mask, self._kinds))
        return masks[0] if self._kind_of_layer is None else jax.lax.select_n(self._kind_of_layer, *masks)
