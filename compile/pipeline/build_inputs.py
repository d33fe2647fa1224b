"""Build inputs: what a bundle's programs and keys were made from, so that a build with nothing to do traces nothing.

An executable's key hashes its program, and only tracing makes a program. Tracing takes longer than all other work of a
build that finds every executable. So a build stores a digest of each input of tracing that the manifest does not have.
If all digests are the same, the keys are those of the manifest.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax

from dflash_aot import cache
from dflash_aot.compile.pipeline.build_target import BuildTarget, TargetDevices, name_slice

# Packages of this project: all modules that make signatures, programs and keys.
OWN_PACKAGES = ("cache", "compile")
# Packages whose code runs while a program is traced, lowered and encoded, or that compile it.
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "numpy", "ml_dtypes", "opt_einsum", "msgspec")
# Prefixes of environment variables.
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "TF_", "MOSAIC_")
# Every lowering sets it to the same value.
IGNORED_SETTINGS = frozenset({"jax_traceback_in_locations_limit"})
START_SLACK = 0.01  # seconds: the kernel counts a process's start in ticks, and no module is read so soon after it

BuildInputs = dict[str, str]  # by name, such as "compile/models/layers.py", "jax" or "XLA_FLAGS"


def read_build_inputs(target: BuildTarget) -> BuildInputs | None:
    """A digest of each input, by name; None where the files may not be what this process runs.

    That is where a file changed after the process had started, and where this project has no source files.
    """
    root = Path(__file__).parents[2]
    sources = list_sources(root)
    packages = list_packages(name_slice(target).platform)
    files = [*sources, *(path for paths in packages.values() for path in paths)]
    try:
        if Path(cache.__file__) not in sources or any(
            is_newer_than_process(path) for path in files
        ):
            return None
        return {
            "python": sys.version,
            "devices": "attached" if isinstance(target, TargetDevices) else "described",
            **digest_sources(root),
            **{name: _digest_package(name, paths) for name, paths in packages.items()},
            **{
                name: _hash(value)
                for name, value in os.environ.items()
                if name.startswith(VARIABLES)
            },
            **{
                name: _hash(repr(value))
                for name, value in jax.config.values.items()
                if name not in IGNORED_SETTINGS
            },
        }
    except OSError:  # a package is being installed
        return None


def find_changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the inputs that differ, sorted."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def list_sources(root: Path) -> list[Path]:
    """Every module of `OWN_PACKAGES` below a directory."""
    return [path for package in OWN_PACKAGES for path in sorted((root / package).rglob("*.py"))]


def digest_sources(root: Path) -> BuildInputs:
    """The sha256 of every module of `OWN_PACKAGES` below a directory, by its path there."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in list_sources(root)
    }


def list_packages(platform: str) -> dict[str, list[Path]]:
    """The files of each package by its name; none for a package that is not installed."""
    plugins = importlib.metadata.entry_points(group="jax_plugins") if platform == "gpu" else ()
    names = (
        *PACKAGES,
        *sorted(plugin.value.partition(":")[0].partition(".")[0] for plugin in plugins),
    )
    return {name: list(_list_package_files(name)) for name in names}


def _list_package_files(name: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(name)
    for root in sorted(spec.submodule_search_locations or ()) if spec else ():
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(folder for folder in folders if folder != "__pycache__")
            yield from (Path(folder, file) for file in sorted(files))


def _digest_package(name: str, files: Iterable[Path]) -> str:
    """The version of a package, with a digest of the names, sizes and times of its files."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(
            f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return f"{version} {digest.hexdigest()}"


def is_newer_than_process(path: Path) -> bool:
    """Whether a file was changed after this process started. Raises OSError."""
    status = path.stat()
    return max(status.st_mtime, status.st_ctime) > PROCESS_START + START_SLACK


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _find_process_start() -> float:
    """The time at which this process started; where the system does not tell, the time of this call."""
    now = time.time()
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return now


PROCESS_START = _find_process_start()  # at import: a forked process runs what its parent has read
