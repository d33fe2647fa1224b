"""Attention of blocks and of pages computes what whole attention computes; rows are written across page borders."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.cache.model_config.architecture import SlidingWindow
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models import attention
from dflash_aot.compile.models.attention import (
    attend,
    attend_blockwise,
    attend_by_page,
    attend_context,
    block_mask,
    context_mask,
)
from dflash_aot.compile.models.backend import CPU, TPU
from dflash_aot.compile.models.kv_cache import KvContext, write_rows
from dflash_aot.compile.models.layers import Rotation
from tests.compile.quick import jit_quickly

B, T, G, R, D = 2, 3, 2, 2, 4
PAGE = 3


def make_case(seed, length, end):
    """Queries, a context in layer 1 with huge values from `end` on, its mask, a part beside it."""
    rng = np.random.default_rng(seed)
    pages = -(-length // PAGE)
    tables = rng.permutation(np.arange(1, 1 + B * pages)).reshape(B, pages)
    keys, values = rng.standard_normal((2, 2, 1 + B * pages, G, PAGE, D), np.float32)
    behind = np.arange(pages * PAGE).reshape(pages, PAGE) >= end
    for pool in (keys, values):
        pool[:, 0] = 1e9
        for table in tables:
            pool[:, table] = np.where(behind[None, :, None, :, None], 1e9, pool[:, table])
    context = KvContext(jnp.asarray(keys), jnp.asarray(values), 1, jnp.asarray(tables), length)
    q = jnp.asarray(rng.standard_normal((B, G, R, T, D)), jnp.float32)
    beside_part = rng.standard_normal((2, B, G, T, D)).astype(np.float32)
    mask = rng.random((B, T, length + 8 * PAGE)) < 0.7
    mask[..., 0] = True
    mask[..., end:] = False
    return q, context, jnp.asarray(mask), (*map(jnp.asarray, beside_part), jnp.asarray(rng.random((B, T, T)) < 0.5))


def attend_whole(q, context, mask, *parts, sinks=None):
    keys, values = context.read(0, context.pages)
    return attend(q, (keys, values, mask[:, :, : keys.shape[2]]), *parts, sinks=sinks)


@partial(jit_quickly, static_argnames=("length", "pages"))
def attend_every_way(q, context, mask, end, parts, sinks, length, pages):
    context, look = KvContext(*context, length), lambda at: mask[:, :, at]
    blockwise = attend_blockwise(q, context, look, end, parts, pages, sinks)
    by_page = attend_by_page(q, context, look, jnp.broadcast_to(end, B), *parts, sinks=sinks)
    return blockwise, by_page, attend_whole(q, context, mask, *parts, sinks=sinks)


# Length and pages of a block: blocks that fill the context, and a last block that ends behind it.
SHAPES = [(6, 1), (7, 2), (13, 6)]


@given(seed=st.integers(0, 99), shape=st.sampled_from(SHAPES), share=st.floats(0, 1), beside=st.booleans())
@settings(max_examples=80)
def test_attention_of_blocks_and_of_pages_equals_attend(seed, shape, share, beside):
    length, pages = shape
    end = max(1, round(share * length))
    q, context, mask, beside_part = make_case(seed, length, end)
    arrays, parts = (context.keys, context.values, context.layer, context.tables), (beside_part,) if beside else ()
    sinks = jax.random.normal(jax.random.key(seed), (G, R)) if seed % 2 else None
    *found, expected = attend_every_way(q, arrays, mask, jnp.int32(end), parts, sinks, length, pages)
    for one in found:
        np.testing.assert_allclose(one, expected, rtol=2e-5, atol=2e-5)


@partial(jit_quickly, static_argnames=())
def attend_pages_and_whole(q, context, mask, ends, part):
    context, look = KvContext(*context, 4 * PAGE), lambda at: mask[:, :, at]
    return attend_by_page(q, context, look, ends, part), attend_whole(q, context, mask, part)


@given(ends=st.lists(st.integers(0, 4 * PAGE), min_size=5, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_rows_read_no_page_after_their_own_end(ends, seed):
    """What lies in other pages is NaN: multiplied by a weight of zero it would show."""
    rng, rows, length = np.random.default_rng(seed), len(ends), 4 * PAGE
    tables = rng.permutation(np.arange(1, 1 + 4 * rows)).reshape(rows, 4)
    keys, values = rng.standard_normal((2, 1, 1 + 4 * rows, G, PAGE, D), np.float32)
    part = *rng.standard_normal((2, rows, G, T, D), np.float32), np.ones((rows, T, T), bool)
    q = rng.standard_normal((rows, G, R, T, D), np.float32)
    mask = np.broadcast_to(np.arange(length) < np.array(ends)[:, None, None], (rows, T, length))
    owned = [table[: -(-end // PAGE)] for table, end in zip(tables, ends, strict=True)]
    spoiled = [pool.copy() for pool in (keys, values)]
    for pool in spoiled:
        pool[:, np.setdiff1d(np.arange(1 + 4 * rows), np.concatenate(owned))] = np.nan
    _, expected = attend_pages_and_whole(q, (keys, values, 0, tables), mask, np.array(ends), part)
    found, _ = attend_pages_and_whole(q, (*spoiled, 0, tables), mask, np.array(ends), part)
    read = np.array(ends) > 0  # a row without pages reads the first of its table
    np.testing.assert_allclose(found[read], expected[read], rtol=2e-5, atol=2e-5)


def test_attend_context_goes_blockwise_above_the_score_limit(monkeypatch):
    """Only whole attention reads the NaN behind `end`, and multiplies it by a weight of zero."""
    q, context, mask, _ = make_case(0, 12, 5)
    spoiled = replace(context, values=context.values.at[:, context.tables[:, 3]].set(jnp.nan))

    def mix(attend=attend_context):
        return np.asarray(attend(q, spoiled, lambda at: mask[:, :, at], jnp.full(B, 5)))

    monkeypatch.setattr(attention, "KV_BLOCK", 2 * PAGE)
    scores = 4 * G * R * T * 12
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", scores)
    assert np.isnan(mix()).all()
    expected = attend_whole(q, context, mask)
    np.testing.assert_allclose(mix(attend_by_page), expected, rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", scores - 1)
    np.testing.assert_allclose(mix(), expected, rtol=2e-5, atol=2e-5)


@partial(jit_quickly, static_argnames=())
def write(pool, rows, tables, starts):
    return write_rows(pool, rows, tables, starts)


@given(page=st.integers(1, 5), width=st.sampled_from([1, 2, 5, 11]), data=st.data())
@settings(max_examples=60)
def test_rows_are_written_across_page_borders(page, width, data):
    entries, rng = 4, np.random.default_rng(0)
    starts = [data.draw(st.integers(0, entries * page)) for _ in range(B)]
    tables = rng.permutation(np.arange(1, 1 + B * entries)).reshape(B, entries)
    pool = rng.standard_normal((2, 1 + B * entries, G, page, D)).astype(np.float32)
    rows = rng.standard_normal((2, B, G, width, D)).astype(np.float32)
    found = np.asarray(write(pool, rows, tables, np.array(starts)))
    for layer, row in np.ndindex(2, B):
        table, start = tables[row], starts[row]
        before, after = (np.concatenate([state[layer, one] for one in table], axis=1) for state in (pool, found))
        np.testing.assert_array_equal(after[:, :start], before[:, :start])
        np.testing.assert_array_equal(after[:, start : start + width], rows[layer, row][:, : entries * page - start])


@pytest.mark.parametrize("rotated", [128, 32])
def test_rotation_by_product_equals_rotation_by_slices(rotated):
    """Of whole heads, and of a part of them."""
    positions = 7 + jnp.arange(5)[None]
    for dtype in ["float32", "bfloat16"]:
        x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 2, 3, 5, 128)), dtype)
        with jax.default_matmul_precision("highest"):  # as programs for TPU are lowered
            rope = Rope(1e4, rotated)
            found, expected = (Rotation(rope, positions, x.dtype, one, 128)(x) for one in (TPU, CPU))
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, expected)


WIDEST, LONGEST = 16, 70  # block and context


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
