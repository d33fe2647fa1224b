"""`dflash-bundle verify --deep`: the self-test of every executable of a bundle, each called once in a subprocess."""

import logging
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest, rebuild_command
from dflash_aot.cache.bundle.quarantine import FaultKind
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import quarantine_files
from dflash_aot.cache.errors import BuildFailed, IncompatibleBundle
from dflash_aot.cache.self_test import SelfTests, set_up_self_tests

logger = logging.getLogger(__name__)


class SelfTestFault(msgspec.Struct, frozen=True):
    """An executable whose file is intact, and which crashes or computes something else than recorded.

    Attributes:
        label: its program and sizes.
        path: its file.
        kind: the kind of fault.
        reason: the fault in words.
    """

    label: str
    path: Path
    kind: FaultKind
    reason: str


class SelfTestReport(msgspec.Struct, frozen=True):
    """What calling the executables of a bundle showed.

    Attributes:
        called: the number of executables that were called.
        compared: those that had recorded outputs to compare.
        recorded: those whose outputs were recorded now.
        faults: executables with a fault.
        quarantined: by label, where executables with a fault were moved to.
        not_quarantined: why some were left in place; None where none was left.
        rebuild: the command that replaces them.
    """

    called: int
    compared: int
    recorded: int
    faults: tuple[SelfTestFault, ...]
    quarantined: dict[str, str]
    not_quarantined: str | None
    rebuild: str


def self_test_bundle(bundle: Path, manifest: Manifest, quarantine: bool, record: bool) -> SelfTestReport:
    """Calls every executable of a verified manifest whose files are intact.

    Args:
        quarantine: whether executables with a fault are moved to quarantine/.
        record: whether the outputs of executables without a record are recorded, if no executable has a fault.

    Raises IncompatibleBundle on another machine, EngineFailed where no subprocess can be started, BadInput and
    BuildFailed where the bundle cannot be written.
    """
    store, compared = Store(bundle), 0
    faults: list[SelfTestFault] = []
    entries = []
    with SelfTests(set_up_self_tests(bundle, manifest)) as self_tests:
        for entry in manifest.entries:
            try:
                result = self_tests.run(entry)
            except IncompatibleBundle as error:
                if not faults:
                    raise
                logger.warning("%s and those behind it were not called: %s", entry.signature.label, error)
                break  # what is wrong so far is reported and quarantined
            if result.fault:
                faults.append(
                    SelfTestFault(entry.signature.label, store.executable_path(entry), result.fault, result.reason)
                )
            compared += result.compared
            entries.append(entry if result.compared else msgspec.structs.replace(entry, self_test=result.record))
    recorded = 0
    if record and not faults:
        recorded = _record(store, manifest, tuple(entries))
    broken = [(fault.path, fault.kind, fault.reason) for fault in faults]
    moved, left = quarantine_files(bundle, broken) if quarantine and broken else ({}, None)
    return SelfTestReport(
        called=len(entries),
        compared=compared,
        recorded=recorded,
        faults=tuple(faults),
        quarantined={fault.label: str(moved[fault.path]) for fault in faults if fault.path in moved},
        not_quarantined=left,
        rebuild=rebuild_command(bundle),
    )


def _record(store: Store, manifest: Manifest, entries: tuple[Entry, ...]) -> int:
    """Publishes the bundle with the new records; returns their number. Raises BadInput, BuildFailed."""
    new = [entry for entry, old in zip(entries, manifest.entries, strict=True) if entry != old]
    if new:
        with store.hold_lock():
            if read_manifest(store.bundle).digest != manifest.digest:
                raise BuildFailed(f"{store.bundle} was published again in the meantime: nothing is recorded. Try again")
            store.restore_records(manifest)
            for entry in new:
                store.write_record(entry)
            store.publish(msgspec.structs.replace(manifest, entries=entries))
    return len(new)


def format_self_tests(report: SelfTestReport) -> list[str]:
    """The report as lines of text."""
    lines = [
        f"{fault.path} ({fault.label}): {fault.reason}"
        + (f"; moved to {report.quarantined[fault.label]}" if fault.label in report.quarantined else "")
        for fault in report.faults
    ]
    if report.not_quarantined:
        lines.append(f"the others stay in place: {report.not_quarantined}")
    if report.faults:
        wrong = f"{len(report.faults)} of {report.called} executables failed their self-test"
        return [*lines, f"{wrong}. Rebuild them: {report.rebuild}"]
    unknown = report.called - report.compared - report.recorded
    recorded = f", the outputs of {report.recorded} are recorded now" if report.recorded else ""
    left = f"; {unknown} have no recorded outputs to compare, --record records them" if unknown else ""
    return [f"{report.called} executables called, {report.compared} compute what they did before{recorded}{left}"]
