"""Warnings where nothing fails and something is wrong."""

import json
import logging

import pytest
from safetensors.numpy import load_file, save_file

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.diagnostics import diagnose_acceptance, diagnose_pair, diagnose_prompt, read_chat_template
from dflash_aot.runtime.metrics.counters import Counters

TEMPLATE = "<|im_start|>{{ messages[0].content }}"


def counted(rounds, stands):
    counters = Counters()
    for number in range(rounds):
        counters.note_row(3, int(number < stands))
    return counters


def test_a_mask_token_that_ends_answers_is_noticed(bundle):
    manifest = read_manifest(bundle("tiny"))
    mask = manifest.draft.facts.mask_token
    (advice,) = diagnose_pair(manifest, frozenset({mask, 1}))
    assert f"mask token {mask} is also one of the target's end tokens" in advice
    assert not [*diagnose_pair(manifest, frozenset({mask - 1}))]


@pytest.mark.parametrize(
    ("rounds", "stands", "warned"), [(200, 59, True), (200, 60, False), (199, 0, False), (0, 0, False)]
)
def test_acceptance_that_collapses_is_noticed_once_there_is_enough_to_see(rounds, stands, warned):
    advice = diagnose_acceptance(counted(rounds, stands))
    assert bool(advice) == warned
    if warned:
        assert "only 30% of 200 rounds" in advice and "k=0 may be faster" in advice


def test_without_speculation_there_is_no_acceptance_to_speak_of():
    counters = Counters()
    for _ in range(300):
        counters.note_row(0, 0)
    assert diagnose_acceptance(counters) is None


def test_a_plain_prompt_to_a_chat_model_is_noticed(tmp_path):
    assert diagnose_prompt(tmp_path, "hello") is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert "has a chat template and this prompt does not follow it" in diagnose_prompt(tmp_path, "hello")
    assert diagnose_prompt(tmp_path, "<|im_start|>user\nhello<|im_end|>") is None


def test_a_template_is_found_in_either_place(tmp_path):
    assert read_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert read_chat_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert read_chat_template(tmp_path) == TEMPLATE


@pytest.fixture
def random_draft(tied, tmp_path):
    """The tied set's draft with its output turned around: a file like any other."""
    tensors = load_file(tied.draft / "model.safetensors")
    tensors["norm.weight"] = -tensors["norm.weight"]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_bytes((tied.draft / "config.json").read_bytes())
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    return tmp_path / "draft"


def test_an_engine_warns_once_of_a_draft_that_does_not_fit(bundle, caplog, random_draft):
    """A draft of another training: nothing fails, and next to nothing is accepted."""
    params = SamplingParams(max_tokens=180, stop_token_ids=())
    with caplog.at_level(logging.WARNING), Engine.open(bundle("tied"), draft=random_draft, k=3) as engine:
        engine.generate_all([[token] for token in (3, 5, 7, 9)], params)
    warned = [record.message for record in caplog.records if "first drafted token" in record.message]
    assert len(warned) == 1


def test_a_draft_that_fits_is_not_warned_of(serve, cases, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            serve("tied", 7).generate(cases["len5"].prompt, SamplingParams(max_tokens=100, stop_token_ids=()))
    assert not caplog.records
