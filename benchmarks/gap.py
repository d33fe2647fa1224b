"""How long the device waits between two rounds: the engine, which enqueues ahead, and a loop that syncs every round.

    python -m dflash_aot.benchmarks.gap [--bundle DIR | --large] [--callers 1,8] [--max_tokens 96] [--repeats 3]
        [--json FILE]

From traces of `jax.profiler`: every operation that the CPU client runs is in them with its executable, run, begin and
end. A gap is the time from the end of a round's last operation to the begin of the next round's first one; where a
prefill lies between, it is left out. Both ways run the same programs, at the grid's largest K and at K = 0, where no
kv_write is behind the verification. --large: a pair of random weights, whose rounds take tens of milliseconds: the host
has all the time that it needs while the device is busy.

The error: every operation that is recorded costs a little, on the device's side; so rounds without a trace are timed
too, and both are printed. What the client does between an execution's start and its first operation counts as gap.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from dflash_aot.benchmarks.benchmark import default_scratch
from dflash_aot.benchmarks.callers import serve_lists
from dflash_aot.benchmarks.estimates import median, percentile
from dflash_aot.benchmarks.findings import Table, format_table
from dflash_aot.benchmarks.jit_loop import JitLoop, Jitted
from dflash_aot.benchmarks.pairs import choose_pair, ensure_bundle
from dflash_aot.benchmarks.script import run_script
from dflash_aot.benchmarks.traffic import Prompt, Serve, Served, gather
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.jax_platform import select_jax_platforms
from dflash_aot.cache.model_config.checkpoint_location import EMBEDDED
from dflash_aot.runtime import Engine

BUCKETS = "batch=1,8 length=256 k=0,7 prefill=64"
WIDTH = 64  # tokens of a prompt
SPECULATIVE, PLAIN = ("draft", "verify", "kv_write"), ("verify",)  # the programs of a round, with a draft and without
Way = Callable[[Sequence[Sequence[Prompt]]], Served]


@dataclass(frozen=True)
class Operation:
    """One operation of one run of an executable; times in nanoseconds."""

    program: str
    run: int
    begin: float
    end: float


@dataclass(frozen=True)
class Execution:
    """One run of an executable, from the begin of its first operation to the end of its last one."""

    program: str
    begin: float
    end: float


Stretch = list[tuple[Execution, ...]]  # rounds that follow each other directly


@dataclass(frozen=True)
class Figures:
    """One way, all repeats. Times in milliseconds.

    round_ms: wall per round, without and with a trace. gap_ms: median and 95th percentile. inner_ms: medians of what
    lies between its programs, in order. busy: share of the traced rounds in which an execution runs.
    """

    callers: int
    way: str
    round_ms: tuple[float, float]
    gap_ms: tuple[float, float]
    inner_ms: tuple[float, ...]
    busy: float
    gaps: int


def read_operations(directory: str) -> Iterator[Operation]:
    """Everything that the CPU client ran while a trace was written to `directory`."""
    (path,) = Path(directory).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                facts = dict(event.stats)
                if "hlo_op" in facts:
                    program = facts["hlo_module"].removeprefix("jit_")
                    yield Operation(program, facts["run_id"], event.start_ns, event.end_ns)


def find_executions(operations: Sequence[Operation]) -> list[Execution]:
    """Ordered by their begin. Operations of one run may overlap."""
    runs: dict[int, list[Operation]] = {}
    for operation in operations:
        runs.setdefault(operation.run, []).append(operation)
    found = [
        Execution(run[0].program, min(one.begin for one in run), max(one.end for one in run)) for run in runs.values()
    ]
    return sorted(found, key=lambda one: one.begin)


def find_rounds(executions: Sequence[Execution], programs: tuple[str, ...]) -> list[Stretch]:
    """Rounds that follow each other directly, in stretches: a prefill or a move is between two stretches.

    programs: what a round runs, in order.
    """
    stretches: list[Stretch] = [[]]
    place = 0
    while place < len(executions):
        chosen = tuple(executions[place : place + len(programs)])
        if tuple(one.program for one in chosen) == programs:
            stretches[-1].append(chosen)
            place += len(programs)
        else:
            stretches.append([])
            place += 1
    return [stretch for stretch in stretches if stretch]


def trace_rounds(run: Callable[[], Served], programs: tuple[str, ...]) -> tuple[list[Stretch], Served]:
    """The rounds of one run, in stretches."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 1, 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            served = run()
        return find_rounds(find_executions(list(read_operations(directory))), programs), served


