"""kv pages of requests: taken as a request grows, shared where a prefix was computed before, returned at its end."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_aot.cache.grid import Grid
from dflash_aot.runtime.scheduler.page_pool import PageKey, PagePool, PoolFull, extend_key, start_key


@dataclass(eq=False)
class PageTable:
    """The pages of one running request, in the order of its positions.

    pages: of the pool. The first pages may be shared: a request writes only to pages after them.
    keys: of the first full pages of its text; empty before the first look-up.
    keyed_pages: how many of `pages` have been looked up, or given their key.
    salt: part of the keys. cached: whether pages are looked up and kept; False for a request that shares nothing.
    version: tables of the same version have the same pages; 0 for an empty table.
    """

    salt: str | None = None
    cached: bool = True
    pages: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    keyed_pages: int = 0
    version: int = 0


class KvPages:
    """Owns the page pool, and gives requests their pages.

    queries, hits: prompt tokens whose kv was looked up, and those whose kv was there; the scheduler counts them.
    """

    def __init__(self, grid: Grid):
        self.queries = self.hits = 0
        self.pool = PagePool(grid.pool_pages)
        self.page = grid.page
        self._grid = grid
        self._versions = itertools.count(1)

    def open(self, table: PageTable, tokens: Sequence[int], further: int = 0) -> int:
        """Gives an empty table the pages of a text and of `further` positions after it.

        The pages of the longest prefix that is present are shared. At least the last token is left to compute. Returns
        the number of positions that need not be computed. Raises PoolFull, and leaves the table empty, where too few
        pages are available.
        """
        start = self.share_prefix(table, tokens, 0)
        try:
            self.grow(table, len(tokens) + further)
        except PoolFull:
            self.close(table)
            raise
        return start

    def share_prefix(self, table: PageTable, tokens: Sequence[int], start: int) -> int:
        """Shares pages with the contents of `tokens` from position `start` on, which others have computed meanwhile.

        They replace the table's own pages. Returns the new start: unchanged, or the end of the last shared page.
        """
        entry = start // self.page
        while table.cached and (entry + 1) * self.page < len(tokens):
            page = self.pool.find(self._find_key(table, tokens, entry))
            if page is None:
                break
            self.pool.share(page)
            table.version = next(self._versions)
            if entry < len(table.pages):
                self.pool.release([table.pages[entry]])
                table.pages[entry] = page
            else:
                table.pages.append(page)
            entry += 1
            start = entry * self.page
            table.keyed_pages = entry
        return start

    def grow(self, table: PageTable, positions: int) -> None:
        """Takes the pages that a table lacks for so many positions. Raises PoolFull."""
        if (missing := self.count_missing(table, positions)) > 0:
            table.pages += self.pool.take(missing)
            table.version = next(self._versions)

    def count_missing(self, table: PageTable, positions: int) -> int:
        """Pages that a table lacks for so many positions."""
        return max(0, self._grid.count_pages(positions) - len(table.pages))

    def index_full_pages(self, table: PageTable, tokens: Sequence[int], length: int) -> None:
        """Keeps the full pages among the first `length` positions for others; `tokens` are the text from 0 on."""
        while table.cached and (table.keyed_pages + 1) * self.page <= length:
            key = self._find_key(table, tokens, table.keyed_pages)
            self.pool.set_key(table.pages[table.keyed_pages], key)
            table.keyed_pages += 1

    def close(self, table: PageTable) -> None:
        """Returns all pages; the keys of the text stay."""
        self.pool.release(table.pages)
        table.pages, table.keyed_pages, table.version = [], 0, 0

    def _find_key(self, table: PageTable, tokens: Sequence[int], entry: int) -> PageKey:
        """The key of the full page `entry` of a text."""
        for index in range(len(table.keys), entry + 1):
            before = table.keys[-1] if table.keys else start_key(table.salt)
            table.keys.append(extend_key(before, tokens[index * self.page : (index + 1) * self.page]))
        return table.keys[entry]
