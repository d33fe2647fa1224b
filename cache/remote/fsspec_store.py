"""Objects behind a URL, through fsspec: what fails for a moment is tried again, the rest is said in our words.

Backends that know them try again by themselves as well, as they are configured; the time is bounded here.
"""

import errno
import posixpath
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import fsspec

from dflash_aot.cache.errors import BadInput, CorruptBundle, StoreFailed, StoreRefused
from dflash_aot.cache.locations import hide_secrets
from dflash_aot.cache.remote.object_store import PERMISSION_ERRNOS
from dflash_aot.cache.remote.retry import RetryPolicy

T = TypeVar("T")
# Where an object appears whole, or not at all, when it was put. Elsewhere it is renamed when it is whole.
ATOMIC_PUT_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "memory"}
# Where a server may send the whole object, whatever part of it was asked for.
STREAMED_PROTOCOLS = {"http", "https"}
TRAILING_SLASHES = re.compile(r"(?<![:/])/+$")  # slashes, but those of "memory://"
PACKAGE_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Asking again would get the same answer. Whatever else a backend raises may pass.
PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
)
TRANSIENT_STATUSES = {408, 425, 429}  # of HTTP's 4xx
REFUSED_STATUSES = {401, 403, 405, 501}
PERMANENT_ERRNOS = {*PERMISSION_ERRNOS, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOSYS, errno.EDQUOT}


class FsspecStore:
    """`system` as fsspec makes it, `root` a path in it. See `Objects`."""

    def __init__(self, system: fsspec.AbstractFileSystem, root: str, url: str, retry: RetryPolicy):
        self.url = hide_secrets(url)
        self._system, self._root, self._retry = system, root, retry
        protocols = {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}
        self._puts_whole = not protocols.isdisjoint(ATOMIC_PUT_PROTOCOLS)
        self._read = self._read_stream if not protocols.isdisjoint(STREAMED_PROTOCOLS) else self._read_range

    def read(self, name: str, limit: int, expected: int = 0) -> bytes | None:
        try:
            content = self._ask(expected, self._read, name, limit + 1)
        except FileNotFoundError:
            return None
        except StoreFailed as error:
            if _is_out_of_range(error.__cause__):  # from its very beginning
                return b""
            raise
        if len(content) > limit:
            raise CorruptBundle(f"{self.url}/{name}: more than {limit} bytes, which is what is read of it at most")
        return content

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask(0, self._system.info, name)["size"])
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        put = self._system.pipe_file if self._puts_whole else self._write_and_rename
        try:
            self._ask(len(content), put, name, content)
        except FileNotFoundError as error:  # the bucket, say
            raise self._translate(name, error) from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(0, self._system.rm_file, name)

    def _ask(self, size: int, method: Callable[..., T], name: str, *arguments: Any, **options: Any) -> T:
        """Calls a method that moves up to `size` bytes.

        Raises FileNotFoundError where there is no such object, StoreRefused and StoreFailed.
        """

        def attempt(seconds: float) -> T:
            timed = {"timeout": seconds} if self._system.async_impl else {}  # others have limits of their own
            return method(f"{self._root}/{name}", *arguments, **options, **timed)

        try:
            return self._retry.call(attempt, size, is_transient)
        except FileNotFoundError:
            raise
        except Exception as error:  # every backend has errors of its own
            raise self._translate(name, error) from error

    def _read_range(self, path: str, most: int, **timed: float) -> bytes:
        content: bytes = self._system.cat_file(path, start=0, end=most, **timed)
        return content

    def _read_stream(self, path: str, most: int, **timed: float) -> bytes:
        """Hangs up after `most` bytes."""
        content = bytearray()
        # Any size will do: without one fsspec asks for it first.
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
            with suppress(Exception):  # what went wrong before is what is told
                self._system.rm_file(unfinished)
            raise

    def _translate(self, name: str, error: Exception) -> StoreFailed:
        where, words = f"{self.url}/{name}", hide_secrets(_find_words(error))
        if is_refusal(error):
            return StoreRefused(f"{where}: not allowed: {words}")
        tries = f" ({self._retry.attempts} attempts)" if is_transient(error) else ""
        return StoreFailed(f"{where}: {words}{tries}")


def open_fsspec_store(url: str, retry: RetryPolicy) -> FsspecStore:
    """Nothing is asked yet.

    Raises BadInput for a URL with a query, StoreFailed for one that fsspec does not know, or whose package is missing.
    """
    shown, protocol = hide_secrets(url), url.partition(":")[0].lower()
    if "?" in url:
        raise BadInput(
            f"{shown}: was given with a query. Names are appended to the URL of a place, which leaves none for a "
            "query. Give it without, and credentials as its backend takes them: in its environment or configuration"
        )
    try:
        system, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = PACKAGE_EXTRAS.get(protocol)
        remedy = f"pip install 'dflash-aot[{extra}]'" if extra else error
        raise StoreFailed(f"{shown}: the package for {protocol} is not installed: {remedy}") from error
    except Exception as error:  # every backend has its own
        raise StoreFailed(f"{shown}: {hide_secrets(_find_words(error))}") from error
    return FsspecStore(system, root.rstrip("/"), TRAILING_SLASHES.sub("", shown), retry)


def is_transient(error: Exception) -> bool:
    """Whether it may be gone when one asks again."""
    if isinstance(error, PERMANENT_ERRORS) or is_refusal(error):
        return False
    status = _find_status(error)
    if status is not None:
        return status >= 500 or status in TRANSIENT_STATUSES
    return not (isinstance(error, OSError) and error.errno in PERMANENT_ERRNOS)


def is_refusal(error: Exception) -> bool:
    """By Python's errors, by HTTP's numbers, and as gcsfs says it."""
    if isinstance(error, OSError) and (error.errno in PERMISSION_ERRNOS or str(error).startswith("Forbidden: ")):
        return True
    return isinstance(error, PermissionError | NotImplementedError) or _find_status(error) in REFUSED_STATUSES


def _find_status(error: BaseException | None) -> int | None:
    """HTTP's, under the names that aiohttp, Azure and gcsfs give it."""
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((status for status in found if isinstance(status, int)), None)


def _is_out_of_range(error: BaseException | None) -> bool:
    """As HTTP and S3 say it."""
    return _find_status(error) == 416 or "range is not satisfiable" in str(error)


def _find_words(error: Exception) -> str:
    """A line; some backends' errors have none."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(words.splitlines()), "") or type(error).__name__
