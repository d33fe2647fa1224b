"""dflash-bench load: throughput and latency of the engine and the plain loop under many callers.

Closed loops: callers share the prompts, on average at least PROMPTS_PER_CALLER each, and each sends the next prompt
when its last one is answered.
Open loops: prompts arrive at times drawn beforehand, independent of the answers, and wait from the time they are due.
Contenders take turns, each in a process of its own together with its callers, and must give the same tokens.

dflash-bench serve: load on a running dflash-serve, by the published client `aiperf`, in its own environment.
"""

import json
import math
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.contenders import Contender, Workers, ask_in_turn
from dflash_aot.benchmarks.messages import FixedOrChosen, Prompts
from dflash_aot.benchmarks.record import GRID_FLAG, ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, group_by, median
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput, PeerFailed
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint

# At least so many: with one each, a closed loop would be a burst that only empties the rows.
PROMPTS_PER_CALLER = 4
SHARES = (0.3, 0.6, 0.8, 0.95)  # of the throughput of the first contender's closed loops


@dataclass(frozen=True)
class Settings(contenders.PromptSettings):
    """Flags of `dflash-bench load`."""

    buckets: str = setting("batch=1,2,4,8,16 length=256 k=0,7 prefill=64", GRID_FLAG)
    prompts: int = setting(32, "questions; each turn of a conversation is a prompt", least=1)
    max_tokens: int = setting(64, "new tokens per prompt", least=2)
    repeats: int = setting(3, "times that everything is measured", least=1)
    callers: tuple[int, ...] = setting((1, 2, 4, 8, 16), "of closed loops; the batches", least=1)
    rates: tuple[float, ...] = setting(
        (), f"per second, of open loops; default: {SHARES} of the closed loops'", least=1e-3
    )
    arrivals: int = setting(64, "prompts of each open loop, 0 for none", least=0)
    seed: int = setting(1, "of the arrival times; every repeat has other times")
    max_waiting: int = setting(64, "prompts that may wait; others are refused", least=1)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """A "closed" sample for each contender, number of callers and repeat; an "open" one by engine, rate and repeat."""
    pair = contenders.choose_pair(settings, scratch)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    prompts = contenders.choose_turns(settings, pair, bundle)
    grid = read_manifest(bundle).grid
    longest = max(map(len, prompts))
    length = longest + settings.max_tokens
    contenders.check_callers(settings.callers, settings.prompts, grid, length)
    largest, *smaller = reversed(grid.k)
    ks: list[FixedOrChosen] = [largest, contenders.CHOSEN, *smaller] if smaller else [largest]
    engines = [contenders.engine_contender(bundle, k, settings.max_waiting) for k in ks]
    loop = contenders.jit_contender(bundle, largest, longest)
    with contenders.open_contenders([*engines, loop], note) as workers:
        closed = []
        for sample in serve_closed_loops(workers, prompts, settings, note):
            closed.append(sample)
            yield sample
        if settings.arrivals:
            rates = settings.rates or choose_rates(closed, engines[0].name, max(settings.callers))
            yield from serve_open_loops(workers[:-1], prompts, rates, settings, note)


def serve_closed_loops(
    workers: Workers, prompts: Prompts, settings: Settings, note: ProgressNote
) -> Iterator[Sample]:
    """Each number of callers with each contender, in another order each time, after a warm-up."""
    for repeat in range(-1, settings.repeats):  # -1: warm-up
        note(f"closed loops, repeat {repeat + 1} of {settings.repeats}")
        for turn, callers in enumerate(settings.callers):
            # Every prompt equally often, and PROMPTS_PER_CALLER or more for each caller.
            count = len(prompts) * math.ceil(PROMPTS_PER_CALLER * callers / len(prompts))
            if repeat < 0:
                count = callers
            order = [turn % len(prompts) for turn in range(count)]
            chosen = [prompts[number] for number in order]
            question = messages.Serve(chosen, settings.max_tokens, callers)
            for contender, served in ask_in_turn(workers, question, turn + repeat):
                if repeat >= 0:
                    facts = {"prompts": order, "callers": callers, "repeat": repeat}
                    facts["seconds"] = round(served.seconds, 6)
                    yield list_answers("closed", contender, served) | facts


def choose_rates(closed: Sequence[Sample], name: str, callers: int) -> list[float]:
    """SHARES of the prompts per second of a contender's closed loops."""
    runs = choose(closed, way=name, callers=callers)
    most = median([len(one["tokens"]) / one["seconds"] for one in runs])
    return [float(f"{share * most:.3g}") for share in SHARES]


