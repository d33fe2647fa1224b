"""Softmax attention over the kv cache and over the keys and values of a block, whole or blockwise, with windows.

B rows · T positions of this call · S kv positions · G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from dflash_aot.cache.model_config.architecture import UNLIMITED_WINDOW, SlidingWindow
from dflash_aot.compile.models.kv_cache import KvContext
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.matmul import round_to

# -- masks: the context and block positions that a layer attends to
#
# These are all positions, those of a window, or those up to the query (see `SlidingWindow`).
#
# B rows · T positions of a block · S context positions


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
            self._kind_of_layer = jnp.array(
                [self._kinds.index(window) for window in windows], jnp.int32
            )[layer]

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
        return (
            masks[0]
            if self._kind_of_layer is None
            else jax.lax.select_n(self._kind_of_layer, *masks)
        )


# -- attention

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
    q: jax.Array,
    context: KvContext,
    mask: MaskOfPositions,
    ends: jax.Array,
    *beside: MaskedKeyValues,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention over a kv context and over the keys and values `beside` it: q and result [B, G, R, T, D].

    `ends` int32 [B]: `mask` is False for every kv position of a row from its end on. `sinks` as of `attend`.
    """
    _, G, R, T, _ = q.shape
    scored = context.length + sum(part[0].shape[2] for part in beside)
    if 4 * G * R * T * scored <= MAX_SCORE_BYTES:
        keys, values = context.read(0, context.pages)
        whole = keys, values, mask(jnp.arange(keys.shape[2]))
        return attend(q, whole, *beside, sinks=sinks)
    pages = max(1, KV_BLOCK // context.page)
    return attend_blockwise(q, context, mask, ends.max(), beside, pages, sinks)


def attend(q: jax.Array, *parts: MaskedKeyValues, sinks: jax.Array | None = None) -> jax.Array:
    """Softmax attention over the union of `parts`, whose keys are not concatenated: q and result [B, G, R, T, D].

    Scores and softmax are float32. `sinks`, float32 [G, R], are scores of every row that have no value (gpt-oss).
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
    if sinks is not None:
        scores.append(_spread_sinks(q, sinks)[..., None])
    weights = round_to(jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1), q.dtype)
    start = 0
    mixed = jnp.zeros((), jnp.float32)
    for keys, values, _ in parts:
        part = jax.lax.slice_in_dim(weights, start, start + keys.shape[2], axis=-1)
        mixed = mixed + jnp.einsum(
            "BGRTS,BGSD->BGRTD", part, values, preferred_element_type=jnp.float32
        )
        start += keys.shape[2]
    return round_to(mixed, q.dtype)


def attend_by_page(
    q: jax.Array,
    context: KvContext,
    mask: MaskOfPositions,
    ends: jax.Array,
    *beside: MaskedKeyValues,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`attend_context` one page at a time: of all rows as long as half have one, then of each row up to its end.

    On CPU, where XLA copies what it gathers: 0.2 to 0.6 of the time of `attend` over contiguous positions.
    """
    B = q.shape[0]
    page = context.page
    pages = jnp.minimum((ends + page - 1) // page, context.pages)
    shared = jnp.sort(pages)[B // 2] if B > 1 else jnp.int32(0)
    state = _start_softmax(q, sinks)
    for part in _divide(beside):
        state = _add_to_softmax(q, state, *part)

    def look(entry: jax.Array) -> jax.Array:
        return mask(entry * page + jnp.arange(page))

    def add_shared(entry: jax.Array, state: SoftmaxState) -> SoftmaxState:
        # A row without this page reads its last one again, all masked: never what another row left behind.
        own = jnp.minimum(entry, jnp.maximum(pages - 1, 0))
        return _add_to_softmax(q, state, *context.read_pages(own), look(entry))

    def add_row(row: jax.Array, state: SoftmaxState) -> SoftmaxState:
        def take(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(jnp.broadcast_to(x, (B, *x.shape[1:])), row, 1)

        def add_page(entry: jax.Array, own: SoftmaxState) -> SoftmaxState:
            return _add_to_softmax(take(q), own, *context.read_page(row, entry), take(look(entry)))

        own = jax.lax.fori_loop(shared, pages[row], add_page, jax.tree.map(take, state))
        return jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, row, 0), state, own
        )

    state = jax.lax.fori_loop(0, shared, add_shared, state)
    state = jax.lax.fori_loop(0, B, add_row, state)
    return _finish_softmax(state, q.dtype)


def attend_blockwise(
    q: jax.Array,
    context: KvContext,
    mask: MaskOfPositions,
    end: jax.Array,
    beside: Sequence[MaskedKeyValues],
    pages: int,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`attend` with an online softmax, which holds the scores of `pages` pages of each row only.

    Blocks from position `end` on are skipped, so the time depends on the prompt's length and not on the bucket's.
    """
    block = pages * context.page

    def add_block(index: jax.Array, state: SoftmaxState) -> SoftmaxState:
        positions = index * block + jnp.arange(block)
        return _add_to_softmax(q, state, *context.read(index * pages, pages), mask(positions))

    state = _start_softmax(q, sinks)
    for part in _divide(beside):
        state = _add_to_softmax(q, state, *part)
    blocks = (jnp.minimum(end, context.length) + block - 1) // block
    return _finish_softmax(jax.lax.fori_loop(0, blocks, add_block, state), q.dtype)


def _divide(parts: Sequence[MaskedKeyValues]) -> Iterator[MaskedKeyValues]:
    """The same keys and values in parts of at most KV_BLOCK positions, so that their scores stay small."""
    for keys, values, mask in parts:
        for start in range(0, keys.shape[2], KV_BLOCK):
            at = slice(start, start + KV_BLOCK)
            yield keys[:, :, at], values[:, :, at], mask[..., at]


# -- the online softmax (Milakov & Gimelshein 2018)


def _spread_sinks(q: jax.Array, sinks: jax.Array) -> jax.Array:
    """Sinks [G, R] for each row of q [B, G, R, T, D]: [B, G, R, T]."""
    return jnp.broadcast_to(sinks[:, :, None], q.shape[:-1])


def _start_softmax(q: jax.Array, sinks: jax.Array | None) -> SoftmaxState:
    *shape, _ = q.shape
    if sinks is not None:
        return _spread_sinks(q, sinks), jnp.ones(shape), jnp.zeros(q.shape)
    return jnp.full(shape, MASKED_SCORE), jnp.zeros(shape), jnp.zeros(q.shape)


def _add_to_softmax(
    q: jax.Array, state: SoftmaxState, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> SoftmaxState:
    peak, total, mixed = state
    scores = (
        jnp.einsum("BGRTD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32)
        * q.shape[-1] ** -0.5
    )
    scores = jnp.where(mask[:, None, None], scores, MASKED_SCORE)
    higher = jnp.maximum(peak, scores.max(axis=-1))
    faded = jnp.exp(peak - higher)
    weights = jnp.exp(scores - higher[..., None])
    news = jnp.einsum(
        "BGRTS,BGSD->BGRTD", round_to(weights, q.dtype), values, preferred_element_type=jnp.float32
    )
    return higher, total * faded + weights.sum(axis=-1), mixed * faded[..., None] + news


def _finish_softmax(state: SoftmaxState, dtype: jnp.dtype) -> jax.Array:
    _, total, mixed = state
    return round_to(mixed / total[..., None], dtype)
