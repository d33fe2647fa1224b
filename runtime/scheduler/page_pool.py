"""The pool of kv pages: which pages are free, in use by how many requests, or kept for prompts to come.

Pure bookkeeping: no JAX and no clock. Both models' kv pools on the device have the same pages.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PageKey = bytes  # of the contents of a full page: sha256 of all tokens up to its end, and of the salt


class PoolFull(Exception):
    """Fewer pages are available than are needed."""


class PagePool:
    """Pages 1 … count. A page is free, in use, or kept: used by no request, but its contents are known by a key.

    Page 0 belongs to no request: the device writes kv there that no request needs.

    evictions: kept pages whose contents made room for other requests.
    changes: counts events after which a request that lacked pages may find them: pages were shared, returned, or got a
    key.
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
        """A page in use is full: its contents are known by `key`, unless another page with these contents is."""
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
    return hashlib.sha256(b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")).digest()


def extend_key(key: PageKey, tokens: Iterable[int]) -> PageKey:
    """The key of the next page, which holds `tokens`. Every token takes four bytes, so no two texts look alike."""
    return hashlib.sha256(key + array("i", tokens).tobytes()).digest()