def serve_open_loops(
    workers: Workers,
    prompts: Prompts,
    rates: Sequence[float],
    settings: Settings,
    note: ProgressNote,
) -> Iterator[Sample]:
    """Each rate with each contender: the same prompts at the same times. due_us: when each prompt was due."""
    count = settings.arrivals
    order = [turn % len(prompts) for turn in range(count)]
    arriving = [prompts[number] for number in order]
    for repeat in range(settings.repeats):
        for turn, rate in enumerate(rates):
            note(f"{rate:g} prompts per second, repeat {repeat + 1} of {settings.repeats}")
            random = np.random.default_rng(settings.seed + repeat)
            due = np.cumsum(random.exponential(1 / rate, count)).tolist()  # a Poisson process
            question = messages.Serve(arriving, settings.max_tokens, count, due)
            for contender, served in ask_in_turn(workers, question, turn + repeat):
                facts = {"prompts": order, "rate": rate, "repeat": repeat}
                facts["due_us"] = [round(1e6 * one) for one in due]
                yield list_answers("open", contender, served) | facts


def list_answers(kind: str, contender: Contender, served: messages.Served) -> Sample:
    """By prompt: its tokens, and microseconds since it was sent, or due, to the first and last one; None if refused."""
    given = [one if one.arrivals else None for one in served.answers]
    return {
        "kind": kind,
        "way": contender.name,
        "exact": contender.exact,
        "tokens": [one and contenders.hash_tokens(one.token_ids) for one in given],
        "first_us": [one and round(1e6 * one.arrivals[0]) for one in given],
        "end_us": [one and round(1e6 * one.arrivals[-1]) for one in given],
        **msgspec.to_builtins(served.work),
    }


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving."""
    answers = [
        (one["way"], prompt, tokens)
        for one in choose(samples, exact=True)
        for prompt, tokens in zip(one["prompts"], one["tokens"], strict=True)
        if tokens is not None
    ]
    return contenders.find_faults(answers, samples)


def make_findings(record: Record) -> tables.Findings:
    """Closed loops: throughput and time per token. Open loops: waiting times by rate."""
    tokens = record.settings["max_tokens"]
    samples = sorted((add_rates(one, tokens) for one in record.samples), key=lambda one: one["way"])
    closed = choose(samples, kind="closed")
    page_tables = [tabulate_callers(closed, tokens)]
    if open_loops := choose(samples, kind="open"):
        page_tables.append(tabulate_arrivals(open_loops, tokens))
    return tables.Findings(tuple(page_tables), (chart_callers(closed),))


def add_rates(sample: Mapping[str, Any], tokens: int) -> Sample:
    """A sample with the time per token of each answer, after its first token, and tokens per second."""
    times = zip(sample["first_us"], sample["end_us"], strict=True)
    token_us = [None if end is None else (end - start) / (tokens - 1) for start, end in times]
    closed = sample["kind"] == "closed"
    speed = len(sample["tokens"]) * tokens / sample["seconds"] if closed else None
    return {**sample, "token_us": token_us, "speed": speed}


def tabulate_callers(closed: Samples, tokens: int) -> tables.Table:
    """A row for each number of callers and contender."""
    columns = [
        tables.label("callers", "callers"),
        tables.label("contender", "way"),
        tables.percentile_column("tokens/s", "speed"),
        tables.percentile_column("ms per token, p50", "token_us", 50, 1e-3),
        tables.percentile_column("p95", "token_us", 95, 1e-3),
        tables.percentile_column("first token ms, p50", "first_us", 50, 1e-3),
        tables.percentile_column("p95", "first_us", 95, 1e-3),
    ]
    rows = [runs for _, runs in sorted(group_by(closed, "callers", "way").items())]
    note = (
        f"At least {PROMPTS_PER_CALLER} prompts for each caller, {tokens} tokens each. Tokens per second: median of "
        "the repeats. Times: median and 95th percentile of all answers; the time per token leaves out the first token."
    )
    return tables.make_table("Callers in closed loops", rows, columns, note)


def chart_callers(closed: Samples) -> tables.Chart:
    """A line for each contender, a point for each number of callers."""
    lines = []
    for (name,), runs in group_by(closed, "way").items():
        points = {}
        for some in group_by(runs, "callers").values():
            pace = median(tables.collect(some, "token_us")) / 1e3
            points[pace] = tables.collect(some, "speed")
        lines.append(tables.make_series(name, points))
    callers = ", ".join(str(name[0]) for name in group_by(closed, "callers"))
    title = f"Throughput against time per token, {callers} callers"
    labels = "milliseconds per token", "tokens per second"
    return tables.Chart("throughput-against-pace", title, *labels, tuple(lines))


def tabulate_arrivals(open_loops: Samples, tokens: int) -> tables.Table:
    """A row for each rate and contender."""
    columns = [
        tables.label("per second", "rate", "{:g}".format),
        tables.label("contender", "way"),
        tables.percentile_column("first token p50", "first_us", 50, 1e-3),
        tables.percentile_column("p95", "first_us", 95, 1e-3),
        tables.percentile_column("per token p50", "token_us", 50, 1e-3),
        tables.percentile_column("p95", "token_us", 95, 1e-3),
    ]
    rows = [runs for _, runs in sorted(group_by(open_loops, "rate", "way").items())]
    refused = sum(one["end_us"].count(None) for one in open_loops)
    note = (
        f"Prompts arrive as a Poisson process, at the same times for all contenders; {tokens} tokens each. The time to "
        f"the first token counts from the arrival. Refused prompts, which have no times: {refused}."
    )
    return tables.make_table("Prompts at independent times, ms", rows, columns, note)


@dataclass(frozen=True)
class ServeSettings:
    """Flags of `dflash-bench serve`."""

    url: str = setting("http://127.0.0.1:8000", "the running server")
    aiperf: str = setting("aiperf", "the client's command, see docs/benchmarks.md")
    target: str = setting(EMBEDDED, "the target whose tokenizer makes the prompts")
    connections: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32), "at a time, run by run", least=1)
    prompts: int = setting(32, "requests of each run, and at least 4 for each connection", least=1)
    prompt_tokens: int = setting(64, "tokens of each prompt", least=1)
    max_tokens: int = setting(32, "new tokens of each answer", least=1)
    rate: float | None = setting(None, "requests per second at random times; default: no pauses")
    seed: int = setting(1, "of the prompts and the times")


def run_client(settings: ServeSettings, artifacts: str, note: ProgressNote) -> None:
    """One run for each number of connections; the client prints its own tables and writes to `artifacts`.

    Raises BadInput without a client or a server, PeerFailed where the client fails.
    """
    if shutil.which(settings.aiperf) is None:
        install = "python -m venv aiperf && aiperf/bin/pip install aiperf, then --aiperf aiperf/bin/aiperf"
        raise BadInput(
            f"--aiperf {settings.aiperf}: not found. Its pins differ, so it needs its own environment: {install}"
        )
    try:
        with urllib.request.urlopen(f"{settings.url}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
    except (OSError, HTTPException, LookupError, TypeError, ValueError) as error:
        raise BadInput(f"--url {settings.url}: no model is served there: {error}") from error
    for connections in settings.connections:
        note(f"{connections} connections")
        command = make_command(settings, model, connections, f"{artifacts}/serve-{connections}")
        done = subprocess.run(command)
        if done.returncode:
            raise PeerFailed(
                f"{settings.aiperf} ended with {done.returncode}; its messages are above"
            )


def make_command(settings: ServeSettings, model: str, connections: int, out: str) -> list[str]:
    """The client's command. It sends only fields that dflash-serve accepts, and reads token counts from `usage`."""
    options = {
        "model": model,
        "url": settings.url,
        "endpoint-type": "completions",
        "tokenizer": locate_checkpoint(settings.target, "target"),
        "concurrency": connections,
        "request-count": max(settings.prompts, PROMPTS_PER_CALLER * connections),
        "warmup-request-count": connections,
        "prompt-input-tokens-mean": settings.prompt_tokens,
        "prompt-output-tokens-mean": settings.max_tokens,
        "random-seed": settings.seed,
        # Every run sends the same prompts, so their kv must not be there already.
        "extra-inputs": json.dumps({"temperature": 0, "ignore_eos": True, "prefix_caching": False}),
        "artifact-dir": out,
        "ui": "none",
    }
    if settings.rate is not None:
        options |= {"request-rate": f"{settings.rate:g}", "arrival-pattern": "poisson"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    switches = ["--streaming", "--use-legacy-max-tokens", "--use-server-token-count"]
    return [settings.aiperf, "profile", *switches, *flags]
