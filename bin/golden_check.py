"""Golden check: compares the answers of a bundle on this machine with recorded ones, `dflash-bundle verify --golden`.

The bundle is opened as serving opens it, once at each K. Its answers are compared across Ks, across batch sizes, and
with the answers of another machine. docs/tpu.md says what counts as wrong.
"""

import argparse
import inspect
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_aot.bin.golden import (
    AcceptedTokensComparison,
    AnswerReport,
    DecodeTiming,
    GoldenFile,
    GoldenOptions,
    GoldenRun,
    TokenComparison,
    TokenIds,
    check_golden,
    compare_acceptance,
    find_differences,
    is_exact,
    read_golden,
)
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, Manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.atomic_files import check_output, write_atomically
from dflash_aot.runtime import Engine, Result, SamplingParams
from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.runtime.weights.checkpoint_pair import locate_checkpoint_pair

MAX_NEW_TOKENS = 64
PROMPTS_PER_LENGTH = 2
REPEATS = 3
RANDOM_TOKENS = 1 << 16


def check_answers(bundle: Path, manifest: Manifest, options: GoldenOptions) -> AnswerReport:
    """Runs the golden check. Raises BadInput, and what `Engine.open` raises."""
    golden = read_golden(options.golden) if options.golden else None
    if golden and options.golden:
        check_golden(golden, manifest, options.golden)
    if options.record:
        inputs = {"--golden": options.golden, "the bundle's manifest": bundle / MANIFEST_FILE}
        check_output("--record_golden", options.record, inputs)
        check_writable(options.record)
    select_jax_platforms(manifest.environment.platform)
    prompts = make_prompts(
        manifest, locate_checkpoint_pair(manifest, options.target, options.draft)["target"]
    )
    test = GoldenCheck(manifest, prompts, golden)
    for k in manifest.grid.k:  # 0 is the first
        # Without reuse of prefixes: each of the runs computes its prompts, and is compared and timed with that.
        with Engine.open(
            bundle, options.target, options.draft, k, preload=True, prefix_caching=False
        ) as engine:
            test.run(engine, k)
    if options.record and not test.failures:
        write_golden(manifest, test, options.record)
    return AnswerReport(
        golden=str(options.golden) if options.golden else None,
        recorded=str(options.record) if options.record and not test.failures else None,
        comparisons=test.comparisons,
        acceptance=test.acceptance,
        timings=test.timings,
        compile_events=test.compile_events,
        failures=test.failures,
        weights=test.weights,
        golden_weights=golden.weights if golden else "",
    )


class GoldenCheck:
    """Comparisons and timings, collected while one engine after the other runs, each at its own K."""

    def __init__(self, manifest: Manifest, prompts: Sequence[TokenIds], golden: GoldenFile | None):
        self._manifest = manifest
        self._prompts = prompts
        self._golden = golden
        self._tokens = count_new_tokens(manifest)
        self._here_exact = is_exact(manifest.environment.platform, manifest.dtype)
        self.comparisons: list[TokenComparison] = []
        self.acceptance: list[AcceptedTokensComparison] = []
        self.timings: list[DecodeTiming] = []
        self.compile_events = 0
        self.weights = ""  # the fingerprint
        # Prompts and answers at K = 0, one request at a time.
        self.answers: list[tuple[TokenIds, TokenIds]] = []
        # By K > 0 and prompt: drafted tokens accepted in each round.
        self.accepted: dict[int, list[list[int]]] = {}

    @property
    def failures(self) -> list[str]:
        """What is wrong with the bundle on this machine."""
        found = [one.failure for one in self.comparisons] + [one.failure for one in self.acceptance]
        return [*filter(None, found)] + [
            f"{self.compile_events} traces or compilations while serving"
        ] * bool(self.compile_events)

    def run(self, engine: Engine, k: int) -> None:
        """Everything at one K; K = 0 comes first. Raises EngineFailed."""
        self.weights = engine.weights
        results = [generate(engine, [(prompt, self._tokens)])[0] for prompt in self._prompts]
        if k == 0:
            self.answers = [
                (prompt, one.token_ids) for prompt, one in zip(self._prompts, results, strict=True)
            ]
        else:
            self.accepted[k] = [one.accepted for one in results]
            self._compare(
                f"K = {k} against K = 0", self.answers, DecodeOneByOne(engine), self._here_exact
            )
        slots = self._manifest.grid.slots
        if slots > 1:
            name = f"K = {k} with up to {slots} rows against one"
            self._compare(name, self.answers, DecodeTogether(engine), self._here_exact)
        if self._golden:
            self._compare_golden(engine, k, self._golden)
        self._add_timings(engine, k)
        self.compile_events += engine.stats().compile_events

    def _compare(
        self,
        name: str,
        runs: Sequence[tuple[TokenIds, TokenIds]],
        decode: "DecodeOneByOne",
        exact: bool,
    ) -> None:
        tokens = sum(len(answer) for _, answer in runs)
        self.comparisons.append(
            TokenComparison(name, tokens, find_differences(runs, decode), exact)
        )

    def _compare_golden(self, engine: Engine, k: int, golden: GoldenFile) -> None:
        name = f"golden, {golden.dtype} on {golden.platform}"
        runs = [(run.prompt_ids, run.token_ids) for run in golden.runs]
        if k == 0:
            exact = self._here_exact and is_exact(golden.platform, golden.dtype)
            self._compare(name, runs, DecodeOneByOne(engine), exact)
        elif k in golden.ks:
            results = [generate(engine, [(prompt, len(answer))])[0] for prompt, answer in runs]
            expected = [count for run in golden.runs for count in run.accepted[k]]
            found = [count for one in results for count in one.accepted]
            self.acceptance.append(compare_acceptance(f"{name}, K = {k}", expected, found))

    def _add_timings(self, engine: Engine, k: int) -> None:
        for at, length in enumerate(self._manifest.grid.length):
            prompts = self._prompts[at * PROMPTS_PER_LENGTH : (at + 1) * PROMPTS_PER_LENGTH]
            results = [
                generate(engine, [(prompt, self._tokens)])[0] for prompt in [*prompts] * REPEATS
            ]
            decoding = [(one.seconds - (one.first_token_seconds or 0.0), one) for one in results]
            rounds = [1e3 * seconds / len(one.accepted) for seconds, one in decoding]
            tokens = [1e3 * seconds / (len(one.token_ids) - 1) for seconds, one in decoding]
            self.timings.append(
                DecodeTiming(
                    length=length,
                    k=k,
                    prefill_ms=statistics.median(
                        1e3 * (one.first_token_seconds or 0.0) for one in results
                    ),
                    round_ms=statistics.median(rounds),
                    token_ms=statistics.median(tokens),
                    tau=1 + statistics.mean(count for one in results for count in one.accepted),
                )
            )


