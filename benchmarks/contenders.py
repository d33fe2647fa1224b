"""Contenders of a benchmark: the engine at each K, the `jax.jit` loop, PyTorch; their pair, bundle and prompts."""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from safetensors.numpy import save

from dflash_aot.benchmarks import messages
from dflash_aot.benchmarks.messages import FixedOrChosen, PromptIds, Serve, Served, Worker
from dflash_aot.benchmarks.prompts import HELD_OUT, Answer, encode_questions, load_questions
from dflash_aot.benchmarks.record import (
    GRID_FLAG,
    ProgressNote,
    check_installed,
    count_cores,
    setting,
)
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.atomic_files import write_atomically
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.architecture import default_target_layer_ids
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

CHOSEN: Literal["auto"] = "auto"
Arithmetic = Literal["float32", "bfloat16", "int8"]
PROMPT_SEED = 7  # of random tokens


@dataclass(frozen=True)
class PairSettings:
    """Flags that choose the checkpoint pair."""

    pair: str = setting(EMBEDDED, f"{EMBEDDED}, or random weights of the shape qwen3-0.6b or large")
    target: str = setting(EMBEDDED, "the target: directory or hub id")
    draft: str = setting(EMBEDDED, "its draft: directory or hub id")


@dataclass(frozen=True)
class PromptSettings(PairSettings):
    """Flags that choose the pair, the grid and the prompts."""

    buckets: str = setting("batch=1 length=256 k=0,3,7,15 prefill=64", GRID_FLAG)
    data: str = setting(HELD_OUT, "the prompts, see dflash-bench data")
    prompts: int = setting(24, "questions; each turn of a conversation is a prompt", least=1)
    prompt_tokens: int = setting(64, "first tokens of a text; conversations are whole", least=1)
    max_tokens: int = setting(128, "new tokens per prompt", least=2)


@dataclass(frozen=True)
class BenchmarkPair:
    """The directories of two checkpoints."""

    target: Path
    draft: Path
    invented: bool = False  # whether the weights are random; such a pair has no tokenizer


def choose_pair(settings: PairSettings, scratch: Path) -> BenchmarkPair:
    """The pair of the flags; random weights are written to `scratch`, once. Raises BadInput, BadCheckpoint."""
    if settings.pair == EMBEDDED:
        return BenchmarkPair(
            locate_checkpoint(settings.target, "target"), locate_checkpoint(settings.draft, "draft")
        )
    if (settings.target, settings.draft) != (EMBEDDED, EMBEDDED):
        raise BadInput(
            f"--pair {settings.pair} has a target and a draft: leave --target and --draft out"
        )
    return ensure_pair(settings.pair, scratch / "pairs")


def ensure_bundle(
    pair: BenchmarkPair, buckets: str, weights: Arithmetic, scratch: Path, note: ProgressNote
) -> Path:
    """A bundle for this machine in `scratch`; the bundle of an earlier run is used again. Raises as `precompile`.

    weights: of both models; what is between int8 products is float32.
    """
    facts = "\n".join((str(pair.target), str(pair.draft), buckets, weights, "greedy"))
    path = scratch / f"{weights}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    note(f"bundle of {buckets}, {weights}: {path}")
    from dflash_aot.compile import precompile  # noqa: PLC0415  imports the models

    # In a process of its own: this process must not hold an accelerator that the workers need.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        places = (pair.target, pair.draft, path)
        dtype = "float32" if weights == "int8" else weights
        options: dict[str, Any] = {"dtype": dtype, "weights": weights, "draft_weights": weights}
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
    data: str, count: int, width: int, pair: BenchmarkPair, answer: Answer | None = None
) -> list[PromptIds]:
    """Prompts of the data; random tokens for a pair of random weights. Raises what `encode_questions` raises."""
    if pair.invented:
        vocabulary = read_target(read_config(pair.target)).decoder.vocab
        return np.random.default_rng(PROMPT_SEED).integers(0, vocabulary, (count, width)).tolist()
    questions = load_questions(data, count)
    return encode_questions(questions, pair.target, Tokenizer.open(pair.target), width, answer)


