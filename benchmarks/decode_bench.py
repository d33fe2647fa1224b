"""How fast tokens come: every K, K chosen while running, the plain `jax.jit` loop, PyTorch; one prompt at a time.

The ways take turns prompt by prompt, each in a process of its own, and begin in another order each time. Every float32
way must give every prompt the same tokens. Then every K runs once more with a wait behind every program, for its parts.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.benchmark import Note, Sample
from dflash_aot.benchmarks.decode_findings import describe
from dflash_aot.benchmarks.orders import PartsOrder
from dflash_aot.benchmarks.pairs import Pair, choose_pair, ensure_bundle
from dflash_aot.benchmarks.peer import Peer, python_module
from dflash_aot.benchmarks.questions import HELD_OUT
from dflash_aot.benchmarks.settings import setting
from dflash_aot.benchmarks.traffic import Answer, Dissect, Parts, Prompt, Serve, Served
from dflash_aot.benchmarks.ways import (
    CHOSEN,
    Way,
    choose_turns,
    engine_way,
    find_compilation,
    find_disagreement,
    jit_way,
    name_tokens,
    open_ways,
    torch_ways,
)
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.locations import EMBEDDED

__all__ = ["Settings", "describe", "find_fault", "measure"]


@dataclass(frozen=True)
class Settings:
    """Which pair, which text, how much of it, and beside what."""

    pair: str = setting(EMBEDDED, f"{EMBEDDED}, or random weights in the shapes of qwen3-0.6b or large")
    target: str | None = setting(None, "a target of your own instead: directory or hub id; needs --draft")
    draft: str | None = setting(None, "its draft")
    buckets: str = setting(
        "batch=1 length=256 k=0,3,7,15 prefill=64", "the bundle's grid, as dflash-precompile takes it"
    )
    data: str = setting(HELD_OUT, "the prompts, see dflash-bench data; a pair of random weights gets random tokens")
    prompts: int = setting(24, "so many questions; each turn of a conversation is a prompt", least=1)
    prompt_tokens: int = setting(64, "of a text the first so many tokens; of a conversation all", least=1)
    max_tokens: int = setting(128, "new tokens per prompt", least=2)
    repeats: int = setting(3, "times that every way answers every prompt", least=1)
    torch: bool = setting(True, "beside PyTorch")
    assisted: bool = setting(True, "beside PyTorch's ways to guess, too")
    bfloat16: bool = setting(False, "the engine on a bfloat16 bundle, too")


def measure(settings: Settings, scratch: Path, note: Note) -> Iterator[Sample]:
    """An "answer" for each way, prompt and repeat; "parts" for each K and prompt; "idle" for each way.

    Raises BadInput, BadCheckpoint, BuildFailed, GridMiss, PeerFailed.
    """
    pair = choose_pair(settings.pair, settings.target, settings.draft, scratch)
    bundle = ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    wanted = (settings.data, settings.prompts, settings.prompt_tokens, settings.max_tokens)
    prompts = choose_turns(*wanted, pair, bundle)
    grid, longest = read_manifest(bundle).grid, max(map(len, prompts))
    check_room(grid, longest + settings.max_tokens)
    ways = [*list_engines(bundle, pair, grid, "float32"), jit_way(bundle, pair, grid.k[-1], longest)]
    if settings.bfloat16:
        rounded = ensure_bundle(pair, settings.buckets, "bfloat16", scratch, note)
        ways += list_engines(rounded, pair, grid, "bfloat16")
    if settings.torch:
        ways += torch_ways(pair, settings.assisted)
    with ExitStack() as stack:
        peers = open_ways(ways, stack, note)
        yield from take_answers(peers, prompts, settings.max_tokens, settings.repeats, note)
    order = PartsOrder(str(bundle), str(pair.target), str(pair.draft))
    with Peer("the programs one by one", python_module("dflash_aot.benchmarks.peer_parts"), order) as parts:
        yield from take_parts(parts, prompts, settings.max_tokens, grid.k, note)


def check_room(grid: Grid, positions: int) -> None:
    """Every round of every K must find room: one that is cut short shows nothing of its K. Raises GridMiss."""
    grid.fit(1, positions + grid.k[-1], grid.k[-1])


def list_engines(bundle: Path, pair: Pair, grid: Grid, dtype: str) -> list[Way]:
    """Each K, and K chosen while running."""
    fixed = [engine_way(bundle, pair, k, dtype) for k in grid.k]
    return [*fixed, engine_way(bundle, pair, CHOSEN, dtype)] if grid.k[-1] else fixed


def take_answers(
    peers: Sequence[tuple[Way, Peer]], prompts: Sequence[Prompt], tokens: int, repeats: int, note: Note
) -> Iterator[Sample]:
    """Each way's answer to each prompt, `repeats` times; then what each used while others worked."""
    for _, peer in peers:  # what is done for the first time is nobody's answer
        peer.ask(Serve([[prompts[0]]], tokens), Served)
    for repeat in range(repeats):
        note(f"repeat {repeat + 1} of {repeats}")
        for number, prompt in enumerate(prompts):
            first = (number + repeat) % len(peers)
            for way, peer in (*peers[first:], *peers[:first]):
                served = peer.ask(Serve([[prompt]], tokens), Served)
                yield make_sample(way, served) | {"prompt": number, "repeat": repeat}
    for way, peer in peers:
        yield {
            "kind": "idle",
            "way": way.name,
            "seconds": round(peer.idle_seconds, 3),
            "cpu_seconds": round(peer.idle_cpu_seconds, 4),
        }


