"""dflash-bench host: the host's work per round, of the engine at every K and of the plain `jax.jit` loop.

Contenders take turns, each in a process of its own. Figures are differences between long and short answers, so that
work before the rounds cancels out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.prompts import HELD_OUT
from dflash_aot.benchmarks.record import GRID_FLAG, ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, group_by, median, pair_up
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid

# The engine; the engine on a bundle that runs several rounds per call; the plain `jax.jit` loop.
ENGINE = "engine"
BURSTS = "engine, bursts"
LOOP = "jax.jit loop"
NOTE = "Work: processor time of the thread that dispatches, median with 95 % interval. Bursts: several rounds per call."


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench host`."""

    buckets: str = setting("batch=1,8 length=256 k=0,7 prefill=64", GRID_FLAG)
    rounds: int = setting(8, "also a bundle that runs so many rounds per call; 1: none", least=1)
    callers: tuple[int, ...] = setting((1, 8), "at a time; each a batch of the grid", least=1)
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
    if settings.short >= settings.long:
        raise BadInput(f"--short {settings.short} must be less than --long {settings.long}")
    length = settings.prompt_tokens + settings.long
    contenders.check_callers(settings.callers, settings.prompts, grid, length)
    bundles = {ENGINE: bundle}
    if settings.rounds > 1:
        buckets = str(msgspec.structs.replace(grid, rounds=settings.rounds))
        bundles[BURSTS] = contenders.ensure_bundle(pair, buckets, "float32", scratch, note)
    entrants = list_contenders(bundles, grid, max(map(len, prompts)))
    with contenders.open_contenders(entrants, note) as workers:
        for repeat in range(-1, settings.repeats):  # -1: warm-up
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for callers in settings.callers:
                taken = list(take_times(workers, prompts, callers, settings))
                if repeat >= 0:
                    yield from (one | {"callers": callers, "repeat": repeat} for one in taken)


def list_contenders(
    bundles: Mapping[str, Path], grid: Grid, longest: int
) -> Iterator[contenders.Contender]:
    """The engine on each bundle and the plain loop, at every K."""
    for k in grid.k:
        for name, bundle in bundles.items():
            yield replace(contenders.engine_contender(bundle, k), name=name)
        yield replace(contenders.jit_contender(bundles[ENGINE], k, longest), name=LOOP)


def take_times(
    workers: contenders.Workers, prompts: messages.Prompts, callers: int, settings: Settings
) -> Iterator[Sample]:
    """Short, then long answers of every contender: times in microseconds, and the tokens of each prompt."""
    for length, tokens in (("short", settings.short), ("long", settings.long)):
        question = messages.Serve(prompts, tokens, callers)
        for contender, served in contenders.ask_in_turn(workers, question, 0):
            yield {
                "kind": "times",
                "way": contender.name,
                "k": contender.k,
                "us": round(1e6 * served.seconds),
                **msgspec.to_builtins(served.work),
                "tokens": [contenders.hash_tokens(one.token_ids) for one in served.answers],
                "length": length,
            }


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving. Short and long answers are compared apart."""
    times = choose(samples, kind="times")
    served = [{**one, "way": f"{one['way']}, K = {one['k']}"} for one in times]
    answers = [
        (one["way"], f"{number} ({one['length']})", tokens)
        for one in served
        for number, tokens in enumerate(one["tokens"])
    ]
    return contenders.find_faults(answers, served)


def make_findings(record: Record) -> tables.Findings:
    """The host's time per round."""
    groups = group_by(choose(record.samples, kind="times"), "callers", "k", "way")
    rows = [groups[name] for name in sorted(groups, key=lambda name: name[:2])]
    columns = [
        tables.label("callers", "callers"),
        tables.label("K", "k"),
        tables.label("contender", "way"),
        ("work µs", lambda row: tables.format_estimate(subtract_short(row, "host_us"))),
        ("share of round", format_share),
    ]
    return tables.Findings((tables.make_table("The host's time per round", rows, columns, NOTE),))


def format_share(samples: Samples) -> str:
    """Median of processor time over time of a round."""
    sides = subtract_short(samples, "host_us"), subtract_short(samples, "us")
    return f"{median([work / whole for work, whole in zip(*sides, strict=True)]):.1%}"


def subtract_short(samples: Samples, value: str) -> list[float]:
    """Microseconds per round, (long - short) / (rounds of long - rounds of short), repeat by repeat."""
    values, rounds = (
        pair_up(samples, name, ["repeat"], {"length": "long"}, {"length": "short"})
        for name in (value, "rounds")
    )
    return [(more - less) / (b - a) for more, less, b, a in zip(*values, *rounds, strict=True)]
