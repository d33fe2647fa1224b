"""What callers get when there are many of them: throughput, and how long each waits.

Closed loops: 1 … 16 callers work through the same prompts, each sends its next one when the one before is answered.
Open loops: prompts come at times drawn beforehand, as independent callers' do, whatever became of those before; each
one waits from the moment at which it was to come. The ways take turns, each in a process of its own, callers included.
Every way must give every prompt the same tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.benchmark import Note, Sample
from dflash_aot.benchmarks.estimates import median
from dflash_aot.benchmarks.load_findings import describe
from dflash_aot.benchmarks.pairs import choose_pair, ensure_bundle
from dflash_aot.benchmarks.peer import Peer
from dflash_aot.benchmarks.questions import HELD_OUT
from dflash_aot.benchmarks.settings import setting
from dflash_aot.benchmarks.traffic import (
    Answer,
    Arrive,
    Arrived,
    Prompt,
    Serve,
    Served,
    Work,
    deal,
    draw_arrivals,
    gather,
)
from dflash_aot.benchmarks.ways import (
    CHOSEN,
    K,
    Way,
    choose_turns,
    engine_way,
    find_compilation,
    find_disagreement,
    jit_way,
    name_tokens,
    open_ways,
)
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.locations import EMBEDDED

__all__ = ["Settings", "describe", "find_fault", "measure"]
SHARES = (0.3, 0.6, 0.8, 0.95)  # of what closed loops get out of the first way


@dataclass(frozen=True)
class Settings:
    """Which pair, which text, how many callers, and how often they come."""

    pair: str = setting(EMBEDDED, f"{EMBEDDED}, or random weights in the shapes of qwen3-0.6b or large")
    target: str | None = setting(None, "a target of your own instead: directory or hub id; needs --draft")
    draft: str | None = setting(None, "its draft")
    buckets: str = setting(
        "batch=1,2,4,8,16 length=256 k=0,7 prefill=64", "the bundle's grid, as dflash-precompile takes it"
    )
    data: str = setting(HELD_OUT, "the prompts, see dflash-bench data; a pair of random weights gets random tokens")
    prompts: int = setting(32, "so many questions; each turn of a conversation is a prompt", least=1)
    prompt_tokens: int = setting(64, "of a text the first so many tokens; of a conversation all", least=1)
    max_tokens: int = setting(64, "new tokens per prompt", least=2)
    repeats: int = setting(3, "times that everything is measured", least=1)
    callers: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16), "of the closed loops; each must be a batch of the grid", least=1
    )
    rates: tuple[float, ...] = setting(
        (),
        "of the open loops, prompts per second; default: "
        f"{', '.join(f'{share:.0%}' for share in SHARES)} of those that most callers in closed loops get answered",
    )
    arrivals: int = setting(64, "prompts of each open loop, 0 for none", least=0)
    seed: int = setting(1, "of their times; each repeat has others")
    max_waiting: int = setting(64, "the engine refuses a prompt while so many wait", least=1)


def measure(settings: Settings, scratch: Path, note: Note) -> Iterator[Sample]:
    """A "closed" sample for each way, number of callers and repeat; an "open" one for each engine, rate and repeat.

    Raises BadInput, BadCheckpoint, BuildFailed, GridMiss, PeerFailed.
    """
    pair = choose_pair(settings.pair, settings.target, settings.draft, scratch)
    bundle = ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    wanted = (settings.data, settings.prompts, settings.prompt_tokens, settings.max_tokens)
    prompts = choose_turns(*wanted, pair, bundle)
    grid, longest = read_manifest(bundle).grid, max(map(len, prompts))
    check_settings(settings, grid, longest)
    ks: tuple[K, ...] = (grid.k[-1], CHOSEN, 0) if grid.k[-1] else (0,)
    ways = [engine_way(bundle, pair, k, max_waiting=settings.max_waiting) for k in ks]
    ways.append(jit_way(bundle, pair, grid.k[-1], longest))
    with ExitStack() as stack:
        peers = open_ways(ways, stack, note)
        closed = []
        for sample in serve_closed(peers, prompts, settings, note):
            closed.append(sample)
            yield sample
        if settings.arrivals:
            rates = settings.rates or choose_rates(closed, ways[0].name, max(settings.callers))
            yield from serve_open(peers[:-1], prompts, rates, settings, note)


def check_settings(settings: Settings, grid: Grid, longest: int) -> None:
    """Raises GridMiss, BadInput."""
    grid.fit(max(settings.callers), longest + settings.max_tokens + grid.k[-1], grid.k[-1])
    if missing := sorted({*settings.callers} - {*grid.batch}):
        raise BadInput(f"--callers: {', '.join(map(str, missing))} is no batch of the grid {grid}")
    if max(settings.callers) > settings.prompts:
        raise BadInput(f"--callers: {max(settings.callers)} of them share {settings.prompts} prompts (--prompts)")
    if settings.rates and min(settings.rates) <= 0:
        raise BadInput(f"--rates: {min(settings.rates):g} prompts per second")


def serve_closed(
    peers: Sequence[tuple[Way, Peer]], prompts: Sequence[Prompt], settings: Settings, note: Note
) -> Iterator[Sample]:
    """Each number of callers with each way, in another order each time; what is done for the first time is left out."""
    for repeat in range(-1, settings.repeats):
        note(f"closed loops, repeat {repeat + 1} of {settings.repeats}" if repeat >= 0 else "warming up")
        for turn, callers in enumerate(settings.callers):
            lists = deal(prompts if repeat >= 0 else prompts[:callers], callers)
            first = (turn + repeat) % len(peers)
            for way, peer in (*peers[first:], *peers[:first]):
                served = peer.ask(Serve(lists, settings.max_tokens), Served)
                if repeat >= 0:
                    yield make_closed(way, served) | {"callers": callers, "repeat": repeat}


def choose_rates(closed: Sequence[Sample], way: str, callers: int) -> list[float]:
    """Shares of the prompts per second that a way's closed loops got answered."""
    runs = [one for one in closed if one["way"] == way and one["callers"] == callers]
    most = median([len(one["tokens"]) / one["seconds"] for one in runs])
    return [float(f"{share * most:.3g}") for share in SHARES]


