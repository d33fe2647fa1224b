"""Process start to first token: a bundle, plain `jax.jit`, and `jax.jit` with its persistent cache warm.

The same programs, weights and prompt in all, each start a process of its own, in turn. Twice: with every program of the
grid ready before the first token, and with what this request needs. And bundles of growing grids.
"""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from dflash_aot.benchmarks.benchmark import Note, Sample
from dflash_aot.benchmarks.findings import Findings
from dflash_aot.benchmarks.laps import read_clock
from dflash_aot.benchmarks.page_cache import cached_share, evict, list_files, warm_up
from dflash_aot.benchmarks.pairs import Pair, choose_pair, choose_prompts, ensure_bundle
from dflash_aot.benchmarks.peer import python_module
from dflash_aot.benchmarks.questions import HELD_OUT
from dflash_aot.benchmarks.record import Record
from dflash_aot.benchmarks.settings import setting
from dflash_aot.benchmarks.start import Order, Scope, Start
from dflash_aot.benchmarks.startup_findings import BUNDLE, COLD, SCOPES, WARM, describe_starts
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.errors import BadInput, PeerFailed
from dflash_aot.cache.locations import EMBEDDED

# By about how many executables they have. All have the same state but for its slack, and the request's own buckets.
GRIDS = {
    10: "batch=1 length=256,1024 k=0,7 prefill=64",
    50: "batch=1 length=256,512,768,1024 k=0,1,3,5,7 prefill=64,256",
    200: "batch=1 length=256,320,384,512,640,768,896,1024 k=0,1,2,3,4,5,7,9,11,13,15 prefill=64,256",
}
LAST_LINES = 5
EXACT = 1e-3  # seconds that phases and their sum may differ by


@dataclass(frozen=True)
class Settings:
    """What is started, and how often."""

    pair: str = setting(EMBEDDED, f"{EMBEDDED}, or random weights: qwen3-0.6b, large")
    target: str | None = setting(None, "a target of yours instead, with --draft")
    draft: str | None = setting(None, "its draft")
    grids: tuple[int, ...] = setting(
        tuple(GRIDS),
        f"bundles of about so many executables, the first one beside jax.jit; of {', '.join(map(str, GRIDS))}",
    )
    repeats: int = setting(5, "starts of each kind", least=1)
    prompt_tokens: int = setting(48, "of the request", least=1)
    tokens: int = setting(16, "that it asks for", least=2)
    cold_files: bool = setting(True, "also start with the bundle and the checkpoints out of the page cache")


@dataclass(frozen=True)
class Way:
    """What starts, with which files in the page cache or out of it. grid: as in GRIDS."""

    name: str
    order: Order
    files: Literal["warm", "cold"]
    grid: int


def measure(settings: Settings, scratch: Path, note: Note) -> Iterator[Sample]:
    """A sample per start. Raises PeerFailed for one that fails, BadInput, BuildFailed."""
    if not settings.grids or set(settings.grids) - GRIDS.keys():
        raise BadInput(f"--grids {','.join(map(str, settings.grids))}: there are {', '.join(map(str, GRIDS))}")
    pair = choose_pair(settings.pair, settings.target, settings.draft, scratch)
    bundles = {grid: ensure_bundle(pair, GRIDS[grid], "float32", scratch, note) for grid in settings.grids}
    manifests = {grid: read_manifest(bundle) for grid, bundle in bundles.items()}
    (prompt,) = choose_prompts(HELD_OUT, 1, settings.prompt_tokens, pair)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="jax-cache-") as cache:
        ways = list(list_ways(settings, pair, bundles, prompt, cache))
        note("filling JAX's persistent cache")
        run_start(next(way.order for way in ways if way.name == WARM and way.order.scope == "grid"))
        for repeat in range(settings.repeats):
            for way in ways:
                what = f"{way.name}, {SCOPES[way.order.scope]}, {way.files} files"
                note(f"start {repeat + 1} of {settings.repeats}: {what}")
                cached = prepare_files(way)
                start = run_start(way.order)
                yield make_sample(way, manifests[way.grid], start, cached) | {"repeat": repeat}


def list_ways(
    settings: Settings, pair: Pair, bundles: Mapping[int, Path], prompt: list[int], cache: str
) -> Iterator[Way]:
    """All kinds of starts, in the order of a round."""

    def order(way: Literal["bundle", "jit"], scope: Scope, grid: int, cache: str = "") -> Order:
        places = f"{bundles[grid]}", f"{pair.target}", f"{pair.draft}"
        return Order(way, scope, *places, prompt, settings.tokens, cache)

    first, *larger = settings.grids
    for files in ("warm", "cold") if settings.cold_files else ("warm",):
        for scope in get_args(Scope):
            yield Way(BUNDLE, order("bundle", scope, first), files, first)
            yield Way(WARM, order("jit", scope, first, cache), files, first)
            yield Way(COLD, order("jit", scope, first), files, first)
    for grid in larger:
        for scope in get_args(Scope):
            yield Way(BUNDLE, order("bundle", scope, grid), "warm", grid)


def prepare_files(way: Way) -> float:
    """What the start will read, into the page cache or out of it. Returns how much is there now, 0 … 1."""
    order = way.order
    files = list_files(Path(place) for place in (order.bundle, order.target, order.draft, order.cache) if place)
    (warm_up if way.files == "warm" else evict)(files)
    return cached_share(files)


def run_start(order: Order) -> Start:
    """In a new process. Raises PeerFailed."""
    timed = msgspec.json.encode(msgspec.structs.replace(order, started=read_clock()))
    done = subprocess.run([*python_module("dflash_aot.benchmarks.start"), timed.decode()], capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise PeerFailed("\n  ".join([f"a start ended with {done.returncode}. Its last lines:", *lines]))
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Start)


def make_sample(way: Way, manifest: Manifest, start: Start, cached: float) -> Sample:
    """seconds: to the first token. cached: share of the files that the page cache held before the start."""
    return {
        "way": way.name,
        "scope": way.order.scope,
        "files": way.files,
        "grid": way.grid,
        "executables": len(manifest.entries),
        "bundle_bytes": sum(entry.bytes for entry in manifest.entries),
        "cached": round(cached, 4),
        "seconds": start.first,
        "last_seconds": start.last,
        "ready": start.executables,
        "phases": start.phases,
        "token_ids": start.token_ids,
    }


def find_fault(samples: Sequence[Sample]) -> str:
    """Tokens that differ, or phases that are not what the whole is made of."""
    if len(answers := {tuple(one["token_ids"]) for one in samples}) > 1:
        return f"the ways do not agree on the tokens: {' and '.join(map(str, sorted(answers)))}"
    for one in samples:
        phases = one["phases"]
        if abs(sum(phases.values()) - one["seconds"]) > EXACT or min(phases.values()) < -EXACT:
            return f"a start of {one['way']} took {one['seconds']} s, and its phases do not add up to that: {phases}"
    return ""


def describe(record: Record) -> Findings:
    """Start-up of every way, by phases, and of growing grids."""
    return describe_starts(record.samples)
