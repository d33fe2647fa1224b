"""SamplingParams: accepted and refused values, and the parameters that need sampled executables."""

import math
from dataclasses import fields
from types import MappingProxyType

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.requests.sampling_params import PARAMETERS, SamplingParams

NOT_NUMBERS = ("hot", True, None, math.nan, [1.0])
NOT_WHOLE_NUMBERS = (1.5, 2.0, True, "8", [1])
# By parameter: values of other types, and values just outside the bounds.
REFUSED = {
    "min_tokens": [*NOT_WHOLE_NUMBERS, -1],
    "max_tokens": [*NOT_WHOLE_NUMBERS, -1, -3],
    "temperature": [*NOT_NUMBERS, -0.1, math.inf, 10_001],
    "top_k": [*NOT_WHOLE_NUMBERS, None, -1],
    "top_p": [*NOT_NUMBERS, 0, -0.5, 1e-9, 1.01, math.inf],
    "seed": [*NOT_WHOLE_NUMBERS, -(2**63) - 1, 2**63],
    "stop": ["text", b"text", [""], ["a", ""], [1], [b"a"], 5, None, {"a"}, {"a": 1}],
    "stop_token_ids": [[1.0], ["1"], [True], [None], 5, "12", b"12", {1}, {1: 2}],
    "ignore_eos": [1, "true", None],
    "trace": [0, "yes", None],
    "min_p": [*NOT_NUMBERS, -0.1, 1.01, math.inf],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1.0, 1e-50, math.inf],
    "presence_penalty": [*NOT_NUMBERS, math.inf, -math.inf],
    "frequency_penalty": [*NOT_NUMBERS, math.inf, -math.inf],
    "logit_bias": [
        *(5, "1", [1], [(1, 2.0)], {1}),
        *({"1": 1.0}, {-1: 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}),
        *({1: "2"}, {1: None}, {1: True}, {1: math.nan}, {1: math.inf}, {1: 100.1}, {1: 0.0, 2: -100.1}),
    ],
    "logprobs": [*NOT_WHOLE_NUMBERS, -1, 21],
    "prompt_logprobs": [*NOT_WHOLE_NUMBERS, -1, 21],
    "k": [*NOT_WHOLE_NUMBERS, -1],
    "structured_outputs": ["{}", b"{}", [1], 5, True],
    "prefix_caching": [0, "no", None],
    "cache_salt": [1, b"a", True],
}
# By parameter: the smallest and the largest value, and each type.
ACCEPTED = {
    "min_tokens": [0, 1],
    "max_tokens": [None, 0, 1, 10**9],
    "temperature": [0, 0.0, 1e-6, 10_000],
    "top_k": [0, 1, 10**9],
    "top_p": [1, 1.0, 1e-6],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "stop": [(), [], ["a"], ("a", "\n\n"), ["\ufffd"]],
    "stop_token_ids": [None, (), [], [0, 7], (7,)],
    "ignore_eos": [True, False],
    "trace": [True, False],
    "min_p": [0, 1, 0.05],
    "repetition_penalty": [1, 1e-3, 1.3, 10_000],
    "presence_penalty": [0, -2.0, 2, 10_000],
    "frequency_penalty": [0, -2.0, 2, 10_000],
    "logit_bias": [None, {}, {0: 1}, {7: -100, 8: 100.0}, MappingProxyType({3: 0.5})],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "k": [None, 0, 15],
    "structured_outputs": [None, {"regex": "a"}],  # the engine checks what is in it
    "prefix_caching": [True, False],
    "cache_salt": [None, "", "tenant"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_are_kept_or_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(BadInput) as error:
            SamplingParams(**{name: value})
        assert str(error.value).startswith(f"{name} is {value!r}: ")
    for value in ACCEPTED[name]:
        kept = getattr(SamplingParams(**{name: value}), name)
        assert kept == value and type(kept) is type(value)


def test_parameters_that_keep_the_greedy_choice_are_plain():
    """top_k, top_p and min_p never remove the likeliest token."""
    for given in (
        {},
        {"max_tokens": 5, "k": 3},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3},
        {"logit_bias": {}},
    ):
        params = SamplingParams(**given)
        assert params.is_greedy and not params.is_penalised


def test_parameters_that_need_sampled_executables_are_named():
    penalties = {"repetition_penalty": 0.9, "presence_penalty": -0.1, "frequency_penalty": 0.1, "logit_bias": {3: 0.0}}
    for name, value in {"temperature": 0.1, "logprobs": 0, **penalties}.items():
        params = SamplingParams(**{name: value})
        assert not params.is_greedy
        assert params.sampled_fields == (name,)
        assert params.is_penalised == (name in penalties)


def test_each_parameter_is_declared_with_meaning_and_default():
    assert list(PARAMETERS) == [field.name for field in fields(SamplingParams)]
    assert {*PARAMETERS} == {*REFUSED} == {*ACCEPTED}
    for name, parameter in PARAMETERS.items():
        assert parameter.meaning and parameter.accepts(parameter.default)
        assert parameter.default == getattr(SamplingParams(), name)
