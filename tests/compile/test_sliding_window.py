"""Sliding-window masks of draft layers, in all four readings of a window."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dflash_aot.cache.model_config.architecture import SlidingWindow
from dflash_aot.compile.models.attention import block_mask, context_mask

WIDEST, LONGEST = 16, 70  # block and context
READINGS = {
    "swa_causal": SlidingWindow(20, causal=True),
    "swa_flash_window": SlidingWindow(20, causal=False),
    "speculators_causal": SlidingWindow(20, causal=True, anchored=True),
    "speculators_noncausal": SlidingWindow(20, causal=False, anchored=True),
}


def sees(window, start, query, key):
    """The rules for one query and one key; `start` is the position of the anchor."""
    if window is None:
        return True
    in_block = key >= start
    if window.anchored:
        return (key <= query or not window.causal) if in_block else key >= start - window.size
    return query - window.size < key <= query if window.causal else query - window.size < key < query + window.size


def mask(window, start, block):
    """bool [block, start + block]: context, then block. Cut from one large shape, so that JAX compiles once."""
    positions, context = start + np.arange(WIDEST)[None], np.arange(LONGEST)[None]
    of_context = np.broadcast_to(context_mask(window, positions, context), (1, WIDEST, LONGEST))
    of_block = block_mask(window, positions)
    return np.concatenate([of_context[0, :block, :start], of_block[0, :block, :block]], axis=-1)


@given(
    window=st.none() | st.builds(SlidingWindow, st.integers(1, 12), st.booleans(), st.booleans()),
    start=st.integers(1, 30),
    block=st.integers(1, 9),
)
@settings(deadline=None)
def test_masks_equal_a_loop_over_positions(window, start, block):
    rows, keys = range(start, start + block), range(start + block)
    assert mask(window, start, block).tolist() == [[sees(window, start, q, k) for k in keys] for q in rows]


def test_rows_of_a_batch_have_their_own_windows():
    window, starts = SlidingWindow(4, causal=True), (3, 11)
    positions = jnp.array([range(start, start + 4) for start in starts])
    seen = context_mask(window, positions, jnp.arange(11)[None])
    for row, start in enumerate(starts):
        assert seen[row, :, :start].tolist() == mask(window, start, 4)[:, :start].tolist()


def test_masks_equal_those_of_the_reference(golden_directory):
    masks = load_file(golden_directory / "qwen3-tiny-swa" / "attention_masks.safetensors")
    for reading, window in READINGS.items():
        for start in (5, 30, 70):
            expected = masks[f"{reading}.ctx{start}"]
            assert (mask(window, start, len(expected)) == expected.astype(bool)).all(), (reading, start)
