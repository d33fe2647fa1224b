"""`dflash-bundle verify --deep`: calls each executable of a bundle once, in a subprocess. Report of --execute."""

import logging
from pathlib import Path

import msgspec

from dflash_aot.bin.command_line import format_table
from dflash_aot.bin.golden import AnswerReport
from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest, rebuild_command
from dflash_aot.cache.bundle.quarantine import FaultKind
from dflash_aot.cache.bundle.self_test import (
    ExecutableDifference,
    SelfTests,
    is_shared,
    set_up_self_tests,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import quarantine_files
from dflash_aot.cache.errors import BuildFailed, IncompatibleBundle

logger = logging.getLogger(__name__)

# -- the report of `dflash-bundle verify --execute`, as data and as text

HEADER = ("program", "bucket", "largest difference", "of", "in", "whole numbers that differ")


class EmulationReport(msgspec.Struct, frozen=True):
    """What the emulated executables of a TPU bundle compute.

    Attributes:
        kept: the directory of the emulated bundle; None where it was temporary.
        executables: how the outputs of each differ from those of the same program on the CPU.
        failures: what is wrong, in words.
        golden: answers of an engine that runs the emulated executables, compared; None where no checkpoint was given.
    """

    kept: str | None
    executables: tuple[ExecutableDifference, ...]
    failures: tuple[str, ...]
    golden: AnswerReport | None = None


def format_emulation(report: EmulationReport) -> list[str]:
    """The report as lines of text."""
    rows = [_format_row(executable) for executable in report.executables]
    lines = [
        "emulated executables against the same programs built for the CPU:",
        *format_table(HEADER, rows),
    ]
    lines += [f"wrong: {failure}" for failure in report.failures]
    right = len(report.executables) - len(report.failures)
    lines.append(
        f"{right} of {len(report.executables)} emulated executables compute what the program says"
    )
    if report.kept:
        lines.append(f"the emulated bundle, which this machine's CPU serves: {report.kept}")
    return lines


def _format_row(executable: ExecutableDifference) -> tuple[str, ...]:
    program, _, bucket = executable.label.partition(" ")
    numbers = [one for one in executable.outputs if not one.whole]
    worst = max(
        numbers, key=lambda one: one.largest / one.scale if one.scale else 0.0, default=None
    )
    differing = ", ".join(
        f"{one.largest:.0f} of {one.scale:.0f} {one.name}"
        for one in executable.outputs
        if one.whole and one.largest
    )
    shown = (f"{worst.largest:.2g}", f"{worst.scale:.2g}", worst.name) if worst else ("", "", "")
    return (program, bucket, *shown, differing or "none")


# -- `dflash-bundle verify --deep`


SHARED = (
    "every executable failed, so that the cause is probably this machine's environment: look at the variables of JAX, "
    "XLA and the accelerator, and at the device"
)


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


def self_test_bundle(
    bundle: Path, manifest: Manifest, quarantine: bool, record: bool
) -> SelfTestReport:
    """Calls every executable of a verified manifest whose files are intact.

    Args:
        quarantine: whether executables with a fault are moved to quarantine/.
        record: whether the outputs of executables without a record are recorded, if no executable has a fault.

    Raises IncompatibleBundle on another machine, EngineFailed where no subprocess can be started, BadInput and
    BuildFailed where the bundle cannot be written.
    """
    store = Store(bundle)
    compared = 0
    faults: list[SelfTestFault] = []
    entries = []
    with SelfTests(set_up_self_tests(bundle, manifest)) as self_tests:
        for entry in manifest.entries:
            try:
                result = self_tests.run(entry)
            except IncompatibleBundle as error:
                if not faults:
                    raise
                logger.warning(
                    "%s and those after it were not called: %s", entry.signature.label, error
                )
                break  # what is wrong so far is reported and quarantined
            if result.fault:
                faults.append(
                    SelfTestFault(
                        entry.signature.label,
                        store.executable_path(entry),
                        result.fault,
                        result.reason,
                    )
                )
            compared += result.compared
            entries.append(
                entry
                if result.compared
                else msgspec.structs.replace(entry, self_test=result.record)
            )
    recorded = 0
    if record and not faults:
        recorded = _record(store, manifest, tuple(entries))
    broken = [(fault.path, fault.kind, fault.reason) for fault in faults]
    moved: dict[Path, Path] = {}
    left: str | None = None
    if is_shared(len(faults), len(entries)):
        left = SHARED
    elif quarantine and broken:
        moved, left = quarantine_files(bundle, broken)
    return SelfTestReport(
        called=len(entries),
        compared=compared,
        recorded=recorded,
        faults=tuple(faults),
        quarantined={
            fault.label: str(moved[fault.path]) for fault in faults if fault.path in moved
        },
        not_quarantined=left,
        rebuild=rebuild_command(bundle),
    )


def _record(store: Store, manifest: Manifest, entries: tuple[Entry, ...]) -> int:
    """Publishes the bundle with the new records; returns their number. Raises BadInput, BuildFailed."""
    new = [entry for entry, old in zip(entries, manifest.entries, strict=True) if entry != old]
    if new:
        with store.hold_lock():
            if read_manifest(store.bundle).digest != manifest.digest:
                raise BuildFailed(
                    f"{store.bundle} was published again in the meantime: nothing is recorded. Try again"
                )
            store.restore_records(manifest)
            for entry in new:
                store.write_record(entry)
            store.publish(msgspec.structs.replace(manifest, entries=entries))
    return len(new)


def format_self_tests(report: SelfTestReport) -> list[str]:
    """The report as lines of text."""
    lines = [
        f"{fault.path} ({fault.label}): {fault.reason}"
        + (
            f"; moved to {report.quarantined[fault.label]}"
            if fault.label in report.quarantined
            else ""
        )
        for fault in report.faults
    ]
    if report.not_quarantined == SHARED:
        return [*lines, f"nothing was moved: {SHARED}"]
    if report.not_quarantined:
        lines.append(f"the others stay in place: {report.not_quarantined}")
    if report.faults:
        wrong = f"{len(report.faults)} of {report.called} executables failed their self-test"
        return [*lines, f"{wrong}. Rebuild them: {report.rebuild}"]
    unknown = report.called - report.compared - report.recorded
    recorded = f", the outputs of {report.recorded} are recorded now" if report.recorded else ""
    left = (
        f"; {unknown} have no recorded outputs to compare, --record records them" if unknown else ""
    )
    return [
        f"{report.called} executables called, {report.compared} compute what they did before{recorded}{left}"
    ]
