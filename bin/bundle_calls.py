"""`dflash-bundle verify --deep`: every executable called once, in a process of its own, and compared."""

from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest, rebuild_command
from dflash_aot.cache.bundle.quarantine import FaultKind
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import quarantine_files
from dflash_aot.cache.errors import BuildFailed


class Fault(msgspec.Struct, frozen=True):
    """An executable that is what the manifest promises, and does not do what it should."""

    label: str
    path: Path
    kind: FaultKind
    words: str


class Calls(msgspec.Struct, frozen=True):
    """How many executables were called, with how many something was kept to compare, and what was wrong.

    `set_aside` by label: where those are now that were wrong; `not_set_aside` why they were left. `recorded` counts
    those of which it is kept now what they compute.
    """

    called: int
    compared: int
    recorded: int
    faults: tuple[Fault, ...]
    set_aside: dict[str, str]
    not_set_aside: str | None
    mend: str


def call_executables(bundle: Path, manifest: Manifest, move: bool, record: bool) -> Calls:
    """Those of a manifest that was verified, whose files are sound; `move`: sets aside what is wrong.

    `record`: keeps what executables compute of which nothing is known, where nothing is wrong. Raises
    IncompatibleBundle on another machine, EngineFailed where no process can be started, BadInput and BuildFailed where
    the bundle cannot be written.
    """
    # Starts JAX's import, which no other command pays for.
    from dflash_aot.runtime.self_test.client import Canaries, order_canaries  # noqa: PLC0415

    store, compared = Store(bundle), 0
    faults, entries = [], []
    with Canaries(order_canaries(bundle, manifest)) as canaries:
        for entry in manifest.entries:
            trial = canaries.try_one(entry)
            if trial.kind:
                faults.append(Fault(entry.signature.label, store.executable_path(entry), trial.kind, trial.words))
            compared += trial.compared
            entries.append(entry if trial.compared else msgspec.structs.replace(entry, self_test=trial.canary))
    recorded = 0
    if record and not faults:
        recorded = _record(store, manifest, tuple(entries))
    broken = [(fault.path, fault.kind, fault.words) for fault in faults]
    moved, left = quarantine_files(bundle, broken) if move and broken else ({}, None)
    return Calls(
        called=len(entries),
        compared=compared,
        recorded=recorded,
        faults=tuple(faults),
        set_aside={fault.label: str(moved[fault.path]) for fault in faults if fault.path in moved},
        not_set_aside=left,
        mend=rebuild_command(bundle),
    )


def _record(store: Store, manifest: Manifest, entries: tuple[Entry, ...]) -> int:
    """Publishes the bundle with what is known now. Raises BadInput, BuildFailed."""
    new = [entry for entry, old in zip(entries, manifest.entries, strict=True) if entry != old]
    if new:
        with store.hold_lock():
            if read_manifest(store.bundle).digest != manifest.digest:
                raise BuildFailed(f"{store.bundle} was published anew meanwhile: nothing is recorded. Try again")
            store.restore_records(manifest)
            for entry in new:
                store.write_record(entry)
            store.publish(msgspec.structs.replace(manifest, entries=entries))
    return len(new)


def format_calls(calls: Calls) -> str:
    """For people."""
    lines = [
        f"{fault.path} ({fault.label}): {fault.words}"
        + (f"; now {calls.set_aside[fault.label]}" if fault.label in calls.set_aside else "")
        for fault in calls.faults
    ]
    if calls.not_set_aside:
        lines.append(f"nothing more is set aside: {calls.not_set_aside}")
    if calls.faults:
        wrong = f"{len(calls.faults)} of {calls.called} executables do not do what they should"
        return "\n".join([*lines, f"{wrong}. Mend it: {calls.mend}"])
    unknown = calls.called - calls.compared - calls.recorded
    recorded = f", of {calls.recorded} it is kept now" if calls.recorded else ""
    left = f"; what {unknown} should compute is not known, --record keeps it" if unknown else ""
    return f"{calls.called} executables called, {calls.compared} compute what they did before{recorded}{left}"
