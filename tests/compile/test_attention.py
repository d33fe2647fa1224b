"""Attention by blocks is attention."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.compile.models import attention
from dflash_aot.compile.models.attention import attend, attend_blockwise, attend_context
from dflash_aot.compile.models.kv_cache import KvContext
from tests.compile.quick import jit_quickly

B, T, G, R, D = 2, 3, 2, 2, 4


def make_case(seed, length, reach):
    """Queries, a context in slots 1 and 2 of layer 1, a part beside it. What lies behind `reach` must not matter."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, 2, 4, G, length + 2, D), np.float32)
    keys[..., reach:, :] = values[..., reach:, :] = 1e9
    context = KvContext(jnp.asarray(keys), jnp.asarray(values), 1, 1, B, length)
    q = jnp.asarray(rng.standard_normal((B, T, G, R, D)), jnp.float32)
    near = rng.standard_normal((2, B, G, T, D)).astype(np.float32)
    visible = rng.random((B, T, length + 2)) < 0.7
    visible[..., 0] = True
    visible[..., reach:] = False
    return q, context, jnp.asarray(visible), (*map(jnp.asarray, near), jnp.asarray(rng.random((B, T, T)) < 0.5))


@partial(jit_quickly, static_argnames=("length", "block"))
def mix_both(q, context, visible, reach, parts, length, block):
    """By blocks and in one go."""
    context = KvContext(*context, 1, 1, B, length)
    by_blocks = attend_blockwise(q, context, lambda at: visible[:, :, at], reach, parts, block)
    return by_blocks, attend(q, (*context.read(0, length), visible[:, :, :length]), *parts)


# One position and one block, blocks that fill the context and blocks of which the last slides back, by little and much.
SHAPES = [(1, 1), (2, 1), (7, 3), (12, 4), (13, 5), (13, 12), (13, 13)]


@given(seed=st.integers(0, 99), shape=st.sampled_from(SHAPES), share=st.floats(0, 1), beside=st.booleans())
@settings(max_examples=300)
def test_blocks_of_any_size_mix_what_one_go_mixes(seed, shape, share, beside):
    length, block = shape
    reach = max(1, round(share * length))
    q, context, visible, near = make_case(seed, length, reach)
    arrays = context.keys, context.values
    found, expected = mix_both(q, arrays, visible, jnp.int32(reach), (near,) if beside else (), length, block)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_context_whose_scores_are_large_goes_by_blocks(monkeypatch):
    """Told by a value that only one go meets: NaN behind the reach, where nobody looks, times nothing."""
    q, context, visible, _ = make_case(0, 12, 5)
    spoiled = KvContext(context.keys, context.values.at[..., 8:, :].set(jnp.nan), 1, 1, B, 12)

    def mix():
        return np.asarray(attend_context(q, spoiled, lambda at: visible[:, :, at], jnp.int32(5)))

    monkeypatch.setattr(attention, "KV_BLOCK", 4)
    scores = 4 * G * R * T * 12
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", scores)
    assert np.isnan(mix()).all()
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", scores - 1)
    expected = attend(q, (*context.read(0, 12), visible[:, :, :12]))
    np.testing.assert_allclose(mix(), expected, rtol=2e-5, atol=2e-5)
