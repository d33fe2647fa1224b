"""Atomic writes, and reads of regular files only."""

import os
import socket
import stat
from pathlib import Path

import pytest

from dflash_aot.cache.files.atomic_files import read_plain, write_atomically


def test_link_is_followed_on_request(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to fifo").symlink_to("fifo")
    assert read_plain(tmp_path / "link", 7, follow_links=True) == b"content"
    with pytest.raises(OSError, match="a fifo, where a file should be"):
        read_plain(tmp_path / "to fifo", 7, follow_links=True)


def test_devices_and_files_beyond_the_limit_are_not_read():
    with pytest.raises(OSError, match="a device, where a file should be"):
        read_plain(os.path.devnull, 100)
    with pytest.raises(OSError, match="more than 3 bytes, where at most 3 are read"):
        read_plain(Path("/proc/self/status"), 3)


def test_mode_of_a_written_file_follows_the_umask(tmp_path):
    for umask, mode in [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)]:
        before = os.umask(umask)
        try:
            write_atomically(tmp_path / "file", b"old")
            write_atomically(tmp_path / "file", b"new")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to(path.parent / "file"), "a symbolic link, where a regular file should be"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link, where a regular file should be"),
        (os.mkfifo, "a fifo, where a file should be"),  # without a writer: reading it would block for ever
        (os.mkdir, "a directory, where a file should be"),
        (make_socket, "No such device"),
    ],
)
def test_links_fifos_and_directories_raise(tmp_path, monkeypatch, make, words):
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    (tmp_path / "file").write_bytes(b"content")
    make(tmp_path / "strange")
    with pytest.raises(OSError, match=words):
        read_plain(tmp_path / "strange", 100)
