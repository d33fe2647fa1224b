"""The pool of kv pages, and the pages of each request: taken as it grows, shared by prefix, returned at its end.

In addition the saved states of hybrid targets, without which pages are of no use to them, and copies of both in host
memory.
"""

import hashlib
import itertools
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dflash_aot.cache.arrays import TRANSFER_BYTES
from dflash_aot.cache.grid import Chunk, Grid

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
        self._copied: set[int] = set()  # pages with a key that were copied to the host

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

    def list_uncopied(self, count: int) -> Iterator[tuple[int, PageKey]]:
        """The kept pages without a copy on the host among the next `count` pages that `take` would give out."""
        for page in itertools.islice(self._kept, max(0, count - len(self._free))):
            if page not in self._copied:
                yield page, self._key_of[page]

    def note_copied(self, page: int) -> None:
        """The host has a copy of a kept page: the page is not copied again before it is evicted."""
        self._copied.add(page)

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._copied.discard(page)
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
        self._copied: set[PageKey] = set()  # states that were copied to the host

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
            evicted, (entry, _) = self._states.popitem(last=False)
            self._copied.discard(evicted)
            self.evictions += 1
        self._states[key] = entry, position
        return entry

    def drop(self, key: PageKey) -> None:
        """Frees the entry of a prefix, if there is one."""
        if key in self._states:
            self._copied.discard(key)
            self._free.append(self._states.pop(key)[0])

    def list_uncopied(self, count: int) -> list[tuple[PageKey, int, int]]:
        """Key, entry and position of the states without a copy on the host that the next `count` would evict."""
        oldest = itertools.islice(self._states.items(), max(0, count - len(self._free)))
        return [(key, *state) for key, state in oldest if key not in self._copied]

    def note_copied(self, key: PageKey) -> None:
        """The host has a copy of a state: the state is not copied again before it is evicted."""
        self._copied.add(key)


# -- host memory: copies of pages and saved states that the device evicts
#
# What would be evicted next is copied ahead of its eviction, so that nothing waits for a copy. What is evicted before
# it was copied is lost.

STATE = b"state "  # before the key of a state: a page that ends there has the same key
STATES_AHEAD = 2  # of a prompt: its end, and the border before


@dataclass(eq=False)
class HostCopy:
    """The contents of a page, or of a saved state and its partly filled page.

    Attributes:
        bytes: of the contents.
        position: of a state; 0 for a page.
        arrays: the contents by name. The dispatcher sets them: of the device until the host has got them.
    """

    bytes: int
    position: int = 0
    arrays: Mapping[str, Any] = field(default_factory=dict)


class Transfer(NamedTuple):
    """A copy from the device to the host, or back.

    Attributes:
        copy: on the host.
        page: of the pools; 0 where none is copied.
        slot: of a state: a slot, or an entry counted after the slots; None for a page alone.
    """

    copy: HostCopy
    page: int
    slot: int | None = None


@dataclass(frozen=True)
class OffloadCosts:
    """What copies cost, and what they save.

    Attributes:
        capacity: bytes of host memory for copies.
        page_bytes, state_bytes: of a page of all pools; of a recurrent state without a page.
        bytes_per_second: of copies to the device.
        chunk_seconds: estimated, of the calls of every chunk.
        round_seconds: estimated, of the longest round: other requests have one after each chunk, and each batch of
            copies.
    """

    capacity: int
    page_bytes: int
    state_bytes: int
    bytes_per_second: float
    chunk_seconds: Mapping[Chunk, float]
    round_seconds: float

    def pays(self, grid: Grid, start: int, end: int, size: int) -> bool:
        """The rule: whether copying `size` bytes takes less time than computing the positions from `start` to `end`."""
        seconds = 0.0
        while start < end:
            chunk = grid.fit_chunk(start, end - start)
            seconds += self.chunk_seconds[chunk] + self.round_seconds
            start += chunk.prefill
        batches = math.ceil(size / TRANSFER_BYTES)
        return size / self.bytes_per_second + batches * self.round_seconds < seconds


