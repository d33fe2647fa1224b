"""The report of `dflash-bundle verify --execute`, as data and as text."""

import msgspec

from dflash_aot.bin.command_line import format_table
from dflash_aot.bin.golden import AnswerReport
from dflash_aot.cache.self_test import ExecutableDifference

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
    lines = ["emulated executables against the same programs built for the CPU:", *format_table(HEADER, rows)]
    lines += [f"wrong: {failure}" for failure in report.failures]
    right = len(report.executables) - len(report.failures)
    lines.append(f"{right} of {len(report.executables)} emulated executables compute what the program says")
    if report.kept:
        lines.append(f"the emulated bundle, which this machine's CPU serves: {report.kept}")
    return lines


def _format_row(executable: ExecutableDifference) -> tuple[str, ...]:
    program, _, bucket = executable.label.partition(" ")
    numbers = [one for one in executable.outputs if not one.whole]
    worst = max(numbers, key=lambda one: one.largest / one.scale if one.scale else 0.0, default=None)
    differing = ", ".join(
        f"{one.largest:.0f} of {one.scale:.0f} {one.name}" for one in executable.outputs if one.whole and one.largest
    )
    shown = (f"{worst.largest:.2g}", f"{worst.scale:.2g}", worst.name) if worst else ("", "", "")
    return (program, bucket, *shown, differing or "none")