def serve_open(
    peers: Sequence[tuple[Way, Peer]],
    prompts: Sequence[Prompt],
    rates: Sequence[float],
    settings: Settings,
    note: Note,
) -> Iterator[Sample]:
    """Each rate with each way; the same prompts at the same times for all of them."""
    order = [turn % len(prompts) for turn in range(settings.arrivals)]
    coming = [prompts[number] for number in order]
    for repeat in range(settings.repeats):
        for turn, rate in enumerate(rates):
            note(f"{rate:g} prompts per second, repeat {repeat + 1} of {settings.repeats}")
            due = draw_arrivals(settings.arrivals, rate, settings.seed + repeat)
            first = (turn + repeat) % len(peers)
            for way, peer in (*peers[first:], *peers[:first]):
                arrived = peer.ask(Arrive(coming, due, settings.max_tokens), Arrived)
                yield make_open(way, arrived, due) | {"prompts": order, "rate": rate, "repeat": repeat}


def make_closed(way: Way, served: Served) -> Sample:
    """By prompt: its tokens, and microseconds from sending it to the first and the last of them."""
    answers = gather(served.answers)
    facts = {"kind": "closed", "way": way.name, "exact": way.exact, "seconds": round(served.seconds, 6)}
    return facts | {"prompts": [*range(len(answers))]} | spell_answers(answers) | spell_work(served.work)


def make_open(way: Way, arrived: Arrived, due: Sequence[float]) -> Sample:
    """By prompt; times in microseconds: when it was to come, how much later it was sent, and since it was to come."""
    times = {"due_us": spell_times(due), "late_us": spell_times(arrived.late)}
    facts = {"kind": "open", "way": way.name, "exact": way.exact}
    return facts | times | spell_answers(arrived.answers) | spell_work(arrived.work)


def spell_answers(answers: Sequence[Answer | None]) -> Sample:
    """None for what was refused."""
    return {
        "tokens": [one and name_tokens(one.token_ids) for one in answers],
        "first_us": [one and round(1e6 * one.first_seconds) for one in answers],
        "end_us": [one and round(1e6 * one.seconds) for one in answers],
    }


def spell_times(seconds: Sequence[float]) -> list[int]:
    return [round(1e6 * one) for one in seconds]


def spell_work(work: Work) -> Sample:
    return {
        "rounds": work.rounds,
        "rows": work.rows,
        "row_rounds": work.row_rounds,
        "padded_rows": work.padded_rows,
        "host_us": round(1e6 * work.host_seconds),
        "compile_events": work.compile_events,
    }


def find_fault(samples: Sequence[Sample]) -> str:
    """Ways that disagree on tokens, or one that compiled while it served."""
    if not samples:
        return "no way answered"
    answers = [
        {"way": one["way"], "exact": one["exact"], "prompt": prompt, "tokens": tokens}
        for one in samples
        for prompt, tokens in zip(one["prompts"], one["tokens"], strict=True)
        if tokens is not None
    ]
    return "; ".join(filter(None, (find_disagreement(answers), find_compilation(samples))))
