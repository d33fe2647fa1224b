"""What a long prompt does to short ones: the pauses in their answers, with it and without it.

    python -m dflash_aot.benchmarks.mix [--bundle DIR] [--short 1,3,7] [--max_tokens 128] [--repeats 3] [--json FILE]

Short callers send prompts of one prefill chunk, one after the other; the long one sends prompts of seven chunks, one
after the other too, and asks for little, so that some chunk of it is nearly always being prefilled: the worst that one
caller can do. A pause is the time between two deltas as the caller's own thread sees them; a delta holds the tokens of
one round. With and without run in turn. The tokens of the short callers must be the same in both.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dflash_aot.benchmarks.benchmark import default_scratch
from dflash_aot.benchmarks.callers import listen
from dflash_aot.benchmarks.estimates import percentile
from dflash_aot.benchmarks.findings import Table, format_table
from dflash_aot.benchmarks.pairs import choose_pair, ensure_bundle
from dflash_aot.benchmarks.prompts import load_prompts
from dflash_aot.benchmarks.questions import HELD_OUT
from dflash_aot.benchmarks.script import run_script
from dflash_aot.benchmarks.traffic import Answer, Prompt, deal
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.jax_platform import select_jax_platforms
from dflash_aot.cache.model_config.checkpoint_location import EMBEDDED
from dflash_aot.runtime import Engine

BUCKETS = "batch=1,2,4,8 length=256,512 k=0,3,7 prefill=64"
SHORT, LONG, LONG_TOKENS = 64, 448, 8  # tokens of the prompts, and of the long ones' answers
PER_CALLER = 4


@dataclass(frozen=True)
class Figures:
    """The short callers, all repeats, in milliseconds: median, 95th percentile, most. long: answers meanwhile."""

    short: int
    beside: str
    pause_ms: tuple[float, float, float]
    first_ms: tuple[float, float, float]
    tokens_per_second: float
    long: int
    long_first_ms: float | None


def find_pauses(answer: Answer) -> list[float]:
    """Seconds between two deltas: tokens of one have come at the same time."""
    steps = zip(answer.arrivals, answer.arrivals[1:], strict=False)
    return [later - earlier for earlier, later in steps if later > earlier]


def listen_in_turn(engine: Engine, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    return [listen(engine, prompt, tokens, time.perf_counter()) for prompt in prompts]


def listen_until(engine: Engine, prompts: Sequence[Prompt], ended: threading.Event) -> list[Answer]:
    """The long caller; what it has not finished when the others have is not counted."""
    heard: list[Answer] = []
    while not ended.is_set():
        one = listen(engine, prompts[len(heard) % len(prompts)], LONG_TOKENS, time.perf_counter())
        heard += [] if ended.is_set() else [one]
    return heard


def run_mix(
    engine: Engine, lists: Sequence[Sequence[Prompt]], tokens: int, long: Sequence[Prompt]
) -> tuple[list[list[Answer]], list[Answer], float]:
    """What the short callers heard, what the long one did, and the seconds that the short ones took."""
    ended = threading.Event()
    with ThreadPoolExecutor(len(lists) + 1) as callers:
        beside = callers.submit(listen_until, engine, long, ended) if long else None
        began = time.perf_counter()
        try:
            heard = list(callers.map(partial(listen_in_turn, engine, tokens=tokens), lists))
        finally:
            ended.set()
        seconds = time.perf_counter() - began
    return heard, beside.result() if beside else [], seconds


def measure(
    engine: Engine, lists: Sequence[Sequence[Prompt]], tokens: int, long: Sequence[Prompt], repeats: int
) -> list[Figures]:
    kinds: dict[str, Sequence[Prompt]] = {"alone": [], "a long prompt": long}
    samples: dict[str, list] = {kind: [] for kind in kinds}
    answers = set()
    for repeat in range(-1, repeats):  # the first one warms up
        for kind, prompts in kinds.items():
            run = run_mix(engine, lists, tokens, prompts)
            answers.add(tuple(tuple(one.token_ids) for caller in run[0] for one in caller))
            samples[kind] += [run] if repeat >= 0 else []
    if len(answers) != 1:
        sys.exit(f"void: {len(lists)} short callers get other tokens beside a long prompt")
    return [describe(len(lists), kind, runs) for kind, runs in samples.items()]


def describe(short: int, beside: str, runs: Sequence[tuple[list[list[Answer]], list[Answer], float]]) -> Figures:
    heard = [one for callers, _, _ in runs for caller in callers for one in caller]
    long = [one for _, answers, _ in runs for one in answers]
    return Figures(
        short=short,
        beside=beside,
        pause_ms=_spread([pause for one in heard for pause in find_pauses(one)]),
        first_ms=_spread([one.first_seconds for one in heard]),
        tokens_per_second=sum(len(one.token_ids) for one in heard) / sum(seconds for _, _, seconds in runs),
        long=len(long),
        long_first_ms=1e3 * percentile([one.first_seconds for one in long], 50) if long else None,
    )


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    return 1e3 * percentile(seconds, 50), 1e3 * percentile(seconds, 95), 1e3 * max(seconds)


def print_figures(figures: Sequence[Figures]) -> None:
    names = (
        "short callers",
        "beside",
        "pause ms",
        "p95",
        "most",
        "first ms",
        "p95",
        "most",
        "tokens/s",
        "long answers",
    )
    rows = [
        (
            f"{one.short}",
            one.beside,
            *(f"{value:.1f}" for value in (*one.pause_ms, *one.first_ms)),
            f"{one.tokens_per_second:.0f}",
            f"{one.long}",
            "" if one.long_first_ms is None else f"{one.long_first_ms:.0f}",
        )
        for one in figures
    ]
    print(format_table(Table("pauses", "", (*names, "their first ms"), tuple(rows))))


def build_bundle() -> Path:
    """Of the embedded pair, unless it is there."""
    scratch = default_scratch()
    scratch.mkdir(parents=True, exist_ok=True)
    pair = choose_pair(EMBEDDED, None, None, scratch)
    return ensure_bundle(pair, BUCKETS, "float32", scratch, lambda message: print(message, file=sys.stderr))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", help=f"of the embedded pair; without it, one is built: {BUCKETS}")
    parser.add_argument("--short", default="1,3,7")
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    figures = []
    with ExitStack() as stack:
        bundle = Path(options.bundle) if options.bundle else build_bundle()
        select_jax_platforms(read_manifest(bundle).environment.platform)
        engine = stack.enter_context(Engine.open(bundle, preload=True))
        long = load_prompts(HELD_OUT, PER_CALLER, engine.target, LONG)
        for short in map(int, options.short.split(",")):
            lists = deal(load_prompts(HELD_OUT, short * PER_CALLER, engine.target, SHORT), short)
            figures += measure(engine, lists, options.max_tokens, long, options.repeats)
    print_figures(figures)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_script(main))
