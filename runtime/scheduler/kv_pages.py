"""The pool of kv pages, and the pages of each request: taken as it grows, shared by prefix, returned at its end.

In addition the saved states of hybrid targets, without which pages are of no use to them.
"""

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


# -- saved states: recurrent states after some prefixes, each in an entry of the device's arrays
#
# No request owns an entry: entries are free, or known by the key of their prefix. The device does copies in the order
# in which they are planned, so an entry may be found, and overwritten, as soon as its copy is planned.


class SlotCopy(NamedTuple):
    """A copy of a slot's or a saved state's arrays, and of a kv page.

    Attributes:
        source, destination: slots, or entries counted after the slots.
        source_page, destination_page: pages of the pools; 0 where no page is copied.
        length: of the text whose state is restored; 0 for other copies.
    """

    source: int
    destination: int
    source_page: int = 0
    destination_page: int = 0
    length: int = 0


class SavedStates:
    """Entries 0 … count-1, and what they hold: a prefix's key and length each.

    Attributes:
        evictions: saved states that made room for others.
    """

    def __init__(self, count: int):
        self.count = count
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all states, after the device state was lost."""
        self._free = list(range(self.count))
        # By key: entry and position, least recently used first.
        self._states: OrderedDict[PageKey, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        """Entries that hold a state."""
        return len(self._states)

    def list_positions(self) -> list[tuple[int, PageKey]]:
        """Position and key of every state, the longest prefix first."""
        return sorted(
            ((position, key) for key, (_, position) in self._states.items()), reverse=True
        )

    def use(self, key: PageKey) -> int | None:
        """The entry with the state after a prefix, which becomes the most recently used; None if there is none."""
        if key not in self._states:
            return None
        self._states.move_to_end(key)
        return self._states[key][0]

    def add(self, key: PageKey, position: int) -> int:
        """Gives out an entry for the state after another prefix; the least recently used one where none is free."""
        if self._free:
            entry = self._free.pop()
        else:
            _, (entry, _) = self._states.popitem(last=False)
            self.evictions += 1
        self._states[key] = entry, position
        return entry

    def drop(self, key: PageKey) -> None:
        """Frees the entry of a prefix, if there is one."""
        if key in self._states:
            self._free.append(self._states.pop(key)[0])


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
        start: the key of the saved state where the text is to go on; None after its restoring was
            planned, and where there is none.
        saved: positions up to the latest state that was saved or restored.
        answered: the key of the latest state saved during the answer; b"" for none.
    """

    salt: str | None = None
    cached: bool = True
    pages: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    keyed_pages: int = 0
    version: int = 0
    start: PageKey | None = None
    saved: int = 0
    answered: PageKey = b""


class KvPages:
    """Owns the page pool and the saved states, and gives requests their pages.

    With saved states, a prefix is present where a state was saved: all its full pages are shared, and the rest of its
    kv is in the entry's own page.

    Attributes:
        queries, hits: prompt tokens whose kv was looked up, and those whose kv was there; the
            scheduler counts them.
    """

    def __init__(self, grid: Grid):
        self.queries = self.hits = 0
        self.pool = PagePool(grid.pool_pages)
        self.states = SavedStates(grid.saved_states)
        self.page = grid.page
        self._grid = grid
        self._versions = itertools.count(1)

    def clear(self) -> None:
        """Forgets all users and contents, after the device state was lost."""
        self.pool.clear()
        self.states.clear()

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

        Shared pages replace the table's own. Returns the new start: unchanged, or the end of the last shared page; with
        saved states, the longest prefix with a state, which `plan_restore` then restores.
        """
        end = self.find_present(table, tokens, start)
        if self.states.count:
            position, key = self._find_state(table, tokens, start, end)
            if key is None:
                return start
            table.start = key
            table.saved = position
            end = position
        for entry in range(start // self.page, end // self.page):
            page = self.pool.find(table.keys[entry])
            assert page is not None
            self._share(table, entry, page)
        return max(start, end)

    def find_present(self, table: PageTable, tokens: Sequence[int], start: int) -> int:
        """The end of the last page with the contents of `tokens`, without a gap from position `start` on; or `start`.

        At least the last token is after it.
        """
        entry = start // self.page
        while (
            table.cached
            and (entry + 1) * self.page < len(tokens)
            and self.pool.find(self._find_key(table, tokens, entry)) is not None
        ):
            entry += 1
        return max(start, entry * self.page)

    def _share(self, table: PageTable, entry: int, page: int) -> None:
        """Makes a page with a key the page `entry` of a table."""
        self.pool.share(page)
        table.version = next(self._versions)
        if entry < len(table.pages):
            self.pool.release([table.pages[entry]])
            table.pages[entry] = page
        else:
            table.pages.append(page)
        table.keyed_pages = entry + 1

    def _find_state(
        self, table: PageTable, tokens: Sequence[int], start: int, present: int
    ) -> tuple[int, PageKey | None]:
        """Position and key of the longest prefix after `start` with a state; its full pages end by `present`."""
        if not table.cached:
            return start, None
        most = min((present // self.page + 1) * self.page, len(tokens)) - 1
        for position, key in self.states.list_positions():
            if start < position <= most and key == self._find_text_key(table, tokens, position):
                return position, key
        return start, None

    # -- saved states

    def plan_restore(self, table: PageTable, slot: int) -> SlotCopy | None:
        """The copy that restores the state that was found for a table with pages, if any was."""
        if table.start is None:
            return None
        state = self.states.use(table.start)
        assert state is not None, "nothing was saved since it was found"
        table.start = None
        source, source_page = self._locate(state)
        page = table.pages[table.saved // self.page] if table.saved % self.page else 0
        return SlotCopy(source, slot, source_page if page else 0, page, table.saved)

    def plan_save(
        self, table: PageTable, tokens: Sequence[int], position: int, slot: int, answers: bool
    ) -> SlotCopy | None:
        """The copy that saves the state of a slot, which is that after `position` tokens; None if it is there already.

        answers: the state takes the place of the one that was saved before during the same answer.
        """
        table.saved = position
        key = self._find_text_key(table, tokens, position)
        known = self.states.use(key) is not None
        if answers:
            if table.answered != key:
                self.states.drop(table.answered)
            table.answered = key
        if known:
            return None
        destination, destination_page = self._locate(self.states.add(key, position))
        page = table.pages[position // self.page] if position % self.page else 0
        return SlotCopy(slot, destination, page, destination_page if page else 0)

    def _locate(self, state: int) -> tuple[int, int]:
        """Where the device has an entry: its place after the slots, and its page after the requests' pages."""
        return self._grid.slots + state, 1 + self.pool.count + state

    def _find_text_key(self, table: PageTable, tokens: Sequence[int], length: int) -> PageKey:
        """The key of the first `length` tokens; of full pages that of the last one."""
        pages, rest = divmod(length, self.page)
        key = self._find_key(table, tokens, pages - 1) if pages else start_key(table.salt)
        return extend_key(key, tokens[length - rest : length]) if rest else key

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
        table.start = None

    def _find_key(self, table: PageTable, tokens: Sequence[int], entry: int) -> PageKey:
        """The key of the full page `entry` of a text."""
        for index in range(len(table.keys), entry + 1):
            before = table.keys[-1] if table.keys else start_key(table.salt)
            table.keys.append(
                extend_key(before, tokens[index * self.page : (index + 1) * self.page])
            )
        return table.keys[entry]
