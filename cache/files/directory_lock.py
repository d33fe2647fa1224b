"""The lock of a directory that several processes may write to: who holds it, and a bounded wait for it.

Only the owner can open the lock file: a process that can open a file, even for reading, can lock it. The operating
system drops a lock when the process that holds it ends.
"""

import errno
import fcntl
import os
import pwd
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dflash_aot.cache.errors import MALFORMED

LOCK_FILE = ".lock"
OWNER_ONLY = 0o600
POLL_SECONDS = 0.1
MAX_HOLDER_BYTES = 1000


class LockHeld(Exception):
    """Another process held the lock for the whole time.

    Attributes:
        holder: the process, as text.
    """

    def __init__(self, holder: str):
        self.holder = holder
        super().__init__(f"the lock is held by {holder}")


class LockHolder(msgspec.Struct, frozen=True):
    """What a process writes into the lock file that it holds.

    Attributes:
        pid: the process.
        host: its machine, as several may share a file system.
    """

    pid: int
    host: str


@contextmanager
def hold_directory_lock(
    directory: Path, seconds: float = 0.0, on_wait: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Holds the lock of a directory.

    Args:
        seconds: how long to wait for another process.
        on_wait: called once with the holder, as text, before waiting.

    Raises LockHeld; OSError, also for a lock file that is no regular file or that belongs to another user.
    """
    lock = _open_lock(directory / LOCK_FILE)
    try:
        if not _try_lock(lock):
            _wait_for_lock(lock, seconds, on_wait)
        _write_holder(lock)
        yield
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, OWNER_ONLY)
    except PermissionError as error:
        if not path.exists():  # the directory itself is not writable
            raise
        words = f"{path.name} belongs to {_name_user(path.stat().st_uid)}, and only its owner may write here"
        raise PermissionError(errno.EACCES, words, str(path)) from error
    try:
        status = os.fstat(lock)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
        if stat.S_IMODE(status.st_mode) != OWNER_ONLY and status.st_uid == os.geteuid():
            os.fchmod(lock, OWNER_ONLY)  # of an earlier version, or of a copy
    except BaseException:
        os.close(lock)
        raise
    return lock


def _name_user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(lock: int, seconds: float, on_wait: Callable[[str], None]) -> None:
    """Asks for the lock again and again: a blocking `flock` has no time limit. Raises LockHeld."""
    if seconds > 0:
        on_wait(_read_holder(lock))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(POLL_SECONDS, seconds))
        if _try_lock(lock):
            return
    raise LockHeld(_read_holder(lock))


def _write_holder(lock: int) -> None:
    """Records this process. The record is for messages: the lock holds without it, for example on a full disk."""
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(LockHolder(os.getpid(), socket.gethostname())), 0)


def _read_holder(lock: int) -> str:
    try:
        holder = msgspec.json.decode(os.pread(lock, MAX_HOLDER_BYTES, 0), type=LockHolder)
    except (OSError, *MALFORMED):
        return "another process"
    return f"process {holder.pid} on {ascii(holder.host)[1:-1]}"
