"""dflash-bench host: the host's work per round, of the engine at every K and of the plain `jax.jit` loop.

Contenders take turns, each in a process of its own. Figures are differences between long and short answers, so that
work before the rounds cancels out. Between them the programs of a round are timed, one at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.estimates import Samples, choose, estimate_median, group_by, median, pair_up
from dflash_aot.benchmarks.prompts import HELD_OUT
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.worker import Worker
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid

# The engine; the engine on a bundle that runs several rounds per call; the plain `jax.jit` loop.
ENGINE, BURSTS, LOOP = "engine", "engine, bursts", "jax.jit loop"
PROGRAMS = "verify", "draft", "kv_write"
PROGRAM_CALLS = 10  # in each repeat


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench host`."""

    buckets: str = setting("batch=1,8 length=256 k=0,7 prefill=64", "the grid, as dflash-precompile takes it")
    rounds: int = setting(8, "also a bundle that runs so many rounds per call; 1: none", least=1)
    callers: tuple[int, ...] = setting((1, 8), "simultaneous callers; each must be a batch of the grid", least=1)
    prompts: int = setting(8, "number of prompts, shared by the callers", least=1)
    prompt_tokens: int = setting(64, "tokens of each prompt", least=1)
    short: int = setting(16, "new tokens of a short answer", least=2)
    long: int = setting(128, "new tokens of a long answer", least=3)
    repeats: int = setting(5, "times that every contender gives all answers", least=1)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """ "times" of short and long answers, and the "parts" of a round: its programs.

    Raises BadInput, BadCheckpoint, BuildFailed, GridMiss, PeerFailed.
    """
    pair = contenders.choose_pair(settings, scratch)
    prompts = contenders.choose_prompts(HELD_OUT, settings.prompts, settings.prompt_tokens, pair)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    grid = read_manifest(bundle).grid
    check_callers(settings, grid)
    bundles = {ENGINE: bundle}
    if settings.rounds > 1:
        buckets = str(msgspec.structs.replace(grid, rounds=settings.rounds))
        bundles[BURSTS] = contenders.ensure_bundle(pair, buckets, "float32", scratch, note)
    spec = messages.BundleForwardSpec(str(bundle), str(pair.target), str(pair.draft), [])
    programs = contenders.Contender("programs", "forward_worker", spec)
    with ExitStack() as stack:
        workers = contenders.open_contenders(list_contenders(bundles, pair, grid, max(map(len, prompts))), stack, note)
        ((_, timer),) = contenders.open_contenders([programs], stack, note)
        for repeat in range(-1, settings.repeats):  # -1: warm-up
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for callers in settings.callers:
                taken = [
                    *take_times(workers, messages.deal(prompts, callers), settings),
                    *take_parts(timer, callers, grid),
                ]
                if repeat >= 0:
                    yield from (one | {"callers": callers, "repeat": repeat} for one in taken)


def take_times(
    workers: contenders.Workers, turns: list[list[messages.PromptIds]], settings: Settings
) -> Iterator[Sample]:
    """Short, then long answers of every contender. turns: the prompts of each caller."""
    for length, tokens in (("short", settings.short), ("long", settings.long)):
        question = messages.ServeClosed(turns, tokens)
        for one, worker in workers:
            yield list_times(one, worker.ask(question, messages.ServedClosed)) | {"length": length}


def take_parts(timer: Worker, batch: int, grid: Grid) -> Iterator[Sample]:
    """The programs of a round at every K, in microseconds."""
    for k in grid.k:
        timed = timer.ask(messages.TimePrograms(batch, k, PROGRAM_CALLS), messages.ProgramSeconds)
        us = {program: [round(1e6 * one) for one in seconds] for program, seconds in timed.seconds.items()}
        yield {"kind": "parts", "k": k, "us": us}


def check_callers(settings: Settings, grid: Grid) -> None:
    """The plain loop pads nothing, and every caller needs a prompt. Raises BadInput, GridMiss."""
    if wrong := [str(count) for count in settings.callers if count not in grid.batch or count > settings.prompts]:
        raise BadInput(
            f"--callers {','.join(wrong)}: not a batch of the grid {grid}, or more than the {settings.prompts} prompts"
        )
    if settings.short >= settings.long:
        raise BadInput(f"--short {settings.short} must be less than --long {settings.long}")
    grid.fit(1, settings.prompt_tokens + settings.long + grid.k[-1], grid.k[-1])


