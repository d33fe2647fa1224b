"""Configs as the published models have them, and a manifest of a pair of them."""

import hashlib
import json
from pathlib import Path

import pytest

from dflash_aot.cache.architecture import Draft, Target, read_draft, read_target
from dflash_aot.cache.config_file import ConfigFile
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.manifest import SCHEMA, DraftModel, Entry, Manifest, Memory, TargetModel
from dflash_aot.cache.recipe import Placement, WeightRecipe
from dflash_aot.cache.signature import KvShape, Pair, ProgramWeights, signatures, state_arrays

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_4B_DFLASH_B16 = {
    **QWEN3_4B,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
}
TARGET_FILE, DRAFT_FILE = Path("qwen3-4b/config.json"), Path("dflash-b16/config.json")


@pytest.fixture
def read_changed_target():
    """Changes to Qwen3-4B's config → its facts; a change to None is what transformers writes for "absent"."""

    def read(**changes: object) -> Target:
        return read_target(ConfigFile(TARGET_FILE, {**QWEN3_4B, **changes}))

    return read


@pytest.fixture
def read_changed_draft(read_changed_target):
    """Changes to the config of its DFlash draft → the draft's facts; `inner` are changes inside dflash_config."""

    def read(inner: dict | None = None, **changes: object) -> Draft:
        config = {**QWEN3_4B_DFLASH_B16, **changes}
        config["dflash_config"] = {**config["dflash_config"], **(inner or {})}
        return read_draft(ConfigFile(DRAFT_FILE, config), read_changed_target())

    return read


@pytest.fixture
def write_config(tmp_path):
    """Content of a config.json, as text or as an object → the checkpoint directory that has it."""

    def write(content: object) -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return write


@pytest.fixture(scope="session")
def environment() -> Environment:
    """Some machine."""
    return Environment(
        jax="0.10.2",
        jaxlib="0.10.2",
        platform="cpu",
        platform_version="<unknown>",
        device_kind="cpu",
        device_count=1,
        machine="x86_64",
        cpu_features=("avx2", "fma", "sse4_2"),
        xla_flags="",
    )


@pytest.fixture(scope="session")
def blobs() -> list[bytes]:
    """What would be executables."""
    return [bytes([seed]) * (100 + seed) for seed in range(7)]


@pytest.fixture(scope="session")
def manifest(environment, blobs) -> Manifest:
    """A complete one; its executables are `blobs`."""
    target = read_target(ConfigFile(TARGET_FILE, QWEN3_4B))
    draft = read_draft(ConfigFile(DRAFT_FILE, QWEN3_4B_DFLASH_B16), target)
    grid = parse_grid("batch=1 length=32 k=0,3 prefill=16", draft.block)
    pair = Pair(
        target_kv=KvShape(36, 8, 128),
        draft_kv=KvShape(5, 8, 128),
        feature_width=5 * 2560,
        block=16,
        vocab=151936,
        dtype="bfloat16",
    )
    placement = Placement("fc.weight", stored=(2560, 12800), offset=(0, 0), extent=(2560, 12800))
    weights = (WeightRecipe("draft.fc.weight", "draft", (2560, 12800), "bfloat16", (placement,)),)
    names = ProgramWeights(target=(), draft=(), context=("draft.fc.weight",))
    entries = tuple(
        Entry(
            signature=signature,
            key=hashlib.sha256(signature.label.encode()).hexdigest(),
            sha256=hashlib.sha256(blob).hexdigest(),
            bytes=len(blob),
            seconds=0.5,
            memory=Memory(arguments=5, outputs=4, aliased=3, temporaries=2, code=1),
        )
        for signature, blob in zip(signatures(pair, grid, names), blobs, strict=True)
    )
    return Manifest(
        schema=SCHEMA,
        environment=environment,
        target=TargetModel("Qwen/Qwen3-4B", target),
        draft=DraftModel("z-lab/Qwen3-4B-DFlash-b16", draft),
        dtype="bfloat16",
        grid=grid,
        state=state_arrays(pair, grid),
        weights=weights,
        entries=entries,
    )
