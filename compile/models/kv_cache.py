"""KV pages: keys and values as pools [L, N, G, P, D], written and read by layer, page table and position.

Layers whose kv is kept for a window have pools of their own, where each slot has a ring of pages.

L layers · N pages of the pool · G kv heads · P positions of a page · D head width
B rows of a call · T positions of a call · E entries of a page table
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from dflash_aot.cache.arrays import count_touched_pages
from dflash_aot.compile.models.layer_loop import LayerIndex

# Keys and values: pools [L, N, G, P, D], or a call's rows [L, B, G, T, D].
KvArrays = tuple[jax.Array, jax.Array]


def make_rows(kv: KvArrays, batch: int, positions: int) -> KvArrays:
    """Room for the keys and values that a call adds to pools: zeros [L, batch, G, positions, D]."""
    L, _, G, _, D = kv[0].shape
    dtype = kv[0].dtype
    return (jnp.zeros((L, batch, G, positions, D), dtype),) * 2


def put_rows(rows: KvArrays, layer: LayerIndex, keys: jax.Array, values: jax.Array) -> KvArrays:
    """`rows`, each [L, B, G, T, D], with a layer's keys and values, each [B, G, ≥ T, D].

    Their later positions are padding.
    """
    keys_rows, values_rows = rows
    T = keys_rows.shape[3]
    update = partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return update(keys_rows, keys[:, :, :T]), update(values_rows, values[:, :, :T])


def write_kv(kv: KvArrays, rows: KvArrays, tables: jax.Array, starts: jax.Array) -> KvArrays:
    """The pools with all layers' keys and values written, see `write_rows`.

    Once for all layers: on TPU each write costs more by its start than by its bytes.
    """
    return write_rows(kv[0], rows[0], tables, starts), write_rows(kv[1], rows[1], tables, starts)


def write_rows(pool: jax.Array, rows: jax.Array, tables: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes rows [L, B, G, T, D]: row b by the page table `tables[b]` (int32 [B, E]) from position `starts[b]` on.

    Positions from E · P on are written to page 0. Up to P positions after the row, in pages of the row after its
    first, become zero: nothing was written there yet.

    A few slice updates per row, because a scatter copies: one for each page that the row may touch, of all layers.
    """
    page = pool.shape[3]
    T = rows.shape[3]
    width = min(page, T)
    parts = count_touched_pages(page, T)
    tables = jnp.pad(tables, ((0, 0), (0, parts)))
    for row in range(rows.shape[1]):
        entry = starts[row] // page
        offset = starts[row] % page
        new = jnp.pad(rows[:, row : row + 1], ((0, 0), (0, 0), (0, 0), (width - 1, width), (0, 0)))
        # The first page: the positions before the row are kept.
        begin = jnp.minimum(offset, page - width)
        at = (0, tables[row, entry], 0, begin, 0)
        part = _take_positions(new, width - 1 - (offset - begin), width)
        if T > 1:
            kept = (jnp.arange(width) < offset - begin)[:, None]
            part = jnp.where(kept, jax.lax.dynamic_slice(pool, at, part.shape), part)
        pool = jax.lax.dynamic_update_slice(pool, part, at)
        for index in range(1, parts):
            part = _take_positions(new, width - 1 + index * page - offset, width)
            pool = jax.lax.dynamic_update_slice(
                pool, part, (0, tables[row, entry + index], 0, 0, 0)
            )
    return pool


def _take_positions(rows: jax.Array, start: jax.Array, width: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, start, width, axis=3)


@dataclass(frozen=True)
class KvRings:
    """The rings of a call's rows: page tables of the pages that a call reads and writes, made from positions.

    Positions in these tables count from the first page of the table. See `RingShape`.

    Attributes:
        slots: of the rows, int32 [B].
        pages: of a ring.
        page: positions of a page.
        seen: `RingShape.count_seen_pages`.
    """

    slots: jax.Array
    pages: int
    page: int
    seen: int

    def find_seen(self, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tables [B, seen + 1] of the positions that blocks at `starts` [B] see, and where the blocks start."""
        first = jnp.maximum(starts // self.page - self.seen, 0)
        return self._list_pages(first, self.seen + 1), starts - first * self.page

    def find_written(
        self, starts: jax.Array, tokens: int, counts: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Tables [B, pages] of `tokens` positions from `starts` [B] on, and where these start in their pages.

        Pages after the first `counts` [B] positions are page 0: padding would overwrite what the window sees.
        """
        first = starts // self.page
        tables = self._list_pages(first, count_touched_pages(self.page, tokens))
        begins = starts - first * self.page
        if counts is not None:
            last = (begins + counts - 1) // self.page
            tables = jnp.where(jnp.arange(tables.shape[1]) <= last[:, None], tables, 0)
        return tables, begins

    def _list_pages(self, first: jax.Array, count: int) -> jax.Array:
        return (
            1 + self.slots[:, None] * self.pages + (first[:, None] + jnp.arange(count)) % self.pages
        )


def copy_ring(pool: jax.Array, pages: int, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Copies the ring of a slot, `pages` pages of the pool, over another slot's, layer by layer."""
    sizes = (1, pages, *pool.shape[2:])

    def copy_layer(layer: jax.Array, pool: jax.Array) -> jax.Array:
        ring = jax.lax.dynamic_slice(pool, (layer, 1 + source * pages, 0, 0, 0), sizes)
        return jax.lax.dynamic_update_slice(pool, ring, (layer, 1 + destination * pages, 0, 0, 0))

    return jax.lax.fori_loop(0, pool.shape[0], copy_layer, pool)


def copy_page(pool: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Copies a page of the pool over another page, layer by layer."""
    return copy_ring(pool, 1, source - 1, destination - 1)


@dataclass(frozen=True)
class KvContext:
    """The first positions of each row in one layer of the kv pools.

    Attributes:
        keys: pool [L, N, G, P, D].
        values: pool [L, N, G, P, D].
        layer: the layer that is read.
        tables: page tables of the rows, int32 [B, E].
        length: number of positions, at most E · P.
    """

    keys: jax.Array
    values: jax.Array
    layer: LayerIndex
    tables: jax.Array
    length: int

    @property
    def page(self) -> int:
        """Positions of a page."""
        return self.keys.shape[3]

    @property
    def pages(self) -> int:
        """Pages that hold `length` positions."""
        return -(-self.length // self.page)

    def read_page(self, row: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one page of one row, each [1, G, P, D]."""
        at = (self.layer, self.tables[row, entry], 0, 0, 0)
        sizes = (1, 1, *self.keys.shape[2:])
        return jax.lax.dynamic_slice(self.keys, at, sizes)[0], jax.lax.dynamic_slice(
            self.values, at, sizes
        )[0]

    def read_pages(self, entries: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one page of each row, whose place in its table is in `entries` [B], each [B, G, P, D]."""
        pages = jnp.take_along_axis(self.tables, entries[:, None], axis=1)
        return self._read(self.keys, pages), self._read(self.values, pages)

    def read(self, entry: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of all rows in `count` pages from `entry` on, each [B, G, count · P, D].

        Entries after the tables' end are page 0.
        """
        tables = jnp.pad(self.tables, ((0, 0), (0, count)))
        pages = jax.lax.dynamic_slice_in_dim(tables, entry, count, axis=1)
        return self._read(self.keys, pages), self._read(self.values, pages)

    def _read(self, pool: jax.Array, pages: jax.Array) -> jax.Array:
        _, _, G, P, D = pool.shape
        B, count = pages.shape
        found = pool[self.layer, pages]  # [B, count, G, P, D]
        return found.swapaxes(1, 2).reshape(B, G, count * P, D)
