"""Blockwise attention computes what whole attention computes."""

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


def make_case(seed, length, end):
    """Queries, a context in slots 1 and 2 of layer 1 with huge values from `end` on, its mask, a part beside it."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, 2, 4, G, length + 2, D), np.float32)
    keys[..., end:, :] = values[..., end:, :] = 1e9
    context = KvContext(jnp.asarray(keys), jnp.asarray(values), 1, 1, B, length)
    q = jnp.asarray(rng.standard_normal((B, G, R, T, D)), jnp.float32)
    beside_part = rng.standard_normal((2, B, G, T, D)).astype(np.float32)
    mask = rng.random((B, T, length + 2)) < 0.7
    mask[..., 0] = True
    mask[..., end:] = False
    return q, context, jnp.asarray(mask), (*map(jnp.asarray, beside_part), jnp.asarray(rng.random((B, T, T)) < 0.5))


@partial(jit_quickly, static_argnames=("length", "block"))
def attend_both_ways(q, context, mask, end, parts, length, block):
    """Blockwise and whole attention."""
    context = KvContext(*context, 1, 1, B, length)
    blockwise = attend_blockwise(q, context, lambda at: mask[:, :, at], end, parts, block)
    return blockwise, attend(q, (*context.read(0, length), mask[:, :, :length]), *parts)


# Context and block: one position, blocks that fill the context, and a last block that moves back by little or much.
SHAPES = [(1, 1), (2, 1), (7, 3), (12, 4), (13, 5), (13, 12), (13, 13)]


@given(seed=st.integers(0, 99), shape=st.sampled_from(SHAPES), share=st.floats(0, 1), beside=st.booleans())
@settings(max_examples=300)
def test_attend_blockwise_equals_attend(seed, shape, share, beside):
    length, block = shape
    end = max(1, round(share * length))
    q, context, mask, beside_part = make_case(seed, length, end)
    arrays = context.keys, context.values
    found, expected = attend_both_ways(q, arrays, mask, jnp.int32(end), (beside_part,) if beside else (), length, block)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_attend_context_goes_blockwise_above_the_score_limit(monkeypatch):
    """Only whole attention reads the NaN behind `end`, and multiplies it by a weight of zero."""
    q, context, mask, _ = make_case(0, 12, 5)
    spoiled = KvContext(context.keys, context.values.at[..., 8:, :].set(jnp.nan), 1, 1, B, 12)

    def mix():
        return np.asarray(attend_context(q, spoiled, lambda at: mask[:, :, at], jnp.int32(5)))

    monkeypatch.setattr(attention, "KV_BLOCK", 4)
    scores = 4 * G * R * T * 12
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", scores)
    assert np.isnan(mix()).all()
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", scores - 1)
    expected = attend(q, (*context.read(0, 12), mask[:, :, :12]))
    np.testing.assert_allclose(mix(), expected, rtol=2e-5, atol=2e-5)
