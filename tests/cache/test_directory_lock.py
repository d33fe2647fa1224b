"""The lock of a directory: who can hold it, what a waiting process learns, damaged lock files."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.files.directory_lock import LockHeld, hold_directory_lock

HOLD = """
import sys
from pathlib import Path
from dflash_aot.cache.files.directory_lock import hold_directory_lock
with hold_directory_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
LOCK_AS_NOBODY = """
import fcntl, os, sys
os.setuid(65534)
with open(sys.argv[1]) as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
"""
BUILD_AS_NOBODY = """
import os, sys
from pathlib import Path
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput
os.setuid(65534)
try:
    with Store(Path(sys.argv[1])).hold_lock():
        pass
except BadInput as refused:
    print(refused)
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def held_by_another_process(directory: Path) -> Iterator[int]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory that every user can write to. pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


def test_holder_is_named_while_its_process_lives(tmp_path):
    with held_by_another_process(tmp_path) as pid:
        with pytest.raises(LockHeld, match=f"held by process {pid} on "), hold_directory_lock(tmp_path):
            pytest.fail("two holders")
        with pytest.raises(BuildFailed, match=f"is at work here: process {pid} on "), Store(tmp_path).hold_lock():
            pytest.fail("two holders")
    with hold_directory_lock(tmp_path):
        pass


def test_waiting_is_reported_once_and_ends(tmp_path):
    reports = []
    with held_by_another_process(tmp_path) as pid:

        def end_the_other(holder: str) -> None:
            reports.append(holder)
            os.kill(pid, 9)

        with hold_directory_lock(tmp_path, 60, end_the_other):
            pass
    assert [report.startswith(f"process {pid} on ") for report in reports] == [True]


def test_lock_is_readable_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        with hold_directory_lock(tmp_path):
            assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


@as_root
def test_reader_of_a_bundle_cannot_hold_its_lock(shared_directory):
    """A lock file of an earlier version is 0644, and `flock` needs read permission only."""
    lock = shared_directory / ".lock"
    lock.touch(0o644)
    attack = [sys.executable, "-c", LOCK_AS_NOBODY, str(lock)]
    assert subprocess.run(attack, check=False).returncode == 0
    with hold_directory_lock(shared_directory):
        pass
    refused = subprocess.run(attack, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "Permission denied" in refused.stderr


@as_root
def test_other_user_is_told_whose_lock_it_is(shared_directory):
    with hold_directory_lock(shared_directory):
        pass
    command = [sys.executable, "-c", BUILD_AS_NOBODY, str(shared_directory)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == (
        f"cannot write to {shared_directory}: .lock belongs to user root, and only its owner may write here\n"
    )


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["fifo", "link"])
def test_lock_that_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(BadInput, match="cannot write to .*lock is "), Store(tmp_path).hold_lock():
        pytest.fail("locked something else")


def test_damaged_record_of_the_holder_is_not_shown(tmp_path):
    with held_by_another_process(tmp_path):
        (tmp_path / ".lock").write_bytes(b'{"pid": "\x1b[2J", "host": 3}')
        with pytest.raises(LockHeld, match="held by another process$"), hold_directory_lock(tmp_path):
            pytest.fail("two holders")
