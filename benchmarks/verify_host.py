"""Whether a bundle computes on this machine what it should, and how fast: the first thing to run on a new TPU VM.

    python -m dflash_aot.benchmarks.verify_host --bundle DIR [--target DIR --draft DIR] [--golden FILE | --record FILE]

Calls every executable once; compares every K with K = 0, and requests served together with single ones; compares with
what --record wrote elsewhere, from a bundle of the same pair; then times every K in turn, all tokens waited for. Ends
with 1 and says why if anything is wrong. docs/tpu.md says what is held to be wrong.
"""

import argparse
import inspect
import os
import random
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from dflash_aot.benchmarks.agreement import (
    Golden,
    Prompt,
    Run,
    Verdict,
    check_golden,
    compare,
    is_exact,
    read_golden,
)
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.errors import BadInput, DflashError
from dflash_aot.cache.jax_platform import start_jax
from dflash_aot.runtime.engine_loop import EngineLoop
from dflash_aot.runtime.executables.bundle_loading import EngineParts, load_engine_parts
from dflash_aot.runtime.executables.compile_guard import CompileGuard
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.requests.request import Request, Result
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.speculation.controller import FixedK

MOST_TOKENS, PER_LENGTH, REPEATS = 64, 2, 3
NOISE = 1 << 16
MOST_WAITING = 1 << 10  # prompts at a time: more than there are


class Host:
    """An open bundle and a loop for every K, all on the same weights and slots, one after the other."""

    def __init__(self, opened: EngineParts):
        self.manifest = opened.bundle.manifest
        self.counters = {k: Counters() for k in self.manifest.grid.k}
        self._line = RequestQueue(MOST_WAITING)
        self._loops = {
            k: EngineLoop(opened.bundle.limited(k), opened.state, one, self._line, FixedK(k))
            for k, one in self.counters.items()
        }

    def run(self, asked: Sequence[tuple[Prompt, int]], k: int) -> list[Result]:
        """Prompts and how many tokens each gets, all at once; waits for every token."""
        loop, requests = self._loops[k], []
        for prompt, tokens in asked:
            params = SamplingParams(max_tokens=tokens)
            requests.append(Request(prompt, params, tokens, frozenset(), None, lambda delta: None))
            self._line.join(requests[-1])
        while not loop.idle:
            loop.step()
        return [request.result() for request in requests]

    def run_alone(self, asked: Sequence[tuple[Prompt, int]], k: int) -> list[Result]:
        """One after the other."""
        return [result for one in asked for result in self.run([one], k)]

    def decode(self, asked: Sequence[tuple[Prompt, int]], k: int) -> list[list[int]]:
        return [result.token_ids for result in self.run(asked, k)]

    def decode_alone(self, asked: Sequence[tuple[Prompt, int]], k: int) -> list[list[int]]:
        return [result.token_ids for result in self.run_alone(asked, k)]


def make_prompts(manifest: Manifest, target: Path) -> list[Prompt]:
    """For each length of the grid some whose answers lie in its bucket, with every K to the end.

    Of the source of Python's argparse, which is everywhere; without a tokenizer, noise.
    """
    grid = manifest.grid
    widths = [max(1, length - count_tokens(manifest) - 2 * (grid.k[-1] + 1)) for length in grid.length]
    if (target / "tokenizer.json").exists():
        text = Tokenizer.from_file(str(target / "tokenizer.json")).encode(inspect.getsource(argparse)).ids
    else:
        text = random.Random(7).choices(range(manifest.target.facts.decoder.vocab), k=NOISE)
    text *= 1 + PER_LENGTH * widths[-1] // len(text)
    return [text[at * width : (at + 1) * width] for width in widths for at in range(PER_LENGTH)]


