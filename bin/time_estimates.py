"""Estimated times in reports: columns of a table of executables, and the longest operations of one executable."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_aot.bin.command_line import format_table, print_json, print_lines
from dflash_aot.cache.bundle.manifest import CallCost, Entry, Manifest, ScheduleEstimate
from dflash_aot.cache.errors import BadInput

TIME_HEADER = ("estimate ms", "bound ms", "ratio")
TIME_NOTE = (
    "estimate: of one call, by the compiler's own cycles; bound: the least time, from bytes, flops and the chip's peaks"
)
OPERATION_HEADER = ("instruction", "ms", "runs", "result", "operation")
LONGEST_OPERATION = 80  # characters of an operation in the text report; its end says most


class ExecutableTime(msgspec.Struct, frozen=True):
    """Times of one call of an executable.

    Attributes:
        executable: its label.
        estimate_seconds: by the compiler's own cycles.
        bound_seconds: the least time; None if the manifest has none.
        ratio: estimate over bound; None likewise.
    """

    executable: str
    estimate_seconds: float
    bound_seconds: float | None
    ratio: float | None


def list_times(entries: Sequence[Entry]) -> tuple[ExecutableTime, ...]:
    """The executables that have an estimate."""
    times = []
    for entry in entries:
        cost = entry.cost
        if cost.estimate_seconds is not None:
            bound = None if cost.bound_seconds is msgspec.UNSET else cost.bound_seconds
            times.append(ExecutableTime(entry.signature.label, cost.estimate_seconds, bound, cost.ratio))
    return tuple(times)


def format_time_cells(cost: CallCost) -> list[str]:
    """The cells under TIME_HEADER."""
    bound = None if cost.bound_seconds is msgspec.UNSET else cost.bound_seconds
    return _format_cells(cost.estimate_seconds, bound, cost.ratio)


def tabulate_times(times: Sequence[ExecutableTime]) -> list[str]:
    """A table of executables; nothing without an estimate."""
    if not times:
        return []
    rows = [[one.executable, *_format_cells(one.estimate_seconds, one.bound_seconds, one.ratio)] for one in times]
    return [*format_table(("executable", *TIME_HEADER), rows), TIME_NOTE]


def report_executable(bundle: Path, manifest: Manifest, label: str, as_json: bool) -> int:
    """Prints the longest operations of one executable. Raises BadInput if there is none, or no estimate of it."""
    known = {entry.signature.label: entry for entry in manifest.entries}
    if (entry := known.get(label)) is None:
        raise BadInput(f"--executable '{label}': the bundle has no such executable, but {', '.join(known)}")
    schedule, (time,) = entry.cost.schedule, list_times([entry]) or (None,)
    if time is None or schedule is msgspec.UNSET:
        raise BadInput(f"--executable '{label}': {bundle} has no estimate of it; a build for a TPU makes estimates")
    if as_json:
        print_json({"bundle": bundle, **msgspec.to_builtins(time), "schedule": msgspec.to_builtins(schedule)})
    else:
        print_lines(*tabulate_times([time]), *format_schedule(schedule))
    return 0


def format_schedule(schedule: ScheduleEstimate) -> list[str]:
    """The longest instructions, what the estimate leaves out, and what was assumed."""
    rows = [
        [one.instruction, f"{one.seconds * 1e3:.3f}", str(one.runs), one.shape, one.operation[-LONGEST_OPERATION:]]
        for one in schedule.largest
    ]
    parts = {"Pallas kernels": schedule.kernel_seconds, "waiting for asynchronous copies": schedule.waiting_seconds}
    return [
        *format_table(OPERATION_HEADER, rows),
        *(f"{name}: {seconds * 1e3:.3f} ms" for name, seconds in parts.items() if seconds),
        *(f"left out: {one.opcode}, {one.runs} runs, {one.bytes / 1e6:.3f} MB" for one in schedule.left_out),
        *schedule.notes,
    ]


def _format_cells(estimate: float | None, bound: float | None, ratio: float | None) -> list[str]:
    times = ["-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in (estimate, bound)]
    return [*times, "-" if ratio is None else f"{ratio:.2f}"]