def choose_turns(settings: PromptSettings, pair: BenchmarkPair, bundle: Path) -> list[PromptIds]:
    """Prompts of --data, with all turns of a conversation; the target answers the earlier turns."""
    ends = read_end_tokens(pair.target, read_target(read_config(pair.target)).decoder.vocab).ids
    with ExitStack() as stack:

        @functools.cache
        def open_plain() -> Worker:
            return stack.enter_context(engine_contender(bundle, 0).open())

        def answer(prompt: PromptIds) -> list[int]:
            (found,) = open_plain().ask(Serve([prompt], settings.max_tokens), Served).answers
            return [*itertools.takewhile(lambda token: token not in ends, found.token_ids)]

        return choose_prompts(settings.data, settings.prompts, settings.prompt_tokens, pair, answer)


@dataclass(frozen=True)
class Contender:
    """One contender."""

    name: str  # in samples and tables
    module: str  # of its worker
    spec: msgspec.Struct  # first message to the worker
    k: int | None = None  # fixed K of the engine and the loop
    dtype: Arithmetic | Literal["gguf"] = "float32"
    sampled: bool = False  # whether its tokens are drawn, which depends on K

    @property
    def exact(self) -> bool:
        """Whether its tokens must equal those of all other exact contenders."""
        return self.dtype == "float32" and not self.sampled

    def open(self) -> AbstractContextManager[Worker]:
        """Starts the worker. Raises PeerFailed."""
        module = f"dflash_aot.benchmarks.{self.module}"
        return messages.open_worker(f"{self.name} ({self.dtype})", module, self.spec)


Workers = Sequence[tuple[Contender, Worker]]


def engine_contender(bundle: Path, k: FixedOrChosen, max_waiting: int | None = None) -> Contender:
    """The engine on a float32 bundle."""
    spec = messages.EngineSpec(str(bundle), k, max_waiting)
    if k == CHOSEN:
        return Contender("engine, K chosen", "engine_worker", spec)
    return Contender(f"engine, K = {k}", "engine_worker", spec, k)


def jit_contender(bundle: Path, k: int, longest: int) -> Contender:
    """The plain loop on the same programs."""
    spec = messages.JitSpec(str(bundle), k, longest)
    return Contender(f"jax.jit loop, K = {k}", "jit_loop", spec, k)


def torch_contender(name: str, spec: messages.TorchSpec) -> Contender:
    """PyTorch. Raises BadInput where it is not installed."""
    check_installed("torch", "the comparison with PyTorch (--notorch leaves it out)")
    return Contender(name, "torch_worker", spec, dtype=spec.dtype)


def llama_contender(gguf: str, longest: int) -> Contender:
    """llama.cpp. Raises BadInput where it is not installed, and without the file."""
    check_installed("xllamacpp", "--llama_cpp")
    if not Path(gguf).is_file():
        raise BadInput(f"--llama_cpp {gguf}: no such file")
    spec = messages.LlamaSpec(gguf, longest, count_cores())
    return Contender("llama.cpp", "llama_worker", spec, dtype="gguf")


def check_callers(callers: Sequence[int], prompts: int, grid: Grid, length: int) -> None:
    """length: of the longest prompt and its answer. The plain loop pads nothing. Raises GridMiss, BadInput."""
    # Otherwise the last rounds would be cut short.
    grid.fit(max(callers), length + grid.k[-1], grid.k[-1])
    if missing := sorted({*callers} - {*grid.batch}):
        shown = ", ".join(map(str, missing))
        raise BadInput(f"--callers: {shown} is not a batch of the grid {grid}")
    if max(callers) > prompts:
        raise BadInput(f"--callers: {max(callers)} callers share {prompts} prompts (--prompts)")


@contextmanager
def open_contenders(contenders: Iterable[Contender], note: ProgressNote) -> Iterator[Workers]:
    """Contenders with their workers. Raises PeerFailed."""
    with ExitStack() as stack:
        workers = []
        for one in contenders:
            note(f"opening {one.name}")
            workers.append((one, stack.enter_context(one.open())))
        yield workers


