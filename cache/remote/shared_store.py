"""Shared store: executables that a team builds once, in an object store.

Layout as in a bundle: executables/<sha256>, programs/<sha256>, entries/<key>.json (the build records).
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import msgspec

from dflash_aot.cache.bundle.blob import read_blob_file
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import OTHER_PROGRAM_FLAW, Store, find_build_record
from dflash_aot.cache.errors import CorruptBundle, StoreFailed, StoreFull, StoreRefused
from dflash_aot.cache.remote.object_store import ObjectStore, read_blob
from dflash_aot.cache.signature import Signature

Result = TypeVar("Result")
MAX_RECORD_BYTES = 1 << 24
READ_ATTEMPTS = 2  # an object that was replaced while it was read is complete at the second attempt
MAX_FAILURES_IN_A_ROW = 3
UPLOAD_THREADS = 4
PROBE_NAME = ".writable"
PROBE_CONTENT = b"dflash-precompile was here\n"


class SharedExecutable(msgspec.Struct, frozen=True):
    """An executable that was read from a shared store and verified.

    Attributes:
        entry: its build record.
        executable, program: the files that the record names, compressed as in a bundle.
    """

    entry: Entry
    executable: bytes
    program: bytes


class StoreReport(msgspec.Struct, frozen=True):
    """What a build found in a shared store and wrote to it.

    Attributes:
        url: the store, without secrets.
        writable: whether writes are allowed.
        hits, misses: executables found and not found.
        written: executables uploaded.
        failures: a message for everything that went wrong.
    """

    url: str
    writable: bool
    hits: int
    misses: int
    written: int
    failures: tuple[str, ...]


class SharedStore:
    """A build's access to a shared store: find an executable before compiling, upload it after its self-test.

    A failing store never fails the build: failures are collected for the report. A full store is only read. Leaving the
    context waits for uploads in progress.
    """

    def __init__(self, objects: ObjectStore):
        """Checks that the store can be read, and whether it can be written. Raises StoreFailed if it cannot be read."""
        objects.read(PROBE_NAME, len(PROBE_CONTENT))
        self._objects = objects
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="store")
        self._lock = threading.Lock()  # guards the attributes below
        self._found: dict[str, Entry | None] = {}  # by key
        self._written = self._failures_in_a_row = 0
        self._failures: list[str] = []
        self._unwritable = _find_write_fault(objects)

    @property
    def unwritable(self) -> str:
        """Why nothing is written; "" for a store that is written."""
        return self._unwritable

    def __enter__(self) -> "SharedStore":
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def find(self, key: str, signature: Signature, program: bytes) -> SharedExecutable | None:
        """Returns the executable that was compiled from this program, if the store has it whole."""
        found = self._collect_failure(
            lambda: _read_executable(self._objects, key, signature, program)
        )
        with self._lock:
            self._found[key] = found.entry if found else None
        return found

    def reject(self, found: SharedExecutable, reason: str) -> None:
        """Counts an executable that was found but cannot be used as a miss."""
        with self._lock:
            self._found[found.entry.key] = None
        message = f"{self._objects.url}/executables/{found.entry.sha256}: not used: {reason}"
        self._add_failure(message, store_failed=False)

    def add(self, store: Store, entry: Entry) -> None:
        """Uploads an executable of a bundle in the background, unless the shared store already holds it.

        An executable that was looked up and not found is written without looking again.
        """
        if not self._unwritable and self._found.get(entry.key) != entry:
            self._pool.submit(self._collect_failure, lambda: self._write(store, entry))

    def report(self) -> StoreReport:
        """Returns the counts and failures so far."""
        with self._lock:
            hits = sum(entry is not None for entry in self._found.values())
            return StoreReport(
                url=self._objects.url,
                writable=not self._unwritable,
                hits=hits,
                misses=len(self._found) - hits,
                written=self._written,
                failures=tuple(self._failures),
            )

    def _write(self, store: Store, entry: Entry) -> None:
        if self._unwritable:  # since it was submitted
            return
        if entry.key not in self._found and self._objects.size(_record_name(entry.key)) is not None:
            return
        _write_executable(self._objects, store, entry)
        with self._lock:
            self._written += 1

    def _collect_failure(self, action: Callable[[], Result]) -> Result | None:
        """Calls `action`; returns None if it fails, or if too many calls before it failed in a row."""
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return None
        try:
            result = action()
        except StoreFull as error:
            self._stop_writing(error)
            return None
        except (StoreFailed, CorruptBundle) as error:
            self._add_failure(str(error), store_failed=isinstance(error, StoreFailed))
            return None
        with self._lock:
            self._failures_in_a_row = 0
        return result

    def _stop_writing(self, error: StoreFull) -> None:
        """Reports the first object that finds no space, and writes no more: the executables are in the bundle."""
        with self._lock:
            if not self._unwritable:
                self._unwritable = str(error)
                self._failures.append(f"{error}: nothing more is written there")

    def _add_failure(self, message: str, store_failed: bool) -> None:
        with self._lock:
            self._failures.append(message)
            self._failures_in_a_row = self._failures_in_a_row + 1 if store_failed else 0
            if (count := self._failures_in_a_row) == MAX_FAILURES_IN_A_ROW:
                self._failures.append(
                    f"{self._objects.url}: no longer used after {count} failures in a row"
                )


def _find_write_fault(objects: ObjectStore) -> str:
    """Writes a probe object and removes it again where that is allowed. Returns why it was not written, or ""."""
    try:
        objects.write(PROBE_NAME, PROBE_CONTENT)
    except StoreRefused:
        return f"{objects.url} is read-only"
    except StoreFull as error:
        return str(error)
    with suppress(StoreRefused):
        objects.remove(PROBE_NAME)
    return ""


def _read_executable(
    objects: ObjectStore, key: str, signature: Signature, program: bytes
) -> SharedExecutable | None:
    """Returns the executable compiled from this program, None if there is no record of it.

    Raises StoreFailed, CorruptBundle for an executable that is corrupt at every attempt.
    """
    for _ in range(READ_ATTEMPTS - 1):
        with suppress(CorruptBundle):
            return _read_once(objects, key, signature, program)
    return _read_once(objects, key, signature, program)


def _read_once(
    objects: ObjectStore, key: str, signature: Signature, program: bytes
) -> SharedExecutable | None:
    where = f"{objects.url}/{_record_name(key)}"
    record = objects.read(_record_name(key), MAX_RECORD_BYTES)
    if record is None:
        return None
    try:
        entry = find_build_record(record, key, signature, program)
    except ValueError as flaw:
        raise CorruptBundle(f"{where}: {flaw}") from flaw
    packed, unpacked = read_blob(objects, f"programs/{entry.program.sha256}", entry.program)
    if unpacked != program:
        raise CorruptBundle(f"{where}: {OTHER_PROGRAM_FLAW}")
    return SharedExecutable(
        entry, read_blob(objects, f"executables/{entry.sha256}", entry)[0], packed
    )


def _write_executable(objects: ObjectStore, store: Store, entry: Entry) -> None:
    """Uploads an executable of a bundle. The record is written last, so that it never names a missing blob.

    Raises StoreFailed, CorruptBundle.
    """
    program = read_blob_file(entry.program, store.program_path(entry))
    executable = read_blob_file(entry, store.executable_path(entry))
    objects.write(f"programs/{entry.program.sha256}", program)
    objects.write(f"executables/{entry.sha256}", executable)
    objects.write(_record_name(entry.key), msgspec.json.encode(entry))


def _record_name(key: str) -> str:
    return f"entries/{key}.json"
