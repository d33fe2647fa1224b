"""Attention over the kv arrays as a Pallas TPU kernel: each row reads the kv pages up to its own length, and no others.

XLA's operations (`models.attention`) read the whole bucket for every row, and write masked scores to main memory. Here
pages are copied to VMEM while the block of pages before them is computed, and scores stay in VMEM (FlashAttention, Dao
et al. 2022; pages as in vLLM, Kwon et al. 2023).

Heads that fill no whole vector registers lie along the columns of pages of LANES positions, so that nothing is padded.

B rows · T positions of this call · G kv heads · R query heads per kv head · D head width
L layers · N pages of the pool · C positions of a page · M query rows of a kv head in a grid step
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.compile.kernels.kernel import (
    DEFAULT_VMEM,
    DTYPES,
    Kernel,
    Launch,
    Operand,
    describe_operands,
    find_largest_divisor,
    multiply,
)
from dflash_aot.compile.kernels.kernel_device import (
    LANES,
    PAGES,
    SUBLANES,
    AttendingBlock,
    KernelDevice,
    round_up,
)

MASKED_SCORE = -1e30  # finite, so that masked positions give no NaN
BLOCK = 512  # kv positions
MAX_QUERY_ROWS = 1024  # of a grid step: query heads times positions
VMEM_BYTES = DEFAULT_VMEM - 4 * 2**20  # sinks take at most 1 MiB of the rest


# -- tiling: how much of the work one grid step takes


@dataclass(frozen=True)
class Tiling:
    """How the attention kernel divides its work.

    Attributes:
        heads: kv heads of a grid step.
        queries: positions of this call in a grid step.
        page: kv positions of the unit of copies: a page of the pools, or a part of one.
        pages: of these in a block, the unit of computation.
    """

    heads: int
    queries: int
    page: int
    pages: int

    @property
    def block(self) -> int:
        """kv positions of a block."""
        return self.page * self.pages


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a call of the attention kernel on one device.

    Attributes:
        queries: positions of the call.
        kv_heads: kv heads of the device.
        group: query heads per kv head.
        head_dim: width of a head.
        itemsize: bytes of an element.
        length: kv positions that rows may attend to.
        kv_page: positions of a page of the kv pools.
    """

    queries: int
    kv_heads: int
    group: int
    head_dim: int
    itemsize: int
    length: int
    kv_page: int

    @property
    def kernel(self) -> "type[AttendKvPages]":
        """The kernel for these sizes: a TPU lays out a page so that its memory tiles are padded least."""
        narrow = self.head_dim % LANES > 0 and self.head_dim % PAGES[-1] == 0
        return AttendKvColumns if narrow and self.kv_page % LANES == 0 else AttendKvPages

    def count_vmem(self, tiling: Tiling) -> int:
        """Bytes of VMEM that the kernel takes with a tiling."""
        G, D = self.kv_heads, self.head_dim
        rows = round_up(self.group * tiling.queries, SUBLANES)
        own = round_up(self.queries, 2 * SUBLANES)
        page = self.kernel.order(self.kv_page, D)
        arrays = [(1, G, 1, rows, D), *[(1, G, own, D)] * 2, *[(1, 1, G, *page)] * 2]
        operands = describe_operands((jnp.int32, [(1,)] * 4), (DTYPES[self.itemsize], arrays))
        kernel = self.kernel(tiling, 1, self.length, self.queries, windowed=False, scale=1)
        return kernel.count_vmem(*operands)


