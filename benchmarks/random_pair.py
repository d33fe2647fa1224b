"""Pairs of checkpoints with random weights, for what takes as long as it does whatever they say.

    python -m dflash_aot.benchmarks.random_pair qwen3-0.6b DIR

Their text makes no sense, and their drafts guess nothing. A draft of longer blocks: qwen3-0.6b-block256.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash_aot.cache.bundle.weight_recipe import CheckpointRole, Placement
from dflash_aot.cache.errors import BadInput, DflashError
from dflash_aot.cache.model_config.architecture import default_target_layer_ids
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.programs.programs import Programs

BLOCK = 16
MOST_BYTES = 1 << 30  # of a file, so that no more than that is held at a time
COMMON = {
    "model_type": "qwen3",
    "dtype": "float32",
    "hidden_act": "silu",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Shapes:
    """As wide as Qwen3-0.6B unless they say otherwise; two query heads share each kv head."""

    layers: int
    draft_layers: int
    vocab: int
    positions: int
    hidden: int = 1024
    kv_heads: int = 8
    mlp: int = 3072


# Millions of weights in target and draft: 596 and 84; 95 and 34, which keep two cores busy for tens of milliseconds;
# next to none, to see whether something runs.
PAIRS = {
    "qwen3-0.6b": Shapes(28, 5, 151936, 40960),
    "large": Shapes(6, 2, 1024, 2048),
    "tiny": Shapes(6, 2, 512, 2048, hidden=64, kv_heads=1, mlp=128),
}
SEEDS: dict[CheckpointRole, int] = {"target": 8, "draft": 9}


def ensure_pair(name: str, cache: Path) -> dict[CheckpointRole, Path]:
    """The two checkpoints' directories by role, written below `cache` unless they are there. Always the same weights.

    Raises BadInput for a name that is none of PAIRS, nor one with a block behind it.
    """
    found = re.fullmatch(r"(.+?)(?:-block([1-9]\d{0,3}))?", name)
    if not found or found[1] not in PAIRS:
        raise BadInput(f"{name!r}: no such random pair; there are {', '.join(PAIRS)}, and each as {{NAME}}-block256")
    shapes, block = found[1], int(found[2] or BLOCK)
    places: dict[CheckpointRole, Path] = {
        "target": cache / shapes / "target",
        "draft": cache / shapes / f"draft-{block}",
    }
    configs = make_configs(PAIRS[shapes], block)
    for role, place in places.items():
        if not place.is_dir():
            _write_checkpoint(role, place, configs)
    return places


def make_configs(shapes: Shapes, block: int) -> dict[CheckpointRole, dict]:
    """What stands in both `config.json`."""
    common = {
        **COMMON,
        "vocab_size": shapes.vocab,
        "max_position_embeddings": shapes.positions,
        "hidden_size": shapes.hidden,
        "num_attention_heads": 2 * shapes.kv_heads,
        "num_key_value_heads": shapes.kv_heads,
        "intermediate_size": shapes.mlp,
    }
    taps = default_target_layer_ids(shapes.layers, shapes.draft_layers)
    return {
        "target": {**common, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": shapes.layers},
        "draft": {
            **common,
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": shapes.draft_layers,
            "block_size": block,
            "dflash_config": {"mask_token_id": shapes.vocab - 1, "target_layer_ids": taps},
        },
    }


def _write_checkpoint(role: CheckpointRole, place: Path, configs: dict[CheckpointRole, dict]) -> None:
    """Whole or not at all, whoever else writes the same one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".writing-") as scratch:
        for each, config in configs.items():
            (Path(scratch) / each).mkdir()
            (Path(scratch) / each / "config.json").write_text(json.dumps(config, indent=1))
        target = read_target(read_config(Path(scratch) / "target"))
        programs = Programs(target, read_draft(read_config(Path(scratch) / "draft"), target), "float32")
        placements = [one for recipe in programs.recipes() if recipe.checkpoint == role for one in recipe.placements]
        _write_weights(placements, Path(scratch) / role, np.random.default_rng(SEEDS[role]))
        try:
            (Path(scratch) / role).rename(place)
        except OSError:
            if not place.is_dir():  # nobody was faster
                raise


def _write_weights(placements: Iterable[Placement], directory: Path, rng: np.random.Generator) -> None:
    """In files with an index, as published checkpoints of this size have it."""
    places: dict[str, str] = {}
    for number, part in enumerate(split(placements, MOST_BYTES)):
        file = f"model-{number:05}.safetensors"
        tensors = {placement.tensor: _draw(placement.stored, rng) for placement in part}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def split(placements: Iterable[Placement], most: int) -> Iterator[list[Placement]]:
    """In their order, each part of at most so many bytes in float32, or of one tensor."""
    part: list[Placement] = []
    held = 0
    for placement in placements:
        size = 4 * int(np.prod(placement.stored))
        if part and held + size > most:
            yield part
            part, held = [], 0
        part.append(placement)
        held += size
    if part:
        yield part


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of a size that keeps activations as they are."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("cache", type=Path)
    options = parser.parse_args()
    try:
        places = ensure_pair(options.name, options.cache)
    except DflashError as error:
        print(f"random_pair: {error}", file=sys.stderr)
        return error.exit_code
    print(" ".join(f"--{role} {place}" for role, place in places.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
