"""Blobs: the compressed files of a bundle, verified before they are decompressed."""

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Blob, Entry
from dflash_aot.cache.bundle.pickle_scan import scan_pickle
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.files.atomic_files import read_plain

# Limits of what is read and decompressed, whatever the manifest says. Of 320 executables and programs for CPU and TPU,
# the largest has 6.4 MB; none is more than 8 times its file, no executable more than 371 times its program.
MAX_BLOB_BYTES = 1 << 28
MAX_EXPANSION = 32
MAX_PROGRAM_EXPANSION = 1500
SMALL_BLOB_BYTES = 1 << 20  # up to here, a blob of any ratio is accepted


class BrokenBlob(ValueError):
    """The content of a blob differs from its description in the manifest.

    Attributes:
        field: what differs: bytes, sha256, serialized_bytes or pickle.
        expected, found: the value in the manifest and the value found.
        content: whether the bytes themselves are wrong; False if they could not be checked.
    """

    def __init__(
        self, words: str, field: str, expected: object, found: object, content: bool = True
    ):
        super().__init__(words)
        self.field = field
        self.expected = str(expected)
        self.found = str(found)
        self.content = content


def pack_blob(serialized: bytes) -> tuple[Blob, bytes]:
    """Compresses an executable or program to about a fifth of its size; decompression takes 3 ms per MB."""
    content = zlib.compress(serialized)
    return Blob(hashlib.sha256(content).hexdigest(), len(content), len(serialized)), content


def unpack_blob(blob: Blob, content: bytes) -> bytes:
    """Verifies and decompresses a blob: size, sha256, decompressed size and, for an executable, its pickle.

    Decompresses no more than the expected size. Raises BrokenBlob.
    """
    check_blob_hash(blob, content)
    serialized = decompress_blob(blob, content)
    if isinstance(blob, Entry):
        with _within_memory(blob):
            _check_pickle(blob, serialized)
    return serialized


def check_blob_hash(blob: Blob, content: bytes) -> None:
    """Checks size and sha256 of a blob's file. Raises BrokenBlob."""
    if len(content) != blob.bytes:
        words = f"{len(content)} bytes, the manifest says {blob.bytes}"
        raise BrokenBlob(words, "bytes", blob.bytes, len(content))
    if (found := hashlib.sha256(content).hexdigest()) != blob.sha256:
        raise BrokenBlob(f"its sha256 is {found}", "sha256", blob.sha256, found)


def decompress_blob(blob: Blob, content: bytes) -> bytes:
    """Decompresses a blob whose hash was checked, no further than to the expected size. Raises BrokenBlob."""
    size = blob.serialized_bytes
    if words := find_excess(blob):
        raise BrokenBlob(words, "serialized_bytes", size, words)
    with _within_memory(blob):
        return _decompress(size, content)


@contextmanager
def _within_memory(blob: Blob) -> Iterator[None]:
    """Turns MemoryError into BrokenBlob."""
    try:
        yield
    except MemoryError as error:
        size = blob.serialized_bytes
        words = f"unpacks to {size} bytes, more than the free memory"
        raise BrokenBlob(words, "serialized_bytes", size, words, content=False) from error


def find_blob_flaw(blob: Blob, content: bytes) -> BrokenBlob | None:
    """Returns the error that `unpack_blob` raises for this content, None if it raises none."""
    try:
        unpack_blob(blob, content)
    except BrokenBlob as flaw:
        return flaw
    return None


def read_blob_file(blob: Blob, path: Path) -> bytes:
    """Reads and verifies a blob's file; returns it compressed. Raises CorruptBundle with the name of the file."""
    try:
        content = read_plain(path, MAX_BLOB_BYTES)
    except OSError as error:
        raise CorruptBundle(f"{path}: {error.strerror}") from error
    if flaw := find_blob_flaw(blob, content):
        raise CorruptBundle(f"{path}: {flaw}") from flaw
    return content


def find_excess(blob: Blob) -> str | None:
    """Returns which limit of size a blob exceeds, so that it is not read; None if it exceeds none."""
    if blob.bytes > MAX_BLOB_BYTES:
        return f"has {blob.bytes} bytes, more than the limit of {MAX_BLOB_BYTES}"
    limit, reason = _limit_size(blob)
    if blob.serialized_bytes > limit:
        size = blob.serialized_bytes
        return f"should unpack to {size} bytes, more than the limit of {limit}{reason}"
    return None


def _limit_size(blob: Blob) -> tuple[int, str]:
    """Returns how many bytes a blob may have when it is decompressed, and why."""
    limits = {
        MAX_BLOB_BYTES: "",
        max(SMALL_BLOB_BYTES, MAX_EXPANSION * blob.bytes): f" for a file of {blob.bytes} bytes",
    }
    if isinstance(blob, Entry):
        program = blob.program.serialized_bytes
        limits[max(SMALL_BLOB_BYTES, MAX_PROGRAM_EXPANSION * program)] = (
            f" for a program of {program} bytes"
        )
    return min(limits.items())


def _decompress(size: int, content: bytes) -> bytes:
    def broken(words: str) -> BrokenBlob:
        return BrokenBlob(words, "serialized_bytes", size, words)

    decompressor = zlib.decompressobj()
    try:
        serialized = decompressor.decompress(content, size + 1)
    except zlib.error as error:
        raise broken(str(error)) from error
    if len(serialized) != size or not decompressor.eof or decompressor.unused_data:
        raise broken(f"does not unpack to {size} bytes, as the manifest says")
    return serialized


def _check_pickle(entry: Entry, serialized: bytes) -> None:
    try:
        scan_pickle(serialized, entry.signature)
    except CorruptBundle as error:
        raise BrokenBlob(str(error), "pickle", "what JAX writes", error) from error
