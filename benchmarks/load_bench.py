"""dflash-bench load: throughput and latency of the engine and the plain loop under many callers.

Closed loops: callers work through the same prompts, at least PROMPTS_PER_CALLER each, and each sends its next prompt
when the last one is answered.
Open loops: prompts arrive at times drawn beforehand, independent of the answers, and wait from the time they are due.
Contenders take turns, each in a process of its own together with its callers, and must give the same tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, group_by, median
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid

# At least so many: with one each, a closed loop would be a burst that only empties the rows.
PROMPTS_PER_CALLER = 4
SHARES = (0.3, 0.6, 0.8, 0.95)  # of the throughput of the first contender's closed loops


@dataclass(frozen=True)
class Settings(contenders.PromptSettings):
    """Flags of `dflash-bench load`."""

    buckets: str = setting(
        "batch=1,2,4,8,16 length=256 k=0,7 prefill=64", "the grid, as dflash-precompile takes it"
    )
    prompts: int = setting(
        32, "number of questions; each turn of a conversation is a prompt", least=1
    )
    max_tokens: int = setting(64, "new tokens per prompt", least=2)
    repeats: int = setting(3, "times that everything is measured", least=1)
    callers: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16), "of the closed loops; each a batch of the grid", least=1
    )
    rates: tuple[float, ...] = setting(
        (),
        "of the open loops, prompts per second; default: "
        f"{', '.join(f'{share:.0%}' for share in SHARES)} of the rate of the closed loops with most callers",
        least=1e-3,
    )
    arrivals: int = setting(64, "prompts of each open loop, 0 for none", least=0)
    seed: int = setting(1, "of the arrival times; every repeat has other times")
    max_waiting: int = setting(
        64, "size of the engine's request queue; prompts beyond it are refused", least=1
    )


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """A "closed" sample for each contender, number of callers and repeat; an "open" one by engine, rate and repeat."""
    pair = contenders.choose_pair(settings, scratch)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    prompts = contenders.choose_turns(settings, pair, bundle)
    grid = read_manifest(bundle).grid
    longest = max(map(len, prompts))
    check_settings(settings, grid, longest)
    largest, *smaller = reversed(grid.k)
    ks: list[int | Literal["auto"]] = (
        [largest, contenders.CHOSEN, *smaller] if smaller else [largest]
    )
    entrants = [
        contenders.engine_contender(bundle, pair, k, max_waiting=settings.max_waiting) for k in ks
    ]
    entrants.append(contenders.jit_contender(bundle, pair, grid.k[-1], longest))
    with ExitStack() as stack:
        workers = contenders.open_contenders(entrants, stack, note)
        closed = []
        for sample in serve_closed_loops(workers, prompts, settings, note):
            closed.append(sample)
            yield sample
        if settings.arrivals:
            rates = settings.rates or choose_rates(closed, entrants[0].name, max(settings.callers))
            yield from serve_open_loops(workers[:-1], prompts, rates, settings, note)


def check_settings(settings: Settings, grid: Grid, longest: int) -> None:
    """Raises GridMiss, BadInput."""
    grid.fit(max(settings.callers), longest + settings.max_tokens + grid.k[-1], grid.k[-1])
    if missing := sorted({*settings.callers} - {*grid.batch}):
        raise BadInput(
            f"--callers: {', '.join(map(str, missing))} is not a batch of the grid {grid}"
        )
    if max(settings.callers) > settings.prompts:
        raise BadInput(
            f"--callers: {max(settings.callers)} callers share {settings.prompts} prompts (--prompts)"
        )


def serve_closed_loops(
    workers: contenders.Workers,
    prompts: Sequence[messages.PromptIds],
    settings: Settings,
    note: ProgressNote,
) -> Iterator[Sample]:
    """Each number of callers with each contender, in another order each time, after a warm-up."""
    for repeat in range(-1, settings.repeats):
        note(
            f"closed loops, repeat {repeat + 1} of {settings.repeats}"
            if repeat >= 0
            else "warming up"
        )
        for turn, callers in enumerate(settings.callers):
            count = count_prompts(len(prompts), callers) if repeat >= 0 else callers
            order = [turn % len(prompts) for turn in range(count)]
            lists = messages.deal([prompts[number] for number in order], callers)
            for contender, worker in contenders.take_turns(workers, turn + repeat):
                served = worker.ask(
                    messages.ServeClosed(lists, settings.max_tokens), messages.ServedClosed
                )
                if repeat >= 0:
                    yield make_closed(contender, served) | {
                        "prompts": order,
                        "callers": callers,
                        "repeat": repeat,
                    }


def count_prompts(prompts: int, callers: int) -> int:
    """Requests of a closed loop: every prompt equally often, and at least PROMPTS_PER_CALLER for each caller."""
    return prompts * math.ceil(PROMPTS_PER_CALLER * callers / prompts)


def choose_rates(closed: Sequence[Sample], name: str, callers: int) -> list[float]:
    """SHARES of the prompts per second of a contender's closed loops."""
    runs = choose(closed, way=name, callers=callers)
    most = median([len(one["tokens"]) / one["seconds"] for one in runs])
    return [float(f"{share * most:.3g}") for share in SHARES]


