"""Parts of several reports: descriptions of models, columns of estimated times, the longest operations of a program."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_aot.bin.command_line import format_table, print_json, print_lines
from dflash_aot.cache.bundle.manifest import CallCost, Entry, Manifest, ScheduleEstimate
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Decoder, Draft, Scaling, Target

# -- models: facts from a `config.json` as one line of text, for plans and inspections; JAX is not imported


def describe_target(target: Target) -> str:
    """The sizes of a target, and its recurrent or sliding layers if it has some."""
    if sliding := target.sliding:
        layers = f"a sliding window of {sliding.window} in {len(sliding.layers)} layers"
        heads = f"{sliding.attention.kv_heads} kv heads of {sliding.attention.head_dim}"
        return f"{describe_decoder(target.decoder)}; {layers}, {heads}, in a ring per slot"
    if target.recurrent is None:
        return describe_decoder(target.decoder)
    heads = f"{target.recurrent.value_heads} heads"
    return f"{describe_decoder(target.decoder)}; Gated DeltaNet in {len(target.recurrent.layers)} layers, {heads}"


def describe_decoder(decoder: Decoder) -> str:
    """The sizes of a model's layers."""
    heads = f"{decoder.attention.heads} heads, {decoder.attention.kv_heads} kv heads"
    return f"{_count_layers(decoder)}, hidden size {decoder.hidden}, {heads}, vocabulary {decoder.vocab}"


def describe_draft(draft: Draft) -> str:
    """Generation, format and facts of a draft, in addition to the sizes of its layers."""
    parts = [
        _count_layers(draft.decoder) + _describe_windows(draft),
        f"blocks of {draft.block}",
        f"target_layer_ids {', '.join(map(str, draft.target_layer_ids))}",
    ]
    heads = draft.heads
    if heads.vocab is not None:
        parts.append(
            f"its own embedding and head over {heads.vocab} of {draft.decoder.vocab} tokens"
        )
    if heads.predicts_next:
        parts.append("anchor sampling")
    if draft.convolution:
        parts.append(
            f"convolutions over {draft.convolution.kernel} rows in groups of {draft.convolution.group}"
        )
    if heads.selector:
        parts.append(
            f"a path through {heads.selector.candidates} candidates of rank {heads.selector.rank}"
        )
    if heads.markov:
        parts.append(f"a Markov head of rank {heads.markov.rank}")
    if heads.confidence:
        parts.append("a confidence head, which is not used")
    parts += _list_scaling(draft.scaling)
    return f"{draft.generation} draft in {draft.dialect} format: {', '.join(parts)}"


def _count_layers(decoder: Decoder) -> str:
    return f"{decoder.layers} layer{'s' * (decoder.layers > 1)}"


def _describe_windows(draft: Draft) -> str:
    """How many layers have a sliding window, and in how many no row of the block sees a later one; "" if neither."""
    windows = [window for window in draft.windows if window is not None]
    if not windows:
        return ""
    sliding = [window.size for window in windows if window.slides]
    sizes = ", ".join(map(str, sorted(set(sliding))))
    parts = [f"{len(sliding)} of them with a sliding window of {sizes}"] if sliding else []
    causal = sum(window.causal for window in windows) or "none"
    return f" ({', '.join([*parts, f'{causal} of them causal inside the block'])})"


def _list_scaling(scaling: Scaling) -> list[str]:
    """The scalars around the layers that change anything."""
    parts = [f"embedding times {scaling.embedding:g}"] if scaling.embedding != 1 else []
    parts += [f"logits times {scaling.logits:g}"] if scaling.logits != 1 else []
    return parts + ([f"logits capped at {scaling.cap:g}"] if scaling.cap else [])


# -- estimated times

TIME_HEADER = ("estimate ms", "bound ms", "ratio")
TIME_NOTE = (
    "estimate: of one call, by the compiler's own cycles and the least time of sums over the devices; "
    "bound: the least time, from bytes, flops and the chip's peaks"
)
OPERATION_HEADER = ("instruction", "ms", "runs", "result", "operation")
LONGEST_OPERATION = 80  # characters of an operation in the text report; its end says most


class ExecutableTime(msgspec.Struct, frozen=True):
    """Times of one call of an executable.

    Attributes:
        executable: its label.
        estimate_seconds: by the compiler's own cycles.
        bound_seconds: the least time; None if the manifest has none.
        ratio: estimate over bound; None without a bound.
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
            times.append(
                ExecutableTime(entry.signature.label, cost.estimate_seconds, bound, cost.ratio)
            )
    return tuple(times)


def format_time_cells(cost: CallCost) -> list[str]:
    """The cells under TIME_HEADER."""
    bound = None if cost.bound_seconds is msgspec.UNSET else cost.bound_seconds
    return _format_cells(cost.estimate_seconds, bound, cost.ratio)


def tabulate_times(times: Sequence[ExecutableTime]) -> list[str]:
    """A table of executables; nothing without an estimate."""
    if not times:
        return []
    rows = [
        [one.executable, *_format_cells(one.estimate_seconds, one.bound_seconds, one.ratio)]
        for one in times
    ]
    return [*format_table(("executable", *TIME_HEADER), rows), TIME_NOTE]


def report_executable(bundle: Path, manifest: Manifest, label: str, as_json: bool) -> int:
    """Prints the longest operations of one executable. Raises BadInput if there is none, or no estimate of it."""
    known = {entry.signature.label: entry for entry in manifest.entries}
    if (entry := known.get(label)) is None:
        raise BadInput(
            f"--executable '{label}': the bundle has no such executable, but {', '.join(known)}"
        )
    schedule = entry.cost.schedule
    (time,) = list_times([entry]) or (None,)
    if time is None or schedule is msgspec.UNSET:
        raise BadInput(
            f"--executable '{label}': {bundle} has no estimate of it; a build for a TPU makes estimates"
        )
    if as_json:
        print_json(
            {
                "bundle": bundle,
                **msgspec.to_builtins(time),
                "schedule": msgspec.to_builtins(schedule),
            }
        )
    else:
        print_lines(*tabulate_times([time]), *format_schedule(schedule))
    return 0


def format_schedule(schedule: ScheduleEstimate) -> list[str]:
    """The longest instructions, what the estimate leaves out, and what was assumed."""
    rows = [
        [
            one.instruction,
            f"{one.seconds * 1e3:.3f}",
            str(one.runs),
            one.shape,
            one.operation[-LONGEST_OPERATION:],
        ]
        for one in schedule.largest
    ]
    parts = {
        "Pallas kernels": schedule.kernel_seconds,
        "waiting for main memory": schedule.waiting_seconds,
    }
    return [
        *format_table(OPERATION_HEADER, rows),
        *(f"{name}: {seconds * 1e3:.3f} ms" for name, seconds in parts.items() if seconds),
        *(
            f"left out: {one.opcode}, {one.runs} runs, {one.bytes / 1e6:.3f} MB"
            for one in schedule.left_out
        ),
        *schedule.notes,
    ]


def _format_cells(estimate: float | None, bound: float | None, ratio: float | None) -> list[str]:
    times = ["-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in (estimate, bound)]
    return [*times, "-" if ratio is None else f"{ratio:.2f}"]
