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
from dflash_aot.compile import precompile
from dflash_aot.runtime import Engine, Result, SamplingParams
from tests.conftest import INT8, RUNS, Golden
from tests.runtime.test_golden_runs import generate, make_params

# Their drafts have heads of their own, and the tied target chooses the same tokens if its head is not rounded.
SAME_CHOICES = ("int8 pruned", "int8 anchored")
# Of the tied pairs whose drafts use the target's head, those for which a float32 bundle with a rounded head is built.
UNTIED_COPIES = (
    "int8 dflash2",
    "int8 dflash2_speculators",
    "int8 dflash2_sliding",
    "int8 softcap",
    "int8 hybrid_text",
    "int8 hybrid_sliding",
)
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


@pytest.fixture(scope="session")
def results(rounded, bundle) -> dict[int, list[Result]]:
    """What the int8 bundle generates for every prompt, by K."""
    run = RUNS[INT8[rounded[0]]]
    found = {}
    for k in read_manifest(bundle(rounded[0])).grid.k:
        with Engine.open(bundle(rounded[0]), k=k, target=run.target, draft=run.draft) as engine:
            found[k] = [generate(engine, prompt) for prompt in run.facts["prompts"]]
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


def test_tokens_of_every_k_equal_greedy_decoding_with_rounded_weights(rounded, results, logits):
    prompts = RUNS[INT8[rounded[0]]].facts["prompts"]
    for number, prompt in enumerate(prompts):
        chosen = logits(prompt["prompt_ids"] + results[0][number].token_ids).argmax(-1).tolist()
        assert chosen[len(prompt["prompt_ids"]) - 1 : -1] == results[0][number].token_ids
        for k, found in results.items():
            assert (k, found[number].token_ids) == (k, results[0][number].token_ids)


def test_drafts_equal_those_of_rounded_weights_in_float32(rounded, results, bundle, tmp_path):
    name, target, draft = rounded
    run, k = RUNS[INT8[name]], max(results)
    if name in UNTIED_COPIES:
        plain, target = tmp_path / "bundle", untie(target, tmp_path / "target")
        grid = f"batch=1 length={read_manifest(bundle(name)).grid.capacity} k={k} prefill=64"
        precompile(target, draft, plain, grid=grid, platform="cpu", dtype="float32", self_test=False)
    elif is_tied(run) and name not in SAME_CHOICES:
        pytest.skip("no float32 bundle has a head beside a tied embedding")
    else:
        plain = bundle(INT8[name])
    with Engine.open(plain, k=k, target=target, draft=draft) as engine:
        for prompt, found in zip(run.facts["prompts"], results[k], strict=True):
            expected = generate(engine, prompt)
            assert (found.drafted, found.accepted) == (expected.drafted, expected.accepted)


@pytest.mark.parametrize("rounded", ["int8 tied", "int8 dflash2"], indirect=True)
def test_prompts_together_give_the_tokens_of_each_alone(rounded, results, bundle):
    run = RUNS[INT8[rounded[0]]]
    assert read_manifest(bundle(rounded[0])).grid.batch == (1, 3)
    prompts = [prompt["prompt_ids"] for prompt in run.facts["prompts"]]
    params = [make_params(prompt) for prompt in run.facts["prompts"]]
    for k, alone in results.items():
        with Engine.open(bundle(rounded[0]), k=k, target=run.target, draft=run.draft) as engine:
            together = engine.generate_all(prompts, params)
        for one, other in zip(together, alone, strict=True):
            assert (one.token_ids, one.drafted, one.accepted) == (other.token_ids, other.drafted, other.accepted)


@pytest.mark.parametrize("rounded", ["int8 untied"], indirect=True)
def test_draft_in_floats_changes_the_blocks_and_not_the_text(rounded, results, bundle):
    run, k, drafted = RUNS["untied"], max(results), []
    formats = read_manifest(bundle("int8 target")).formats
    assert (formats.target, formats.draft) == ("int8", "plain")
    with Engine.open(bundle("int8 target"), k=k) as engine:
        for prompt, expected in zip(run.facts["prompts"], results[k], strict=True):
            found = generate(engine, prompt)
            assert found.token_ids == expected.token_ids
            drafted.append(found.drafted == expected.drafted)
    assert not all(drafted)


@pytest.mark.parametrize("rounded", ["int8 untied"], indirect=True)
def test_activations_in_bfloat16_choose_nearly_the_tokens_of_rounded_weights(rounded_run, rounded, logits, bundle):
    """Each token is compared behind the same text: the first that differs does not change what follows."""
    gaps, accepted, rounds = [], 0, 0
    with Engine.open(bundle("int8 bfloat16"), k=15) as engine:
        for prompt in rounded_run.facts["prompts"]:
            found = generate(engine, prompt)
            rows = logits(prompt["prompt_ids"] + found.token_ids)[len(prompt["prompt_ids"]) - 1 : -1]
            chosen = rows[range(len(rows)), found.token_ids]
            gaps += (rows.max(-1).values - chosen).tolist()
            accepted, rounds = accepted + sum(found.accepted), rounds + len(found.accepted)
        assert engine.stats().compile_events == 0
    assert sum(gap > 0 for gap in gaps) <= len(gaps) / 50 and max(gaps) < 0.25
    assert abs(accepted / rounds - 5.4) < 0.5


@pytest.mark.parametrize("rounded", ["int8 tied", "int8 untied"], indirect=True)
def test_sampled_tokens_are_equal_at_every_k_and_batch_and_their_probabilities_those_of_rounded_weights(
    rounded, logits, bundle
):
    run = RUNS[INT8[rounded[0]]]
    prompts = [prompt["prompt_ids"] for prompt in run.facts["prompts"]]
    params = SamplingParams(max_tokens=24, stop_token_ids=(), temperature=2.0, seed=3, logprobs=1)
    found = {}
    for k in read_manifest(bundle(rounded[0])).grid.k:
        with Engine.open(bundle(rounded[0]), k=k, target=run.target, draft=run.draft) as engine:
            found[k, 3] = engine.generate_all(prompts, params)
            found[k, 1] = [engine.generate(prompt, params) for prompt in prompts]
    for results in found.values():
        assert [result.token_ids for result in results] == [result.token_ids for result in found[0, 1]]
        for prompt, result in zip(prompts, results, strict=True):
            rows = logits(prompt + result.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
            expected = [float(row[token]) for row, token in zip(rows, result.token_ids, strict=True)]
            assert [one.logprob for one in result.logprobs] == pytest.approx(expected, abs=2e-4)
    assert any(
        result.token_ids != logits(prompt + result.token_ids)[len(prompt) - 1 : -1].argmax(-1).tolist()
        for prompt, result in zip(prompts, found[0, 1], strict=True)
    )