def serve_open_loops(
    workers: contenders.Workers,
    prompts: Sequence[messages.PromptIds],
    rates: Sequence[float],
    settings: Settings,
    note: ProgressNote,
) -> Iterator[Sample]:
    """Each rate with each contender: the same prompts at the same times."""
    order = [turn % len(prompts) for turn in range(settings.arrivals)]
    arriving = [prompts[number] for number in order]
    for repeat in range(settings.repeats):
        for turn, rate in enumerate(rates):
            note(f"{rate:g} prompts per second, repeat {repeat + 1} of {settings.repeats}")
            due = messages.draw_arrivals(settings.arrivals, rate, settings.seed + repeat)
            for contender, worker in contenders.take_turns(workers, turn + repeat):
                served = worker.ask(
                    messages.ServeOpen(arriving, due, settings.max_tokens), messages.ServedOpen
                )
                yield make_open(contender, served, due) | {
                    "prompts": order,
                    "rate": rate,
                    "repeat": repeat,
                }


def make_closed(contender: contenders.Contender, served: messages.ServedClosed) -> Sample:
    """By prompt sent: tokens, and microseconds from sending it to its first and last token."""
    facts = {
        "kind": "closed",
        "way": contender.name,
        "exact": contender.exact,
        "seconds": round(served.seconds, 6),
    }
    return facts | list_answers(messages.gather(served.answers)) | list_counts(served.work)


def make_open(
    contender: contenders.Contender, served: messages.ServedOpen, due: Sequence[float]
) -> Sample:
    """By prompt, in microseconds: when it was due, and the times since it was due."""
    facts = {"kind": "open", "way": contender.name, "exact": contender.exact}
    return (
        facts
        | {"due_us": [round(1e6 * one) for one in due]}
        | list_answers(served.answers)
        | list_counts(served.work)
    )


def list_answers(answers: Sequence[messages.TimedAnswer | None]) -> Sample:
    """Tokens and times of each answer, by prompt; None for a refused prompt."""
    return {
        "tokens": [one and contenders.hash_tokens(one.token_ids) for one in answers],
        "first_us": [one and round(1e6 * one.arrivals[0]) for one in answers],
        "end_us": [one and round(1e6 * one.arrivals[-1]) for one in answers],
    }


