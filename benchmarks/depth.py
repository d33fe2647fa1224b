"""K chosen while running against every fixed K, on easy and hard prompts that alternate in one run, batch 1.

    python -m dflash_aot.benchmarks.depth --bundle DIR [--prompts 12] [--max_tokens 256] [--repeats 3]

The bundle needs --sampling greedy,sample. Easy prompts are pieces of files that the embedded pair was trained on,
continued greedily; hard ones are random tokens, continued at a high temperature, since greedily they end in loops
that are easy to draft. Each prompt is answered by every engine in turn, so that noise of the machine meets all of
them; all must give the same tokens. Seconds per token leave out the time to the first one. An engine opened with K = 0
has no draft; "0 kept" is K = 0 with the draft's kv kept up to date, as whoever may draft again has to.
"""

import argparse
import ast
import inspect
import statistics
import subprocess
import sys
import tarfile
import threading
import typing
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from dflash_aot.benchmarks.script import run_script
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.jax_platform import select_jax_platforms
from dflash_aot.runtime import Engine, Result, SamplingParams

WIDTH = 64  # tokens of a prompt
TRAINED_ON = (argparse, ast, inspect, subprocess, tarfile, threading, typing)
AUTO: Literal["auto"] = "auto"
KEPT = "0 kept"  # every request asks for K = 0 of an engine that could draft
Runs = dict[str, dict[int | str, list[list[Result]]]]  # by kind and K: for each prompt, its repeats


def make_prompts(engine: Engine, count: int) -> dict[str, list[list[int]]]:
    """`count` prompts of each kind."""
    tokenizer = Tokenizer.from_file(str(engine.target / "tokenizer.json"))
    rng = np.random.default_rng(11)
    seen = np.concatenate([tokenizer.encode(inspect.getsource(module)).ids for module in TRAINED_ON])
    starts = rng.integers(0, len(seen) - WIDTH, count)
    easy = [seen[start : start + WIDTH].tolist() for start in starts]
    return {"easy": easy, "hard": rng.integers(8, tokenizer.get_vocab_size(), (count, WIDTH)).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max_tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    manifest = read_manifest(Path(options.bundle))
    params = {
        "easy": SamplingParams(max_tokens=options.max_tokens, stop_token_ids=()),
        "hard": SamplingParams(max_tokens=options.max_tokens, stop_token_ids=(), temperature=2.0, seed=1),
    }
    select_jax_platforms(manifest.environment.platform)
    with ExitStack() as stack:
        ks: tuple[int | Literal["auto"], ...] = (*manifest.grid.k, AUTO)
        engines: dict[int | str, Engine] = {
            k: stack.enter_context(Engine.open(options.bundle, k=k, preload=True)) for k in ks
        }
        engines[KEPT] = stack.enter_context(Engine.open(options.bundle, k=AUTO, preload=True))
        prompts = make_prompts(engines[AUTO], options.prompts)
        runs: Runs = {kind: {k: [[] for _ in own] for k in engines} for kind, own in prompts.items()}
        for _ in range(options.repeats):
            for number in range(options.prompts):
                for kind in prompts:
                    run_prompt(engines, prompts[kind][number], params[kind], runs[kind], number)
        print(f"{options.prompts} prompts of each kind, {options.max_tokens} tokens each, {options.repeats} repeats")
        for kind, by_k in runs.items():
            print_kind(kind, by_k)
        print_choice(engines[AUTO])


def run_prompt(
    engines: dict[int | str, Engine],
    prompt: list[int],
    params: SamplingParams,
    by_k: dict[int | str, list[list[Result]]],
    number: int,
) -> None:
    for k, engine in engines.items():
        by_k[k][number].append(engine.generate(prompt, replace(params, k=0) if k == KEPT else params))
    if len({tuple(by_k[k][number][-1].token_ids) for k in engines}) != 1:
        sys.exit(f"void: the Ks do not agree on the tokens behind {prompt}")


def seconds_per_token(result: Result) -> float:
    return (result.seconds - (result.first_token_seconds or 0)) / (len(result.token_ids) - 1)


def print_kind(kind: str, by_k: dict[int | str, list[list[Result]]]) -> None:
    """The median of a prompt's repeats, summed over prompts: long answers count as they do for a user."""
    times = {
        k: statistics.mean(statistics.median(map(seconds_per_token, repeats)) for repeats in by_prompt)
        for k, by_prompt in by_k.items()
    }
    best = min((k for k in times if isinstance(k, int)), key=times.__getitem__)
    print(f"{kind}: best fixed K = {best}; auto takes {times[AUTO] / times[best]:.3f} of its time per token")
    print("     K  ms/token  of best     τ")
    for k, by_prompt in by_k.items():
        rounds = [accepted for repeats in by_prompt for one in repeats for accepted in one.accepted]
        print(f"{k:>6} {1e3 * times[k]:>9.3f} {times[k] / times[best]:>8.3f} {1 + statistics.mean(rounds):>5.2f}")


def print_choice(engine: Engine) -> None:
    counters = engine.stats()
    rounds: Counter[int] = Counter()
    for (bucket, _), count in counters.bucket_rounds.items():
        rounds[bucket.k] += count
    share = ", ".join(f"K={k} {count / counters.rounds:.0%}" for k, count in sorted(rounds.items()))
    print(f"auto's rounds: {share}; timed at load in {engine.startup['timing']:.2f} s")


if __name__ == "__main__":
    sys.exit(run_script(main))