def count_tokens(manifest: Manifest) -> int:
    """New tokens per prompt, so that they fit the shortest bucket."""
    return min(MOST_TOKENS, max(2, manifest.grid.length[0] // 4))


def verify_parity(host: Host, runs: Sequence[tuple[Prompt, list[int]]], verdict: Verdict) -> None:
    """What K = 0 answered, one prompt at a time, against every K and against many prompts at a time."""
    manifest, tokens = host.manifest, sum(len(answer) for _, answer in runs)
    exact = is_exact(manifest.environment.platform, manifest.dtype)
    for k in manifest.grid.k[1:]:
        found = compare(runs, partial(host.decode_alone, k=k))
        verdict.note_tokens(f"K = {k} against K = 0", tokens, found, exact)
    for k in manifest.grid.k if manifest.grid.slots > 1 else ():
        found = compare(runs, partial(host.decode, k=k))
        verdict.note_tokens(f"K = {k} with up to {manifest.grid.slots} rows against one", tokens, found, exact)


def verify_golden(host: Host, golden: Golden, verdict: Verdict) -> None:
    """What another machine answered."""
    manifest = host.manifest
    what = f"golden, {golden.dtype} on {golden.platform}"
    exact = is_exact(manifest.environment.platform, manifest.dtype) and is_exact(golden.platform, golden.dtype)
    runs = [(run.prompt_ids, run.token_ids) for run in golden.runs]
    found = compare(runs, partial(host.decode_alone, k=0))
    verdict.note_tokens(what, sum(len(answer) for _, answer in runs), found, exact)
    for k in sorted(set(manifest.grid.k) & golden.ks):
        results = host.run_alone([(prompt, len(answer)) for prompt, answer in runs], k)
        expected = [accepted for run in golden.runs for accepted in run.accepted[k]]
        verdict.note_acceptance(f"{what}, K = {k}", expected, [one for result in results for one in result.accepted])


def check_record(path: Path) -> None:
    """Before there is anything to write. Raises BadInput."""
    if not path.parent.is_dir():
        raise BadInput(f"--record {path}: there is no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"--record {path}: no file can be written there")


def record(host: Host, answers: Sequence[tuple[Prompt, list[int]]], path: Path) -> None:
    """Raises BadInput where the disk does not take it."""
    manifest, runs = host.manifest, []
    for prompt, answer in answers:
        accepted = {k: host.run([(prompt, len(answer))], k)[0].accepted for k in manifest.grid.k[1:]}
        runs.append(Run(prompt, answer, accepted))
    facts = (manifest.target.facts, manifest.draft.facts, manifest.dtype, manifest.environment.platform)
    try:
        path.write_bytes(msgspec.json.encode(Golden(*facts, runs)))
    except OSError as error:
        raise BadInput(f"--record {path}: {error.strerror}") from error
    print(f"{len(runs)} prompts and their tokens are in {path}")


def measure(host: Host, prompts: Sequence[Prompt]) -> None:
    """Every K on every prompt in turn, so that what disturbs the machine meets all; time to first token left out."""
    manifest, tokens = host.manifest, count_tokens(host.manifest)
    print(f"\nmedians of {PER_LENGTH * REPEATS} answers of {tokens} tokens, one at a time")
    names = ("K", "prefill ms", "ms/round", "ms/token", "x K=0", "τ")
    print("length", *(f"{name:>{width}}" for name, width in zip(names, (3, 11, 9, 9, 6, 5), strict=True)))
    for at, length in enumerate(manifest.grid.length):
        results: dict[int, list[Result]] = {k: [] for k in manifest.grid.k}
        for prompt in [*prompts[at * PER_LENGTH : (at + 1) * PER_LENGTH]] * REPEATS:
            for k, found in results.items():
                found += host.run([(prompt, tokens)], k)
        plain = median_seconds(results[0])[1]
        for k, found in results.items():
            per_round, per_token = median_seconds(found)
            prefill = statistics.median(one.first_token_seconds or 0.0 for one in found)
            tau = 1 + statistics.mean(accepted for one in found for accepted in one.accepted)
            times = f"{1e3 * prefill:>11.2f} {1e3 * per_round:>9.2f} {1e3 * per_token:>9.2f}"
            print(f"{length:>6} {k:>3} {times} {plain / per_token:>6.2f} {tau:>5.2f}")
    for k, counters in host.counters.items():
        print(f"K = {k}: {1e3 * counters.host_seconds / counters.rounds:.2f} ms of the host's work per round")


def median_seconds(results: Sequence[Result]) -> tuple[float, float]:
    """Per round and per token, of what follows the first one."""
    decoding = [(one.seconds - (one.first_token_seconds or 0.0), one) for one in results]
    return (
        statistics.median(seconds / len(one.accepted) for seconds, one in decoding),
        statistics.median(seconds / (len(one.token_ids) - 1) for seconds, one in decoding),
    )


def verify(options: argparse.Namespace, verdict: Verdict) -> None:
    """Tells the verdict everything that is wrong. Raises BadInput and what opening a bundle raises."""
    golden = read_golden(options.golden) if options.golden else None
    manifest = read_manifest(options.bundle)
    environment = manifest.environment
    if golden:
        check_golden(golden, manifest, options.golden)
    if options.record:
        check_record(options.record)
    start_jax(environment.platform)
    opened = load_engine_parts(options.bundle, options.target, options.draft, manifest.grid.k[-1])
    host, watch = Host(opened), CompileGuard()
    print(f"{environment.device_count} x {environment.device_kind}, {environment.topology or environment.platform}")
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in opened.startup.items())
    print(f"{len(opened.bundle.executables.order)} executables loaded and called once: {phases}")
    with watch.forbid_tracing():
        prompts = make_prompts(host.manifest, opened.target)
        asked = [(prompt, count_tokens(host.manifest)) for prompt in prompts]
        answers = list(zip(prompts, host.decode_alone(asked, k=0), strict=True))
        verify_parity(host, answers, verdict)
        if golden:
            verify_golden(host, golden, verdict)
        if options.record and not verdict.failures:
            record(host, answers, options.record)
        measure(host, prompts)
    if watch.events:
        verdict.failures.append(f"{watch.events} traces or compilations while serving")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True, type=Path)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--golden", type=Path, help="compare with what --record wrote")
    files.add_argument("--record", type=Path, help="write what this machine computes")
    options, verdict = parser.parse_args(), Verdict()
    try:
        verify(options, verdict)
    except DflashError as error:
        verdict.failures.append(str(error))
        return error.exit_code
    finally:
        for failure in verdict.failures:
            print(f"verify_host: {failure}", file=sys.stderr)
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
