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
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.compile.pipeline.build_target import BuildTarget, TargetDevices, name_platform

OWN_PACKAGES = ("cache", "compile")  # of this project: all modules that make signatures, programs and keys
# Packages whose code runs while a program is traced, lowered and encoded, or that compile it.
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "numpy", "ml_dtypes", "opt_einsum", "msgspec")
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "TF_", "MOSAIC_")  # prefixes of environment variables
IGNORED_SETTINGS = frozenset({"jax_traceback_in_locations_limit"})  # every lowering sets it to the same value
START_SLACK = 0.01  # seconds: the kernel counts a process's start in ticks, and no module is read so soon after it

BuildInputs = dict[str, str]  # by name, such as "compile/models/layers.py", "jax" or "XLA_FLAGS"


class _ChangedWhileRunning(Exception):
    """A file was changed after this process started, so that its content may not be what the process runs."""


def read_build_inputs(target: BuildTarget) -> BuildInputs | None:
    """A digest of each input, by name; None if sources or packages changed after this process had started."""
    try:
        return {
            "python": sys.version,
            "devices": "attached" if isinstance(target, TargetDevices) else "described",
            **digest_sources(Path(__file__).parents[2]),
            **_digest_packages(name_platform(target)),
            **{name: _hash(value) for name, value in os.environ.items() if name.startswith(VARIABLES)},
            **{name: _hash(repr(value)) for name, value in jax.config.values.items() if name not in IGNORED_SETTINGS},
        }
    except (_ChangedWhileRunning, OSError):
        return None


def find_changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the inputs that differ, sorted."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def digest_sources(root: Path) -> BuildInputs:
    """The sha256 of every module of `OWN_PACKAGES` below a directory, by its path there."""
    digests = {}
    for package in OWN_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            _check_age(path.stat())
            digests[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    if not digests:
        raise BuildFailed(f"{root} has no modules of {' and '.join(OWN_PACKAGES)}: reinstall dflash-aot")
    return digests


def _digest_packages(platform: str) -> BuildInputs:
    """The version of each package, with a digest of the names, sizes and times of its files."""
    digests = {}
    plugins = importlib.metadata.entry_points(group="jax_plugins") if platform == "gpu" else ()
    for name in (*PACKAGES, *sorted(plugin.value.partition(":")[0].partition(".")[0] for plugin in plugins)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        spec = importlib.util.find_spec(name)
        digest = hashlib.sha256()
        for root in sorted(spec.submodule_search_locations or ()) if spec else ():
            for line in _list_files(root):
                digest.update(line.encode())
        digests[name] = f"{version} {digest.hexdigest()}"
    return digests


def _list_files(directory: str) -> Iterator[str]:
    """Name, size and time of each file below a directory."""
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            status = os.stat(path)
            _check_age(status)
            yield f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n"


def _check_age(status: os.stat_result) -> None:
    """Raises _ChangedWhileRunning for a file that was changed after this process started."""
    if max(status.st_mtime, status.st_ctime) > PROCESS_START + START_SLACK:
        raise _ChangedWhileRunning


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
