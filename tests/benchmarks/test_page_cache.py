"""The kernel's page cache: what was evicted is not in it, what was read is."""

from pathlib import Path

import pytest

from dflash_aot.benchmarks.page_cache import cached_share, evict, list_files, warm_up

MOUNTS = Path("/proc/mounts")


def lies_in_memory(path: Path) -> bool:
    """A file system that has no disk to forget to."""
    mounts = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()]
    holding = [(place, kind) for place, kind in mounts if path.is_relative_to(place)]
    return max(holding, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs")


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Of three pages and of one."""
    if not MOUNTS.exists() or lies_in_memory(tmp_path.resolve()):
        pytest.skip("no Linux, or no disk")
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(3 * 4096))
    (tmp_path / "inner" / "b").write_bytes(b"1")
    return list_files([tmp_path])


def test_files_go_and_come_back(files):
    assert [path.name for path in files] == ["a", "b"]
    evict(files)
    assert cached_share(files) == 0.0
    warm_up(files[1:])
    assert cached_share(files) == 0.25
    warm_up(files)
    assert cached_share(files) == 1.0


def test_nothing_is_always_there(tmp_path):
    (tmp_path / "empty").touch()
    assert cached_share(list_files([tmp_path])) == cached_share([]) == 1.0
