"""Tokens per second, τ and host time per round at every K of a bundle, batch 1, on held-out prompts.

    python benchmarks/decode.py --bundle DIR [--prompts 24] [--max_tokens 128]

Prompts are windows of standard-library files that the embedded pair was not trained on. For each prompt every K
runs in turn, so that noise of the machine meets all of them; all must give the same tokens.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dflash_aot.bin.jax_platform import start_jax
from dflash_aot.cache.manifest import read_manifest
from dflash_aot.runtime import Engine, Result, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "embedded_pair"))
from corpus import read_split, token_stream, windows  # the split lives with the training script


def held_out_prompts(engine: Engine, count: int, width: int = 64) -> list[list[int]]:
    """The same ones on every machine with the same standard library."""
    tokenizer = Tokenizer.from_file(str(engine.target / "tokenizer.json"))
    stream = token_stream(tokenizer, read_split(held_out=True))
    return windows(stream, count, width, np.random.default_rng(7)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max_tokens", type=int, default=128)
    options = parser.parse_args()
    params = SamplingParams(max_tokens=options.max_tokens, stop_token_ids=())
    start_jax(read_manifest(Path(options.bundle)).environment.platform)
    with ExitStack() as stack:
        first = stack.enter_context(Engine.open(options.bundle, k=0))
        engines = {0: first}
        for k in first.manifest.grid.k[1:]:
            engines[k] = stack.enter_context(Engine.open(options.bundle, k=k))
        prompts = held_out_prompts(first, options.prompts)
        results: dict[int, list[Result]] = {k: [] for k in engines}
        for prompt in prompts:
            for k, engine in engines.items():
                results[k].append(engine.generate(prompt, params))
            if len({tuple(results[k][-1].token_ids) for k in engines}) != 1:
                sys.exit(f"void: the Ks do not agree on the tokens behind {prompt}")
        print_table(engines, results)


def print_table(engines: dict[int, Engine], results: dict[int, list[Result]]) -> None:
    """Speed is the median over prompts, time to first token left out; compared prompt by prompt with K = 0."""
    seconds = {
        k: [(one.seconds - (one.first_token_seconds or 0)) / (len(one.token_ids) - 1) for one in runs]
        for k, runs in results.items()
    }
    print(f"{len(results[0])} prompts, {len(results[0][0].token_ids)} tokens each, batch 1")
    names = ("tokens/s", "x K=0", "τ micro", "τ mean", "host ms/round: work", "clock", "compiles")
    print("  K", *(f"{name:>{width}}" for name, width in zip(names, (9, 6, 8, 7, 20, 6, 9), strict=True)))
    for k, runs in results.items():
        rounds = [accepted for one in runs for accepted in one.accepted]
        micro = 1 + sum(rounds) / len(rounds)
        mean = statistics.mean(1 + statistics.mean(one.accepted) for one in runs)
        gain = statistics.median(base / own for base, own in zip(seconds[0], seconds[k], strict=True))
        counters = engines[k].stats()
        work, clock = (1e3 * all_ / counters.rounds for all_ in (counters.host_seconds, counters.host_wall_seconds))
        speed = 1 / statistics.median(seconds[k])
        print(
            f"{k:>3} {speed:>9.0f} {gain:>6.2f} {micro:>8.2f} {mean:>7.2f} "
            f"{work:>20.2f} {clock:>6.2f} {counters.compile_events:>9}"
        )
    for k, engine in engines.items():
        counters = engine.stats()
        shares = zip(counters.accepted_at, counters.verified_at, strict=True)
        if k:
            print(f"K={k} accepted per position:", " ".join(f"{stands / tried:.2f}" for stands, tried in shares))


if __name__ == "__main__":
    main()
