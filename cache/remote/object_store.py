"""Whole objects under names, in a directory or behind a URL: what shared stores and pushed bundles are made of."""

import errno
from pathlib import Path
from typing import Protocol

from dflash_aot.cache.bundle.atomic_files import read_plain, write_atomically
from dflash_aot.cache.bundle.blob import MAX_BLOB_BYTES, BrokenBlob, unpack_blob
from dflash_aot.cache.bundle.manifest import Blob
from dflash_aot.cache.errors import CorruptBundle, StoreFailed, StoreRefused
from dflash_aot.cache.locations import is_url
from dflash_aot.cache.remote.retry import DEFAULT_RETRY, RetryPolicy

PERMISSION_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}


class ObjectStore(Protocol):
    """Names are relative, with slashes; `url` is for people, without secrets.

    Everything raises StoreRefused where it is not allowed, StoreFailed where something else is in the way.
    """

    url: str

    def read(self, name: str, limit: int, expected: int = 0) -> bytes | None:
        """All of it; None where there is none. Raises CorruptBundle for more than `limit` bytes.

        `expected` bytes are worth waiting for.
        """

    def size(self, name: str) -> int | None:
        """In bytes; None where there is none."""

    def write(self, name: str, content: bytes) -> None:
        """In one piece, as far as the place allows; over what is there."""

    def remove(self, name: str) -> None:
        """If it is there."""


class DirectoryStore:
    """Objects that are files."""

    def __init__(self, path: Path):
        self.url, self._path = str(path), path

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
    """Those in a directory, which is made when something is written, or behind a URL.

    Nothing is asked yet. Raises BadInput for a URL with a query, StoreFailed for one that nobody knows, or whose
    package is missing.
    """
    if not is_url(place):
        return DirectoryStore(Path(place).expanduser())
    # A tenth of a second and a thread that only those pay who use URLs.
    from dflash_aot.cache.remote.fsspec_store import open_fsspec_store  # noqa: PLC0415

    return open_fsspec_store(place, retry)


def read_blob(objects: ObjectStore, name: str, blob: Blob) -> tuple[bytes, bytes]:
    """As it lies there, and unpacked, once it is whole. Raises StoreFailed, CorruptBundle."""
    most = min(blob.bytes, MAX_BLOB_BYTES)  # whatever it promises
    content = objects.read(name, most, most)
    if content is None:
        raise CorruptBundle(f"{objects.url}/{name}: not there, though it was promised")
    try:
        return content, unpack_blob(blob, content)
    except BrokenBlob as flaw:
        raise CorruptBundle(f"{objects.url}/{name}: {flaw}") from flaw


def _to_store_error(path: Path, error: OSError) -> StoreFailed:
    kind = StoreRefused if error.errno in PERMISSION_ERRNOS else StoreFailed
    return kind(f"{path}: {error.strerror}")
