"""What a file of a bundle holds: packed, and unpacked by nobody before it is what was promised."""

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_aot.cache.bundle.atomic_files import read_plain
from dflash_aot.cache.bundle.manifest import Blob, Entry
from dflash_aot.cache.bundle.pickle_scan import scan_pickle
from dflash_aot.cache.errors import CorruptBundle

MAX_BLOB_BYTES = 1 << 30  # bytes of a file, and of what it unpacks to, whatever is promised; executables take some MB


class BrokenBlob(ValueError):
    """Content that is not what was promised: in which `field`, and both values.

    `content` is False where the bytes themselves are not at fault.
    """

    def __init__(self, words: str, field: str, promised: object, found: object, content: bool = True):
        super().__init__(words)
        self.field, self.promised, self.found, self.content = field, str(promised), str(found), content


def pack_blob(serialized: bytes) -> tuple[Blob, bytes]:
    """What is serialized, as a file: a fifth of its size, unpacked in 3 ms per MB."""
    content = zlib.compress(serialized)
    return Blob(hashlib.sha256(content).hexdigest(), len(content), len(serialized)), content


def unpack_blob(blob: Blob, content: bytes) -> bytes:
    """What a file holds, once it is whole: its size, its sha256, what it unpacks to, and an executable's pickle.

    Unpacked no further than to the promised size. Raises BrokenBlob.
    """
    check_blob_hash(blob, content)
    serialized = decompress_blob(blob, content)
    if isinstance(blob, Entry):
        with _within_memory(blob):
            _check_pickle(serialized)
    return serialized


def check_blob_hash(blob: Blob, content: bytes) -> None:
    """Its size and its sha256. Raises BrokenBlob."""
    if len(content) != blob.bytes:
        words = f"{len(content)} bytes, the manifest promises {blob.bytes}"
        raise BrokenBlob(words, "bytes", blob.bytes, len(content))
    if (found := hashlib.sha256(content).hexdigest()) != blob.sha256:
        raise BrokenBlob(f"its sha256 is {found}", "sha256", blob.sha256, found)


def decompress_blob(blob: Blob, content: bytes) -> bytes:
    """What a file holds whose hash was checked; no further than to the promised size. Raises BrokenBlob."""
    with _within_memory(blob):
        return _decompress(blob.serialized_bytes, content)


@contextmanager
def _within_memory(blob: Blob) -> Iterator[None]:
    """Raises BrokenBlob where there is no room."""
    try:
        yield
    except MemoryError as error:
        size = blob.serialized_bytes
        words = f"unpacks to {size} bytes, for which no memory is free here"
        raise BrokenBlob(words, "serialized_bytes", size, words, content=False) from error


def find_blob_flaw(blob: Blob, content: bytes) -> BrokenBlob | None:
    """In what a file is not whole, see `unpack`."""
    try:
        unpack_blob(blob, content)
    except BrokenBlob as flaw:
        return flaw
    return None


def read_blob_file(blob: Blob, path: Path) -> bytes:
    """A file as it lies there, once it is whole. Raises CorruptBundle, which names it."""
    try:
        content = read_plain(path, MAX_BLOB_BYTES)
    except OSError as error:
        raise CorruptBundle(f"{path}: {error.strerror}") from error
    if flaw := find_blob_flaw(blob, content):
        raise CorruptBundle(f"{path}: {flaw}") from flaw
    return content


def _decompress(size: int, content: bytes) -> bytes:
    def broken(words: str) -> BrokenBlob:
        return BrokenBlob(words, "serialized_bytes", size, words)

    if size > MAX_BLOB_BYTES:
        raise broken(f"promises to unpack to {size} bytes, no file unpacks to more than {MAX_BLOB_BYTES}")
    unpacking = zlib.decompressobj()
    try:
        serialized = unpacking.decompress(content, size + 1)
    except zlib.error as error:
        raise broken(str(error)) from error
    if len(serialized) != size or not unpacking.eof or unpacking.unused_data:
        raise broken(f"does not unpack to {size} bytes, as the manifest promises")
    return serialized


def _check_pickle(serialized: bytes) -> None:
    try:
        scan_pickle(serialized)
    except CorruptBundle as error:
        raise BrokenBlob(str(error), "pickle", "names that JAX writes", error) from error
