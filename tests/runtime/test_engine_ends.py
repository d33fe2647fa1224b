"""Where an answer ends: stop tokens, limits, and the last position of the grid."""

import json
import shutil

import pytest

from dflash_aot.cache.errors import GridMiss
from dflash_aot.runtime import Engine, SamplingParams

KS = (0, 3, 7)
CAPACITY = 208  # of the tied bundle
TINY = 32  # of the tiny one


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", ["len70", "len5"])
def test_any_token_can_be_the_stop_token(serve, cases, k, name):
    case = cases[name]
    stops = sorted(set(case.answer))
    params = [SamplingParams(max_tokens=len(case.answer), stop_token_ids=[stop]) for stop in stops]
    results = serve("tied", k).generate_all([case.prompt] * len(stops), params)
    for stop, result in zip(stops, results, strict=True):
        assert result.token_ids == case.answer[: case.answer.index(stop) + 1]
        assert result.finish_reason == "stop"


def test_stop_token_drops_accepted_tokens_behind_it(serve, tied):
    prompt = next(prompt for prompt in tied.facts["prompts"] if prompt["name"] == "stop_mid_block")
    result = serve("tied", 7).generate(
        prompt["prompt_ids"], SamplingParams(max_tokens=64, stop_token_ids=prompt["stop_token_ids"])
    )
    assert result.token_ids == prompt["new_token_ids"]
    assert 1 + sum(accepted + 1 for accepted in result.accepted) > len(result.token_ids)


def test_first_of_several_stop_tokens_ends_the_answer(serve, cases):
    case = cases["len70"]
    early, late = case.answer[3], case.answer[-1]
    result = serve("tied", 7).generate(case.prompt, SamplingParams(stop_token_ids=[late, early]))
    assert result.token_ids == case.answer[: min(case.answer.index(early), case.answer.index(late)) + 1]


def test_stop_token_in_the_prompt_is_ignored(serve, cases):
    case = cases["len30"]
    unseen = next(token for token in case.prompt if token not in case.answer)
    result = serve("tied", 7).generate(
        case.prompt, SamplingParams(max_tokens=len(case.answer), stop_token_ids=[unseen])
    )
    assert (result.token_ids, result.finish_reason) == (case.answer, "length")


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", ["len70", "random12"])
def test_max_tokens_cuts_the_answer_exactly(serve, cases, k, name):
    case = cases[name]
    limits = range(1, len(case.answer) + 1)
    results = serve("tied", k).generate_all(
        [case.prompt] * len(limits), [SamplingParams(max_tokens=limit, stop_token_ids=()) for limit in limits]
    )
    assert [result.token_ids for result in results] == [case.answer[:limit] for limit in limits]
    assert {result.finish_reason for result in results} == {"length"}


def test_stop_token_at_the_limit_counts_as_stop(serve, cases):
    case = cases["len70"]
    at = case.answer.index(case.answer[5])
    result = serve("tied", 7).generate(case.prompt, SamplingParams(max_tokens=at + 1, stop_token_ids=[case.answer[5]]))
    assert (len(result.token_ids), result.finish_reason) == (at + 1, "stop")


def test_request_without_limit_runs_to_the_last_position(serve, cases):
    case = cases["len1"]
    result = serve("tiny", 3).generate(case.prompt, SamplingParams(stop_token_ids=()))
    # The last token needs no kv: one more than there are positions.
    assert case.prompt + result.token_ids == case.prompt + case.answer[:TINY]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_of_any_length_fills_the_last_position(serve, cases, k):
    later = [cases["len1"].later(cut) for cut in range(TINY)]
    results = serve("tiny", k).generate_all([case.prompt for case in later], SamplingParams(stop_token_ids=()))
    for case, result in zip(later, results, strict=True):
        assert result.token_ids == case.answer[: TINY + 1 - len(case.prompt)]
        assert result.finish_reason == "length"
    assert len(results[-1].token_ids) == 1  # its prompt is as long as the capacity


def test_last_positions_give_the_same_tokens_for_every_k(serve, cases):
    everything = SamplingParams(stop_token_ids=())
    start = cases["len131"]
    whole = start.prompt + serve("tied", 0).generate(start.prompt, everything).token_ids
    assert len(whole) == CAPACITY + 1
    cuts = [*range(CAPACITY - 12, CAPACITY + 1), 140]
    for k in KS:
        results = serve("tied", k).generate_all([whole[:cut] for cut in cuts], everything)
        assert [result.token_ids for result in results] == [whole[cut:] for cut in cuts]


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
