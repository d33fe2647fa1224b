"""Checkpoint pairs with random weights, in the shapes of real ones: for times that do not depend on the weights.

Their text makes no sense, and their drafts are never accepted.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import default_target_layer_ids
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.programs.programs import Programs

BLOCK = 16
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
SHORT = {"vocab_size": 1024, "max_position_embeddings": 2048}
NARROW = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
}
# Layers of target and draft, and what differs from QWEN3. Millions of weights: 596 and 84; 95 and 34, which keep two
# cores busy for tens of milliseconds; almost none, for tests.
PAIRS = {
    "qwen3-0.6b": (28, 5, QWEN3),
    "large": (6, 2, QWEN3 | SHORT),
    "tiny": (6, 2, QWEN3 | SHORT | NARROW),
}
SEEDS: dict[CheckpointRole, int] = {"target": 8, "draft": 9}


def ensure_pair(name: str, cache: Path) -> dict[CheckpointRole, Path]:
    """The directories of a pair, written below `cache` if missing; always the same weights. Raises BadInput."""
    if name not in PAIRS:
        raise BadInput(f"{name!r} is not a random pair; there are {', '.join(PAIRS)}")
    configs = make_configs(*PAIRS[name])
    places: dict[CheckpointRole, Path] = {role: cache / name / role for role in SEEDS}
    for role, place in places.items():
        if not place.is_dir():
            _write_checkpoint(role, place, configs)
    return places


def make_configs(layers: int, draft_layers: int, common: dict) -> dict[str, dict]:
    """Contents of both `config.json`."""
    layer_ids = list(default_target_layer_ids(layers, draft_layers))
    mask = common["vocab_size"] - 1
    target = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}
    draft = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": draft_layers,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": layer_ids},
    }
    return {"target": common | target, "draft": common | draft}


def _write_checkpoint(role: CheckpointRole, place: Path, configs: Mapping[str, dict]) -> None:
    """Writes to a temporary directory and renames it, so that several processes may write the same checkpoint."""
    target = read_target(ConfigFile(place, configs["target"]))
    draft = read_draft(ConfigFile(place, configs["draft"]), target)
    rng = np.random.default_rng(SEEDS[role])
    tensors: dict[str, np.ndarray] = {}
    for recipe in Programs(target, draft, "float32").recipes():
        if recipe.checkpoint == role:
            tensors |= {one.tensor: _draw(one.stored, rng) for one in recipe.placements}
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".writing-") as scratch:
        written = Path(scratch) / role
        written.mkdir()
        (written / "config.json").write_text(json.dumps(configs[role], indent=1))
        save_file(tensors, written / "model.safetensors", metadata={"format": "pt"})
        try:
            written.rename(place)
        except OSError:
            if not place.is_dir():  # another process was not faster
                raise


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws one tensor: norms are 1, matrices keep the size of activations."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
