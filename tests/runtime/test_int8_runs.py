"""Int8 bundles against float32 models of the same integers: transformers' for the target, an engine's for the draft."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.key import REORDER_SUMS
from dflash_aot.compile import precompile
from dflash_aot.runtime import Engine, Result
from tests.conftest import INT8, RUNS, Golden, leave_out_k0
from tests.runtime.test_golden_runs import generate

# What is looked up, routers, DFlash2's convolutions and selector, and the strengths and decays of a delta rule.
PLAIN = ("embed_tokens.weight", "mlp.gate.weight", "codebook", "kernel_projection.weight", "hidden_projection.weight")
PLAIN += ("in_proj_a.weight", "in_proj_b.weight")
HEAD = "lm_head.weight"


def round_weight(weight: np.ndarray) -> np.ndarray:
    """The numbers that int8 leaves of a float32 weight [out, in]."""
    scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(weight / scales) * scales


def is_linear(name: str, tensor: np.ndarray) -> bool:
    """Whether an int8 bundle holds a tensor in int8."""
    return tensor.ndim == 2 and not name.endswith(PLAIN)


def round_checkpoint(source: Path, place: Path, tied: bool = False) -> Path:
    """Copies a checkpoint with its linear layers rounded. The head of a tied checkpoint becomes a tensor of its own."""
    read = (item for file in source.glob("*.safetensors") for item in load_file(file).items())
    tensors = {name: (one.float() if one.is_floating_point() else one).numpy() for name, one in read}
    if tied:
        tensors[HEAD] = next(array for name, array in tensors.items() if name.endswith("embed_tokens.weight"))
    place.mkdir()
    for name, array in tensors.items():
        if is_linear(name, array):
            tensors[name] = round_weight(array)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", place)
    return place


def untie(source: Path, place: Path) -> Path:
    """Copies a rounded checkpoint. The copy's head is no longer that of the embedding."""
    shutil.copytree(source, place)
    config = json.loads((source / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return place


@pytest.fixture(scope="session", params=INT8)
def rounded(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """Name of an int8 bundle, and its checkpoints with rounded weights."""
    run, place = RUNS[INT8[request.param]], tmp_path_factory.mktemp("rounded")
    target = round_checkpoint(run.target, place / "target", is_tied(run))
    return request.param, target, round_checkpoint(run.draft, place / "draft")


def is_tied(run: Golden) -> bool:
    return json.loads((run.target / "config.json").read_text())["tie_word_embeddings"]


def find_prompts(name: str) -> list[dict]:
    return RUNS[INT8[name]].facts["prompts"][::2]


@pytest.fixture(scope="session")
def results(rounded, bundle) -> dict[int, list[Result]]:
    """What the int8 bundle generates for every prompt, by K."""
    run = RUNS[INT8[rounded[0]]]
    found = {}
    for k in read_manifest(bundle(rounded[0])).grid.k:
        with Engine.open(bundle(rounded[0]), k=k, target=run.target, draft=run.draft) as engine:
            found[k] = [generate(engine, prompt) for prompt in find_prompts(rounded[0])]
            assert engine.stats().compile_events == 0
    return found


@pytest.fixture(scope="session")
def logits(rounded) -> Callable[[list[int]], torch.Tensor]:
    """Token ids → logits of transformers' model with rounded weights behind each [T, V]."""
    config = AutoConfig.from_pretrained(rounded[1], tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(rounded[1], config=config, dtype=torch.float32).eval()

    def compute(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return compute


def test_tokens_equal_greedy_decoding_with_rounded_weights(rounded, results, logits):
    prompts = find_prompts(rounded[0])
    for number, prompt in enumerate(prompts):
        for k, found in results.items():
            tokens = found[number].token_ids
            chosen = logits(prompt["prompt_ids"] + tokens).argmax(-1).tolist()
            assert (k, chosen[len(prompt["prompt_ids"]) - 1 : -1]) == (k, tokens)


@pytest.mark.parametrize("rounded", ["int8 causal", "int8 pruned", "int8 dflash2"], indirect=True)
def test_drafts_equal_those_of_rounded_weights_in_float32(rounded, results, bundle, tmp_path):
    name, target, draft = rounded
    k = max(results)
    plain = bundle(INT8[name])
    manifest = read_manifest(bundle(name))
    verified = [entry.compiler_options for entry in manifest.entries if entry.signature.program == "verify"]
    assert all(options.items() >= REORDER_SUMS.items() for options in verified)
    if (formats := manifest.formats).draft == "plain":
        assert (name, formats.target) == ("int8 causal", "int8")
        draft = RUNS[INT8[name]].draft
    if name == "int8 dflash2":  # the draft uses the tied head, which float32 bundles do not round
        plain, target = tmp_path / "bundle", untie(target, tmp_path / "target")
        grid = read_manifest(bundle(name)).grid
        options = {"platform": "cpu", "dtype": "float32", "sampling": ("greedy",), "self_test": False}
        with leave_out_k0():
            precompile(target, draft, plain, grid=grid, **options)
    with Engine.open(plain, k=k, target=target, draft=draft) as engine:
        for prompt, found in zip(find_prompts(name), results[k], strict=True):
            expected = generate(engine, prompt)
            assert (found.drafted, found.accepted) == (expected.drafted, expected.accepted)
