"""The attention kernel, interpreted on CPU with a check for races, computes what `attend` computes."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.cache.model_config.architecture import CAUSAL, SlidingWindow
from dflash_aot.compile.kernels.kernel_device import AttendingBlock
from dflash_aot.compile.kernels.kv_attention import (
    AttendKvColumns,
    AttendKvPages,
    AttentionSizes,
    PagedKv,
    Tiling,
    attend_kv,
    choose_tiling,
)
from dflash_aot.compile.models.attention import attend, block_mask, context_mask, window_limits
from dflash_aot.compile.models.backend import Kernels
from tests.compile.quick import jit_quickly

INTERPRETED = Kernels("", 1, pltpu.InterpretParams(detect_races=True))
LAYERS, SLOTS, COLUMNS = 2, 4, AttendKvColumns


@dataclass(frozen=True)
class Case:
    """Shapes that are compiled once, for any lengths, pages and windows."""

    tiling: Tiling
    group: int
    T: int
    length: int
    windowed: bool = False
    kv_heads: int = 2
    D: int = 8
    rows: int = 3
    form: type[AttendKvPages] = AttendKvPages
    sinks: bool = False

    @cached_property
    def pages(self) -> int:
        return -(-self.length // self.tiling.page)

    @cached_property
    def run(self):
        def call(q, keys, values, table, starts, own, limits):
            kv = PagedKv(keys, values, jnp.int32(1), table, self.pages, self.length)
            block = AttendingBlock(q, *own, starts, limits, self.windowed, self.make_sinks())
            return attend_kv(block, kv, self.tiling, INTERPRETED.interpret, self.form)

        return jit_quickly(call)

    def make_sinks(self):
        return jnp.linspace(-3, 6, self.kv_heads * self.group).reshape(self.kv_heads, -1) if self.sinks else None

    def expect(self, q, keys, values, table, starts, own, window):
        """By `attend`, on a context whose pages are put in order."""
        page, width = self.tiling.page, self.pages * self.tiling.page
        at = np.arange(width)
        slot, position = np.divmod(np.asarray(table)[:, at // page], self.pages)
        position = position * page + at % page
        context = [array[1][slot, :, position].transpose(0, 2, 1, 3) for array in (keys, values)]
        block = starts[:, None] + np.arange(self.T)
        seen = (at < starts[:, None, None]) & (at < self.length)
        before = (*map(np.nan_to_num, context), seen & context_mask(window, jnp.asarray(block), at[None]))
        own = *own, block_mask(window, jnp.asarray(block))
        return attend(q, before, own, sinks=self.make_sinks())


CASES = {
    "verify: one head group, blocks of two pages": Case(Tiling(2, 4, 16, 2), group=2, T=4, length=80),
    "verify: one token, head groups, pages beyond the length": Case(Tiling(1, 1, 16, 3), group=3, T=1, length=72),
    "prefill: tiles of queries": Case(Tiling(1, 8, 16, 2), group=3, T=24, length=64, rows=1, sinks=True),
    "prefill: a block longer than a block of pages": Case(Tiling(1, 8, 16, 1), group=1, T=40, length=64, rows=1),
    "draft: with windows": Case(Tiling(2, 6, 16, 2), group=1, T=6, length=80, windowed=True),
    "draft, narrow": Case(Tiling(2, 6, 16, 2), group=1, T=6, length=80, windowed=True, D=80, form=COLUMNS),
    "verify, narrow": Case(Tiling(1, 4, 16, 2), 3, T=4, length=80, windowed=True, D=80, form=COLUMNS, sinks=True),
    "prefill, narrow": Case(Tiling(1, 8, 16, 1), group=2, T=24, length=64, rows=1, D=96, form=COLUMNS),
}
UNLIMITED = [None, CAUSAL]
SIZES = product((1, 4, 37), (True, False), (True, False))  # with `causal` and `anchored`
WINDOWS = [*UNLIMITED, *(SlidingWindow(*one) for one in SIZES)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_attend_and_reads_no_other_page(case, capfd):
    """At random lengths and pages, in each kind of window. Pages that no query sees are NaN."""

    @given(data=st.data(), seed=st.integers(0, 99))
    @settings(max_examples=6)
    def check(data, seed):
        rng, page = np.random.default_rng(seed), case.tiling.page
        starts = np.array([data.draw(st.integers(0, case.length)) for _ in range(case.rows)], np.int32)
        window = data.draw(st.sampled_from(WINDOWS if case.windowed else UNLIMITED))
        table = rng.permutation(SLOTS * case.pages)[: case.rows * case.pages].reshape(case.rows, case.pages)
        shape = (2, LAYERS, SLOTS, case.kv_heads, case.pages * page, case.D)
        filled, kv = rng.standard_normal(shape, np.float32), np.full(shape, np.nan, np.float32)
        for row, start in enumerate(starts):
            reach = 0 if window is None else max(0, start - window.size + (0 if window.anchored else 1))
            for index in range(reach // page, -(-start // page)):
                slot, at = divmod(int(table[row, index]), case.pages)
                part = (slice(None), 1, slot, slice(None), slice(at * page, (at + 1) * page))
                kv[part] = filled[part]
        q = rng.standard_normal((case.rows, case.kv_heads, case.group, case.T, case.D), np.float32)
        own = tuple(rng.standard_normal((2, case.rows, case.kv_heads, case.T, case.D), np.float32))
        found = case.run(q, *kv, table.astype(np.int32), starts, own, jnp.array(window_limits(window), jnp.int32))
        np.testing.assert_allclose(found, case.expect(q, *kv, table, starts, own, window), rtol=1e-5, atol=1e-5)

    check()
    assert "RACE" not in capfd.readouterr().out


QWEN3_4B_VERIFY = AttentionSizes(16, kv_heads=8, group=4, head_dim=128, itemsize=2, length=4096, kv_page=128)


def test_choose_tiling_divides_heads_queries_and_pages():
    for sizes, cores, expected in [
        (QWEN3_4B_VERIFY, 1, Tiling(8, 16, 128, 4)),
        (QWEN3_4B_VERIFY, 2, Tiling(4, 16, 128, 4)),  # the cores share the heads
        (replace(QWEN3_4B_VERIFY, kv_heads=1), 2, Tiling(1, 16, 128, 4)),
        (replace(QWEN3_4B_VERIFY, queries=1000), 1, Tiling(1, 200, 128, 4)),  # tiles of whole registers
        (replace(QWEN3_4B_VERIFY, queries=509), 1, None),  # prime: no tile divides it
        (replace(QWEN3_4B_VERIFY, queries=6144), 1, Tiling(1, 192, 128, 4)),  # smaller, because the block is in VMEM
        (replace(QWEN3_4B_VERIFY, queries=2048, head_dim=256), 1, Tiling(1, 128, 128, 4)),
        (replace(QWEN3_4B_VERIFY, queries=16384), 1, None),  # a block of 16 MB
        (replace(QWEN3_4B_VERIFY, kv_page=256), 1, Tiling(8, 16, 128, 4)),  # a page is copied in two parts
        (replace(QWEN3_4B_VERIFY, kv_page=48), 1, Tiling(8, 16, 16, 32)),
        (replace(QWEN3_4B_VERIFY, length=100), 1, Tiling(8, 16, 128, 1)),
        (replace(QWEN3_4B_VERIFY, group=8, queries=8, head_dim=64, kv_page=256), 1, Tiling(8, 8, 128, 4)),
    ]:
        assert choose_tiling(sizes, cores) == expected
