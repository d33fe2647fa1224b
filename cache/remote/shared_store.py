"""Executables that a team shares: looked for before one is compiled, put there when it is proven."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import CorruptBundle, StoreFailed, StoreRefused
from dflash_aot.cache.remote.object_store import ObjectStore
from dflash_aot.cache.remote.shared_entries import SharedExecutable, has_shared, read_shared, write_shared
from dflash_aot.cache.signature import Signature

T = TypeVar("T")
MAX_FAILURES_IN_A_ROW = 3  # failures in a row, after which nothing more is asked of it
UPLOAD_THREADS = 4
PROBE, PROBED = ".writable", b"dflash-precompile was here\n"


class StoreReport(msgspec.Struct, frozen=True):
    """What came of sharing: executables found, not found, and written; and whatever went wrong, in words."""

    url: str
    writable: bool
    hits: int
    misses: int
    written: int
    failures: tuple[str, ...]


class SharedStore:
    """A build's view of it. No failure of it is the build's: all are noted. Leaving the context waits for writes."""

    def __init__(self, objects: ObjectStore):
        """Asks whether it can be read, and written. Raises StoreFailed where it cannot be read, or is not there."""
        objects.read(PROBE, len(PROBED))
        self._objects, self._writable = objects, _is_writable(objects)
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="store")
        self._lock = threading.Lock()  # of what follows
        self._found: dict[str, Entry | None] = {}  # by key
        self._written = self._failures_in_a_row = 0
        self._failures: list[str] = []

    def __enter__(self) -> "SharedStore":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._pool.shutdown()

    def find(self, key: str, signature: Signature, program: bytes) -> SharedExecutable | None:
        """What somebody built from this program, if all of it is what its record says."""
        found = self._guard(lambda: read_shared(self._objects, key, signature, program))
        with self._lock:
            self._found[key] = found.entry if found else None
        return found

    def refuse(self, found: SharedExecutable, words: str) -> None:
        """What was found and cannot be used all the same counts as missing."""
        with self._lock:
            self._found[found.entry.key] = None
        self._note(f"{self._objects.url}/executables/{found.entry.sha256}: not used: {words}", failed=False)

    def add(self, store: Store, entry: Entry) -> None:
        """In the background, from a bundle: what was looked for and not found so; the rest if it is not there yet."""
        if self._writable and self._found.get(entry.key) != entry:
            self._pool.submit(self._guard, lambda: self._write(store, entry))

    def report(self) -> StoreReport:
        with self._lock:
            hits = sum(entry is not None for entry in self._found.values())
            return StoreReport(
                url=self._objects.url,
                writable=self._writable,
                hits=hits,
                misses=len(self._found) - hits,
                written=self._written,
                failures=tuple(self._failures),
            )

    def _write(self, store: Store, entry: Entry) -> None:
        if entry.key not in self._found and has_shared(self._objects, entry.key):
            return
        write_shared(self._objects, store, entry)
        with self._lock:
            self._written += 1

    def _guard(self, action: Callable[[], T]) -> T | None:
        """None where something went wrong, which is noted; after too much of it nothing is asked any more."""
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return None
        try:
            result = action()
        except (StoreFailed, CorruptBundle) as error:
            self._note(str(error), failed=isinstance(error, StoreFailed))
            return None
        with self._lock:
            self._failures_in_a_row = 0
        return result

    def _note(self, words: str, failed: bool) -> None:
        with self._lock:
            self._failures.append(words)
            self._failures_in_a_row = self._failures_in_a_row + 1 if failed else 0
            if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
                self._failures.append(
                    f"{self._objects.url}: not asked any more, after {MAX_FAILURES_IN_A_ROW} failures in a row"
                )


def _is_writable(objects: ObjectStore) -> bool:
    """By writing; what was written is removed again, where that is allowed."""
    try:
        objects.write(PROBE, PROBED)
    except StoreRefused:
        return False
    with suppress(StoreRefused):
        objects.remove(PROBE)
    return True
