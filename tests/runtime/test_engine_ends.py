"""Where an answer ends: stop tokens, limits, and the last position of the grid."""

import json
import shutil

import pytest

from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

TINY = 32  # of the tiny one


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_of_any_length_fills_the_last_position(serve, cases, k):
    later = [cases["len1"].later(cut) for cut in range(TINY)]
    results = serve("tiny", k).generate_all([case.prompt for case in later], SamplingParams(stop_token_ids=()))
    for case, result in zip(later, results, strict=True):
        assert result.token_ids == case.answer[: TINY + 1 - len(case.prompt)]
        assert result.finish_reason == "length"
    assert len(results[-1].token_ids) == 1  # its prompt is as long as the capacity


NAMED = {"id": 7, "content": "<|im_end|>"}
ENDS = [
    ({"config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": [2, 1]}}, {1, 2}, 0),
    ({"config.json": {"text_config": {"eos_token_id": 3}, "eos_token_id": None}}, {3}, 0),
    ({"generation_config.json": {"eos_token_id": -1}}, set(), 1),
    ({"generation_config.json": {"eos_token_id": 1, "suppress_tokens": [5, 6]}}, {1}, 1),
    ({"config.json": {"eos_token_id": [9, 4]}, "generation_config.json": {"eos_token_id": [9]}}, {4}, 2),
    ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, {7}, 0),
    ({"config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": NAMED}}, {0, 7}, 0),
    ({"special_tokens_map.json": {"eos_token": "b"}}, {5}, 0),
    ({"tokenizer_config.json": {"eos_token": "c"}}, set(), 1),  # beyond the head
    ({"tokenizer_config.json": {"eos_token": "d"}}, set(), 1),
    ({"tokenizer_config.json": {"eos_token": None}}, set(), 0),
]


@pytest.mark.parametrize(("files", "expected", "warnings"), ENDS)
def test_end_tokens_are_those_of_configs_and_tokenizer(tmp_path, files, expected, warnings):
    tokenizer = {"added_tokens": [NAMED], "model": {"vocab": {"b": 5, "c": 9}}}
    for name, content in {"tokenizer.json": tokenizer, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = read_end_tokens(tmp_path, 9)
    assert (found.ids, len(found.warnings)) == (expected, warnings)
    assert ("<|im_end|> (tokenizer_config.json)" in str(found)) is (7 in expected)
    assert str(found).startswith("none") is (not expected)


def test_default_stop_tokens_are_those_of_the_target(bundle, tied, cases, tmp_path):
    case = cases["len5"]
    first, second = case.answer[9], next(token for token in case.answer if token not in case.answer[:10])
    target = tmp_path / "target"
    shutil.copytree(tied.target, target)
    facts = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**facts, "eos_token_id": [second, first]}))
    with Engine.open(bundle("tiny"), target=str(target)) as engine:
        default = engine.generate(case.prompt)
        assert default.token_ids == case.answer[: case.answer.index(first) + 1]
        assert default.finish_reason == "stop"
        endless = engine.generate(case.prompt, SamplingParams(stop_token_ids=()))
        assert endless.token_ids == case.answer[: TINY + 1 - len(case.prompt)]
        replaced = engine.generate(case.prompt, SamplingParams(stop_token_ids=[second]))
        assert replaced.token_ids == case.answer[: case.answer.index(second) + 1]
        (target / "generation_config.json").unlink()  # config.json names another one, which never comes
    with Engine.open(bundle("tiny"), target=str(target)) as engine:
        assert engine.generate(case.prompt).finish_reason == "length"
