"""Contenders of a benchmark: the engine at each K, the `jax.jit` loop, PyTorch; their pair, bundle and prompts."""

import functools
import hashlib
import importlib.util
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from dflash_aot.benchmarks.messages import (
    EngineSpec,
    JitSpec,
    PromptIds,
    ServeClosed,
    ServedClosed,
    TorchSpec,
    Worker,
)
from dflash_aot.benchmarks.prompts import HELD_OUT, load_prompts
from dflash_aot.benchmarks.record import ProgressNote, setting
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

CHOSEN: Literal["auto"] = "auto"
PROMPT_SEED = 7  # of random tokens
# Looked-up tokens, as in transformers' documentation; of 3, 7 and 10 the number with the fewest passes.
LOOKUP_TOKENS = 10
# Share of the layers that draft; of 0.25, 0.5 and 0.75 the best on the embedded pair.
EARLY_EXIT = 0.75


@dataclass(frozen=True)
class PairSettings:
    """Flags that choose the checkpoint pair."""

    pair: str = setting(
        EMBEDDED, f"{EMBEDDED}, or random weights in the shapes of qwen3-0.6b or large"
    )
    target: str = setting(EMBEDDED, "the target: directory or hub id")
    draft: str = setting(EMBEDDED, "its draft: directory or hub id")


@dataclass(frozen=True)
class PromptSettings(PairSettings):
    """Flags that choose the pair, the grid and the prompts."""

    buckets: str = setting(
        "batch=1 length=256 k=0,3,7,15 prefill=64", "the grid, as dflash-precompile takes it"
    )
    data: str = setting(HELD_OUT, "the prompts, see dflash-bench data")
    prompts: int = setting(
        24, "number of questions; each turn of a conversation is a prompt", least=1
    )
    prompt_tokens: int = setting(
        64, "of a text the first so many tokens; of a conversation all", least=1
    )
    max_tokens: int = setting(128, "new tokens per prompt", least=2)


@dataclass(frozen=True)
class BenchmarkPair:
    """The directories of two checkpoints.

    Attributes:
        target: the target's directory.
        draft: the draft's directory.
        invented: whether the weights are random; such a pair has no tokenizer.
    """

    target: Path
    draft: Path
    invented: bool = False


def choose_pair(settings: PairSettings, scratch: Path) -> BenchmarkPair:
    """The pair of --target and --draft, or of --pair: random weights are written to `scratch`, once.

    Raises BadInput, BadCheckpoint.
    """
    if settings.pair == EMBEDDED:
        return BenchmarkPair(
            locate_checkpoint(settings.target, "target"), locate_checkpoint(settings.draft, "draft")
        )
    if (settings.target, settings.draft) != (EMBEDDED, EMBEDDED):
        raise BadInput(
            f"--pair {settings.pair} has a target and a draft: leave --target and --draft out"
        )
    from dflash_aot.benchmarks.random_pair import ensure_pair  # noqa: PLC0415  imports the models

    places = ensure_pair(settings.pair, scratch / "pairs")
    return BenchmarkPair(places["target"], places["draft"], invented=True)


def ensure_bundle(
    pair: BenchmarkPair, buckets: str, dtype: str, scratch: Path, note: ProgressNote
) -> Path:
    """A bundle for this machine in `scratch`; the bundle of an earlier run is used again. Raises as `precompile`."""
    facts = "\n".join((str(pair.target), str(pair.draft), buckets, dtype, "greedy"))
    path = scratch / f"{dtype}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    note(f"bundle of {buckets}, {dtype}: {path}")
    from dflash_aot.compile import precompile  # noqa: PLC0415  imports the models

    # In a process of its own: this process must not hold an accelerator that the workers need.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        places = (pair.target, pair.draft, path)
        options: dict[str, Any] = {"dtype": dtype, "weights": dtype, "draft_weights": dtype}
        pool.submit(precompile, *places, grid=buckets, exact=True, replace=True, **options).result()
    return path