def make_sample(way: Way, served: Served) -> Sample:
    """Times in microseconds. gaps_us: of each token since the one before it, of the first since the prompt was sent."""
    ((answer,),) = served.answers
    work = served.work
    return {
        "kind": "answer",
        "way": way.name,
        "k": way.k,
        "exact": way.exact,
        "tokens": name_tokens(answer.token_ids),
        "gaps_us": spell_gaps(answer),
        "accepted": answer.accepted,
        "passes": len(answer.accepted) or work.rounds,
        "rounds_by_k": {str(k): count for k, count in work.rounds_by_k.items()},
        "rounds": work.rounds,
        "host_us": round(1e6 * work.host_seconds),
        "host_wall_us": round(1e6 * work.host_wall_seconds),
        "compile_events": work.compile_events,
    }


def spell_gaps(answer: Answer) -> list[int]:
    """Rounded so that their sums stay true."""
    at = [0, *(round(1e6 * seconds) for seconds in answer.arrivals)]
    return [later - earlier for earlier, later in zip(at, at[1:], strict=False)]


def take_parts(peer: Peer, prompts: Sequence[Prompt], tokens: int, ks: Sequence[int], note: Note) -> Iterator[Sample]:
    """By K and prompt, in microseconds by step. Nothing where a bundle has no such programs."""
    note("the programs one by one")
    for turn in range(-1, len(prompts)):  # the first one warms up
        for k in ks:
            parts = peer.ask(Dissect(prompts[max(turn, 0)], tokens, k), Parts)
            if parts.answer is None or turn < 0:
                continue
            steps = {f"{step}_us": [round(1e6 * one) for one in seconds] for step, seconds in parts.seconds.items()}
            way = f"programs one by one, K = {k}"
            yield {"kind": "parts", "way": way, "k": k, "prompt": turn, "exact": True} | {
                "tokens": name_tokens(parts.answer.token_ids),
                **steps,
            }


def find_fault(samples: Sequence[Sample]) -> str:
    """Ways that disagree on tokens, or an engine that compiled while it served."""
    answers = [one for one in samples if one["kind"] != "idle"]
    if not answers:
        return "no way answered"
    return "; ".join(filter(None, (find_disagreement(answers), find_compilation(answers))))
