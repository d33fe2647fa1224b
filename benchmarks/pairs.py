"""The pair that a benchmark runs on, its bundles and its prompts."""

import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_aot.benchmarks.benchmark import Note
from dflash_aot.benchmarks.peer import python_module
from dflash_aot.benchmarks.prompts import Prompt, load_prompts
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.target import read_target

LAST_LINES = 5
NOISE = 7  # the seed of prompts for a pair that has no words


@dataclass(frozen=True)
class Pair:
    """Two checkpoints' directories. invented: its weights are random, and it has no words."""

    name: str
    target: Path
    draft: Path
    invented: bool = False


def choose_pair(name: str, target: str | None, draft: str | None, scratch: Path) -> Pair:
    """--target and --draft, or else the pair of that name; one of random weights is written to `scratch`, once.

    Raises BadInput, BadCheckpoint.
    """
    if (target is None) != (draft is None):
        raise BadInput("--target and --draft: a pair needs both")
    if target and draft:
        return Pair("given", locate_checkpoint(target, "target"), locate_checkpoint(draft, "draft"))
    if name == EMBEDDED:
        return Pair(name, locate_checkpoint(EMBEDDED, "target"), locate_checkpoint(EMBEDDED, "draft"))
    from dflash_aot.benchmarks.random_pair import ensure_pair  # noqa: PLC0415  brings the models

    places = ensure_pair(name, scratch / "pairs")
    return Pair(name, places["target"], places["draft"], invented=True)


def ensure_bundle(pair: Pair, buckets: str, dtype: str, scratch: Path, note: Note) -> Path:
    """A bundle of greedy executables for this machine, in `scratch`: what an earlier run left there is used.

    Raises BuildFailed.
    """
    facts = "\n".join((str(pair.target), str(pair.draft), buckets, dtype))
    path = scratch / f"{pair.name}-{dtype}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    note(f"bundle of {buckets}, {dtype}: {path}")
    flags = {"target": pair.target, "draft": pair.draft, "bundle": path, "buckets": buckets, "dtype": dtype}
    command = [*python_module("dflash_aot.bin.precompile"), *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run([*command, "--sampling=greedy", "--json"], capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed("\n".join(done.stderr.strip().splitlines()[-LAST_LINES:]))
    return path


def choose_prompts(
    data: str, count: int, width: int, pair: Pair, answer: Callable[[Prompt], list[int]] | None = None
) -> list[Prompt]:
    """Of the data, see `load_prompts`; random tokens for a pair that has no words.

    Raises BadInput, BadCheckpoint, and what `answer` raises.
    """
    if pair.invented:
        vocab = read_target(read_config(pair.target)).decoder.vocab
        return np.random.default_rng(NOISE).integers(0, vocab, (count, width)).tolist()
    return load_prompts(data, count, pair.target, width, answer)
