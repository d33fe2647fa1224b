"""The machine: peak rates, and files in the kernel's page cache."""

from pathlib import Path

import pytest

from dflash_aot.benchmarks.machine import (
    READ_BYTES,
    SQUARE,
    evict_files,
    list_files,
    measure_cached_share,
    measure_peaks,
    read_files,
)

MOUNTS = Path("/proc/mounts")


def lies_in_memory(path: Path) -> bool:
    """Whether a file system has no disk."""
    mounts = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()]
    holding = [(place, kind) for place, kind in mounts if path.is_relative_to(place)]
    return max(holding, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs")


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """A file of three pages and one of one page."""
    if not MOUNTS.exists() or lies_in_memory(tmp_path.resolve()):
        pytest.skip("not Linux, or not a disk")
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(3 * 4096))
    (tmp_path / "inner" / "b").write_bytes(b"1")
    return list_files([tmp_path])


def test_files_are_evicted_and_read_again(files):
    assert [path.name for path in files] == ["a", "b"]
    evict_files(files)
    assert measure_cached_share(files) == 0.0
    read_files(files[1:])
    assert measure_cached_share(files) == 0.25
    read_files(files)
    assert measure_cached_share(files) == 1.0


def test_empty_files_count_as_cached(tmp_path):
    (tmp_path / "empty").touch()
    assert measure_cached_share(list_files([tmp_path])) == measure_cached_share([]) == 1.0


def test_peak_rates_leave_out_the_first_calls():
    calls = []
    found = measure_peaks(lambda: calls.append("read"), lambda: calls.append("multiply"), 2)
    assert (calls.count("read"), calls.count("multiply")) == (3, 3)
    assert len(found.bytes_per_second) == len(found.flops_per_second) == 2
    assert min(found.bytes_per_second) > 2 * READ_BYTES and min(found.flops_per_second) > SQUARE**3  # almost no time