class HostPool:
    """Copies by key, at most `capacity` bytes of them.

    Attributes:
        bytes: of all copies.
        evictions: copies that made room for others.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all copies, after the device state was lost: some may be on their way."""
        self.bytes = 0
        self._copies: OrderedDict[PageKey, HostCopy] = OrderedDict()  # least recently used first

    def __contains__(self, key: PageKey) -> bool:
        return key in self._copies

    def find(self, key: PageKey) -> HostCopy | None:
        """The copy with a key; None if there is none."""
        return self._copies.get(key)

    def use(self, key: PageKey) -> HostCopy | None:
        """The copy with a key, which becomes the most recently used; None if there is none."""
        if key in self._copies:
            self._copies.move_to_end(key)
        return self.find(key)

    def add(self, key: PageKey, copy: HostCopy) -> None:
        """Keeps a copy that the capacity holds, and evicts others as needed."""
        while self.bytes + copy.bytes > self._capacity:
            _, evicted = self._copies.popitem(last=False)
            self.bytes -= evicted.bytes
            self.evictions += 1
        self._copies[key] = copy
        self.bytes += copy.bytes

    def list_positions(self) -> list[tuple[int, PageKey]]:
        """Position and key of every state."""
        return [
            (copy.position, key.removeprefix(STATE))
            for key, copy in self._copies.items()
            if copy.position
        ]


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
        restores: of the pages after `keyed_pages` and of the state at their end, key and copy: not yet planned.
        restored: the position at the end of the last copy.
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
    restores: deque[tuple[PageKey, HostCopy]] = field(default_factory=deque)
    restored: int = 0