def choose_tiling(sizes: AttentionSizes, cores: int) -> Tiling | None:
    """The tiling for a device with `cores` TensorCores; None where the kernel does not fit the sizes.

    It does not fit where no part of PAGES divides a page of the pools, or a tile of queries exceeds VMEM.
    """
    page = next((page for page in PAGES if sizes.kv_page % page == 0), None)
    if page is None:
        return None
    pages = max(1, min(BLOCK, round_up(sizes.length, page)) // page)

    def fits(queries: int, heads: int) -> bool:
        rows = heads * sizes.group * queries
        vmem = sizes.count_vmem(Tiling(heads, queries, page, pages))
        divided = sizes.kv_heads // heads >= min(cores, sizes.kv_heads)
        whole = queries == sizes.queries or queries % SUBLANES == 0
        return whole and divided and rows <= MAX_QUERY_ROWS and vmem <= VMEM_BYTES

    # The largest tile of queries first: each of them reads the kv again.
    queries = find_largest_divisor(sizes.queries, lambda size: fits(size, 1))
    if queries is None:
        return None
    heads = find_largest_divisor(sizes.kv_heads, partial(fits, queries))
    assert heads is not None
    return Tiling(heads, queries, page, pages)


# -- the call


@dataclass(frozen=True)
class PagedKv:
    """The kv pools of a model, and where each row's pages lie in them.

    The kernel copies parts of pages: `Tiling.page` positions each.

    Attributes:
        keys: pool [L, N, G, C, D].
        values: pool [L, N, G, C, D].
        layer: the layer that is read, int32 scalar.
        table: int32 [B, parts of the bucket]; entry e is part e % `parts` of page e // `parts`.
        parts: of a page, static.
        end: static; no position from `end` on is read.
    """

    keys: jax.Array
    values: jax.Array
    layer: jax.Array
    table: jax.Array
    parts: int
    end: int


def divide_pages(tables: jax.Array, parts: int) -> jax.Array:
    """The table of parts of pages: page tables [B, E] → int32 [B, E · parts]."""
    divided = tables[..., None] * parts + jnp.arange(parts, dtype=jnp.int32)
    return divided.reshape(tables.shape[0], -1)


def attend_pages(
    device: KernelDevice,
    block: AttendingBlock,
    kv: tuple[jax.Array, jax.Array],
    layer: int | jax.Array,
    tables: jax.Array,
    length: int,
) -> jax.Array | None:
    """`attend_kv` over the first `length` positions of each row, by its page table; None where there is no kernel.

    There is none for sizes that `choose_tiling` does not divide, and for heads of no whole registers in pages of
    none. `tables` are int32 [B, E].
    """
    _, G, R, T, D = block.q.shape
    page = kv[0].shape[3]
    sizes = AttentionSizes(T, G, R, D, block.q.dtype.itemsize, length, page)
    if sizes.kernel is AttendKvPages and not device.attends:
        return None
    if (tiling := choose_tiling(sizes, device.cores)) is None:
        return None
    parts = page // tiling.page
    pages = divide_pages(tables[:, : -(-length // page)], parts)
    paged = PagedKv(*kv, jnp.asarray(layer, jnp.int32), pages, parts, length)
    return attend_kv(block, paged, tiling, device.interpret, sizes.kernel)


def attend_kv(
    block: AttendingBlock,
    kv: PagedKv,
    tiling: Tiling,
    interpret: Any = False,
    form: "type[AttendKvPages] | None" = None,
) -> jax.Array:
    """Attention of a block of T positions per row, result [B, G, R, T, D].

    Each position attends to the row's kv positions before starts[b], and to the block's own keys and values.

    Args:
        block: queries, and the block's own keys and values.
        kv: the kv arrays.
        tiling: from `choose_tiling`.
        interpret: for tests on CPU: `pltpu.InterpretParams`.
        form: of the kernel, see `AttentionSizes.kernel`.
    """
    form = form or AttendKvPages
    q = block.q
    B, G, R, T, D = q.shape
    tile = tiling.queries
    tiles = T // tile
    M = round_up(R * tile, SUBLANES)
    x = q.reshape(B, G, R, tiles, tile, D).swapaxes(2, 3).reshape(B, G, tiles, R * tile, D)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, M - R * tile), (0, 0)))
    width = round_up(T, 2 * SUBLANES)
    block_kv = [
        jnp.pad(part, ((0, 0), (0, 0), (0, width - T), (0, 0)))
        for part in (block.keys, block.values)
    ]
    kernel = form(tiling, kv.parts, kv.end, T, block.windowed, D**-0.5)
    scalars = (kv.layer.reshape(1), kv.table, block.starts, block.limits)
    pools = [pool.swapaxes(3, 4) if form.columns else pool for pool in (kv.keys, kv.values)]
    sinks = [] if block.sinks is None else [_spread_sinks(block.sinks, tile, M)]
    mixed = kernel.call((*scalars, x, *block_kv, *sinks, *pools), interpret)
    mixed = mixed[..., : R * tile, :].reshape(B, G, tiles, R, tile, D).swapaxes(2, 3)
    return mixed.reshape(B, G, R, T, D)


def _spread_sinks(sinks: jax.Array, tile: int, rows: int) -> jax.Array:
    """Sinks [G, R] for the query rows of a tile of positions: float32 [G, rows, LANES]."""
    by_row = jnp.repeat(sinks, tile, axis=1)
    padded = jnp.pad(by_row, ((0, 0), (0, rows - by_row.shape[1])))
    return jnp.broadcast_to(padded[..., None], (*padded.shape, LANES))


# -- the kernel


@dataclass(frozen=True)
class AttendKvPages(Kernel):
    """The kernel.

    Attributes:
        columns: whether a position's keys are a column of their page, and not a row.
        tiling: how the work is divided.
        parts: see `PagedKv`.
        end: see `PagedKv`.
        own: positions of the block.
        windowed: see `AttendingBlock`.
        scale: factor of the scores.
    """

    name = "attend_kv_pages"
    columns: ClassVar[bool] = False

    tiling: Tiling
    parts: int
    end: int
    own: int
    windowed: bool
    scale: float

    @classmethod
    def order(cls, positions: Any, width: Any) -> tuple[Any, Any]:
        """What belongs to the positions and to the width of a page, in the order of its axes."""
        return (width, positions) if cls.columns else (positions, width)

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, table, starts, limits, queries by tile, own keys and values, perhaps sinks, kv arrays."""
        x, own, _, *sinks = operands[4:-2]
        keys = operands[-2]
        heads = self.tiling.heads
        B, G, tiles, M, D = x.shape
        width = own.shape[2]
        queries = pl.BlockSpec(
            (1, heads, 1, M, D), lambda group, row, tile, *_: (row, group, tile, 0, 0)
        )
        block = pl.BlockSpec((1, heads, width, D), lambda group, row, tile, *_: (row, group, 0, 0))
        by_head = pl.BlockSpec((heads, M, LANES), lambda group, row, tile, *_: (group, 0, 0))
        main_memory = pl.BlockSpec(memory_space=pl.ANY)
        buffers = pltpu.VMEM((2, heads, *self.order(self.tiling.block, D)), keys.dtype)
        scores = B * G * tiles * M * (self.end + width)
        return Launch(
            body=partial(_attend_tile, self),
            results=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(G // heads, B, tiles),
            # Chips with two cores per device (v4, v5p) divide the groups of heads.
            axes=("parallel", "arbitrary", "arbitrary"),
            scalars=4,
            inputs=[queries, block, block, *[by_head for _ in sinks], main_memory, main_memory],
            outputs=queries,
            scratch=[
                buffers,
                buffers,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((heads, M, LANES), jnp.float32),
                pltpu.VMEM((heads, M, LANES), jnp.float32),
                pltpu.VMEM((heads, M, D), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
            value_bytes=2 * 4 * M * self.tiling.block,
            # Of rows that fill the bucket.
            cost=pl.CostEstimate(
                flops=4 * scores * D,
                transcendentals=scores,
                bytes_accessed=2 * B * G * (self.end + width) * D * keys.dtype.itemsize
                + 2 * x.size * x.dtype.itemsize,
            ),
        )


class AttendKvColumns(AttendKvPages):
    """The kernel for pools [L, N, G, D, C], which a TPU takes for pools [L, N, G, C, D] of narrow heads."""

    name = "attend_kv_columns"
    columns = True


def _attend_tile(
    kernel: AttendKvPages, layer: Any, table: Any, starts: Any, limits: Any, q: Any, *refs: Any
) -> None:
    """The kernel: one grid step attends with one tile of queries of one row, for one group of kv heads."""
    (
        *own,
        keys,
        values,
        out,
        key_buffers,
        value_buffers,
        copied,
        peak,
        total,
        mixed,
        first_buffer,
    ) = refs
    group, row, tile = (pl.program_id(axis) for axis in range(3))
    reader = _Reader(
        kernel,
        layer,
        table,
        starts,
        limits,
        group,
        keys,
        values,
        key_buffers,
        value_buffers,
        copied,
    )
    softmax = _Softmax(kernel, q, peak, total, mixed)
    reach, slope, behind, ahead = (limits[index] for index in range(4))
    M = q.shape[-2]
    queries = kernel.tiling.queries
    # of each query row
    t = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (M, 1), 0), queries) + tile * queries

    @pl.when((row == 0) & (tile == 0))
    def start_first() -> None:
        # No page may be NaN that no copy has filled: its weights are zero, and zero times NaN is NaN.
        value_buffers[...] = jnp.zeros_like(value_buffers)
        first_buffer[0] = 0
        reader.start(row, tile, 0, 0)

    softmax.start(*own[2:])

    def add_own(at: int) -> None:
        part = pl.ds(at, min(kernel.tiling.block, own[0].shape[2] - at))
        other = at + jax.lax.broadcasted_iota(jnp.int32, (1, part.size), 1)
        mask = (other <= t + ahead) & (other >= t - behind) & (other < kernel.own)
        softmax.add(own[0].at[0, :, part], own[1].at[0, :, part], mask, columns=False)

    for at in range(0, own[0].shape[2], kernel.tiling.block):
        pl.when(at < (tile + 1) * queries + ahead)(partial(add_own, at))

    blocks = reader.count_blocks(row, tile)
    buffer_before = first_buffer[0]
    first_position = reader.find_pages(row, tile)[0] * kernel.tiling.page
    last_tile = tile + 1 == pl.num_programs(2)
    next_row = jnp.where(last_tile, row + 1, row)
    next_tile = jnp.where(last_tile, 0, tile + 1)

    def add_block(index: jax.Array, _: None) -> None:
        buffer = jax.lax.rem(buffer_before + index, 2)
        last = index + 1 == blocks

        @pl.when(jnp.logical_not(last) | (next_row < pl.num_programs(1)))
        def start_next() -> None:
            at = (
                jnp.where(last, next_row, row),
                jnp.where(last, next_tile, tile),
                jnp.where(last, 0, index + 1),
            )
            reader.start(*at, 1 - buffer)

        reader.wait(row, tile, index, buffer)
        shape = (1, kernel.tiling.block)
        position = (
            first_position
            + index * kernel.tiling.block
            + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        )
        mask = position < starts[row]
        if kernel.windowed:
            mask &= position >= starts[row] + slope * t - reach
        columns = kernel.columns
        softmax.add(key_buffers.at[buffer], value_buffers.at[buffer], mask, columns)

    jax.lax.fori_loop(0, blocks, add_block, None)
    first_buffer[0] = jax.lax.rem(buffer_before + blocks, 2)
    softmax.write(out)


@dataclass(frozen=True)
class _Reader:
    """Copies blocks of pages from main memory to one of two buffers in VMEM. The arrays are Pallas references."""

    kernel: AttendKvPages
    layer: Any
    table: Any
    starts: Any
    limits: Any
    group: jax.Array
    keys: Any
    values: Any
    key_buffers: Any
    value_buffers: Any
    copied: Any

    def find_pages(self, row: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first page that a tile of a row reads, and the page after the last."""
        start = self.starts[row]
        page = self.kernel.tiling.page
        queries = self.kernel.tiling.queries
        first: jax.Array | int = 0
        if self.kernel.windowed:
            first = jax.lax.div(
                jnp.maximum(start + self.limits[1] * tile * queries - self.limits[0], 0), page
            )
        return jnp.int32(first), jax.lax.div(jnp.minimum(start, self.kernel.end) + page - 1, page)

    def count_blocks(self, row: jax.Array, tile: jax.Array) -> jax.Array:
        """Blocks of a tile of a row, at least one: a block without pages copies nothing."""
        first, end = self.find_pages(row, tile)
        pages = self.kernel.tiling.pages
        return jnp.maximum(jax.lax.div(end - first + pages - 1, pages), 1)

    def start(
        self, row: jax.Array, tile: jax.Array, index: jax.Array | int, buffer: jax.Array | int
    ) -> None:
        """Starts the copies of block `index` of a tile of a row."""
        self._for_copies(row, tile, index, buffer, lambda copy: copy.start())

    def wait(self, row: jax.Array, tile: jax.Array, index: jax.Array, buffer: jax.Array) -> None:
        """Waits for the copies that `start` began with the same arguments."""
        self._for_copies(row, tile, index, buffer, lambda copy: copy.wait())

    def _for_copies(
        self, row: Any, tile: Any, index: Any, buffer: Any, act: Callable[[Any], None]
    ) -> None:
        first, end = self.find_pages(row, tile)
        for part in range(self.kernel.tiling.pages):
            at = first + index * self.kernel.tiling.pages + part
            pl.when(at < end)(partial(self._for_page, row, at, part, buffer, act))

    def _for_page(
        self, row: Any, at: Any, part: int, buffer: Any, act: Callable[[Any], None]
    ) -> None:
        entry = self.table[row, at]
        page = self.kernel.tiling.page
        heads = self.kernel.tiling.heads
        number = jax.lax.div(entry, self.kernel.parts)
        position = pl.multiple_of(jax.lax.rem(entry, self.kernel.parts) * page, page)
        order = self.kernel.order
        source = (
            self.layer[0],
            number,
            pl.ds(self.group * heads, heads),
            *order(pl.ds(position, page), slice(None)),
        )
        place = (buffer, slice(None), *order(pl.ds(part * page, page), slice(None)))
        act(
            pltpu.make_async_copy(
                self.keys.at[source], self.key_buffers.at[place], self.copied.at[0, buffer]
            )
        )
        act(
            pltpu.make_async_copy(
                self.values.at[source], self.value_buffers.at[place], self.copied.at[1, buffer]
            )
        )


@dataclass(frozen=True)
class _Softmax:
    """Online softmax (Milakov & Gimelshein 2018) of all kv heads of a grid step, in VMEM. The arrays are references.

    Attributes:
        peak, total: largest score and sum of weights, float32 [heads, M, LANES], equal in all
            lanes.
        mixed: weighted values, float32 [heads, M, D].
    """

    kernel: AttendKvPages
    q: Any
    peak: Any
    total: Any
    mixed: Any

    def start(self, sinks: Any = None) -> None:
        """Sets the state before any key. `sinks` is a reference [heads, M, LANES], see `AttendingBlock`."""
        if sinks is None:
            self.peak[...] = jnp.full_like(self.peak, MASKED_SCORE)
            self.total[...] = jnp.zeros_like(self.total)
        else:
            self.peak[...] = sinks[...]
            self.total[...] = jnp.ones_like(self.total)
        self.mixed[...] = jnp.zeros_like(self.mixed)

    def add(self, keys: Any, values: Any, mask: jax.Array, columns: bool) -> None:
        """Adds keys and values, references [heads, n, D] or of columns [heads, D, n], under a mask [M, n]."""
        axes = (0, 1) if columns else (1, 0)  # of the width, of the positions
        for head in range(self.kernel.tiling.heads):
            self._add(head, keys[head], values[head], mask, axes)

    def _add(
        self,
        head: int,
        keys: jax.Array,
        values: jax.Array,
        mask: jax.Array,
        axes: tuple[int, int],
    ) -> None:
        width, positions = axes
        scores = multiply(self.q[0, head, 0], keys, (1, width)) * self.kernel.scale
        scores = jnp.where(mask, scores, MASKED_SCORE)
        before = self.peak[head]
        higher = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        faded = jnp.exp(before - higher)
        weights = jnp.exp(scores - _widen(higher, scores.shape[1]))
        news = multiply(weights.astype(values.dtype), values, (1, positions))
        self.peak[head] = higher
        self.total[head] = self.total[head] * faded + jnp.sum(weights, axis=1, keepdims=True)
        self.mixed[head] = self.mixed[head] * _widen(faded, news.shape[1]) + news

    def write(self, out: Any) -> None:
        """Writes the result."""
        for head in range(self.kernel.tiling.heads):
            mixed = self.mixed[head]
            out[0, head, 0] = (mixed / _widen(self.total[head], mixed.shape[1])).astype(out.dtype)


def _widen(x: jax.Array, width: int) -> jax.Array:
    """x [M, LANES], equal in all lanes → [M, width]."""
    copies = -(-width // LANES)
    return (jnp.concatenate([x] * copies, axis=1) if copies > 1 else x)[:, :width]