def list_counts(work: messages.ServingWork) -> Sample:
    """Counters that the tables show."""
    names = ("rounds", "rows", "row_rounds", "compile_events")
    return {name: getattr(work, name) for name in names} | {
        "host_us": round(1e6 * work.host_seconds)
    }


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving."""
    answers = [
        {"way": one["way"], "exact": one["exact"], "prompt": prompt, "tokens": tokens}
        for one in samples
        for prompt, tokens in zip(one["prompts"], one["tokens"], strict=True)
        if tokens is not None
    ]
    return contenders.find_faults(answers, samples)


def make_findings(record: Record) -> tables.Findings:
    """Closed loops: throughput and time per token. Open loops: waiting times by rate."""
    tokens = record.settings["max_tokens"]
    samples = sorted((add_rates(one, tokens) for one in record.samples), key=lambda one: one["way"])
    closed, open_loops = (choose(samples, kind=kind) for kind in ("closed", "open"))
    page_tables = [tabulate_callers(closed, tokens)]
    if open_loops:
        page_tables.append(tabulate_arrivals(open_loops, tokens))
    return tables.Findings(tuple(page_tables), (chart_callers(closed),))


def add_rates(sample: Mapping[str, Any], tokens: int) -> Sample:
    """A sample with the time per token of each answer, after its first token, and tokens per second."""
    times = zip(sample["first_us"], sample["end_us"], strict=True)
    token_us = [None if end is None else (end - start) / (tokens - 1) for start, end in times]
    speed = (
        len(sample["tokens"]) * tokens / sample["seconds"] if sample["kind"] == "closed" else None
    )
    return {**sample, "token_us": token_us, "speed": speed}


def tabulate_callers(closed: Samples, tokens: int) -> tables.Table:
    """A row for each number of callers and contender."""
    columns = [
        tables.label("callers", "callers"),
        tables.label("contender", "way"),
        tables.Column("tokens/s", "speed"),
        *tables.percentile_columns("ms per token,", "token_us", (50, 95), 1e-3),
        *tables.percentile_columns("first token ms,", "first_us", (50, 95), 1e-3),
    ]
    rows = [runs for _, runs in sorted(group_by(closed, "callers", "way").items())]
    note = (
        f"At least {PROMPTS_PER_CALLER} prompts for each caller, {tokens} tokens each. Tokens per second: median of "
        "the repeats. Times: median and 95th percentile of all answers; the time per token leaves out the first token."
    )
    return tables.make_table("callers", "Callers in closed loops", rows, columns, note)


def chart_callers(closed: Samples) -> tables.Chart:
    """A line for each contender, a point for each number of callers."""
    lines = []
    for (name,), runs in group_by(closed, "way").items():
        by_callers = [*group_by(runs, "callers").values()]
        x = tuple(median(tables.collect(some, "token_us")) / 1e3 for some in by_callers)
        speeds = [tables.collect(some, "speed") for some in by_callers]
        lines.append(
            tables.Series(
                name,
                x,
                tuple(map(median, speeds)),
                tuple(map(min, speeds)),
                tuple(map(max, speeds)),
            )
        )
    callers = ", ".join(str(name[0]) for name in group_by(closed, "callers"))
    title = f"Throughput against time per token, {callers} callers"
    return tables.Chart(
        "throughput-against-pace",
        title,
        "milliseconds per token",
        "tokens per second",
        tuple(lines),
    )


def tabulate_arrivals(open_loops: Samples, tokens: int) -> tables.Table:
    """A row for each rate and contender."""
    columns = [
        tables.label("per second", "rate", "{:g}".format),
        tables.label("contender", "way"),
        *tables.percentile_columns("first token", "first_us", (50, 95), 1e-3),
        *tables.percentile_columns("per token", "token_us", (50, 95), 1e-3),
    ]
    rows = [runs for _, runs in sorted(group_by(open_loops, "rate", "way").items())]
    refused = sum(one["end_us"].count(None) for one in open_loops)
    note = (
        f"Prompts arrive as a Poisson process, at the same times for all contenders; {tokens} tokens each. The time to "
        f"the first token counts from the arrival. Refused prompts, which have no times: {refused}."
    )
    return tables.make_table("arrivals", "Prompts at independent times, ms", rows, columns, note)
