"""Which parameters are refused, by name, and what the greedy executables are enough for."""

import math
from dataclasses import fields
from types import MappingProxyType

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.requests.sampling_params import SamplingParams

NO_NUMBERS = ("hot", True, None, math.nan, [1.0])
NO_WHOLE_NUMBERS = (1.5, 2.0, True, "8", [1])
# By name, what cannot be: of another kind, or just outside the limits.
BAD = {
    "max_tokens": [*NO_WHOLE_NUMBERS, 0, -3],
    "temperature": [*NO_NUMBERS, -0.1, math.inf, 10_001],
    "top_k": [*NO_WHOLE_NUMBERS, None, -1],
    "top_p": [*NO_NUMBERS, 0, -0.5, 1e-9, 1.01, math.inf],
    "seed": [*NO_WHOLE_NUMBERS, -(2**63) - 1, 2**63],
    "stop": ["text", b"text", [""], ["a", ""], [1], [b"a"], 5, None, {"a"}, {"a": 1}],
    "stop_token_ids": [[1.0], ["1"], [True], [None], 5, "12", b"12", {1}, {1: 2}],
    "min_p": [*NO_NUMBERS, -0.1, 1.01, math.inf],
    "repetition_penalty": [*NO_NUMBERS, 0, -1.0, 1e-50, math.inf],
    "presence_penalty": [*NO_NUMBERS, math.inf, -math.inf],
    "frequency_penalty": [*NO_NUMBERS, math.inf, -math.inf],
    "logit_bias": [
        *(5, "1", [1], [(1, 2.0)], {1}),
        *({"1": 1.0}, {-1: 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}),
        *({1: "2"}, {1: None}, {1: True}, {1: math.nan}, {1: math.inf}, {1: 100.1}, {1: 0.0, 2: -100.1}),
    ],
    "logprobs": [*NO_WHOLE_NUMBERS, -1, 21],
    "k": [*NO_WHOLE_NUMBERS, -1],
}
# By name, the least and the most that can be, and every form it may have.
GOOD = {
    "max_tokens": [None, 1, 10**9],
    "temperature": [0, 0.0, 1e-6, 10_000],
    "top_k": [0, 1, 10**9],
    "top_p": [1, 1.0, 1e-6],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "stop": [(), [], ["a"], ("a", "\n\n"), ["\ufffd"]],
    "stop_token_ids": [None, (), [], [0, 7], (7,)],
    "min_p": [0, 1, 0.05],
    "repetition_penalty": [1, 1e-3, 1.3, 10_000],
    "presence_penalty": [0, -2.0, 2, 10_000],
    "frequency_penalty": [0, -2.0, 2, 10_000],
    "logit_bias": [None, {}, {0: 1}, {7: -100, 8: 100.0}, MappingProxyType({3: 0.5})],
    "logprobs": [None, 0, 20],
    "k": [None, 0, 15],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_cannot_be_is_refused_by_name_and_value(name, value):
    with pytest.raises(BadInput) as refusal:
        SamplingParams(**{name: value})
    assert str(refusal.value).startswith(f"{name} is {value!r}: ")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_what_can_be_is_taken_as_it_is(name, value):
    taken = getattr(SamplingParams(**{name: value}), name)
    assert taken == value and type(taken) is type(value)


def test_no_parameter_is_left_unchecked():
    assert {field.name for field in fields(SamplingParams)} == {*BAD, "trace"} == {*GOOD, "trace"}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 5, "stop": ["a"], "stop_token_ids": [1], "trace": True, "k": 3},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3},  # of the likeliest tokens the likeliest is the same
        {"logit_bias": {}},
    ],
    ids=str,
)
def test_the_likeliest_token_is_all_that_a_plain_request_asks_for(asked):
    assert SamplingParams(**asked).plain


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 0.9},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 0.0}},
        {"logprobs": 0},
    ],
    ids=str,
)
def test_what_the_greedy_executables_cannot_give_is_not_plain(asked):
    params = SamplingParams(**asked)
    assert not params.plain
    assert params.shaped_by == tuple(asked)
