"""The machine of a benchmark (Linux): processor, versions and load, peak rates, files."""

import importlib.metadata
import os
import platform
import timeit
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

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


def read_files(directories: Iterable[Path]) -> None:
    """Reads all files in directories and their subdirectories, so that the kernel keeps them."""
    for path in (path for directory in directories for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
