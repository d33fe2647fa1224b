"""Statistics of a dflash-run: times, rounds per K, accepted tokens, padding; as JSON fields and as text."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_aot.bin.command_line import name_phase
from dflash_aot.runtime.metrics.counters import Counters, summarize_acceptance
from dflash_aot.runtime.requests.request import Result


@dataclass(frozen=True)
class FinishedRun:
    """What the statistics are computed from.

    Attributes:
        startup: seconds of each start-up phase.
        dialect: checkpoint format of the draft.
        k: largest K that the engine may choose.
        executables: how many executables the engine can call.
        weights: the fingerprint of the weights.
        results: result of every request.
        counters: the engine's counters at the end.
    """

    startup: Mapping[str, float]
    dialect: str
    k: int
    executables: int
    weights: str
    results: Sequence[Result]
    counters: Counters


def report_fields(run: FinishedRun) -> dict[str, Any]:
    """All statistics by name. Times are in seconds."""
    started = [result for result in run.results if result.first_token_seconds is not None]
    counters = run.counters
    speculation = summarize_acceptance(run.results, run.counters)
    tokens = sum(len(result.token_ids) for result in started)
    return {
        "startup_seconds": {**run.startup, "total": sum(run.startup.values())},
        "executables": run.executables,
        "executables_loaded": counters.loaded,
        "dialect": run.dialect,
        "weights": run.weights,
        "k": run.k,
        "requests": len(run.results),
        "tokens": tokens,
        "time_to_first_token": _median([result.first_token_seconds for result in started]),
        "time_per_output_token": _median(
            [_seconds_per_output_token(result) for result in started if len(result.token_ids) > 1]
        ),
        "rounds": counters.rounds,
        "rounds_per_k": {str(k): rounds for k, rounds in _count_per_k(counters).items()},
        "sampled_rounds": sum(
            rounds for (_, sampled), rounds in counters.bucket_rounds.items() if sampled
        ),
        "padding_waste": _padding_waste(counters),
        "cached_tokens": counters.prefix_hits,
        "preemptions": counters.preemptions,
        "evictions": counters.evictions,
        "tau_micro": speculation.micro_tau,
        "tau_mean": speculation.mean_tau,
        "acceptance_per_position": list(speculation.per_position),
        "host_seconds_per_round": counters.host_seconds / counters.rounds
        if counters.rounds
        else None,
        "host_wall_seconds_per_round": counters.host_wall_seconds / counters.rounds
        if counters.rounds
        else None,
        "compile_events": counters.compile_events,
    }


def format_report(run: FinishedRun) -> list[str]:
    """The statistics as lines of text."""
    fields = report_fields(run)
    phases = ", ".join(
        f"{name_phase(name)} {seconds:.2f} s" for name, seconds in run.startup.items()
    )
    per_position = " ".join(f"{share:.2f}" for share in fields["acceptance_per_position"])
    lines = [
        ("start-up", f"{fields['startup_seconds']['total']:.2f} s: {phases}"),
        ("executables", f"{fields['executables']}, {fields['executables_loaded']} of them loaded"),
        ("draft", f"{run.dialect} format"),
        ("weights", run.weights),
        ("requests", f"{fields['requests']}, {fields['tokens']} tokens"),
        ("time to first token", _format_milliseconds(fields["time_to_first_token"])),
        ("time per output token", _format_milliseconds(fields["time_per_output_token"])),
        ("rounds", _format_rounds(fields)),
        ("padding waste", _format_padding(fields["padding_waste"])),
        (
            "prompt tokens reused",
            f"{fields['cached_tokens']}; {fields['evictions']} kv pages evicted",
        ),
        ("preemptions", str(fields["preemptions"])),
        (
            "tokens per round (τ)",
            f"{fields['tau_micro']:.2f} over rounds, {fields['tau_mean']:.2f} over requests",
        ),
        ("accepted per position", per_position or "-"),
        ("host time per round", _format_host_time(fields)),
        ("compile events", f"{fields['compile_events']} while serving"),
    ]
    return [f"{name:<22} {value}" for name, value in lines]


def _seconds_per_output_token(result: Result) -> float:
    """Seconds per token after the first token (TPOT)."""
    assert result.first_token_seconds is not None
    return (result.seconds - result.first_token_seconds) / (len(result.token_ids) - 1)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _format_host_time(fields: dict[str, Any]) -> str:
    work, wall = (
        _format_milliseconds(fields[f"host_{kind}seconds_per_round"]) for kind in ("", "wall_")
    )
    return f"{work} of work, {wall} by the clock"


def _count_per_k(counters: Counters) -> dict[int, int]:
    """Number of rounds at each K, the smallest K first."""
    per_k: dict[int, int] = {}
    for (bucket, _), rounds in sorted(counters.bucket_rounds.items()):
        per_k[bucket.k] = per_k.get(bucket.k, 0) + rounds
    return dict(sorted(per_k.items()))


def _padding_waste(counters: Counters) -> float | None:
    """Share of the computed batch rows that no request used; None without a round."""
    rows = sum(bucket.batch * rounds for (bucket, _), rounds in counters.bucket_rounds.items())
    return counters.padded_rows / rows if rows else None


def _format_rounds(fields: dict[str, Any]) -> str:
    """Rounds at each K, and how many rounds sampled."""
    sampled = fields["sampled_rounds"]
    text = ", ".join(f"{rounds} of K = {k}" for k, rounds in fields["rounds_per_k"].items()) or "0"
    return f"{text}; {sampled} of them sampled" if sampled else text


def _format_padding(waste: float | None) -> str:
    return "-" if waste is None else f"{waste:.1%} of the rows computed"


def _format_milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"
