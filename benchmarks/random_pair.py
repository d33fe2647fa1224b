"""Checkpoint pairs with random weights, in the shapes of real ones: for times that do not depend on the weights.

Their text makes no sense, and their drafts are never accepted.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import default_target_layer_ids
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.programs.programs import Programs

BLOCK = 16
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
class PairSize:
    """Sizes of a random pair; by default those of Qwen3-0.6B. Two query heads share each kv head."""

    layers: int
    draft_layers: int
    vocab: int
    positions: int
    hidden: int = 1024
    kv_heads: int = 8
    mlp: int = 3072


# Millions of weights in target and draft: 596 and 84; 95 and 34, which keep two cores busy for tens of milliseconds;
# almost none, for tests.
PAIRS = {
    "qwen3-0.6b": PairSize(28, 5, 151936, 40960),
    "large": PairSize(6, 2, 1024, 2048),
    "tiny": PairSize(6, 2, 512, 2048, hidden=64, kv_heads=1, mlp=128),
}
SEEDS: dict[CheckpointRole, int] = {"target": 8, "draft": 9}


def ensure_pair(name: str, cache: Path) -> dict[CheckpointRole, Path]:
    """The directories of a pair, written below `cache` if missing; always the same weights. Raises BadInput."""
    found = re.fullmatch(r"(.+?)(?:-block([1-9]\d{0,3}))?", name)
    if not found or found[1] not in PAIRS:
        raise BadInput(
            f"{name!r} is not a random pair; there are {', '.join(PAIRS)}, and each as {{NAME}}-block256"
        )
    shapes, block = found[1], int(found[2] or BLOCK)
    folder = cache / shapes
    places: dict[CheckpointRole, Path] = {
        "target": folder / "target",
        "draft": folder / f"draft-{block}",
    }
    configs = make_configs(PAIRS[shapes], block)
    for role, place in places.items():
        if not place.is_dir():
            _write_checkpoint(role, place, configs)
    return places


def make_configs(shapes: PairSize, block: int) -> dict[CheckpointRole, dict]:
    """Contents of both `config.json`."""
    common = {
        **COMMON,
        "vocab_size": shapes.vocab,
        "max_position_embeddings": shapes.positions,
        "hidden_size": shapes.hidden,
        "num_attention_heads": 2 * shapes.kv_heads,
        "num_key_value_heads": shapes.kv_heads,
        "intermediate_size": shapes.mlp,
    }
    layer_ids = default_target_layer_ids(shapes.layers, shapes.draft_layers)
    return {
        "target": {
            **common,
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": shapes.layers,
        },
        "draft": {
            **common,
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": shapes.draft_layers,
            "block_size": block,
            "dflash_config": {"mask_token_id": shapes.vocab - 1, "target_layer_ids": layer_ids},
        },
    }


def _write_checkpoint(
    role: CheckpointRole, place: Path, configs: dict[CheckpointRole, dict]
) -> None:
    """Writes to a temporary directory and renames it, so that several processes may write the same checkpoint."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".writing-") as scratch:
        for each, config in configs.items():
            (Path(scratch) / each).mkdir()
            (Path(scratch) / each / "config.json").write_text(json.dumps(config, indent=1))
        target = read_target(read_config(Path(scratch) / "target"))
        programs = Programs(
            target, read_draft(read_config(Path(scratch) / "draft"), target), "float32"
        )
        placements = [
            one
            for recipe in programs.recipes()
            if recipe.checkpoint == role
            for one in recipe.placements
        ]
        rng = np.random.default_rng(SEEDS[role])
        tensors = {one.tensor: _draw(one.stored, rng) for one in placements}
        save_file(tensors, Path(scratch) / role / "model.safetensors", metadata={"format": "pt"})
        try:
            (Path(scratch) / role).rename(place)
        except OSError:
            if not place.is_dir():  # another process was not faster
                raise


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws one tensor: norms are 1, matrices keep the size of activations."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
