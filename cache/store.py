"""The executables of a bundle: blobs under the hash of their content, and a record for each under its key.

manifest.json            what is served, written last
executables/<sha256>     serialized executables, compressed
entries/<key>.json       what each build left behind: a killed build goes on from here, a changed grid reuses it
"""

import fcntl
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle
from dflash_aot.cache.files import temporaries, write_atomically
from dflash_aot.cache.manifest import FILE, Entry, Manifest, build_command, encode_manifest


class Store:
    """A bundle directory being built or read."""

    def __init__(self, bundle: Path):
        self.bundle = bundle
        self._executables = bundle / "executables"
        self._entries = bundle / "entries"

    @contextmanager
    def open_for_building(self) -> Iterator[None]:
        """Makes the directories and holds the builders' lock, which dies with its process.

        Raises BadInput where nothing can be written, BuildFailed where another builder is at work.
        """
        try:
            for directory in (self._executables, self._entries):
                directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.bundle / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error
        try:
            self._take(lock)
            yield
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildFailed(
                f"{self.bundle}: another dflash-precompile is building here. Wait for it, or give another --bundle"
            ) from error
        try:
            self._sweep()
            write_atomically(self.bundle / ".writable", b"")
            (self.bundle / ".writable").unlink()
        except OSError as error:
            raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error

    def _sweep(self) -> None:
        """Removes what builders that were killed had begun to write; only the lock's holder writes here."""
        for directory in (self.bundle, self._executables, self._entries):
            for temporary in temporaries(directory):
                temporary.unlink()

    def find(self, key: str) -> Entry | None:
        """The record of an executable built before, if its blob is whole."""
        try:
            entry = msgspec.json.decode((self._entries / f"{key}.json").read_bytes(), type=Entry)
            self._read_blob(entry)
        except (OSError, msgspec.DecodeError, CorruptBundle):
            return None  # never built, or not readable any more: it is built anew
        return entry if entry.key == key else None

    def add(self, entry: Entry, blob: bytes) -> None:
        """Blob, as `pack` makes it, first, record second: a record never speaks of a blob that is not there."""
        write_atomically(self._executables / entry.sha256, blob)
        write_atomically(self._entries / f"{entry.key}.json", msgspec.json.encode(entry))

    def publish(self, manifest: Manifest) -> None:
        """From here on readers see the new bundle."""
        write_atomically(self.bundle / FILE, encode_manifest(manifest))

    def read(self, entry: Entry) -> bytes:
        """A serialized executable, whose blob has the size and sha256 that the manifest promises.

        Unpacked no further than to the size that it promises as well. Raises CorruptBundle.
        """
        blob = self._read_blob(entry)
        unpacking = zlib.decompressobj()
        try:
            serialized = unpacking.decompress(blob, entry.serialized_bytes + 1)
        except zlib.error as error:
            raise CorruptBundle(f"{self._name(entry)}: {error}. {self._remedy}") from error
        if len(serialized) != entry.serialized_bytes or not unpacking.eof or unpacking.unused_data:
            raise CorruptBundle(
                f"{self._name(entry)}: does not unpack to {entry.serialized_bytes} bytes, as the manifest promises. "
                f"{self._remedy}"
            )
        return serialized

    def _read_blob(self, entry: Entry) -> bytes:
        where = self._name(entry)
        try:
            blob = (self._executables / entry.sha256).read_bytes()
        except OSError as error:
            raise CorruptBundle(f"{where}: {error.strerror}. {self._remedy}") from error
        if len(blob) != entry.bytes:
            raise CorruptBundle(f"{where}: {len(blob)} bytes, the manifest promises {entry.bytes}. {self._remedy}")
        if (found := hashlib.sha256(blob).hexdigest()) != entry.sha256:
            raise CorruptBundle(f"{where}: its sha256 is {found}. {self._remedy}")
        return blob

    def _name(self, entry: Entry) -> str:
        return f"{self._executables / entry.sha256} ({entry.signature.label})"

    @property
    def _remedy(self) -> str:
        return f"Build it again: {build_command(self.bundle)}"


def pack(serialized: bytes) -> bytes:
    """A serialized executable as it is stored: a fifth of its size, unpacked in 3 ms per MB."""
    return zlib.compress(serialized)
