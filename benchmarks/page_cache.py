"""Files in and out of the kernel's page cache, as far as that goes without being root (Linux).

What other processes have mapped stays: the interpreter and libraries cannot be had cold this way.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def list_files(places: Iterable[Path]) -> list[Path]:
    """All files in directories, however deep."""
    return sorted(path for place in places for path in place.rglob("*") if path.is_file())


def warm_up(files: Iterable[Path]) -> None:
    """Reads them."""
    for path in files:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def evict(files: Iterable[Path]) -> None:
    """Asks the kernel to forget what it keeps of them."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on the disk yet cannot be forgotten
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Iterable[Path]) -> float:
    """How much of them the kernel keeps, 0 … 1, by pages; of no pages, 1."""
    pages = np.concatenate([np.ones(0, bool), *map(_cached_pages, files)])
    return float(pages.mean()) if pages.size else 1.0


def _cached_pages(path: Path) -> np.ndarray:
    """Whether each of its pages is there, bool [n]."""
    size = path.stat().st_size
    if not size:
        return np.ones(0, bool)
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
        )
        del content  # or the mapping could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return (found & 1).astype(bool)
