"""Writing so that a reader, or a crash, sees the whole file or none of it; reading nothing but plain files."""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".unfinished"


def write_atomically(path: Path, content: bytes) -> None:
    """Temporary name in the same directory, fsync, rename, fsync the directory. Raises OSError, which names `path`."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # what went wrong before is what is told
            os.unlink(temporary)
        if isinstance(error, OSError):  # a full disk does not say of what file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_directory(path.parent)


def read_plain(path: Path, limit: int | None = None) -> bytes:
    """A file's content; nothing that a name only leads to, and nothing that would keep the reader waiting.

    Raises OSError, also for a link, a fifo or a device, and for more than `limit` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link, where a file of its own should be", str(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"a {file_kind(status.st_mode)}, where a file should be", str(path))
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, where at most {limit} are read", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def file_kind(mode: int) -> str:
    """What `st_mode` says that it is, if it is no plain file."""
    kinds = {stat.S_ISLNK: "symbolic link", stat.S_ISDIR: "directory", stat.S_ISFIFO: "fifo", stat.S_ISSOCK: "socket"}
    return next((name for holds, name in kinds.items() if holds(mode)), "device")


def list_temporary_files(directory: Path) -> list[Path]:
    """What writers that were killed left behind in `directory`."""
    return [path for path in directory.iterdir() if is_temporary_file(path)]


def is_temporary_file(path: Path) -> bool:
    """By its name."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
