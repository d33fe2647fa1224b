"""dflash-bench host: the host's work per round, of the engine at every K and of the plain `jax.jit` loop.

Contenders take turns, each in a process of its own. Figures are differences between long and short answers, so that
work before the rounds cancels out.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.prompts import HELD_OUT
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, estimate_median, group_by, median, pair_up
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid

# The engine; the engine on a bundle that runs several rounds per call; the plain `jax.jit` loop.
ENGINE = "engine"
BURSTS = "engine, bursts"
LOOP = "jax.jit loop"


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench host`."""

    buckets: str = setting(
        "batch=1,8 length=256 k=0,7 prefill=64", "the grid, as dflash-precompile takes it"
    )
    rounds: int = setting(8, "also a bundle that runs so many rounds per call; 1: none", least=1)
    callers: tuple[int, ...] = setting(
        (1, 8), "simultaneous callers; each must be a batch of the grid", least=1
    )
    prompts: int = setting(8, "number of prompts, shared by the callers", least=1)
    prompt_tokens: int = setting(64, "tokens of each prompt", least=1)
    short: int = setting(16, "new tokens of a short answer", least=2)
    long: int = setting(128, "new tokens of a long answer", least=3)
    repeats: int = setting(5, "times that every contender gives all answers", least=1)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """ "times" of short and long answers."""
    pair = contenders.choose_pair(settings, scratch)
    prompts = contenders.choose_prompts(HELD_OUT, settings.prompts, settings.prompt_tokens, pair)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    grid = read_manifest(bundle).grid
    check_callers(settings, grid)
    bundles = {ENGINE: bundle}
    if settings.rounds > 1:
        buckets = str(msgspec.structs.replace(grid, rounds=settings.rounds))
        bundles[BURSTS] = contenders.ensure_bundle(pair, buckets, "float32", scratch, note)
    with ExitStack() as stack:
        workers = contenders.open_contenders(
            list_contenders(bundles, pair, grid, max(map(len, prompts))), stack, note
        )
        for repeat in range(-1, settings.repeats):  # -1: warm-up
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for callers in settings.callers:
                taken = list(take_times(workers, messages.deal(prompts, callers), settings))
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


def check_callers(settings: Settings, grid: Grid) -> None:
    """The plain loop pads nothing, and every caller needs a prompt. Raises BadInput, GridMiss."""
    if wrong := [
        str(count)
        for count in settings.callers
        if count not in grid.batch or count > settings.prompts
    ]:
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
    pair_facts = (str(pair.target), str(pair.draft))
    entrants = []
    for k in grid.k:
        specs = {
            name: messages.EngineSpec(str(bundle), *pair_facts, k)
            for name, bundle in bundles.items()
        }
        entrants += [
            contenders.Contender(name, "engine_worker", spec, k=k) for name, spec in specs.items()
        ]
        spec = messages.JitSpec(str(bundles[ENGINE]), *pair_facts, k, longest)
        entrants.append(contenders.Contender(LOOP, "jit_loop", spec, k=k))
    return entrants


def list_times(contender: contenders.Contender, served: messages.ServedClosed) -> Sample:
    """Times in microseconds, and the tokens of each prompt."""
    work = served.work
    tokens = [contenders.hash_tokens(one.token_ids) for one in messages.gather(served.answers)]
    facts = {
        "kind": "times",
        "way": contender.name,
        "k": contender.k,
        "us": round(1e6 * served.seconds),
    }
    facts |= {
        "rounds": work.rounds,
        "row_rounds": work.row_rounds,
        "compile_events": work.compile_events,
    }
    return facts | {"host_us": round(1e6 * work.host_seconds), "tokens": tokens}


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving. Short and long answers are compared apart."""
    served = [{**one, "way": f"{one['way']}, K = {one['k']}"} for one in samples if "tokens" in one]
    answers = [
        {
            "way": one["way"],
            "exact": True,
            "prompt": f"{number} ({one['length']})",
            "tokens": tokens,
        }
        for one in served
        for number, tokens in enumerate(one["tokens"])
    ]
    return contenders.find_faults(answers, served)


def make_findings(record: Record) -> tables.Findings:
    """The host's time per round."""
    groups = group_by(choose(record.samples, kind="times"), "callers", "k", "way")
    cases = [make_case(groups[name]) for name in sorted(groups, key=lambda name: name[:2])]
    table = tables.make_table(
        "times", "The host's time per round", [[one] for one in cases], COLUMNS, NOTE
    )
    return tables.Findings((table,))


def make_case(samples: Samples) -> Sample:
    """Microseconds per round, a value per repeat."""
    work, whole = (subtract_short(samples, value) for value in ("host_us", "us"))
    return {
        **{key: samples[0][key] for key in ("callers", "k", "way")},
        "work": work,
        "share": median([one / other for one, other in zip(work, whole, strict=True)]),
    }


def subtract_short(samples: Samples, value: str) -> list[float]:
    """(long - short) / (rounds of long - rounds of short), repeat by repeat."""
    values, rounds = (
        pair_up(samples, name, ["repeat"], {"length": "long"}, {"length": "short"})
        for name in (value, "rounds")
    )
    return [(more - less) / (b - a) for more, less, b, a in zip(*values, *rounds, strict=True)]


COLUMNS = [
    tables.label("callers", "callers"),
    tables.label("K", "k"),
    tables.label("contender", "way"),
    tables.Column("work µs", "work", estimate_median, show=tables.format_estimate),
    tables.Column("share of round", "share", tables.first, show="{:.1%}".format),
]
NOTE = "Work: processor time of the thread that dispatches, median with 95 % interval. Bursts: several rounds per call."
