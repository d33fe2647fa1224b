"""Engines on the golden pairs, cases whose answers the reference implementation has given, and pairs made up."""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.weight_recipe import PLAIN, WeightFormats, WeightRecipe
from dflash_aot.compile.models.backend import CPU, TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.runtime import Engine

OPEN_ENGINES = 4  # under JAX 0.12 each holds up to 6,800 of the 65,530 memory mappings of a process


@dataclass(frozen=True)
class Case:
    """A prompt and the reference's plain greedy continuation of it, a token at a time."""

    prompt: list[int]
    answer: list[int]

    def later(self, tokens: int) -> "Case":
        """Greedy decoding has no memory but the text: a prompt that holds the answer's start gets the rest."""
        return Case(self.prompt + self.answer[:tokens], self.answer[tokens:])


@pytest.fixture(scope="session")
def serve(bundle: Callable[[str], Path], runs: dict) -> Iterator[Callable[..., Engine]]:
    """The engine of a set with a K, shared by tests. The least recently used is closed for another."""
    engines: dict[tuple[str, int], Engine] = {}

    def find_or_open(name: str, k: int) -> Engine:
        engine = engines.pop((name, k), None)
        if engine is None:
            if len(engines) == OPEN_ENGINES:
                _close(engines.pop(next(iter(engines))))
            pair = {"target": runs[name].target, "draft": runs[name].draft} if name in runs else {}
            engine = Engine.open(bundle(name), k=k, **pair)
        engines[name, k] = engine
        return engine

    yield find_or_open
    for engine in engines.values():
        _close(engine)


def _close(engine: Engine) -> None:
    assert engine.stats().compile_events == 0
    engine.close()


@pytest.fixture(scope="session")
def cases(tied) -> dict[str, Case]:
    """The tied set's prompts by name."""
    return {
        prompt["name"]: Case(prompt["prompt_ids"], prompt["ar_output_ids"][len(prompt["prompt_ids"]) :])
        for prompt in tied.facts["prompts"]
    }


# As small as a pair gets that eight devices can share. With few tokens some of a random draft's are the target's too.
VOCAB, DRAFT_VOCAB = 32, 16
SHAPES = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
DENSE = {**SHAPES, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 2,  # more devices than that hold copies
    "attention_bias": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
HYBRID = {
    **SHAPES,
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
HYBRID_EXPERTS = {
    **HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
ZLAB = {
    **SHAPES,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "block_size": 8,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]},
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "target"}},
    "block_size": 8,
    "draft_vocab_size": DRAFT_VOCAB,
    "mask_token_id": VOCAB - 1,
    "aux_hidden_state_layer_ids": [1, 2],
    "transformer_layer_config": {**SHAPES, "num_key_value_heads": 2, "model_type": "qwen3", "num_hidden_layers": 1},
}
SELECTING = {
    **ZLAB,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        **ZLAB["dflash_config"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 8,
    },
}
DSPARK = {
    **SHAPES,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 1,
    "block_size": 7,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": [0, 1],
    "markov_head_type": "vanilla",
    "markov_rank": 4,
}
# So wide that attention, layers, MLPs, Gated DeltaNet and DFlash2's convolutions are kernels of a TPU.
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 128}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LAYER = {**WIDE, "hidden_size": 256, "intermediate_size": 256}  # halves for two cores
SHARED = {**WIDE, "intermediate_size": 192}  # 96 on each of two devices
CONVOLVED = {"dflash_config": {**SELECTING["dflash_config"], "conv_group_size": 8}}
MADE_UP = {
    "dense": (DENSE, ZLAB),
    "wide heads": ({**DENSE, **LAYER}, {**ZLAB, **LAYER}),
    "hybrid of wide heads": ({**HYBRID_EXPERTS, **SHARED, **LINEAR}, {**SELECTING, **SHARED, **CONVOLVED}),
    "wide hybrid": ({**HYBRID, **LAYER, **LINEAR}, {**ZLAB, **LAYER}),
    "dspark": (DENSE, DSPARK),
    "experts": (EXPERTS, SPECULATORS),
    "dflash2": (HYBRID_EXPERTS, SELECTING),
    "hybrid": (HYBRID, ZLAB),
    "smallest": (
        {**DENSE, "num_hidden_layers": 2},
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "target_layer_ids": [0]}},
    ),
}


@dataclass(frozen=True)
class MadeUp:
    """A pair of checkpoints with random weights, and its programs."""

    places: dict[str, Path]

    def programs(self, devices: int = 1, stacked: bool = False, formats: WeightFormats = PLAIN) -> Programs:
        target = read_target(read_config(self.places["target"]))
        draft = read_draft(read_config(self.places["draft"]), target)
        return Programs(target, draft, "float32", TensorParallel(devices, TPU if stacked else CPU), formats=formats)


@pytest.fixture(scope="session")
def make_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], MadeUp]:
    """A key of MADE_UP → the pair, always the same."""

    @functools.cache
    def make(kind: str) -> MadeUp:
        pair = MadeUp({role: tmp_path_factory.mktemp(kind) / role for role in ("target", "draft")})
        for place, config in zip(pair.places.values(), MADE_UP[kind], strict=True):
            place.mkdir()
            (place / "config.json").write_text(json.dumps(config))
        tensors: dict[str, dict[str, np.ndarray]] = {role: {} for role in pair.places}
        rng = np.random.default_rng(8)
        for recipe in pair.programs().recipes():
            tensors[recipe.checkpoint] |= _fill(recipe, rng)
        for role, place in pair.places.items():
            save_file(tensors[role], place / "model.safetensors")
        return pair

    return make


@pytest.fixture(scope="session")
def smallest(make_up) -> SimpleNamespace:
    """Target and draft of a pair for tests of builds, whose programs are traced and compiled soonest."""
    return SimpleNamespace(**make_up("smallest").places)


def _fill(recipe: WeightRecipe, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tensors of a size that keeps activations as they are; a map to random tokens."""
    if recipe.mapped:
        met = np.sort(rng.choice(recipe.mapped.size, recipe.shape[0], replace=False))
        mask = np.isin(np.arange(recipe.mapped.size), met)
        return {recipe.placements[0].tensor: met - np.arange(met.size), recipe.mapped.mask: mask}
    tensors = {}
    for placement in recipe.placements:
        noise = rng.standard_normal(placement.stored, np.float32)
        norm = len(placement.stored) == 1 and not placement.tensor.endswith("_proj.bias")
        tensors[placement.tensor] = 1 + noise / 8 if norm else noise / np.float32(placement.stored[-1] ** 0.5)
    return tensors