def describe(
    callers: int, way: str, plain: Sequence[Served], traced: Sequence[tuple[Sequence[Stretch], Served]]
) -> Figures:
    """plain: runs without a trace; traced: runs with one, and what it shows."""
    stretches = [stretch for found, _ in traced for stretch in found]
    pairs = [pair for stretch in stretches for pair in zip(stretch, stretch[1:], strict=False)]
    gaps = [(later[0].begin - earlier[-1].end) / 1e6 for earlier, later in pairs]
    rounds = [(later[0].begin - earlier[0].begin) / 1e6 for earlier, later in pairs]
    works = [sum(one.end - one.begin for one in earlier) / 1e6 for earlier, _ in pairs]
    inner = [[(b.begin - a.end) / 1e6 for a, b in zip(one, one[1:], strict=False)] for one, _ in pairs]
    return Figures(
        callers=callers,
        way=way,
        round_ms=(_wall(plain), _wall([served for _, served in traced])),
        gap_ms=(median(gaps), percentile(gaps, 95)),
        inner_ms=tuple(map(median, zip(*inner, strict=True))),
        busy=sum(works) / sum(rounds),
        gaps=len(gaps),
    )


def _wall(runs: Sequence[Served]) -> float:
    return median([1e3 * run.seconds / run.work.rounds for run in runs])


def measure(
    callers: int, ways: dict[str, tuple[Way, int]], lists: Sequence[Sequence[Prompt]], repeats: int
) -> list[Figures]:
    """The ways, each with its K, in turn, without a trace and with one. Ends the process where tokens differ."""
    plain: dict[str, list[Served]] = {name: [] for name in ways}
    traced: dict[str, list[tuple[Sequence[Stretch], Served]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (way, k) in ways.items():
            plain[name].append(way(lists))
            traced[name].append(trace_rounds(partial(way, lists), SPECULATIVE if k else PLAIN))
    runs = [
        served for each in (*plain.values(), [one for each in traced.values() for _, one in each]) for served in each
    ]
    if len({tuple(tuple(answer.token_ids) for answer in gather(run.answers)) for run in runs}) != 1:
        sys.exit(f"void: with {callers} callers the ways do not agree on the tokens")
    return [describe(callers, name, plain[name], traced[name]) for name in ways]


def print_figures(figures: Sequence[Figures]) -> None:
    names = ("callers", "way", "round ms", "traced", "gap ms", "p95", "inside ms", "busy", "gaps")
    rows = [
        (
            f"{one.callers}",
            one.way,
            *(f"{value:.2f}" for value in one.round_ms),
            *(f"{value:.3f}" for value in one.gap_ms),
            " ".join(f"{value:.3f}" for value in one.inner_ms),
            f"{one.busy:.1%}",
            f"{one.gaps}",
        )
        for one in figures
    ]
    print(format_table(Table("gaps", "", names, tuple(rows))))


def open_bundle(options: argparse.Namespace) -> tuple[Path, Path | None, Path | None]:
    """The bundle and its pair, made here unless given."""
    if options.bundle:
        return Path(options.bundle), None, None
    scratch = default_scratch()
    scratch.mkdir(parents=True, exist_ok=True)
    pair = choose_pair("large" if options.large else EMBEDDED, None, None, scratch)
    bundle = ensure_bundle(pair, BUCKETS, "float32", scratch, lambda message: print(message, file=sys.stderr))
    return bundle, pair.target, pair.draft


def serve(engine: Engine, lists: Sequence[Sequence[Prompt]], tokens: int) -> Served:
    """A thread per list."""
    return serve_lists(engine, Serve([list(prompts) for prompts in lists], tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--callers", default="1,8")
    parser.add_argument("--max_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    select_jax_platforms("cpu")
    figures = []
    with ExitStack() as stack:
        bundle, target, draft = open_bundle(options)
        manifest = read_manifest(bundle)
        ks = (manifest.grid.k[-1], 0)
        engines = {k: stack.enter_context(Engine.open(bundle, target, draft, k=k, preload=True)) for k in ks}
        jitted = Jitted(manifest, target, draft)
        vocab = manifest.target.facts.decoder.vocab
        prompts = np.random.default_rng(7).integers(0, vocab, (8, WIDTH)).tolist()
        for callers in map(int, options.callers.split(",")):
            ways: dict[str, tuple[Way, int]] = {}
            for k, engine in engines.items():
                ways[f"engine, K={k}"] = partial(serve, engine, tokens=options.max_tokens), k
                ways[f"jax.jit loop, K={k}"] = JitLoop(jitted, callers, k, WIDTH, options.max_tokens).serve, k
            figures += measure(callers, ways, [[prompt] for prompt in prompts[:callers]], options.repeats)
    print_figures(figures)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_script(main))
