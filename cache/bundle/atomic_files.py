"""Atomic file writes, and reads of regular files only."""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".unfinished"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that readers, and a crash, see the old file or the new one, never a part.

    Writes to a temporary name in the same directory, syncs, renames, and syncs the directory. Raises OSError with the
    name of `path`.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to report
            os.unlink(temporary)
        if isinstance(error, OSError):  # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_directory(path.parent)


def read_plain(path: Path, limit: int | None = None) -> bytes:
    """Reads a regular file without following a symbolic link, and without blocking on a fifo.

    Raises OSError, also for links, fifos and devices, and for more than `limit` bytes (EFBIG).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link, where a regular file should be", str(path)) from error
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
    """Returns the kind of a file that is not regular, from its `st_mode`: symbolic link, directory, fifo, …"""
    kinds = {stat.S_ISLNK: "symbolic link", stat.S_ISDIR: "directory", stat.S_ISFIFO: "fifo", stat.S_ISSOCK: "socket"}
    return next((name for holds, name in kinds.items() if holds(mode)), "device")


def list_temporary_files(directory: Path) -> list[Path]:
    """Returns the files that `write_atomically` left in a directory because its process was killed, or is at work."""
    return [path for path in directory.iterdir() if is_temporary_file(path)]


def is_temporary_file(path: Path) -> bool:
    """Whether a name is one that `write_atomically` uses for unfinished files."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
