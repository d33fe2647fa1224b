"""JSON lines: fields of requests and results, errors, order."""

import json
from dataclasses import replace

import pytest

from dflash_aot.bin.jsonl import READ_AHEAD_LINES, answer_lines, failed, output_line
from dflash_aot.runtime import Engine, Result, SamplingParams, TokenLogprob

DONE = Result([5, 6], "ab", "length", 3, [1], [[5, 7]], None, 0.1, 0.2)
LOGPROBS = [TokenLogprob(5, -0.25, ((5, -0.25), (7, -1.5))), TokenLogprob(6, -2.0)]
LINE = {"prompt_ids": [1, 2, 3], "max_tokens": 4}


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.open(bundle("sampled_small")) as engine:
        yield engine


def ask(engine: Engine, *lines: dict | bytes, **defaults) -> list[Result]:
    written = [line if isinstance(line, bytes) else json.dumps({**LINE, **line}).encode() for line in lines]
    return [result for _, result in answer_lines(engine, written, SamplingParams(**defaults))]


def test_output_line_has_logprobs_and_drafted_only_on_request():
    plain = json.loads(output_line("a", DONE, False))
    assert plain == {
        "id": "a", "token_ids": [5, 6], "text": "ab", "finish_reason": "length", "prompt_tokens": 3, "accepted": [1],
        "cached_tokens": 0, "error": None,
    }  # fmt: skip
    detailed = json.loads(output_line("a", replace(DONE, logprobs=LOGPROBS), True))
    assert detailed.pop("drafted") == [[5, 7]]
    assert detailed.pop("logprobs") == [
        {"token_id": 5, "logprob": -0.25, "top": [[5, -0.25], [7, -1.5]]},
        {"token_id": 6, "logprob": -2.0, "top": []},
    ]
    assert detailed == plain


def test_output_line_of_an_incomplete_result_has_its_error():
    cut = replace(DONE, finish_reason="cancelled", error="its deadline of 2 s has passed")
    answer = json.loads(output_line(1, cut, False))
    assert (answer["token_ids"], answer["finish_reason"], answer["error"]) == ([5, 6], "cancelled", cut.error)
    assert json.loads(output_line(1, failed("no"), False))["error"] == "no"


def test_every_sampling_field_of_a_line_reaches_the_engine(engine):
    fields = {"max_tokens": 100, "temperature": 3.0, "seed": 4, "top_k": 10, "top_p": 0.8, "min_p": 0.2}
    fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    fields |= {"logit_bias": {"17": 5, "0": -100}, "logprobs": 2}
    (answer,) = ask(engine, {**fields, "k": 7})  # with equal K log-probabilities are equal to the last bit
    params = SamplingParams(**{**fields, "logit_bias": {17: 5, 0: -100}}, k=7)
    expected = engine.generate(LINE["prompt_ids"], params)
    assert (answer.error, answer.token_ids, answer.logprobs) == (None, expected.token_ids, expected.logprobs)
    assert [len(chosen.top) for chosen in answer.logprobs] == [2] * 100
    for name in fields:
        without = engine.generate(LINE["prompt_ids"], replace(params, **{name: getattr(SamplingParams(), name)}))
        assert (without.token_ids, without.logprobs) != (answer.token_ids, answer.logprobs), name


def test_fields_of_a_line_override_the_defaults(engine):
    fields = {"temperature": 3.0, "seed": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5}
    asked = {"max_tokens": 16, "k": 7}
    (by_line,), (by_default,) = ask(engine, {**asked, **fields}), ask(engine, asked, **fields)
    assert by_line.error is None and by_line.token_ids == by_default.token_ids
    without, null = ask(engine, asked, {**asked, **dict.fromkeys(fields)})
    assert without.token_ids == null.token_ids != by_line.token_ids


CHECKED = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_p")
INVALID = [
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2]: an object of token ids and numbers is needed"),
    ({"logit_bias": {"x": 1}}, "logit_bias names 'x': a token id is needed"),
    ({"logit_bias": {"01": 1}}, "logit_bias names '01'"),
    ({"logit_bias": {"١": 1}}, "logit_bias names '١'"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias names '999"),
    ({"logit_bias": {"9999": 1}}, "logit_bias holds 9999: the target's tokens are 0 to 511"),
    ({"logit_bias": {"1": 101}}, "logit_bias is {1: 101}"),
    ({"logit_bias": {"1": "2"}}, "logit_bias is {1: '2'}"),
    ({"logprobs": 21}, "logprobs is 21"),
    *(({name: "much"}, f"{name} is 'much'") for name in CHECKED),
    ({"k": 2}, "k=2"),
    ({"priority": 0.5}, "priority is 0.5"),
    ({"deadline": 0}, "deadline is 0"),
    ({"deadline": "soon"}, "deadline is 'soon'"),
    ({"trace": True}, "unknown fields trace"),
    (b"[" * 100_000, "not JSON"),
    (b'{"id": NaN, "prompt_ids": [1], "max_tokens": 1}', "not JSON"),
    (b'{"prompt_ids": [1], "logit_bias": {"1": 2, "1": 3}}', "'1' is given twice"),
    (b'{"prompt_ids": [1], "max_tokens": 1, "max_tokens": 2}', "'max_tokens' is given twice"),
    (b'{"prompt_ids": [1], "temperature": 1e999}', "the number 1e999 is too large"),
    (b'{"prompt_ids": [1, 2], "max_tokens": ' + b"9" * 4300 + b"}", "a number of 4300 digits"),
]


def test_invalid_lines_are_refused_and_other_lines_are_served(engine):
    before, *refused, after = ask(engine, {}, *(fields for fields, _ in INVALID), {})
    for (fields, words), wrong in zip(INVALID, refused, strict=True):
        assert (wrong.finish_reason, wrong.token_ids) == ("error", []) and words in wrong.error, fields
    assert before.token_ids == after.token_ids and len(before.token_ids) == 4 and before.error is None


def test_passed_deadline_cancels_the_request_with_an_error(engine):
    (late,) = ask(engine, {"max_tokens": 150, "deadline": 1e-6})
    assert late.finish_reason == "cancelled" and "deadline" in late.error and len(late.token_ids) < 150
    (early,) = ask(engine, {"deadline": 600, "priority": -3})
    assert (early.finish_reason, early.error) == ("length", None)


def test_more_lines_than_the_queue_holds_are_all_served(bundle):
    with Engine.open(bundle("tiny"), k=0, max_waiting=1) as engine:
        count = READ_AHEAD_LINES + 10
        answers = ask(engine, *[{"max_tokens": 1}] * count)
        assert [(answer.finish_reason, answer.error) for answer in answers] == [("length", None)] * count
        assert engine.stats().refused == 0
