"""What a request makes of the tokens that are committed to it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime.requests.request import Delta, Request, RoundOutcome, TokenLogprob
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.text.detokenizer import Detokenizer
from dflash_aot.runtime.text.tokenizer import Tokenizer
from tests.runtime.tokenizer_kinds import END, byte_level

TOKENIZER = Tokenizer(byte_level())


def make(limit: int, stops=()) -> Request:
    return Request([1], SamplingParams(), limit, frozenset(stops), None, lambda delta: None)


@given(
    rounds=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    limit=st.integers(1, 20),
    stops=st.sets(st.integers(0, 7), max_size=2),
)
def test_tokens_are_kept_up_to_stop_or_limit(rounds, limit, stops):
    request, deltas = make(limit, stops), []
    for tokens in rounds:
        if request.output.finish_reason is None:
            deltas.append(request.take(tokens))
    everything = [token for tokens in rounds for token in tokens]
    stop = next((at + 1 for at, token in enumerate(everything) if token in stops), len(everything) + 1)
    end = min(stop, limit, len(everything))
    assert request.output.token_ids == everything[:end] == [token for delta in deltas for token in delta.token_ids]
    expected = "stop" if end == stop else "length" if end == limit else None
    assert request.output.finish_reason == deltas[-1].finish_reason == expected


def test_result_counts_accepted_tokens_per_round():
    request = make(4)
    request.take([7])
    request.take([8, 9, 10], rounds=[RoundOutcome(3, 2)])
    result = request.result()
    assert (result.token_ids, result.accepted, result.finish_reason) == ([7, 8, 9, 10], [2], "length")
    assert (result.prompt_tokens, result.text, result.error) == (1, None, None)
    assert 0 <= result.first_token_seconds <= result.seconds


def test_last_delta_says_why_a_request_ended_early():
    request = make(4)
    deltas = [request.take([7]), request.end("error", "the engine was closed")]
    assert deltas == [Delta((7,), ""), Delta((), "", "error", "the engine was closed")]
    assert (request.result().token_ids, request.result().error) == ([7], "the engine was closed")


class FailAt:
    """A grammar that cannot be followed at one token."""

    is_complete, ends = False, frozenset[int]()

    def __init__(self, token: int):
        self._token, self.seen = token, list[int]()

    def accept(self, token: int, room: int) -> Sequence[int] | None:
        self.seen.append(token)
        if token == self._token:
            raise EngineFailed("the grammar cannot be followed: too complex")
        return None


texts = st.text(st.sampled_from("ab é東🎉"), max_size=12)


@given(prompt=texts, text=texts, stops=st.lists(st.text("ab é東", min_size=1, max_size=3), max_size=3), data=st.data())
def test_text_is_cut_before_the_stop_string(prompt, text, stops, data):
    """Also where the stop begins in one accepted block and ends in the next one."""
    deltas: list[Delta] = []
    ids = TOKENIZER.encode(text) + TOKENIZER.encode(END)
    stream = Detokenizer(TOKENIZER, stops, TOKENIZER.encode(prompt))
    request = Request([1], SamplingParams(), len(ids) + 1, frozenset(ids[-1:]), stream, print)
    while request.output.finish_reason is None:
        block = data.draw(st.integers(1, 8))
        deltas.append(request.take(ids[len(request.output.token_ids) :][:block]))
    end = min((text.index(stop) for stop in stops if stop in text), default=len(text))
    assert text.startswith(request.result().text) and request.output.finish_reason == "stop"
    # Where two stops overlap, the one that is complete first counts: Detokenizer's own tests know it.
    assert len(request.result().text) == end or sum(stop in text for stop in stops) > 1
    assert "".join(delta.text for delta in deltas) == request.result().text
    kept = request.output.token_ids
    assert kept == ids[: len(kept)] and (kept == ids or any(stop in TOKENIZER.decode(kept) for stop in stops))
    assert not any(stop in TOKENIZER.decode(kept[:-1]) for stop in stops)


@pytest.mark.parametrize("block", [1, 4])
def test_grammar_sees_no_tokens_after_a_stop_text(block):
    ids = [token for letter in "abcd" for token in TOKENIZER.encode(letter)]
    grammar = FailAt(ids[2])
    request = Request([1], SamplingParams(), 9, frozenset(), Detokenizer(TOKENIZER, ["b"]), print)
    request.matcher = grammar  # type: ignore[assignment]
    while request.output.finish_reason is None:
        request.take(ids[len(request.output.token_ids) :][:block])
    result = request.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("a", ids[:2], "stop")
    assert grammar.seen == ids[:2]


@pytest.mark.parametrize("stops", [[], ["c"]])
def test_token_against_the_grammar_raises_before_a_stop_text(stops):
    ids = [token for letter in "abc" for token in TOKENIZER.encode(letter)]
    request = Request([1], SamplingParams(), 9, frozenset(), Detokenizer(TOKENIZER, stops), print)
    request.matcher = FailAt(ids[1])  # type: ignore[assignment]
    with pytest.raises(EngineFailed, match="too complex"):
        request.take(ids)


@pytest.mark.parametrize("asked", [None, 0, 1])
def test_log_probabilities_are_cut_with_their_tokens(asked):
    request = Request([1], SamplingParams(logprobs=asked), 9, frozenset([8]), None, print)
    told = [TokenLogprob(token, -token / 4, ((token, -token / 4),) if asked else ()) for token in (5, 6, 7, 8, 9)]
    given = told if asked is not None else []
    deltas = [request.take([5, 6], given[:2]), request.take([7, 8, 9], given[2:])]
    assert [delta.logprobs for delta in deltas] == [tuple(given[:2]), tuple(given[2:4])]
    assert request.result().logprobs == (None if asked is None else told[:4])


def test_deadline_ends_a_request_at_its_time():
    request = Request([1], SamplingParams(), 4, frozenset(), None, print, submitted=10.0, deadline=12.5)
    assert request.find_end(12.4) is None
    assert request.find_end(12.5) == "its deadline of 2.5 s has passed"
    request.cancel()
    assert request.find_end(10.0) == ""  # cancelled: there is no reason to report
