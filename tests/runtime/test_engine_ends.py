"""Where an answer ends: stop tokens, limits, and the last position of the grid."""

import json
import shutil

import pytest

from dflash_aot.cache.errors import GridMiss
from dflash_aot.runtime import Engine, SamplingParams

TINY = 32  # of the tiny one


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_of_any_length_fills_the_last_position(serve, cases, k):
    later = [cases["len1"].later(cut) for cut in range(TINY)]
    results = serve("tiny", k).generate_all([case.prompt for case in later], SamplingParams(stop_token_ids=()))
    for case, result in zip(later, results, strict=True):
        assert result.token_ids == case.answer[: TINY + 1 - len(case.prompt)]
        assert result.finish_reason == "length"
    assert len(results[-1].token_ids) == 1  # its prompt is as long as the capacity


def test_position_beyond_the_last_is_refused(serve, cases):
    engine, case = serve("tiny", 3), cases["len5"]
    fits = TINY + 1 - len(case.prompt)
    exact = engine.generate(case.prompt, SamplingParams(max_tokens=fits, stop_token_ids=()))
    assert exact.token_ids == case.answer[:fits]
    with pytest.raises(
        GridMiss, match=f"length={TINY + 1}.*grid ends at.*length={TINY}.*dflash-precompile .*--buckets"
    ):
        engine.generate(case.prompt, SamplingParams(max_tokens=fits + 1, stop_token_ids=()))


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