def ask_in_turn(workers: Workers, question: Serve, turn: int) -> Iterator[tuple[Contender, Served]]:
    """The answers of all workers; another worker is asked first in each turn. Raises PeerFailed."""
    first = turn % len(workers)
    for contender, worker in (*workers[first:], *workers[:first]):
        yield contender, worker.ask(question, Served)


def hash_tokens(token_ids: Sequence[int]) -> str:
    """A short hash: equal for equal tokens."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


GivenAnswer = tuple[str, int | str, str]  # who gave it, to which prompt, its hash


def list_answers(samples: Sequence[Mapping[str, Any]]) -> list[GivenAnswer]:
    """The answers in samples of one answer each."""
    return [(one["way"], one["prompt"], one["tokens"]) for one in samples]


def find_faults(answers: Sequence[GivenAnswer], samples: Sequence[Mapping[str, Any]]) -> str:
    """Names contenders whose tokens differ from those of the first, and those that compiled; "" if none."""
    if not samples:
        return "no contender answered"
    reference = answers[0][0] if answers else ""
    first: dict[int | str, tuple[str, str]] = {}
    wrong: dict[tuple[str, str], set[int | str]] = {}
    for way, prompt, tokens in sorted(answers, key=lambda answer: answer[0] != reference):
        other, expected = first.setdefault(prompt, (way, tokens))
        if tokens != expected:
            wrong.setdefault((way, other), set()).add(prompt)
    faults = [
        f"{way} gives other tokens than {other} for prompts {', '.join(map(str, sorted(prompts)))}"
        for (way, other), prompts in wrong.items()
    ]
    if compiled := sorted({one["way"] for one in samples if one.get("compile_events")}):
        faults.append(f"{', '.join(compiled)} compiled while serving")
    return "; ".join(faults)


# Qwen3-0.6B's; the drafts have the same.
QWEN3 = {
    "model_type": "qwen3",
    "dtype": "float32",
    "hidden_act": "silu",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
}
# Layers of target and draft, and their configs. Millions of weights: 596 and 84; 95 and 34, which keep two cores busy
# for tens of milliseconds.
PAIRS = {
    "qwen3-0.6b": (28, 5, QWEN3),
    "large": (6, 2, QWEN3 | {"vocab_size": 1024, "max_position_embeddings": 2048}),
}
SEEDS = {"target": 8, "draft": 9}


def ensure_pair(name: str, cache: Path) -> BenchmarkPair:
    """A pair of random weights, written below `cache` if missing; always the same weights. Raises BadInput."""
    if name not in PAIRS:
        raise BadInput(f"{name!r} is not a random pair; there are {', '.join(PAIRS)}")
    configs = make_configs(*PAIRS[name])
    pair = BenchmarkPair(cache / name / "target", cache / name / "draft", invented=True)
    for role, place in (("target", pair.target), ("draft", pair.draft)):
        if not (place / "config.json").is_file():
            _write_checkpoint(role, place, configs)
    return pair


def make_configs(layers: int, draft_layers: int, common: dict) -> dict[str, dict]:
    """Contents of both `config.json`."""
    layer_ids = list(default_target_layer_ids(layers, draft_layers))
    mask = common["vocab_size"] - 1
    target = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}
    draft = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": draft_layers,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": layer_ids},
    }
    return {"target": common | target, "draft": common | draft}


def _write_checkpoint(role: str, place: Path, configs: Mapping[str, dict]) -> None:
    """Writes each file atomically, the config last: several processes may write the same checkpoint."""
    target = read_target(ConfigFile(place, configs["target"]))
    draft = read_draft(ConfigFile(place, configs["draft"]), target)
    from dflash_aot.compile.programs.programs import Programs  # noqa: PLC0415  imports the models

    rng = np.random.default_rng(SEEDS[role])
    tensors: dict[str, np.ndarray] = {}
    for recipe in Programs(target, draft, "float32").recipes():
        if recipe.checkpoint == role:
            tensors |= {one.tensor: _draw(one.stored, rng) for one in recipe.placements}
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_atomically(place / "config.json", json.dumps(configs[role], indent=1).encode())


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws one tensor: norms are 1, matrices keep the size of activations."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