def end_with_parent() -> None:
    """Lets this process end with its parent: a killed benchmark compiles nothing more."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "this process was started by multiprocessing"
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def choose_prompts(
    data: str,
    count: int,
    width: int,
    pair: BenchmarkPair,
    answer: Callable[[PromptIds], list[int]] | None = None,
) -> list[PromptIds]:
    """Prompts of the data, see `load_prompts`; random tokens for a pair of random weights.

    Raises BadInput, BadCheckpoint, and what `answer` raises.
    """
    if not pair.invented:
        return load_prompts(data, count, pair.target, width, answer)
    vocabulary = read_target(read_config(pair.target)).decoder.vocab
    return np.random.default_rng(PROMPT_SEED).integers(0, vocabulary, (count, width)).tolist()


def choose_turns(settings: PromptSettings, pair: BenchmarkPair, bundle: Path) -> list[PromptIds]:
    """Prompts of --data, with all turns of a conversation; the target answers the earlier turns."""
    ends = read_end_tokens(pair.target, read_target(read_config(pair.target)).decoder.vocab).ids
    with ExitStack() as stack:

        @functools.cache
        def open_plain() -> Worker:
            return stack.enter_context(engine_contender(bundle, pair, 0).open())

        def answer(prompt: PromptIds) -> list[int]:
            ((found,),) = (
                open_plain().ask(ServeClosed([[prompt]], settings.max_tokens), ServedClosed).answers
            )
            return [*itertools.takewhile(lambda token: token not in ends, found.token_ids)]

        return choose_prompts(settings.data, settings.prompts, settings.prompt_tokens, pair, answer)


@dataclass(frozen=True)
class Contender:
    """One contender."""

    name: str  # in samples and tables
    module: str  # of its worker
    spec: msgspec.Struct  # first message to the worker
    exact: bool = True  # its tokens must equal those of all other exact contenders
    k: int | None = None  # fixed K of the engine and the loop
    dtype: str = ""  # where a benchmark compares several

    def open(self) -> Worker:
        """Starts the worker. Raises PeerFailed."""
        return Worker(
            f"{self.name} {self.dtype}".strip(), f"dflash_aot.benchmarks.{self.module}", self.spec
        )


Workers = Sequence[tuple[Contender, Worker]]


def engine_contender(
    bundle: Path,
    pair: BenchmarkPair,
    k: int | Literal["auto"],
    dtype: str = "float32",
    max_waiting: int | None = None,
) -> Contender:
    """The engine on a bundle of that dtype."""
    spec = EngineSpec(str(bundle), str(pair.target), str(pair.draft), k, max_waiting)
    engine = "engine" if dtype == "float32" else f"engine, {dtype}"
    fixed = None if k == CHOSEN else k
    name = f"{engine}, K {'chosen' if fixed is None else f'= {k}'}"
    return Contender(name, "engine_worker", spec, dtype == "float32", fixed)


def jit_contender(bundle: Path, pair: BenchmarkPair, k: int, longest: int) -> Contender:
    """The plain loop on the same programs."""
    spec = JitSpec(str(bundle), str(pair.target), str(pair.draft), k, longest)
    return Contender(f"jax.jit loop, K = {k}", "jit_loop", spec, k=k)


def torch_contenders(pair: BenchmarkPair, assisted: bool) -> list[Contender]:
    """Greedy `generate` of PyTorch; with `assisted` also its speculation without other weights. Raises BadInput."""
    check_torch()
    target = str(pair.target)
    specs = {"float32": TorchSpec(target, "float32"), "bfloat16": TorchSpec(target, "bfloat16")}
    if assisted:
        layers = read_target(read_config(pair.target)).decoder.layers
        specs["float32, prompt lookup"] = TorchSpec(target, "float32", lookup_tokens=LOOKUP_TOKENS)
        specs["float32, early exit"] = TorchSpec(
            target, "float32", exit_layer=max(1, int(EARLY_EXIT * layers))
        )
        specs["bfloat16, prompt lookup"] = TorchSpec(
            target, "bfloat16", lookup_tokens=LOOKUP_TOKENS
        )
    return [
        Contender(f"PyTorch {name}", "torch_worker", one, one.dtype == "float32")
        for name, one in specs.items()
    ]


def check_torch() -> None:
    """Raises BadInput where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise BadInput(
            "PyTorch is not installed: pip install 'dflash-aot[bench]', or leave it out: --notorch"
        )


def open_contenders(
    contenders: Sequence[Contender], stack: ExitStack, note: ProgressNote
) -> Workers:
    """Contenders with their workers, which end with the stack. Raises PeerFailed."""
    workers = []
    for one in contenders:
        note(f"opening {one.name}")
        workers.append((one, stack.enter_context(one.open())))
    return workers


def take_turns(workers: Workers, turn: int) -> Iterator[tuple[Contender, Worker]]:
    """All workers once; another worker is first in each turn."""
    first = turn % len(workers)
    yield from (*workers[first:], *workers[:first])


def hash_tokens(token_ids: Sequence[int]) -> str:
    """A short hash: equal for equal tokens."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def find_disagreement(samples: Sequence[Mapping[str, Any]]) -> str:
    """Names the exact contenders whose tokens differ from those of the first contender, "" if none do."""
    exact = [one for one in samples if one["exact"]]
    # The reference, whichever contender was first for a prompt.
    chosen = exact[0]["way"] if exact else ""
    first: dict[int, Mapping[str, Any]] = {}
    wrong: dict[tuple[str, str], set[int]] = {}
    for one in sorted(exact, key=lambda one: one["way"] != chosen):
        reference = first.setdefault(one["prompt"], one)
        if one["tokens"] != reference["tokens"]:
            wrong.setdefault((one["way"], reference["way"]), set()).add(one["prompt"])
    return "; ".join(
        f"{name} gives other tokens than {reference} for prompts {', '.join(map(str, sorted(prompts)))}"
        for (name, reference), prompts in wrong.items()
    )


def find_faults(
    answers: Sequence[Mapping[str, Any]], served: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Disagreements of the answers, and compilations of the served samples (default: the answers); "" if none."""
    if not answers:
        return "no contender answered"
    compiled = sorted({one["way"] for one in served or answers if one.get("compile_events")})
    faults = [
        find_disagreement(answers),
        f"{', '.join(compiled)} compiled while serving" if compiled else "",
    ]
    return "; ".join(filter(None, faults))