class KvPages:
    """Owns the page pool and the saved states, and gives requests their pages.

    With saved states, a prefix is present where a state was saved: all its full pages are shared, and the rest of its
    kv is in the entry's own page.

    Attributes:
        queries, hits: prompt tokens whose kv was looked up, and those whose kv was there; the
            scheduler counts them.
        host_queries, host_hits: of these, those that were looked up on the host, and those that came from there.
        offloaded_bytes, restored_bytes: copied to the host, and to the device.
    """

    def __init__(self, grid: Grid, offload: OffloadCosts | None = None):
        """offload: what copies to host memory cost; None for no copies."""
        self.queries = self.hits = self.host_queries = self.host_hits = 0
        self.offloaded_bytes = self.restored_bytes = 0
        self.host = HostPool(offload.capacity if offload else 0)
        self._offload = offload
        self.pool = PagePool(grid.pool_pages)
        self.states = SavedStates(grid.saved_states)
        self.page = grid.page
        self._grid = grid
        self._versions = itertools.count(1)

    def clear(self) -> None:
        """Forgets all users and contents, after the device state was lost."""
        self.pool.clear()
        self.states.clear()
        self.host.clear()

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
        if self._offload and table.cached:
            self._find_copies(table, tokens, start, self._offload)
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
        return self._match_state(table, tokens, start, present, self.states.list_positions())

    def _match_state(
        self,
        table: PageTable,
        tokens: Sequence[int],
        start: int,
        present: int,
        listed: Sequence[tuple[int, PageKey]],
    ) -> tuple[int, PageKey | None]:
        """`_find_state` among listed states, the longest prefix first."""
        most = min((present // self.page + 1) * self.page, len(tokens)) - 1
        for position, key in listed:
            if start < position <= most and key == self._find_text_key(table, tokens, position):
                return position, key
        return start, None

    # -- copies in host memory

    def plan_offload(self) -> list[Transfer]:
        """Copies to the host of what would be evicted next: a batch of states, and of pages for the longest request.

        Whatever was planned before must have been dispatched.
        """
        costs = self._offload
        if costs is None:
            return []
        planned: list[Transfer] = []
        batch = 0
        for key, transfer in self._list_uncopied(costs):
            copy = transfer.copy
            if self.host.use(key) is None and copy.bytes <= costs.capacity:
                self.host.add(key, copy)
                planned.append(transfer)
                batch += copy.bytes
            if batch >= TRANSFER_BYTES:
                break
        self.offloaded_bytes += batch
        return planned

    def _list_uncopied(self, costs: OffloadCosts) -> Iterator[tuple[PageKey, Transfer]]:
        """Key and copy of what would be evicted next. What is listed is noted as copied."""
        for key, entry, position in self.states.list_uncopied(STATES_AHEAD):
            slot, page = self._locate(entry)
            page = page if position % self.page else 0
            size = costs.state_bytes + (costs.page_bytes if page else 0)
            self.states.note_copied(key)
            yield STATE + key, Transfer(HostCopy(size, position), page, slot)
        for page, key in self.pool.list_uncopied(self._grid.row_pages):
            self.pool.note_copied(page)
            yield key, Transfer(HostCopy(costs.page_bytes), page)

    def _find_copies(
        self, table: PageTable, tokens: Sequence[int], start: int, costs: OffloadCosts
    ) -> None:
        """Plans to continue the prefix of a table with all its pages from copies, if that takes less than computing.

        Pages on the device come first, then pages on the host; with saved states, up to a state, wherever it is.
        """
        self.host_queries += len(tokens) - start
        present = self.find_present(table, tokens, 0) // self.page
        copied = present
        while (copied + 1) * self.page < len(tokens) and self._find_key(
            table, tokens, copied
        ) in self.host:
            copied += 1
        end, key = copied * self.page, None
        if self.states.count:
            listed = sorted({*self.states.list_positions(), *self.host.list_positions()})
            end, key = self._match_state(table, tokens, start, end, listed[::-1])
        pages = [(one, self.host.find(one)) for one in table.keys[present : end // self.page]]
        state = None
        if key is not None and self.states.use(key) is None:
            state = self.host.find(STATE + key)
        found = [(one, copy) for one, copy in pages if copy]
        if key is not None and state:
            found.append((key, state))
        size = sum(copy.bytes for _, copy in found)
        if not found or end <= start or not costs.pays(self._grid, start, end, size):
            return
        for entry in range(table.keyed_pages, min(present, end // self.page)):
            page = self.pool.find(table.keys[entry])
            assert page is not None
            self._share(table, entry, page)
        for one, copy in reversed(found):  # the end of a text is evicted first
            self.host.use(STATE + one if copy.position else one)
        if key is not None:
            table.start = None if state else key
            table.saved = end
        table.restores.extend(found)
        table.restored = end

    def plan_host_copies(self, table: PageTable, slot: int) -> list[Transfer]:
        """The next copies from the host, in the order of the text; other requests may share their pages from now on."""
        planned: list[Transfer] = []
        batch = 0
        while table.restores and batch < TRANSFER_BYTES:
            key, copy = table.restores.popleft()
            entry = table.keyed_pages
            if copy.position:
                page = table.pages[entry] if copy.position % self.page else 0
                self.host_hits += copy.position % self.page
                planned.append(Transfer(copy, page, slot))
            elif (present := self.pool.find(key)) is not None:
                # Another request has restored or computed it meanwhile.
                self._share(table, entry, present)
                continue
            else:
                self.pool.set_key(table.pages[entry], key)
                table.keyed_pages += 1
                self.host_hits += self.page
                planned.append(Transfer(copy, table.pages[entry]))
            batch += copy.bytes
        self.restored_bytes += batch
        return planned

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
        """The copy that saves a slot's state after `position` tokens; None if that state is saved already.

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
        table.restores.clear()

    def _find_key(self, table: PageTable, tokens: Sequence[int], entry: int) -> PageKey:
        """The key of the full page `entry` of a text."""
        for index in range(len(table.keys), entry + 1):
            before = table.keys[-1] if table.keys else start_key(table.salt)
            table.keys.append(
                extend_key(before, tokens[index * self.page : (index + 1) * self.page])
            )
        return table.keys[entry]
