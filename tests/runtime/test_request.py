"""What one request makes of the tokens it is given, and which parameters it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.request import Delta, Request, SamplingParams

BAD = [
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 2.0},
    {"max_tokens": True},
    {"max_tokens": "8"},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"temperature": True},
    {"temperature": 0.7},  # sampling is not built yet: refused, never ignored
    {"top_k": -1},
    {"top_k": 1.5},
    {"top_p": 0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"top_p": "most"},
    {"seed": 1.5},
    {"seed": True},
    {"stop": "text"},
    {"stop": [""]},
    {"stop": [1]},
    {"stop": 5},
    {"stop": None},
    {"stop_token_ids": [1.0]},
    {"stop_token_ids": ["1"]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": 5},
    {"stop_token_ids": "12"},
]


@pytest.mark.parametrize("params", BAD, ids=str)
def test_a_parameter_that_cannot_be_is_refused_by_name(params):
    with pytest.raises(BadInput, match=next(iter(params))):
        SamplingParams(**params)


def test_parameters_at_their_limits_are_taken():
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, seed=-1, stop=("a",), stop_token_ids=())


def make(limit: int, stops=()) -> tuple[Request, list[Delta]]:
    deltas: list[Delta] = []
    return Request([1], SamplingParams(), limit, frozenset(stops), None, deltas.append), deltas


@given(
    rounds=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    limit=st.integers(1, 20),
    stops=st.sets(st.integers(0, 7), max_size=2),
)
def test_tokens_are_kept_up_to_the_first_stop_or_the_limit_however_they_come(rounds, limit, stops):
    request, deltas = make(limit, stops)
    for tokens in rounds:
        if request.finish_reason is None:
            request.take(tokens)
    everything = [token for tokens in rounds for token in tokens]
    stop = next((at + 1 for at, token in enumerate(everything) if token in stops), len(everything) + 1)
    end = min(stop, limit, len(everything))
    assert request.token_ids == everything[:end] == [token for delta in deltas for token in delta.token_ids]
    expected = "stop" if end == stop else "length" if end == limit else None
    assert request.finish_reason == deltas[-1].finish_reason == expected


def test_a_result_tells_how_often_what_was_drafted_stood():
    request, _ = make(4)
    request.take([7])
    request.accepted.append(2)
    request.take([8, 9, 10])
    result = request.result()
    assert (result.token_ids, result.accepted, result.finish_reason) == ([7, 8, 9, 10], [2], "length")
    assert (result.prompt_tokens, result.text, result.error) == (1, None, None)
    assert 0 <= result.first_token_seconds <= result.seconds


def test_what_ends_early_says_why_in_its_last_delta():
    request, deltas = make(4)
    request.take([7])
    request.end("error", "the engine was closed")
    assert deltas == [Delta((7,), ""), Delta((), "", "error", "the engine was closed")]
    assert (request.result().token_ids, request.result().error) == ([7], "the engine was closed")
