"""Self-tests after a build: every new executable is called once, and its results are recorded or compared."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY
from dflash_aot.cache.bundle.self_test import (
    SelfTestResult,
    SelfTests,
    is_shared,
    set_up_self_tests,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed, IncompatibleBundle
from dflash_aot.cache.printable import format_bytes
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver, Progress

MEMORY = Path("/proc/meminfo")


def run_self_tests(
    store: Store, manifest: Manifest, untested_keys: Collection[str], observer: BuildObserver
) -> tuple[Entry, ...]:
    """The manifest's entries, each with the record of its results where there is one.

    Calls the executables of these keys. Where they cannot be called here, tells the observer why.

    Raises BuildFailed for executables with other results than recorded; they are quarantined.
    """
    untested = [entry for entry in manifest.entries if entry.key in untested_keys]
    if not untested:
        return manifest.entries
    if obstacle := _find_obstacle(manifest, store.bundle):
        observer.on_info(f"executables were not called: {obstacle}")
        return manifest.entries
    observer.on_phase("self-test", len(untested))
    try:
        tested = _test_all(store, manifest, untested, observer)
    finally:
        observer.on_phase_end("self-test")
    return tuple(tested.get(entry.key, entry) for entry in manifest.entries)


def _find_obstacle(manifest: Manifest, bundle: Path) -> str | None:
    """An accelerator is held by this process or is not attached; a CPU host may not have the memory."""
    if manifest.environment.platform != "cpu":
        return f"on the host that serves, run dflash-bundle verify {shlex.quote(str(bundle))} --deep --record"
    return find_lack_of_memory(manifest)


def find_lack_of_memory(manifest: Manifest) -> str | None:
    """Why this machine cannot call the executables; None where its memory suffices, or the system does not tell."""
    needed = sum(array.bytes for array in manifest.arrays_by_name().values()) + sum(
        one.bytes for one in manifest.state
    )
    available = available_memory()
    if available is None or needed <= available:
        return None
    return (
        f"that takes {format_bytes(needed)} of memory, and {format_bytes(available)} are available"
    )


def available_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _test_all(
    store: Store, manifest: Manifest, entries: list[Entry], observer: BuildObserver
) -> dict[str, Entry]:
    """Tested entries by key. Raises BuildFailed."""
    tested = {}
    failures: list[tuple[Entry, SelfTestResult]] = []
    with SelfTests(set_up_self_tests(store.bundle, manifest)) as self_tests:
        for done, entry in enumerate(entries):
            observer.on_executable(Progress(done, len(entries), entry.signature.label))
            try:
                result = self_tests.run(entry)
            except IncompatibleBundle as error:  # memory is short
                observer.on_info(f"no more executables were called: {error}")
                break
            if result.fault:
                failures.append((entry, result))
            else:
                record = entry.self_test if result.compared else result.record
                tested[entry.key] = msgspec.structs.replace(entry, self_test=record)
                store.write_record(tested[entry.key])
            observer.on_executable(Progress(done + 1, len(entries), entry.signature.label))
    if failures:
        raise _refuse_build(store, failures, len(failures) + len(tested))
    return tested


def _refuse_build(
    store: Store, failures: Sequence[tuple[Entry, SelfTestResult]], called: int
) -> BuildFailed:
    """Quarantines the executables with a fault, unless all have one, and returns the error."""
    place = f"they are quarantined in {store.bundle / QUARANTINE_DIRECTORY}"
    if is_shared(len(failures), called):
        place = "all of them did, so that the cause is probably this machine's environment, and none is quarantined"
    else:
        try:
            for entry, result in failures:
                assert result.fault is not None
                store.quarantine(entry, result.fault, result.reason)
        except OSError as error:
            place = f"not all could be quarantined: {store.bundle}: {error.strerror}"
    return BuildFailed(
        f"{len(failures)} of {called} executables failed their self-test. Nothing is published; {place}:",
        *(f"  {entry.signature.label}: {result.reason}" for entry, result in failures),
    )
