"""The pool of kv pages, and the pages of each request: taken as it grows, shared by prefix, returned at its end."""

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dflash_aot.cache.grid import Grid

# -- the pool: which kv pages are free, in use by how many requests, or kept for prompts to come
#
# Pure bookkeeping: no JAX and no clock. Both models' kv pools on the device have the same pages.

# The key of a full page's contents: sha256 of all tokens up to its end, and of the salt.
PageKey = bytes


class PoolFull(Exception):
    """Fewer pages are available than are needed."""


class PagePool:
    """Pages 1 … count. A page is free, in use, or kept: used by no request, but its contents are known by a key.

    Page 0 belongs to no request: the device writes kv there that no request needs.

    Attributes:
        evictions: kept pages whose contents made room for other requests.
        changes: counts events after which a request that lacked pages may find them: pages were
            shared, returned, or got a key.
    """

    def __init__(self, count: int):
        self.count = count
        self.evictions = self.changes = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all users and contents, after the device state was lost."""
        self.changes += 1
        self._users = [0] * (self.count + 1)
        self._free = list(range(self.count, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}

    @property
    def available(self) -> int:
        """Pages that no request uses."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.count - self.available

    def take(self, count: int) -> list[int]:
        """Gives out `count` pages to one user, and evicts kept pages only where no page is free. Raises PoolFull."""
        if count > self.available:
            raise PoolFull
        taken = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._users[page] = 1
            taken.append(page)
        return taken

    def find(self, key: PageKey) -> int | None:
        """The page with these contents; None if there is none."""
        return self._page_of.get(key)

    def share(self, page: int) -> None:
        """Adds a user to a page with a key."""
        assert page in self._key_of, "only full pages are shared: nothing writes to them again"
        self._users[page] += 1
        self._kept.pop(page, None)
        self.changes += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes one user from each page. Of the kept pages, those at the end of a text are evicted first."""
        self.changes += 1
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, f"page {page} is released, but has no user"
            if self._users[page] == 0:
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def set_key(self, page: int, key: PageKey) -> None:
        """Makes a full page in use known by the key of its contents, unless another page has that key."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key
            self.changes += 1

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page


def start_key(salt: str | None) -> PageKey:
    """The key before the first page: requests of other salts, or of none, have other keys."""
    return hashlib.sha256(
        b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    ).digest()


def extend_key(key: PageKey, tokens: Iterable[int]) -> PageKey:
    """The key of the next page, which holds `tokens`. Every token takes four bytes, so no two texts look alike."""
    return hashlib.sha256(key + array("i", tokens).tobytes()).digest()


# -- the pages of requests


@dataclass(eq=False)
class PageTable:
    """The pages of one running request, in the order of its positions.

    Attributes:
        pages: of the pool. The first pages may be shared: a request writes only to pages after
            them.
        keys: of the first full pages of its text; empty before the first look-up.
        keyed_pages: how many of `pages` have been looked up, or given their key.
        salt: part of the keys.
        cached: whether pages are looked up and kept; False for a request that shares nothing.
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

    Attributes:
        queries, hits: prompt tokens whose kv was looked up, and those whose kv was there; the
            scheduler counts them.
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

        Shared pages replace the table's own. Returns the new start: unchanged, or the end of the last shared page.
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
        table.pages = []
        table.keyed_pages = 0
        table.version = 0

    def _find_key(self, table: PageTable, tokens: Sequence[int], entry: int) -> PageKey:
        """The key of the full page `entry` of a text."""
        for index in range(len(table.keys), entry + 1):
            before = table.keys[-1] if table.keys else start_key(table.salt)
            table.keys.append(
                extend_key(before, tokens[index * self.page : (index + 1) * self.page])
            )
        return table.keys[entry]
