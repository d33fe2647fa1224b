"""Diagnostics: warnings about a checkpoint pair, a prompt, and low acceptance."""

import json
import logging

import pytest
from safetensors.numpy import load_file, save_file

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.diagnostics import diagnose_acceptance, diagnose_pair, diagnose_prompt

TEMPLATE = "<|im_start|>{{ messages[0].content }}"


def test_mask_token_among_the_end_tokens_is_diagnosed(bundle):
    manifest = read_manifest(bundle("tiny"))
    mask = manifest.draft.facts.mask_token
    (advice,) = diagnose_pair(manifest, frozenset({mask, 1}))
    assert f"mask token {mask} is also one of the target's end tokens" in advice
    assert not [*diagnose_pair(manifest, frozenset({mask - 1}))]


@pytest.mark.parametrize(
    ("rounds", "accepted", "warned"), [(200, 59, True), (200, 60, False), (199, 0, False), (0, 0, False)]
)
def test_low_acceptance_is_diagnosed_after_enough_rounds(rounds, accepted, warned):
    advice = diagnose_acceptance(rounds, accepted)
    assert bool(advice) == warned
    if warned:
        assert "only 30% of 200 greedy rounds" in advice and "k=0 may be faster" in advice


def test_plain_prompt_to_a_chat_model_is_diagnosed(tmp_path):
    assert diagnose_prompt(tmp_path, "hello") is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert "has a chat template and this prompt does not follow it" in diagnose_prompt(tmp_path, "hello")
    assert diagnose_prompt(tmp_path, "<|im_start|>user\nhello<|im_end|>") is None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert diagnose_prompt(tmp_path, "hello") is None


@pytest.fixture
def random_draft(tied, tmp_path):
    """The tied pair's draft with a negated output: a valid checkpoint that predicts nothing."""
    tensors = load_file(tied.draft / "model.safetensors")
    tensors["norm.weight"] = -tensors["norm.weight"]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_bytes((tied.draft / "config.json").read_bytes())
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    return tmp_path / "draft"


@pytest.mark.parametrize(("name", "temperature", "warnings"), [("tied", 0.0, 1), ("sampled", 1.0, 0)])
def test_engine_warns_once_about_a_draft_of_another_training(bundle, caplog, random_draft, name, temperature, warnings):
    params = SamplingParams(max_tokens=180, temperature=temperature, stop_token_ids=())
    with caplog.at_level(logging.WARNING), Engine.open(bundle(name), draft=random_draft, k=7) as engine:
        engine.generate_all([[token] for token in (3, 5, 7, 9)], params)
    warned = [record.message for record in caplog.records if "first drafted token" in record.message]
    assert len(warned) == warnings
