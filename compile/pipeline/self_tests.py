"""Self-tests after a build: every new executable is called once, and its results are recorded or compared."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest, SelfTest
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed, IncompatibleBundle
from dflash_aot.cache.self_test import SelfTests, is_comparable, set_up_self_tests
from dflash_aot.cache.units import format_bytes
from dflash_aot.compile.pipeline.observer import BuildObserver, Progress

MEMORY = Path("/proc/meminfo")


def run_self_tests(
    store: Store,
    manifest: Manifest,
    compiled: frozenset[str],
    records: Mapping[str, SelfTest],
    enabled: bool,
    observer: BuildObserver,
) -> tuple[Entry, ...]:
    """The manifest's entries, each with the record of its results where there is one.

    Calls the executables that this build compiled, and those without a comparable record. Where they cannot be called
    here, tells the observer why.

    Args:
        compiled: keys of the executables that this build compiled.
        records: by label, earlier results of the same programs that new executables must reproduce.
        enabled: False calls nothing.

    Raises BuildFailed for executables with wrong results; they are quarantined.
    """
    entries = [_add_record(entry, records) for entry in manifest.entries]
    untested = [entry for entry in entries if entry.key in compiled or not is_comparable(entry.self_test)]
    if not enabled or not untested:
        return tuple(entries)
    if obstacle := _find_obstacle(manifest, store.bundle):
        observer.on_info(f"executables were not called: {obstacle}")
        return tuple(entries)
    observer.on_phase("self-test", len(untested))
    try:
        tested = _test_all(store, manifest, untested, observer)
    finally:
        observer.on_phase_end("self-test")
    return tuple(tested.get(entry.key, entry) for entry in entries)


def _add_record(entry: Entry, records: Mapping[str, SelfTest]) -> Entry:
    return msgspec.structs.replace(entry, self_test=entry.self_test or records.get(entry.signature.label))


def _find_obstacle(manifest: Manifest, bundle: Path) -> str | None:
    """An accelerator is held by this process or is not attached; a CPU host may not have the memory."""
    if manifest.environment.platform != "cpu":
        return f"on the host that serves, run dflash-bundle verify {shlex.quote(str(bundle))} --deep --record"
    needed = sum(array.bytes for array in manifest.arrays_by_name().values()) + sum(one.bytes for one in manifest.state)
    available = available_memory()
    if available is not None and needed > available:
        return f"that takes {format_bytes(needed)} of memory, and {format_bytes(available)} are available"
    return None


def available_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _test_all(store: Store, manifest: Manifest, entries: list[Entry], observer: BuildObserver) -> dict[str, Entry]:
    """Tested entries by key. Raises BuildFailed."""
    tested, failures = {}, []
    with SelfTests(set_up_self_tests(store.bundle, manifest)) as self_tests:
        for done, entry in enumerate(entries):
            observer.on_executable(Progress(done, len(entries), entry.signature.label))
            try:
                result = self_tests.run(entry)
            except IncompatibleBundle as error:  # memory is short
                observer.on_info(f"no more executables were called: {error}")
                break
            if result.fault:
                store.quarantine(entry, result.fault, result.reason)
                failures.append(f"  {entry.signature.label}: {result.reason}")
            else:
                record = entry.self_test if result.compared else result.record
                tested[entry.key] = msgspec.structs.replace(entry, self_test=record)
                store.write_record(tested[entry.key])
            observer.on_executable(Progress(done + 1, len(entries), entry.signature.label))
    if failures:
        raise BuildFailed(
            f"{len(failures)} of {len(entries)} executables failed their self-test. Nothing is published; they are "
            f"quarantined in {store.bundle / QUARANTINE_DIRECTORY}:",
            *failures,
        )
    return tested
