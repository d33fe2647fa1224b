"""What HTTP costs: dflash-serve under load from a second process, beside the same traffic inside the engine's own.

All prompts at once over 1 … 32 connections, which is throughput; then prompts at times drawn beforehand, as
independent callers' are, each of which waits from the moment at which it was to come, for a connection, too. Answers
are streamed. Both ways must give every prompt the same text, and no answer may be lost. What a request and a part of an
answer cost comes from answers of one token and of many, one after the other.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.benchmark import Note, Sample
from dflash_aot.benchmarks.estimates import choose, median
from dflash_aot.benchmarks.pairs import choose_pair, ensure_bundle
from dflash_aot.benchmarks.peer import Peer
from dflash_aot.benchmarks.questions import HELD_OUT
from dflash_aot.benchmarks.serve_findings import describe
from dflash_aot.benchmarks.serve_process import open_server
from dflash_aot.benchmarks.serve_traffic import Came, Come
from dflash_aot.benchmarks.settings import setting
from dflash_aot.benchmarks.traffic import Prompt, draw_arrivals
from dflash_aot.benchmarks.ways import (
    Way,
    choose_turns,
    engine_way,
    find_compilation,
    find_disagreement,
    open_ways,
)
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.checkpoint_location import EMBEDDED

__all__ = ["Settings", "describe", "find_fault", "measure"]
SERVER = "dflash-serve"
SHARE = 0.7  # of what a server gets answered when all prompts come at once
SHORT_RUNS = 4  # answers of one token for each of many: they are over before a clock of 10 ms tells much
REFUSALS = (429, 503)  # stated ones; any other status is a fault
Peers = Sequence[tuple[Way, Peer]]


@dataclass(frozen=True)
class Settings:
    """Which pair, which text, over how many connections, and how often prompts come."""

    target: str | None = setting(None, "a target of your own instead of the embedded one; needs --draft")
    draft: str | None = setting(None, "its draft")
    buckets: str = setting(
        "batch=1,2,4,8,16 length=256 k=0,7 prefill=64", "the bundle's grid, as dflash-precompile takes it"
    )
    k: int | None = setting(None, "tokens verified per round, one of the grid's; default: the most", least=0)
    data: str = setting(HELD_OUT, "the prompts, see dflash-bench data")
    prompts: int = setting(32, "so many questions; each turn of a conversation is a prompt", least=1)
    prompt_tokens: int = setting(64, "of a text the first so many tokens; of a conversation all", least=1)
    max_tokens: int = setting(32, "new tokens per prompt", least=2)
    repeats: int = setting(3, "times that everything is measured", least=1)
    connections: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32), "open at once, at most", least=1)
    rate: float | None = setting(
        None, f"prompts per second; default: {SHARE:.0%} of those that as many connections get answered at once"
    )
    seed: int = setting(1, "of their times; each repeat has others")
    max_waiting: int = setting(64, "the engine refuses a prompt while so many wait", least=1)


def measure(settings: Settings, scratch: Path, note: Note) -> Iterator[Sample]:
    """For each way and repeat: a "full" and an "open" sample by connections, a "cost" one by length of the answers.

    Raises BadInput, BadCheckpoint, BuildFailed, GridMiss, PeerFailed.
    """
    pair = choose_pair(EMBEDDED, settings.target, settings.draft, scratch)
    if not (pair.target / "tokenizer.json").exists():
        raise BadInput(f"--target {pair.target} has no tokenizer.json, and texts are compared")
    bundle = ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    wanted = (settings.data, settings.prompts, settings.prompt_tokens, settings.max_tokens)
    prompts = choose_turns(*wanted, pair, bundle)
    k = check_settings(settings, read_manifest(bundle).grid, max(map(len, prompts)))
    with ExitStack() as stack:
        note(f"opening {SERVER}")
        most = max(settings.connections)
        server = stack.enter_context(open_server(bundle, pair, k, settings.max_waiting, most))
        ways = [engine_way(bundle, pair, k, max_waiting=settings.max_waiting), Way(SERVER, "peer_http", server)]
        peers = open_ways(ways, stack, note)
        full = []
        for sample in serve_full(peers, prompts, settings, note):
            full.append(sample)
            yield sample
        yield from serve_alone(peers, prompts, settings, note)
        yield from serve_open(peers, prompts, choose_rates(full, settings), settings, note)


def check_settings(settings: Settings, grid: Grid, longest: int) -> int:
    """K. Raises GridMiss, BadInput."""
    k = grid.k[-1] if settings.k is None else settings.k
    if k not in grid.k:
        raise BadInput(f"--k {k} is none of the grid {grid}")
    grid.fit(1, longest + settings.max_tokens + k, k)
    if max(settings.connections) > settings.prompts:
        raise BadInput(f"--connections: {max(settings.connections)} share {settings.prompts} prompts (--prompts)")
    if settings.rate is not None and settings.rate <= 0:
        raise BadInput(f"--rate {settings.rate:g}: prompts per second")
    return k


def serve_full(peers: Peers, prompts: Sequence[Prompt], settings: Settings, note: Note) -> Iterator[Sample]:
    """All prompts at once over each number of connections; what is done for the first time is left out."""
    for repeat in range(-1, settings.repeats):
        note(f"all at once, repeat {repeat + 1} of {settings.repeats}" if repeat >= 0 else "warming up")
        for turn, connections in enumerate(settings.connections):
            asked = [*range(len(prompts) if repeat >= 0 else connections)]
            due = [0.0] * len(asked)
            for sample in ask_in_turn(peers, turn + repeat, prompts, asked, due, connections, settings.max_tokens):
                if repeat >= 0:
                    yield {"kind": "full", "repeat": repeat, **sample}


def serve_alone(peers: Peers, prompts: Sequence[Prompt], settings: Settings, note: Note) -> Iterator[Sample]:
    """One connection, answers of one token and of many."""
    for repeat in range(settings.repeats):
        note(f"one by one, repeat {repeat + 1} of {settings.repeats}")
        for tokens, runs in ((1, SHORT_RUNS), (settings.max_tokens, 1)):
            asked = [*range(len(prompts))] * runs
            for sample in ask_in_turn(peers, repeat, prompts, asked, [0.0] * len(asked), 1, tokens):
                yield {"kind": "cost", "repeat": repeat, **sample}


def choose_rates(full: Sequence[Sample], settings: Settings) -> dict[int, float]:
    """Prompts per second by connections: what is asked for, or a share of what the server got answered."""
    if settings.rate is not None:
        return dict.fromkeys(settings.connections, settings.rate)
    rates = {}
    for connections in settings.connections:
        runs = choose(full, way=SERVER, connections=connections)
        rates[connections] = float(f"{SHARE * median([len(one['prompts']) / one['seconds'] for one in runs]):.3g}")
    return rates


def serve_open(
    peers: Peers, prompts: Sequence[Prompt], rates: dict[int, float], settings: Settings, note: Note
) -> Iterator[Sample]:
    """Each number of connections at its rate; the same prompts at the same times for both ways."""
    for repeat in range(settings.repeats):
        for turn, (connections, rate) in enumerate(rates.items()):
            note(f"{rate:g} prompts per second, repeat {repeat + 1} of {settings.repeats}")
            due = draw_arrivals(len(prompts), rate, settings.seed + repeat)
            asked = [*range(len(prompts))]
            for sample in ask_in_turn(peers, turn + repeat, prompts, asked, due, connections, settings.max_tokens):
                yield {"kind": "open", "repeat": repeat, "rate": rate, **sample}


def ask_in_turn(
    peers: Peers,
    turn: int,
    prompts: Sequence[Prompt],
    asked: Sequence[int],
    due: list[float],
    connections: int,
    max_tokens: int,
) -> Iterator[Sample]:
    """Each way once, in another order each turn. asked: which prompts."""
    question = Come([prompts[number] for number in asked], due, connections, max_tokens)
    first = turn % len(peers)
    for way, peer in (*peers[first:], *peers[:first]):
        sample = {"way": way.name, "connections": connections, "max_tokens": max_tokens, "prompts": [*asked]}
        yield sample | spell(peer.ask(question, Came), due)


def spell(came: Came, due: Sequence[float]) -> Sample:
    """By prompt: what became of it, its text by name, and microseconds since it was due; None for what has none."""
    whole = [one if one.status == 200 else None for one in came.heard]
    return {
        "statuses": [one.status for one in came.heard],
        "lost": [one.lost for one in came.heard if one.lost],
        "texts": [one and name_text(one.text) for one in whole],
        "parts": [one and len(one.arrivals) for one in whole],
        "due_us": [round(1e6 * one) for one in due],
        "late_us": [round(1e6 * one.late) for one in came.heard],
        "first_us": [one and round(1e6 * one.arrivals[0]) for one in whole],
        "end_us": [one and round(1e6 * one.arrivals[-1]) for one in whole],
        "seconds": round(came.seconds, 6),
        "loop_us": round(1e6 * came.loop_seconds),
        "client_us": None if came.client_seconds is None else round(1e6 * came.client_seconds),
        "host_us": round(1e6 * came.work.host_seconds),
        "rounds": came.work.rounds,
        "compile_events": came.work.compile_events,
    }


def name_text(text: str) -> str:
    """The same for the same text, and short."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_fault(samples: Sequence[Sample]) -> str:
    """What was lost, a status that states nothing, a text that differs, a way that compiled while it served."""
    if not samples:
        return "no way answered"
    texts = [
        {"way": one["way"], "exact": True, "prompt": (prompt, one["max_tokens"]), "tokens": text}
        for one in samples
        for prompt, text in zip(one["prompts"], one["texts"], strict=True)
        if text is not None
    ]
    faults = [*map(find_loss, samples), find_disagreement(texts), find_compilation(samples)]
    return "; ".join(dict.fromkeys(filter(None, faults)))


def find_loss(sample: Sample) -> str:
    """ "" where every prompt was answered whole or refused."""
    odd = sorted({*sample["statuses"]} - {0, 200, *REFUSALS})
    if odd:
        return f"{sample['way']} answered with {', '.join(map(str, odd))}"
    if lost := sample["lost"]:
        return f"{sample['way']} lost {len(lost)} of {len(sample['prompts'])} answers: {lost[0]}"
    return ""
