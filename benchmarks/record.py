"""What one run of a benchmark measured: all samples, and where and how they were taken. Everything else follows."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.bundle.atomic_files import write_atomically
from dflash_aot.cache.environment import read_flags
from dflash_aot.cache.errors import BadInput

SCHEMA = 1
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
ROOMS = ("bin", "cache", "compile", "runtime", "server", "benchmarks")


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine and what is installed. versions: "" for a package that is not.

    load: how many processes wanted to run, on average over a minute, before the first sample and after the last one.
    """

    processor: str
    cores: int
    memory_bytes: int
    python: str
    versions: dict[str, str]
    xla_flags: str
    load: tuple[float, float]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """started: UTC, ISO 8601. commit: with "-dirty" where the rooms differ from it, "" outside of git.

    command: that takes the same samples again. void: "", or why the figures mean nothing.
    """

    schema: int
    benchmark: str
    command: str
    commit: str
    started: str
    seconds: float
    environment: Site
    settings: dict[str, Any]
    samples: list[dict[str, Any]]
    void: str


def read_record(path: Path) -> Record:
    """Raises BadInput for what is none."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no record of a benchmark: {error}") from error
    if record.schema != SCHEMA:
        raise BadInput(f"{path} has schema {record.schema}, and {SCHEMA} is read here: take the samples again")
    return record


def write_record(record: Record, path: Path) -> None:
    """A sample a line, so that a changed one is a changed line. Raises OSError."""
    facts = msgspec.to_builtins(record)
    samples = facts.pop("samples")
    head = msgspec.json.format(msgspec.json.encode(facts), indent=1).rstrip(b"\n}")
    lines = b",\n  ".join(map(msgspec.json.encode, samples))
    body = b"[\n  " + lines + b"\n ]" if samples else b"[]"
    write_atomically(path, head + b',\n "samples": ' + body + b"\n}\n")


def describe_site(load_before: float) -> Site:
    """This machine, now."""
    return Site(
        processor=_processor(),
        cores=count_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        versions={package: _version(package) for package in PACKAGES},
        xla_flags=read_flags("XLA_FLAGS"),
        load=(load_before, read_load()),
    )


def count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def read_load() -> float:
    """Processes that wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def read_commit() -> str:
    """Of the sources that run, with "-dirty" where they differ from it; "" where git does not know them."""
    here = Path(__file__).resolve()
    root = here.parents[1]
    try:
        _git(root, "ls-files", "--error-unmatch", str(here))  # an installed package may lie in somebody's repository
        changed = _git(root, "status", "--porcelain", "--", *ROOMS)
        return _git(root, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
