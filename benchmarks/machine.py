"""The machine of a benchmark (Linux): processor, versions and load, peak rates, files in the page cache."""

import ctypes
import importlib.metadata
import mmap
import os
import platform
import timeit
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np

from dflash_aot.benchmarks.messages import PeakRates
from dflash_aot.cache.environment import read_flags

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
READ_BYTES = 1 << 29  # far more than caches hold
SQUARE = 2048  # rows and columns of a matmul: far more operations than bytes


class MachineFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine and what is installed on it."""

    processor: str
    cores: int
    memory_bytes: int
    python: str
    versions: dict[str, str]  # of PACKAGES, "" for a package that is not installed
    xla_flags: str
    load: tuple[float, float]  # average of one minute, before the first sample and after the last one


def read_machine(load_before: float) -> MachineFacts:
    """This machine, now."""
    return MachineFacts(
        processor=_read_processor(),
        cores=count_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        versions={package: _read_version(package) for package in PACKAGES},
        xla_flags=read_flags("XLA_FLAGS"),
        load=(load_before, read_load()),
    )


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def read_load() -> float:
    """Load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _read_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure_peaks(read: Callable[[], object], multiply: Callable[[], object], calls: int) -> PeakRates:
    """Times `read`, which reads READ_BYTES, and `multiply`, a matmul of two SQUARE by SQUARE matrices.

    First calls are not counted. The best rate of several libraries is a lower bound of what the machine can do.
    """
    seconds = {call: timeit.repeat(call, number=1, repeat=calls + 1)[1:] for call in (read, multiply)}
    flops = [2 * SQUARE**3 / one for one in seconds[multiply]]
    return PeakRates([READ_BYTES / one for one in seconds[read]], flops)


def list_files(directories: Iterable[Path]) -> list[Path]:
    """All files in directories and their subdirectories."""
    return sorted(path for directory in directories for path in directory.rglob("*") if path.is_file())


def read_files(files: Iterable[Path]) -> None:
    """Reads files, so that the kernel keeps them."""
    for path in files:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def evict_files(files: Iterable[Path]) -> None:
    """Asks the kernel to drop the pages of files."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_cached_share(files: Iterable[Path]) -> float:
    """Share of the files' pages that the kernel keeps, 0 to 1; 1 for no pages."""
    pages = np.concatenate([np.ones(0, bool), *map(_find_cached_pages, files)])
    return float(pages.mean()) if pages.size else 1.0


def _find_cached_pages(path: Path) -> np.ndarray:
    """Whether the kernel keeps each page, bool [pages]."""
    size = path.stat().st_size
    if not size:
        return np.ones(0, bool)
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
        )
        del content  # a mapping with a view cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return (found & 1).astype(bool)
