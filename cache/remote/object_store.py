"""Object stores: whole objects under names, in a directory or at a URL through fsspec, which retries.

Some of fsspec's backends retry by themselves, as configured; the time limit applies to all of it.
"""

import errno
import os
import posixpath
import random
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dflash_aot.cache.bundle.blob import MAX_BLOB_BYTES, BrokenBlob, unpack_blob
from dflash_aot.cache.bundle.manifest import Blob
from dflash_aot.cache.errors import (
    BadInput,
    CorruptBundle,
    StoreFailed,
    StoreFull,
    StoreRefused,
)
from dflash_aot.cache.files.atomic_files import read_plain, write_atomically
from dflash_aot.cache.files.locations import hide_secrets, is_url
from dflash_aot.cache.printable import quote_first_line

if TYPE_CHECKING:
    import fsspec

Result = TypeVar("Result")
PERMISSION_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}
FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Protocols whose put is atomic. With the others an object is written under a temporary name and renamed.
ATOMIC_PUT_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "memory"}
# Protocols whose servers may send the whole object although a range was requested.
STREAMED_PROTOCOLS = {"http", "https"}
TRAILING_SLASHES = re.compile(r"(?<![:/])/+$")  # but not the slashes of "memory://"
PACKAGE_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Errors that another attempt would meet again. Any other error of a backend may be transient.
PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
)
TRANSIENT_STATUSES = {408, 425, 429}  # HTTP status codes
REFUSED_STATUSES = {401, 403, 405, 501}
FULL_STATUS = 507
PERMANENT_ERRNOS = {
    *PERMISSION_ERRNOS,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    *FULL_ERRNOS,
}


# -- retries


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long an operation is tried.

    Attributes:
        attempts: calls in all.
        seconds: time limit of an attempt, without the time for its bytes.
        bytes_per_second: the slowest transfer that is waited for; it extends the limit by the
            size of the transfer.
        pause: longest pause before the second attempt, in seconds; doubled before each further
            one.
    """

    attempts: int = 3
    seconds: float = 30.0
    bytes_per_second: float = 250_000.0
    pause: float = 1.0

    def call(
        self,
        action: Callable[[float], Result],
        size: int,
        is_transient: Callable[[Exception], bool],
    ) -> Result:
        """Calls `action` with its time limit in seconds until it succeeds; returns its result or raises its last error.

        size: bytes that the action transfers. is_transient: whether an error may go away.
        """
        seconds = self.seconds + size / self.bytes_per_second
        for attempt in range(1, self.attempts):
            try:
                return action(seconds)
            except Exception as error:
                if not is_transient(error):
                    raise
            # Random, so that clients that failed together do not come back together.
            time.sleep(random.uniform(0.5, 1) * self.pause * 2 ** (attempt - 1))
        return action(seconds)


DEFAULT_RETRY = RetryPolicy()


# -- stores


class ObjectStore(Protocol):
    """An object store. Object names are relative paths with slashes.

    All methods raise StoreRefused if the operation is not permitted, StoreFull where there is no space, and StoreFailed
    for other failures.

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


def _to_store_error(path: Path, error: OSError) -> StoreFailed:
    words = f"{path}: {error.strerror}"
    if error.errno in FULL_ERRNOS:
        return StoreFull(words)
    return StoreRefused(words) if error.errno in PERMISSION_ERRNOS else StoreFailed(words)


