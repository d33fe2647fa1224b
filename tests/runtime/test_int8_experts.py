"""Mixtures of experts in int8, from plain and quantized checkpoints, against transformers with the same integers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_aot.compile import precompile
from dflash_aot.runtime import Engine, SamplingParams
from tests.quantized_checkpoints import FILE, quantize_checkpoint
from tests.runtime.test_int8_runs import is_linear, round_weight

PROMPTS = [[1], [5] * 20, [*range(31)], [31, 0, 9, 9]]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]


@pytest.fixture(scope="module")
def bundle_with_experts(make_up, tmp_path_factory):
    path, places = tmp_path_factory.mktemp("experts") / "bundle", make_up("experts").places
    precompile(
        *places.values(),
        path,
        grid="batch=4 length=64 k=0,7 prefill=16",
        platform="cpu",
        dtype="float32",
        weights="int8",
        sampling=["greedy"],
        self_test=False,
    )
    return path


def load_model(config: dict, tensors: dict, place: Path):
    """The float32 model of transformers with `tensors`."""
    place.mkdir()
    config.pop("quantization_config", None)
    (place / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    save_file(tensors, place / FILE, {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


@pytest.mark.parametrize("form", [None, "fp8", "packed"])
def test_tokens_are_those_of_transformers_with_the_same_integers(form, bundle_with_experts, make_up, tmp_path, caplog):
    places = make_up("experts").places
    if form is None:
        meant, exact = load_file(places["target"] / FILE), set()
    else:
        made = quantize_checkpoint(places["target"], tmp_path / "target", form, ROUTERS)
        meant, places = made.meant, {**places, "target": made.directory}
        exact = {name for name in meant if f"{name}_scale" in made.stored}
    meant = {
        name: round_weight(tensor) if is_linear(name, tensor) and name not in exact else tensor
        for name, tensor in meant.items()
    }
    assert len(exact) == (3 * (4 + 4 * 3) if form == "packed" else 0)  # projections and experts of three layers
    model = load_model(json.loads((places["target"] / "config.json").read_text()), meant, tmp_path / "meant")
    params = SamplingParams(max_tokens=16, stop_token_ids=())
    answers = {}
    for k in (0, 7):
        with Engine.open(bundle_with_experts, k=k, **places) as engine:
            together = engine.generate_all(PROMPTS, params)
            answers[k, 4] = [result.token_ids for result in together]
            answers[k, 1] = [engine.generate(prompt, params).token_ids for prompt in PROMPTS]
    for answer in answers.values():
        assert answer == answers[0, 1]
    for prompt, tokens in zip(PROMPTS, answers[0, 1], strict=True):
        with torch.no_grad():
            chosen = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1).tolist()
        assert chosen[len(prompt) - 1 : -1] == tokens
    assert len({token for answer in answers[0, 1] for token in answer}) > 8
    said = [record.getMessage() for record in caplog.records if record.name.endswith("engine_parts")]
    assert [message.split("block ")[-1] for message in said] == (
        ["become int8 with a scale per output channel, rounded"] * 2 if form == "fp8" else []
    )
