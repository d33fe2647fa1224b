"""A pair of checkpoints with random weights, large enough that a machine without an accelerator is busy with it.

What it says makes no sense, and its draft guesses nothing; how long a round takes does not depend on that.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash_aot.cache.config_file import read_config
from dflash_aot.cache.draft_config import read_draft
from dflash_aot.cache.target_config import read_target
from dflash_aot.compile.programs import Programs

# As wide as Qwen3-0.6B, with 6 of its 28 layers and a small vocabulary: 94 million weights, and 31 in the draft.
VOCAB = 1024
SHAPES = {
    "hidden_act": "silu",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "target": {**SHAPES, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 6},
    "draft": {
        **SHAPES,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": 16,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 4]},
    },
}


def write_pair(directory: Path) -> dict[str, Path]:
    """Always the same one. Returns the two checkpoints' directories by role."""
    places = {role: directory / role for role in CONFIGS}
    for role, place in places.items():
        place.mkdir()
        (place / "config.json").write_text(json.dumps(CONFIGS[role]))
    target = read_target(read_config(places["target"]))
    programs = Programs(target, read_draft(read_config(places["draft"]), target), "float32")
    tensors: dict[str, dict[str, np.ndarray]] = {role: {} for role in places}
    rng = np.random.default_rng(8)
    for recipe in programs.recipes():
        for placement in recipe.placements:
            tensors[recipe.checkpoint][placement.tensor] = _draw(placement.stored, rng)
    for role, place in places.items():
        save_file(tensors[role], place / "model.safetensors")
    return places


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of a size that keeps activations as they are."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