class DecodeOneByOne:
    """Greedy decoding by an engine, one request at a time."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __call__(self, asked: Sequence[tuple[TokenIds, int]]) -> list[TokenIds]:
        return [generate(self._engine, [one])[0].token_ids for one in asked]


class DecodeTogether(DecodeOneByOne):
    """Greedy decoding by an engine, all requests at a time."""

    def __call__(self, asked: Sequence[tuple[TokenIds, int]]) -> list[TokenIds]:
        return [result.token_ids for result in generate(self._engine, asked)]


def generate(engine: Engine, asked: Sequence[tuple[TokenIds, int]]) -> list[Result]:
    """Greedy answers with the given numbers of tokens, no stop tokens. Raises EngineFailed."""
    params = [SamplingParams(max_tokens=tokens, stop_token_ids=()) for _, tokens in asked]
    return engine.generate_all([prompt for prompt, _ in asked], params)


def make_prompts(manifest: Manifest, target: Path) -> list[TokenIds]:
    """Prompts for each length of the grid, so long that their answers use the buckets of that length at every K.

    The text is the source code of Python's argparse. A target without a tokenizer gets random tokens.
    """
    grid = manifest.grid
    widths = [
        max(1, length - count_new_tokens(manifest) - 2 * (grid.k[-1] + 1)) for length in grid.length
    ]
    if (target / "tokenizer.json").exists():
        text = Tokenizer.open(target).encode(inspect.getsource(argparse))
    else:
        text = random.Random(7).choices(range(manifest.target.facts.decoder.vocab), k=RANDOM_TOKENS)
    text *= 1 + PROMPTS_PER_LENGTH * widths[-1] // len(text)
    return [
        text[at * width : (at + 1) * width] for width in widths for at in range(PROMPTS_PER_LENGTH)
    ]


def count_new_tokens(manifest: Manifest) -> int:
    """New tokens per prompt, so that they fit the shortest length."""
    return min(MAX_NEW_TOKENS, max(2, manifest.grid.length[0] // 4))


def check_writable(path: Path) -> None:
    """Before anything is computed. Raises BadInput."""
    if not path.parent.is_dir():
        raise BadInput(f"--record_golden {path}: there is no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"--record_golden {path}: the file cannot be written")


def write_golden(manifest: Manifest, test: GoldenCheck, path: Path) -> None:
    """Writes a golden file. Raises BadInput where the disk refuses."""
    runs = [
        GoldenRun(prompt, answer, {k: by_prompt[number] for k, by_prompt in test.accepted.items()})
        for number, (prompt, answer) in enumerate(test.answers)
    ]
    facts = (
        manifest.target.facts,
        manifest.draft.facts,
        manifest.dtype,
        manifest.environment.platform,
    )
    try:
        write_atomically(path, msgspec.json.encode(GoldenFile(*facts, runs, test.weights)))
    except OSError as error:
        raise BadInput(f"--record_golden {path}: {error.strerror}") from error
