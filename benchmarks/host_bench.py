"""What a round costs the host: time of the thread that dispatches, and what it asks of JAX, counted from traces of it.

The engine at every K beside the plain `jax.jit` loop, each a process of its own, in turn. Times are differences between
long answers and short ones, so that what comes before the rounds is in neither; counts are of the rounds alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_aot.benchmarks.benchmark import Note, Sample
from dflash_aot.benchmarks.host_findings import BURSTS, ENGINE, LOOP, describe
from dflash_aot.benchmarks.observation import Floor, FloorOrder, Watch, Watched, WatchedOrder
from dflash_aot.benchmarks.orders import EngineOrder, JitOrder
from dflash_aot.benchmarks.pairs import Pair, choose_pair, choose_prompts, ensure_bundle
from dflash_aot.benchmarks.peer import Peer, python_module
from dflash_aot.benchmarks.questions import HELD_OUT
from dflash_aot.benchmarks.settings import setting
from dflash_aot.benchmarks.traffic import Prompt, Serve, Served, deal, gather
from dflash_aot.benchmarks.ways import Way, find_disagreement, name_tokens, open_ways
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.locations import EMBEDDED

__all__ = ["Settings", "describe", "find_fault", "measure"]
ARGUMENTS = (1, 30, 90)
WIDTHS = {"idle": 8, "busy": 512}  # of the floor's products: the device is done at once, or works for milliseconds


@dataclass(frozen=True)
class Settings:
    """Which pair and grid, how many callers, how much text."""

    pair: str = setting(EMBEDDED, f"{EMBEDDED}, or random weights in the shapes of qwen3-0.6b or large")
    target: str | None = setting(None, "a target of your own instead: directory or hub id; needs --draft")
    draft: str | None = setting(None, "its draft")
    buckets: str = setting("batch=1,8 length=256 k=0,7 prefill=64", "the grid, as dflash-precompile takes it")
    rounds: int = setting(8, "for one caller, also on a bundle that runs so many rounds per call; 1: not", least=1)
    callers: tuple[int, ...] = setting((1, 8), "that ask at the same time; each is a batch of the grid", least=1)
    prompts: int = setting(8, "so many of them, shared by the callers", least=1)
    prompt_tokens: int = setting(64, "of each", least=1)
    short: int = setting(16, "new tokens of a short answer", least=2)
    long: int = setting(128, "and of a long one", least=3)
    repeats: int = setting(5, "times that every way gives all answers", least=1)
    floor_calls: int = setting(200, "calls by which the floor is measured", least=1)


def measure(settings: Settings, scratch: Path, note: Note) -> Iterator[Sample]:
    """ "times" of short and long answers, "counts" of the rounds of long ones, and the "floor".

    Raises BadInput, BadCheckpoint, BuildFailed, GridMiss, PeerFailed.
    """
    pair = choose_pair(settings.pair, settings.target, settings.draft, scratch)
    prompts = choose_prompts(HELD_OUT, settings.prompts, settings.prompt_tokens, pair)
    bundle = ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    manifest = read_manifest(bundle)
    check_callers(settings, manifest.grid)
    bundles = {ENGINE: bundle}
    if settings.rounds > 1:
        buckets = str(msgspec.structs.replace(manifest.grid, rounds=settings.rounds))
        bundles[BURSTS] = ensure_bundle(pair, buckets, "float32", scratch, note)
    with ExitStack() as stack:
        peers = open_ways(list_ways(bundles, pair, manifest.grid, max(map(len, prompts))), stack, note)
        for repeat in range(-1, settings.repeats):  # the first one warms up
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for callers in settings.callers:
                chosen = [(way, peer) for way, peer in peers if way.name != BURSTS or callers == 1]
                for sample in take_samples(chosen, prompts, callers, settings):
                    if repeat >= 0:
                        yield sample | {"callers": callers, "repeat": repeat}
    note("the floor")
    order = FloorOrder(manifest.environment.platform)
    with Peer("the floor", python_module("dflash_aot.benchmarks.peer_floor"), order) as peer:
        yield from take_floor(peer, settings)


def check_callers(settings: Settings, grid: Grid) -> None:
    """The plain loop pads nothing, and every caller has a prompt. Raises BadInput, GridMiss."""
    if wrong := [str(count) for count in settings.callers if count not in grid.batch or count > settings.prompts]:
        raise BadInput(
            f"--callers {','.join(wrong)}: no batch of the grid {grid}, or more than the {settings.prompts} prompts"
        )
    if settings.short >= settings.long:
        raise BadInput(f"--short {settings.short} is to be less than --long {settings.long}")
    grid.fit(1, settings.prompt_tokens + settings.long + grid.k[-1], grid.k[-1])


def list_ways(bundles: Mapping[str, Path], pair: Pair, grid: Grid, longest: int) -> list[Way]:
    """Every K of the engine on each bundle, and of the plain loop."""
    target, draft, ways = str(pair.target), str(pair.draft), []
    for k in grid.k:
        orders = {
            name: WatchedOrder(engine=EngineOrder(str(bundle), target, draft, k)) for name, bundle in bundles.items()
        }
        orders[LOOP] = WatchedOrder(jit=JitOrder(str(bundles[ENGINE]), target, draft, k, longest))
        ways += [Way(name, "peer_watched", order, k=k) for name, order in orders.items()]
    return ways


def take_samples(
    peers: Sequence[tuple[Way, Peer]], prompts: Sequence[Prompt], callers: int, settings: Settings
) -> Iterator[Sample]:
    """Of every way: short answers, long ones, and long ones under a trace, a prompt per caller."""
    for length, tokens in (("short", settings.short), ("long", settings.long)):
        for way, peer in peers:
            served = peer.ask(Serve(deal(prompts, callers), tokens), Served)
            yield {"kind": "times", "way": way.name, "k": way.k, "length": length} | describe_served(served)
    for way, peer in peers:
        watched = peer.ask(Watch([[prompt] for prompt in prompts[:callers]], settings.long), Watched)
        yield {"kind": "counts", "way": way.name, "k": way.k, "length": "long"} | describe_watched(watched)


def describe_served(served: Served) -> Sample:
    """Times in microseconds; tokens of each prompt by name."""
    work = served.work
    return {
        "rounds": work.rounds,
        "row_rounds": work.row_rounds,
        "us": round(1e6 * served.seconds),
        "host_us": round(1e6 * work.host_seconds),
        "host_wall_us": round(1e6 * work.host_wall_seconds),
        "compile_events": work.compile_events,
        "tokens": [name_tokens(answer.token_ids) for answer in gather(served.answers)],
    }


def describe_watched(watched: Watched) -> Sample:
    """Of so many rounds."""
    counts = watched.counts
    return {
        "rounds": watched.rounds,
        "calls": counts.calls,
        "call_us": round(1e6 * counts.call_seconds),
        "to_device": counts.to_device,
        "to_host": counts.to_host,
        "reads": counts.reads,
        "waits": counts.waits,
        "unseen": counts.unseen,
        "us": round(1e6 * counts.seconds),
        "wait_us": round(1e6 * counts.wait_seconds),
        "compile_events": watched.served.work.compile_events,
        "tokens": [name_tokens(answer.token_ids) for answer in gather(watched.served.answers)],
    }


def take_floor(peer: Peer, settings: Settings) -> Iterator[Sample]:
    """By how many arguments a call has, and whether the device works."""
    for arguments in ARGUMENTS:
        for device, width in WIDTHS.items():
            seconds = peer.ask(Floor(arguments, width, settings.floor_calls), list[float])
            spent = [round(1e6 * one, 1) for one in seconds]
            yield {"kind": "floor", "way": "one call", "arguments": arguments, "device": device, "work_us": spent}


def find_fault(samples: Sequence[Sample]) -> str:
    """Ways that disagree on tokens, a compilation while serving, a loop whose waits were not understood."""
    served = [one for one in samples if one["kind"] != "floor"]
    faults = [find_disagreement(split_prompts(served))]
    for what, wrong in (("compiled while serving", "compile_events"), ("waited where nobody looked", "unseen")):
        if names := sorted({f"{one['way']}, K = {one['k']}" for one in served if one.get(wrong)}):
            faults.append(f"{'; '.join(names)} {what}")
    if blind := sorted({f"{one['way']}, K = {one['k']}" for one in served if one.get("reads") == 0}):
        faults.append(f"{'; '.join(blind)} read nothing, as far as one can see")
    return "; ".join(filter(None, faults))


def split_prompts(served: Sequence[Sample]) -> list[Sample]:
    """A short answer is another prompt's, for it has other tokens."""
    return [
        {
            "way": f"{one['way']}, K = {one['k']}",
            "exact": True,
            "prompt": f"{number} ({one['length']})",
            "tokens": tokens,
        }
        for one in served
        for number, tokens in enumerate(one["tokens"])
    ]