def list_contenders(
    bundles: Mapping[str, Path], pair: contenders.BenchmarkPair, grid: Grid, longest: int
) -> list[contenders.Contender]:
    """The engine on each bundle and the plain loop, at every K."""
    pair_facts, entrants = (str(pair.target), str(pair.draft)), []
    for k in grid.k:
        specs = {name: messages.EngineSpec(str(bundle), *pair_facts, k) for name, bundle in bundles.items()}
        entrants += [contenders.Contender(name, "engine_worker", spec, k=k) for name, spec in specs.items()]
        spec = messages.JitSpec(str(bundles[ENGINE]), *pair_facts, k, longest)
        entrants.append(contenders.Contender(LOOP, "jit_loop", spec, k=k))
    return entrants


def list_times(contender: contenders.Contender, served: messages.ServedClosed) -> Sample:
    """Times in microseconds, and the tokens of each prompt."""
    work, tokens = served.work, [contenders.hash_tokens(one.token_ids) for one in messages.gather(served.answers)]
    facts = {"kind": "times", "way": contender.name, "k": contender.k, "us": round(1e6 * served.seconds)}
    facts |= {"rounds": work.rounds, "row_rounds": work.row_rounds, "compile_events": work.compile_events}
    return facts | contenders.list_host_us(work) | {"tokens": tokens}


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving. Short and long answers are compared apart."""
    served = [{**one, "way": f"{one['way']}, K = {one['k']}"} for one in samples if "tokens" in one]
    answers = [
        {"way": one["way"], "exact": True, "prompt": f"{number} ({one['length']})", "tokens": tokens}
        for one in served
        for number, tokens in enumerate(one["tokens"])
    ]
    return contenders.find_faults(answers, served)


def make_findings(record: Record) -> tables.Findings:
    """The host's time per round, and its chart."""
    groups = group_by(choose(record.samples, kind="times"), "callers", "k", "way")
    cases = [make_case(groups[name]) for name in sorted(groups, key=lambda name: name[:2])]
    table = tables.make_table("times", "The host's time per round", [[one] for one in cases], COLUMNS, NOTE)
    series = []
    for (name,), chosen in group_by(cases, "way").items():
        series.append(tables.make_series(name, {name_case(one): one["work"] for one in chosen}, "interval"))
    charts = [tables.Chart("work", "The host's work per round", "", "µs", tuple(series), "bar")]
    if parts := choose(record.samples, kind="parts"):
        charts.append(chart_parts(parts, choose(cases, way=ENGINE)))
    return tables.Findings((table,), tuple(charts))


def name_case(case: Mapping[str, Any]) -> str:
    return f"{case['callers']} caller{'s' * (case['callers'] > 1)}, K = {case['k']}"


def chart_parts(samples: Samples, cases: Samples) -> tables.Chart:
    """A bar for each number of callers and K: medians of its programs and of the host's work."""
    parts: dict[str, dict[str, float]] = {program: {} for program in PROGRAMS}
    for group in group_by(samples, "callers", "k").values():
        for program in group[0]["us"]:
            times = [one for sample in group for one in sample["us"][program]]
            parts[program][name_case(group[0])] = median(times) / 1000
    parts["host"] = {name_case(one): median(one["work"]) / 1000 for one in cases}
    series = tuple(tables.Series(name, tuple(of), tuple(of.values())) for name, of in parts.items() if of)
    title = "The parts of a round, each waited for; a served round overlaps them"
    return tables.Chart("parts", title, "", "ms", series, "stack")


def make_case(samples: Samples) -> Sample:
    """Microseconds per round, a value per repeat."""
    work, clock, whole = (subtract_short(samples, value) for value in ("host_us", "host_wall_us", "us"))
    return {
        **{key: samples[0][key] for key in ("callers", "k", "way")},
        "work": work,
        "clock": clock if any(clock) else [],
        "round": whole,
        "share": median([one / other for one, other in zip(work, whole, strict=True)]),
    }


def subtract_short(samples: Samples, value: str) -> list[float]:
    """(long - short) / (rounds of long - rounds of short), repeat by repeat."""
    values, rounds = (
        pair_up(samples, name, ["repeat"], {"length": "long"}, {"length": "short"}) for name in (value, "rounds")
    )
    return [(more - less) / (b - a) for more, less, b, a in zip(*values, *rounds, strict=True)]


COLUMNS = [
    tables.label("callers", "callers"),
    tables.label("K", "k"),
    tables.label("contender", "way"),
    tables.Column("work µs", "work", estimate_median, show=tables.format_estimate),
    tables.Column("clock µs", "clock"),
    tables.Column("round ms", "round", scale=1e-3, show="{:.3f}".format),
    tables.Column("work of round", "share", tables.first, show="{:.1%}".format),
]
NOTE = (
    "Work: processor time of the thread that dispatches; medians of the repeats with 95 % intervals. Clock: wall time "
    "without waits for the device, as the engine counts it. On a CPU the device works on the same cores, which "
    "lengthens the clock and cools the caches. Bursts: several rounds per call."
)
