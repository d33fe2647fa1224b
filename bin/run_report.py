"""What a user wants to know after serving."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_aot.runtime.metrics.counters import Counters, summarize_acceptance
from dflash_aot.runtime.requests.request import Result


@dataclass(frozen=True)
class Served:
    """One run: start-up phases in seconds, the draft's dialect, the largest K, executables, answers, counters."""

    startup: Mapping[str, float]
    dialect: str
    k: int
    executables: int
    results: Sequence[Result]
    counters: Counters


def report_fields(served: Served) -> dict[str, Any]:
    """All figures by name; seconds unless the name says otherwise."""
    answered = [result for result in served.results if result.first_token_seconds is not None]
    counters, speculation = served.counters, summarize_acceptance(served.results, served.counters)
    tokens = sum(len(result.token_ids) for result in answered)
    return {
        "startup_seconds": {**served.startup, "total": sum(served.startup.values())},
        "executables": served.executables,
        "executables_loaded": counters.loaded,
        "dialect": served.dialect,
        "k": served.k,
        "requests": len(served.results),
        "tokens": tokens,
        "time_to_first_token": _median([result.first_token_seconds for result in answered]),
        "time_per_output_token": _median([_per_token(result) for result in answered if len(result.token_ids) > 1]),
        "rounds": counters.rounds,
        "rounds_per_k": {str(k): rounds for k, rounds in _count_per_k(counters).items()},
        "sampled_rounds": sum(rounds for (_, sampled), rounds in counters.bucket_rounds.items() if sampled),
        "padding_waste": _find_waste(counters),
        "tau_micro": speculation.micro_tau,
        "tau_mean": speculation.mean_tau,
        "acceptance_per_position": list(speculation.per_position),
        "host_seconds_per_round": counters.host_seconds / counters.rounds if counters.rounds else None,
        "host_wall_seconds_per_round": counters.host_wall_seconds / counters.rounds if counters.rounds else None,
        "compile_events": counters.compile_events,
    }


def format_report(served: Served) -> str:
    """The same for people."""
    fields = report_fields(served)
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in served.startup.items())
    per_position = " ".join(f"{share:.2f}" for share in fields["acceptance_per_position"])
    lines = [
        ("start-up", f"{fields['startup_seconds']['total']:.2f} s: {phases}"),
        ("executables", f"{fields['executables']}, {fields['executables_loaded']} of them loaded"),
        ("draft", f"{served.dialect} format"),
        ("requests", f"{fields['requests']}, {fields['tokens']} tokens"),
        ("time to first token", _milliseconds(fields["time_to_first_token"])),
        ("time per output token", _milliseconds(fields["time_per_output_token"])),
        ("rounds", _format_rounds(fields)),
        ("padding waste", _format_waste(fields["padding_waste"])),
        ("acceptance length τ", f"{fields['tau_micro']:.2f} over rounds, {fields['tau_mean']:.2f} over requests"),
        ("accepted per position", per_position or "-"),
        ("host time per round", _host_time(fields)),
        ("compile events", f"{fields['compile_events']} while serving"),
    ]
    return "\n".join(f"{name:<22} {value}" for name, value in lines)


def _per_token(result: Result) -> float:
    """Between the first and the last token, as the field counts it."""
    assert result.first_token_seconds is not None
    return (result.seconds - result.first_token_seconds) / (len(result.token_ids) - 1)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _host_time(fields: dict[str, Any]) -> str:
    work, wall = (_milliseconds(fields[f"host_{kind}seconds_per_round"]) for kind in ("", "wall_"))
    return f"{work} of work, {wall} by the clock"


def _count_per_k(counters: Counters) -> dict[int, int]:
    """Rounds by the K that was chosen for them, the smallest first."""
    per_k: dict[int, int] = {}
    for (bucket, _), rounds in sorted(counters.bucket_rounds.items()):
        per_k[bucket.k] = per_k.get(bucket.k, 0) + rounds
    return dict(sorted(per_k.items()))


def _find_waste(counters: Counters) -> float | None:
    """Of the rows that rounds computed, the share that no request had."""
    rows = sum(bucket.batch * rounds for (bucket, _), rounds in counters.bucket_rounds.items())
    return counters.padded_rows / rows if rows else None


def _format_rounds(fields: dict[str, Any]) -> str:
    """The K of all, or how many had each; and how many sampled, if any."""
    sampled = fields["sampled_rounds"]
    text = ", ".join(f"{rounds} of K = {k}" for k, rounds in fields["rounds_per_k"].items()) or "0"
    return f"{text}; {sampled} of them sampled" if sampled else text


def _format_waste(waste: float | None) -> str:
    return "-" if waste is None else f"{waste:.1%} of the rows computed"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"