class FsspecStore:
    """An `ObjectStore` at the path `root` of an fsspec file system."""

    def __init__(
        self, system: "fsspec.AbstractFileSystem", root: str, url: str, retry: RetryPolicy
    ):
        self.url = hide_secrets(url)
        self._system = system
        self._root = root
        self._retry = retry
        protocols = {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}
        self._puts_whole = not protocols.isdisjoint(ATOMIC_PUT_PROTOCOLS)
        self._read = (
            self._read_stream if not protocols.isdisjoint(STREAMED_PROTOCOLS) else self._read_range
        )

    def read(self, name: str, limit: int, expected: int = 0) -> bytes | None:
        try:
            content = self._ask(expected, self._read, name, limit + 1)
        except FileNotFoundError:
            return None
        except StoreFailed as error:
            # The range starts after the end of an empty object.
            if _is_out_of_range(error.__cause__):
                return b""
            raise
        if len(content) > limit:
            raise CorruptBundle(f"{self.url}/{name}: more than the limit of {limit} bytes")
        return content

    def size(self, name: str) -> int | None:
        try:
            size = self._ask(0, self._system.info, name)["size"]
        except FileNotFoundError:
            return None
        if size is None:  # of a web server that sends no Content-Length
            raise StoreFailed(f"{self.url}/{name}: the server does not tell how large it is")
        return int(size)

    def write(self, name: str, content: bytes) -> None:
        put = self._system.pipe_file if self._puts_whole else self._write_and_rename
        try:
            self._ask(len(content), put, name, content)
        except FileNotFoundError as error:  # for example, no such bucket
            raise self._translate(name, error) from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(0, self._system.rm_file, name)

    def _ask(
        self, size: int, method: Callable[..., Result], name: str, *arguments: Any, **options: Any
    ) -> Result:
        """Calls a method of the file system that transfers up to `size` bytes, with retries.

        Raises FileNotFoundError for a missing object, StoreRefused and StoreFailed.
        """

        def attempt(seconds: float) -> Result:
            # Other backends have limits of their own.
            timed = {"timeout": seconds} if self._system.async_impl else {}
            return method(f"{self._root}/{name}", *arguments, **options, **timed)

        try:
            return self._retry.call(attempt, size, is_transient)
        except FileNotFoundError:
            raise
        except Exception as error:  # every backend has its own errors
            raise self._translate(name, error) from error

    def _read_range(self, path: str, most: int, **timed: float) -> bytes:
        content: bytes = self._system.cat_file(path, start=0, end=most, **timed)
        return content

    def _read_stream(self, path: str, most: int, **timed: float) -> bytes:
        """Reads a stream and closes it after `most` bytes."""
        content = bytearray()
        # With any size given, fsspec does not request the size first.
        with self._system.open(path, block_size=0, size=most, **timed) as stream:
            while len(content) < most and (part := stream.read(most - len(content))):
                content += part
        return bytes(content)

    def _write_and_rename(self, path: str, content: bytes, **timed: float) -> None:
        folder, name = posixpath.split(path)
        unfinished = f"{folder}/.{name}.{secrets.token_hex(4)}.unfinished"
        self._system.makedirs(folder, exist_ok=True)
        try:
            self._system.pipe_file(unfinished, content, **timed)
            self._system.mv(unfinished, path)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._system.rm_file(unfinished)
            raise

    def _translate(self, name: str, error: Exception) -> StoreFailed:
        where = f"{self.url}/{name}"
        words = _find_message(error)
        if is_refusal(error):
            return StoreRefused(f"{where}: not allowed: {words}")
        if is_full(error):
            return StoreFull(f"{where}: {words}")
        tries = f" ({self._retry.attempts} attempts)" if is_transient(error) else ""
        return StoreFailed(f"{where}: {words}{tries}")


def open_object_store(place: str, retry: RetryPolicy = DEFAULT_RETRY) -> ObjectStore:
    """Returns the store in a directory, which the first write creates, or at a URL; contacts nothing yet.

    Raises BadInput for a URL with a query, StoreFailed for an unknown scheme or a missing package.
    """
    if not is_url(place):
        return DirectoryStore(Path(os.path.expanduser(place)))
    return _open_fsspec_store(place, retry)


def _open_fsspec_store(url: str, retry: RetryPolicy) -> FsspecStore:
    # It takes a tenth of a second and a thread: imported for URLs only.
    import fsspec  # noqa: PLC0415

    shown = hide_secrets(url)
    protocol = url.partition(":")[0].lower()
    if "?" in url:
        raise BadInput(
            f"{shown}: the URL has a query, which is not supported because object names are appended to the URL. Give "
            "the URL without it, and credentials in the environment or configuration of the backend"
        )
    try:
        system, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = PACKAGE_EXTRAS.get(protocol)
        remedy = f"pip install 'dflash-aot[{extra}]'" if extra else _find_message(error)
        raise StoreFailed(
            f"{shown}: the package for {protocol} is not installed: {remedy}"
        ) from error
    except Exception as error:  # every backend has its own errors
        raise StoreFailed(f"{shown}: {_find_message(error)}") from error
    return FsspecStore(system, root.rstrip("/"), TRAILING_SLASHES.sub("", shown), retry)


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


# -- errors of backends


def is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, PERMANENT_ERRORS) or is_refusal(error) or is_full(error):
        return False
    status = _find_status(error)
    if status is not None:
        return status >= 500 or status in TRANSIENT_STATUSES
    return not (isinstance(error, OSError) and error.errno in PERMANENT_ERRNOS)


def is_refusal(error: Exception) -> bool:
    """Whether the store does not permit the operation, by Python's errors, HTTP status codes and gcsfs's messages."""
    if isinstance(error, OSError) and (
        error.errno in PERMISSION_ERRNOS or str(error).startswith("Forbidden: ")
    ):
        return True
    return (
        isinstance(error, PermissionError | NotImplementedError)
        or _find_status(error) in REFUSED_STATUSES
    )


def is_full(error: Exception) -> bool:
    """Whether the store has no space, by Python's errors and the HTTP status code."""
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
        return True
    return _find_status(error) == FULL_STATUS


def _find_status(error: BaseException | None) -> int | None:
    """Returns the HTTP status code of an error of aiohttp, Azure or gcsfs; None if it has none."""
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((status for status in found if isinstance(status, int)), None)


def _is_out_of_range(error: BaseException | None) -> bool:
    """Whether HTTP or S3 refused a range after the end of an object."""
    return _find_status(error) == 416 or "range is not satisfiable" in str(error)


def _find_message(error: Exception) -> str:
    """Returns the first line of an error's message without secrets, or the name of its class.

    The message may be the body of a store's response, of any length: it is cut first.
    """
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return hide_secrets(quote_first_line(words)) or type(error).__name__
