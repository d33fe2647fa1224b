"""Throughput and latency under 1, 2, 4 and 8 callers: the engine at every depth, and a plain `jax.jit` loop.

    python benchmarks/callers.py [--bundle DIR] [--callers 1,2,4,8] [--prompts 24] [--max_tokens 128] [--repeats 3]
        [--json FILE]

Callers work in closed loops through the same prompts, held out from the embedded pair's training: however many callers
there are, together they ask all of them. The ways run in turn, repeat by repeat, so that noise of the machine meets
all of them; every way must give every prompt the same tokens, or the figures are void.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from decode import held_out_prompts
from jit_loop import JitLoop, Jitted
from traffic import Prompt, Served, build_bundle, deal, gather, percentile, serve_engine

from dflash_aot.bin.command import format_table
from dflash_aot.bin.jax_platform import start_jax
from dflash_aot.cache.manifest import read_manifest
from dflash_aot.runtime import Engine

BUCKETS = "batch=1,2,4,8 length=256,512 k=0,3,7 prefill=64"
WIDTH = 64  # tokens of a prompt
Way = Callable[[Sequence[Sequence[Prompt]]], Served]


@dataclass(frozen=True)
class Figures:
    """All repeats of one way with so many callers.

    tokens_per_second: median, least and most of the repeats. Other pairs: median and 95th percentile over all requests
    of all repeats, in milliseconds. host_ms: work of the dispatching thread per round. padded, late: shares of the
    rows that rounds computed for no request, and for one whose end the host had not read yet.
    """

    callers: int
    way: str
    tokens_per_second: tuple[float, float, float]
    token_ms: tuple[float, float]
    first_token_ms: tuple[float, float]
    tokens_per_row_round: float
    host_ms: float
    padded: float
    late: float
    compile_events: int


def describe(callers: int, way: str, runs: Sequence[Served]) -> Figures:
    answers = [answer for run in runs for answer in gather(run.answers)]
    speeds = [sum(len(one.token_ids) for one in gather(run.answers)) / run.seconds for run in runs]
    rows, used, rounds = (sum(getattr(run, name) for run in runs) for name in ("rows", "row_rounds", "rounds"))
    padded = sum(run.padded_rows for run in runs)
    return Figures(
        callers=callers,
        way=way,
        tokens_per_second=(statistics.median(speeds), min(speeds), max(speeds)),
        token_ms=_spread([1e3 * answer.seconds_per_token for answer in answers]),
        first_token_ms=_spread([1e3 * answer.first_seconds for answer in answers]),
        tokens_per_row_round=sum(len(answer.token_ids) - 1 for answer in answers) / used,
        host_ms=1e3 * sum(run.host_seconds for run in runs) / rounds,
        padded=padded / rows,
        late=(rows - padded - used) / rows,
        compile_events=sum(run.compile_events for run in runs),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return percentile(values, 50), percentile(values, 95)


def check_agreement(callers: int, runs: Mapping[str, Served], expected: list[tuple[int, ...]]) -> None:
    """Every way gave every prompt the tokens that K = 0 gives one caller. Ends the process if not."""
    for way, run in runs.items():
        found = [answer.token_ids for answer in gather(run.answers)]
        if wrong := [place for place, tokens in enumerate(expected) if found[place] != tokens]:
            sys.exit(f"void: with {callers} callers, {way} gives other tokens for prompts {wrong}")


def measure(ways: Mapping[int, Mapping[str, Way]], prompts: Sequence[Prompt], repeats: int) -> list[Figures]:
    """ways: by callers and name."""
    samples: dict[tuple[int, str], list[Served]] = {}
    expected: list[tuple[int, ...]] = []
    for repeat in range(-1, repeats):  # the first one warms up
        for callers, named in ways.items():
            lists = deal(prompts, callers)
            runs = {name: way(lists) for name, way in named.items()}
            expected = expected or [answer.token_ids for answer in gather(runs["engine, K=0"].answers)]
            check_agreement(callers, runs, expected)
            for name, run in runs.items() if repeat >= 0 else ():
                samples.setdefault((callers, name), []).append(run)
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr)
    return [describe(callers, name, runs) for (callers, name), runs in samples.items()]


def open_ways(stack: ExitStack, bundle: str, counts: Sequence[int], tokens: int) -> tuple[Engine, dict]:
    """The engines and the loops, everything compiled and called once."""
    manifest = read_manifest(Path(bundle))
    deepest = manifest.grid.k[-1]
    engines = {f"K={k}": stack.enter_context(Engine.open(bundle, k=k)) for k in ("auto", deepest, 0)}
    jitted = Jitted(manifest)
    ways: dict[int, dict[str, Way]] = {}
    for callers in counts:
        ways[callers] = {f"engine, {k}": partial(serve_engine, one, tokens=tokens) for k, one in engines.items()}
        ways[callers][f"jax.jit loop, K={deepest}"] = JitLoop(jitted, callers, deepest, WIDTH, tokens).serve
    return engines["K=0"], ways


def print_figures(figures: Sequence[Figures]) -> None:
    names = ("callers", "way", "tokens/s", "least-most", "ms/token", "p95", "first ms", "p95", "τ", "host ms/round")
    rows = [
        (
            f"{one.callers}",
            one.way,
            f"{one.tokens_per_second[0]:.0f}",
            f"{one.tokens_per_second[1]:.0f}-{one.tokens_per_second[2]:.0f}",
            *(f"{value:.2f}" for value in one.token_ms),
            *(f"{value:.1f}" for value in one.first_token_ms),
            f"{one.tokens_per_row_round:.2f}",
            f"{one.host_ms:.3f}",
            f"{one.padded:.1%}",
            f"{one.late:.1%}",
            f"{one.compile_events}",
        )
        for one in figures
    ]
    print(format_table((*names, "padded", "late", "compiles"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", help=f"of the embedded pair; without it, one is built: {BUCKETS}")
    parser.add_argument("--callers", default="1,2,4,8")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with ExitStack() as stack:
        bundle = options.bundle or build_bundle(f"{stack.enter_context(tempfile.TemporaryDirectory())}/bundle", BUCKETS)
        start_jax(read_manifest(Path(bundle)).environment.platform)
        counts = [int(count) for count in options.callers.split(",")]
        engine, ways = open_ways(stack, bundle, counts, options.max_tokens)
        prompts = held_out_prompts(engine, options.prompts, WIDTH)
        figures = measure(ways, prompts, options.repeats)
    print(f"{options.prompts} prompts of {WIDTH} tokens, {options.max_tokens} tokens each, {options.repeats} repeats")
    print_figures(figures)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
