"""Object stores: whole objects under names, in a directory or at a URL."""

import errno
from pathlib import Path
from typing import Protocol

from dflash_aot.cache.bundle.blob import MAX_BLOB_BYTES, BrokenBlob, unpack_blob
from dflash_aot.cache.bundle.manifest import Blob
from dflash_aot.cache.errors import CorruptBundle, StoreFailed, StoreRefused
from dflash_aot.cache.files.atomic_files import read_plain, write_atomically
from dflash_aot.cache.files.locations import is_url
from dflash_aot.cache.remote.retry import DEFAULT_RETRY, PERMISSION_ERRNOS, RetryPolicy


class ObjectStore(Protocol):
    """An object store. Object names are relative paths with slashes.

    All methods raise StoreRefused if the operation is not permitted, StoreFailed for other failures.

    Attributes:
        url: the location for messages, without secrets.
    """

    url: str

    def read(self, name: str, limit: int, expected: int = 0) -> bytes | None:
        """Returns an object, None if it does not exist. Raises CorruptBundle for more than `limit` bytes.

        `expected` is its likely size, which extends the time limit.
        """

    def size(self, name: str) -> int | None:
        """Returns the size of an object in bytes, None if it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Writes or replaces an object, atomically as far as the store allows."""

    def remove(self, name: str) -> None:
        """Removes an object if it exists."""


class DirectoryStore:
    """An object store in a directory: objects are files."""

    def __init__(self, path: Path):
        self.url = str(path)
        self._path = path

    def read(self, name: str, limit: int, expected: int = 0) -> bytes | None:
        try:
            return read_plain(self._path / name, limit)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise CorruptBundle(f"{self._path / name}: {error.strerror}") from error
            raise _to_store_error(self._path / name, error) from error

    def size(self, name: str) -> int | None:
        try:
            return (self._path / name).lstat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _to_store_error(self._path / name, error) from error

    def write(self, name: str, content: bytes) -> None:
        path = self._path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            raise _to_store_error(path, error) from error

    def remove(self, name: str) -> None:
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _to_store_error(self._path / name, error) from error


def open_object_store(place: str, retry: RetryPolicy = DEFAULT_RETRY) -> ObjectStore:
    """Returns the store in a directory, which the first write creates, or at a URL; contacts nothing yet.

    Raises BadInput for a URL with a query, StoreFailed for an unknown scheme or a missing package.
    """
    if not is_url(place):
        return DirectoryStore(Path(place).expanduser())
    # fsspec takes a tenth of a second and a thread: imported for URLs only.
    from dflash_aot.cache.remote.fsspec_store import open_fsspec_store  # noqa: PLC0415

    return open_fsspec_store(place, retry)


def read_blob(objects: ObjectStore, name: str, blob: Blob) -> tuple[bytes, bytes]:
    """Reads and verifies a blob; returns it compressed and decompressed. Raises StoreFailed, CorruptBundle."""
    most = min(blob.bytes, MAX_BLOB_BYTES)  # the description may be forged
    content = objects.read(name, most, most)
    if content is None:
        raise CorruptBundle(
            f"{objects.url}/{name}: missing, although the manifest or record names it"
        )
    try:
        return content, unpack_blob(blob, content)
    except BrokenBlob as flaw:
        raise CorruptBundle(f"{objects.url}/{name}: {flaw}") from flaw


def _to_store_error(path: Path, error: OSError) -> StoreFailed:
    kind = StoreRefused if error.errno in PERMISSION_ERRNOS else StoreFailed
    return kind(f"{path}: {error.strerror}")
