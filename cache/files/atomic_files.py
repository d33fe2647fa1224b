"""Atomic file writes, reads of regular files only, and output files that a user names."""

import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_aot.cache.errors import BadInput

# -- output files that a user names
#
# An output file is never a file that the same command reads. Errors name flag and file.


def check_output(
    flag: str, output: str | Path | int, inputs: Mapping[str, str | Path | None]
) -> None:
    """Raises BadInput if an output is one of the files that the command reads, however either of them is spelled.

    To be called before the output is opened: opening it for writing empties it.

    Args:
        flag: the output's name in the message.
        output: a path, or the file descriptor of a stream that the caller of the command has opened.
        inputs: by flag, the files that are read; None for a flag that is not given.
    """
    try:
        written = os.stat(output)
    except (OSError, ValueError):  # does not exist, or cannot be opened either
        return
    if not stat.S_ISREG(written.st_mode):  # a terminal may be both
        return
    for name, path in inputs.items():
        try:
            same = path is not None and os.path.samestat(written, os.stat(path))
        except (OSError, ValueError):
            continue
        if same:
            shown = flag if isinstance(output, int) else f"{flag} {output}"
            raise BadInput(
                f"{shown} is the same file as {name} {path}, which it would overwrite: name another file"
            )


@contextmanager
def open_output(flag: str, path: str, kept: int = 0) -> Iterator[Callable[[str], None]]:
    """Creates a text file or cuts it after `kept` bytes; yields a function that appends at once. Raises BadInput."""

    def refuse(error: OSError) -> BadInput:
        return BadInput(f"{flag} {path}: {error.strerror}")

    try:
        file = open(path, "a" if kept else "w", encoding="utf-8")  # noqa: SIM115  closed below
        if kept:
            file.truncate(kept)
    except OSError as error:
        raise refuse(error) from error

    def write(text: str) -> None:
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            raise refuse(error) from error

    try:
        yield write
    finally:
        try:
            file.close()
        except OSError as error:
            if sys.exc_info()[1] is None:  # otherwise the first error is the one to report
                raise refuse(error) from error


# -- atomic writes, and reads of regular files

TEMPORARY_SUFFIX = ".unfinished"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that readers, and a crash, see the old file or the new one, never a part.

    Writes to a temporary name in the same directory, syncs, renames, and syncs the directory. The mode of the file is
    0666 without the bits of the umask. Raises OSError with the name of `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        # Not tempfile, whose files are 0600. The kernel applies the umask: a thread cannot read it without setting it.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to report
            os.unlink(temporary)
        if isinstance(error, OSError):  # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_directory(path.parent)


def read_plain(path: Path, limit: int, *, follow_links: bool = False) -> bytes:
    """Reads a regular file of at most `limit` bytes, without blocking on a fifo.

    Raises OSError, also for fifos and devices, for links unless `follow_links`, and for more bytes (EFBIG).
    """
    with open_plain(path, limit, follow_links=follow_links) as descriptor:
        size = os.fstat(descriptor).st_size
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(size + 1)
            while size < len(content) <= limit and (
                more := file.read(min(len(content), limit + 1 - len(content)))
            ):
                content += more
        if len(content) > limit:  # the file grows, or its file system gives no size
            raise OSError(
                errno.EFBIG, f"more than {limit} bytes, where at most {limit} are read", str(path)
            )
        return content


@contextmanager
def open_plain(
    path: Path, limit: int | None = None, *, follow_links: bool = False
) -> Iterator[int]:
    """Opens a regular file for reading, and yields its descriptor. Raises OSError as `read_plain` does.

    The kind is checked on the open file, so that nobody can replace the file between check and use.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        )
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(
                errno.ELOOP, "a symbolic link, where a regular file should be", str(path)
            ) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(
                errno.EINVAL, f"a {file_kind(status.st_mode)}, where a file should be", str(path)
            )
        if limit is not None and status.st_size > limit:
            raise OSError(
                errno.EFBIG, f"{status.st_size} bytes, where at most {limit} are read", str(path)
            )
        yield descriptor
    finally:
        os.close(descriptor)


def file_kind(mode: int) -> str:
    """Returns the kind of a file that is not regular, from its `st_mode`: symbolic link, directory, fifo, …"""
    kinds = {
        stat.S_ISLNK: "symbolic link",
        stat.S_ISDIR: "directory",
        stat.S_ISFIFO: "fifo",
        stat.S_ISSOCK: "socket",
    }
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
