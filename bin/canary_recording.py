"""After a build: every new executable is called once; what it computes is kept, or held to what was kept before."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from tqdm import tqdm

from dflash_aot.bin.command_line import format_bytes
from dflash_aot.cache.bundle.manifest import Entry, Manifest, SelfTest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed, IncompatibleBundle
from dflash_aot.runtime.self_test.client import Canaries, order_canaries
from dflash_aot.runtime.self_test.self_test import is_comparable

MEMORY = Path("/proc/meminfo")


def prove_executables(
    store: Store, manifest: Manifest, compiled: frozenset[str], canaries: Mapping[str, SelfTest], asked: bool
) -> tuple[Entry, ...]:
    """The manifest's entries, each with what it computes; `canaries` by label are what they are held to.

    Where that cannot be said, and was `asked` for, the reason is printed. Raises BuildFailed for executables that do
    not do what they should; they are set aside.
    """
    entries = [_hold_to(entry, canaries) for entry in manifest.entries]
    untried = [entry for entry in entries if entry.key in compiled or not is_comparable(entry.self_test)]
    if not asked or not untried:
        return tuple(entries)
    if reason := _find_obstacle(manifest, store.bundle):
        print(f"executables were not called: {reason}", file=sys.stderr)
        return tuple(entries)
    proven = _try_all(store, manifest, untried)
    return tuple(proven.get(entry.key, entry) for entry in entries)


def _hold_to(entry: Entry, canaries: Mapping[str, SelfTest]) -> Entry:
    return msgspec.structs.replace(entry, self_test=entry.self_test or canaries.get(entry.signature.label))


def _find_obstacle(manifest: Manifest, bundle: Path) -> str | None:
    """An accelerator is held by this process, or is not here at all; a processor has only so much memory."""
    if manifest.environment.platform != "cpu":
        return f"on the host that serves, run dflash-bundle verify {shlex.quote(str(bundle))} --deep --record"
    needed = sum(array.bytes for array in manifest.arrays_by_name().values()) + sum(one.bytes for one in manifest.state)
    available = _available_memory()
    if available is not None and needed > available:
        return f"that takes {format_bytes(needed)} of memory, and {format_bytes(available)} are available"
    return None


def _available_memory() -> int | None:
    """Bytes, None where the system does not tell."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _try_all(store: Store, manifest: Manifest, entries: list[Entry]) -> dict[str, Entry]:
    """By key. Raises BuildFailed."""
    proven, failures = {}, []
    with (
        Canaries(order_canaries(store.bundle, manifest)) as canaries,
        tqdm(entries, desc="calling", unit="exe", file=sys.stderr, dynamic_ncols=True, leave=False) as bar,
    ):
        for entry in bar:
            try:
                trial = canaries.try_one(entry)
            except IncompatibleBundle as error:  # memory is short
                print(f"no more executables were called: {error}", file=sys.stderr)
                break
            if trial.kind:
                store.quarantine(entry, trial.kind, trial.words)
                failures.append(f"  {entry.signature.label}: {trial.words}")
            else:
                canary = entry.self_test if trial.compared else trial.canary
                proven[entry.key] = msgspec.structs.replace(entry, self_test=canary)
                store.write_record(proven[entry.key])
    if failures:
        lines = "\n".join(failures)
        raise BuildFailed(
            f"{len(failures)} of {len(entries)} executables do not compute what they should, nothing is published; "
            f"they are in {store.bundle / 'set-aside'}:\n{lines}"
        )
    return proven
