"""Incremental detokenizer: streamed text in whole characters, cut before a stop string."""

import os.path
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.text.detokenizer import RESYNC_TOKENS, Detokenizer, IncrementalDecoder
from dflash_aot.runtime.text.tokenizer import Tokenizer
from tests.runtime.tokenizer_kinds import ALPHABET, END, KINDS, VOCABULARY, byte_level, list_byte_tokens

BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)
every_kind = pytest.mark.parametrize("backend", [make() for make in KINDS], ids=[make.__name__ for make in KINDS])


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    pushes, at = [], 0
    for size in (*sizes, len(ids)):
        pushes.append(ids[at : at + size])
        at += size
    return pushes


def run(stream: Detokenizer, pushes: Sequence[Sequence[int]]) -> str:
    shown = []
    for push in pushes:
        shown.append(stream.push(push))
        if stream.finished:
            break
    return "".join([*shown, stream.flush()])


def decode_reference(
    ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer = TOKENIZER
) -> tuple[str, int, bool]:
    """Returns text, tokens kept, and whether a stop was found; decodes all tokens again after each token."""
    for count in range(1, len(ids) + 1):
        if END in stops and ids[count - 1] in tokenizer.encode(END, add_special_tokens=False):
            return tokenizer.decode(ids[: count - 1]), count, True
        text = tokenizer.decode(ids[:count])
        for end in range(len(text) + 1):
            starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
            if starts:
                return text[: min(starts)], count, True
    return tokenizer.decode(ids), len(ids), False


def added_text(prompt: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns what `ids` add to the text of `prompt`."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    return whole[len(os.path.commonprefix([before, whole])) :]


texts = st.text(st.sampled_from(ALPHABET), max_size=60) | st.text(max_size=40)
any_ids = st.lists(st.integers(0, VOCABULARY + 3), max_size=80)
# Lead bytes, continuation bytes and invalid bytes: character boundaries become rare, or never come.
broken_ids = st.lists(st.sampled_from(list_byte_tokens(b"\xe2\x82\xac\xf0\x9f\x8e\xff\xc0\xed\xa0\x41")), max_size=120)
many_ids = any_ids | broken_ids | texts.map(TOKENIZER.encode)
sizes = st.lists(st.integers(0, 9), max_size=12)
stop_texts = st.text(st.sampled_from(ALPHABET.replace("\ufffd", "")), min_size=1, max_size=4)


def ids_of(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=30)


@given(many_ids, sizes, st.lists(stop_texts, max_size=3))
@example(TOKENIZER.encode("aaab"), [], ["aab"])
@example(TOKENIZER.encode("bab"), [], ["bab", "ab"])
def test_stop_strings_match_the_reference_implementation(ids, sizes, stops):
    stream = Detokenizer(TOKENIZER, stops)
    text = run(stream, chunked(ids, sizes))
    assert (text, stream.tokens_kept, stream.finished) == decode_reference(ids, stops)


def test_characters_are_returned_once_they_are_certain():
    for data, shown in (
        ("a🎉é".encode(), ["a", "", "", "", "🎉", "", "é"]),
        (b"a\xffb\xc3c", ["a", "\ufffd", "b", "", "\ufffdc"]),
    ):
        stream = Detokenizer(TOKENIZER, [])
        assert [stream.push([token]) for token in list_byte_tokens(data)] == shown


def test_skipped_tokens_inside_a_character_change_nothing():
    first, *rest = list_byte_tokens("🎉".encode())
    for skipped in (BACKEND.token_to_id(END), VOCABULARY + 1):
        assert Detokenizer(TOKENIZER, []).push([first, *[skipped] * 200, *rest]) == "🎉"


def test_stop_string_across_pushes():
    stream = Detokenizer(TOKENIZER, ["stop"])
    assert [stream.push(list_byte_tokens(part)) for part in (b"go s", b"t", b"o")] == ["go ", "", ""]
    assert not stream.finished
    assert stream.push(list_byte_tokens(b"pped")) == ""
    assert stream.finished
    assert stream.tokens_kept == len("go stop")
    assert stream.flush() == ""


@pytest.mark.parametrize("least", [0, 2])
def test_stop_strings_count_after_min_tokens(least):
    stream = Detokenizer(TOKENIZER, ["a"], min_tokens=least)
    assert stream.push(list_byte_tokens(b"aaaa")) == "a" * least
    assert (stream.finished, stream.tokens_kept) == (True, least + 1)


def test_flush_can_complete_a_stop_string():
    stream = Detokenizer(TOKENIZER, ["a\ufffd"])
    assert stream.push(list_byte_tokens(b"xa\xf0")) == "x"
    assert stream.flush() == ""
    assert stream.finished


def test_empty_stop_string_raises():
    with pytest.raises(BadInput, match="empty stop string"):
        Detokenizer(TOKENIZER, ["a", ""])


@every_kind
@settings(max_examples=30)
@given(data=st.data())
def test_every_tokenizer_kind_matches_the_reference_implementation(backend, data):
    tokenizer, ids = Tokenizer(backend), data.draw(ids_of(backend))
    for pushes in (chunked(ids, data.draw(sizes)), [[one] for one in ids], [ids]):
        assert run(Detokenizer(tokenizer, []), pushes) == tokenizer.decode(ids)
    stops = data.draw(st.lists(stop_texts | st.just(END), max_size=3))
    stream = Detokenizer(tokenizer, stops)
    text = run(stream, chunked(ids, data.draw(sizes)))
    assert (text, stream.tokens_kept, stream.finished) == decode_reference(ids, stops, tokenizer)


@every_kind
@settings(max_examples=30)
@given(data=st.data())
def test_every_tokenizer_kind_continues_the_prompt(backend, data):
    tokenizer, prompt, ids = Tokenizer(backend), data.draw(ids_of(backend)), data.draw(ids_of(backend))
    for pushes in ([ids], [[one] for one in ids]):
        assert run(Detokenizer(tokenizer, [], prompt), pushes) == added_text(prompt, ids, tokenizer)


@given(broken_ids | many_ids, sizes)
def test_tokens_pushed_together_show_the_same_text(ids, sizes):
    """Not only at the end: after every push the same text was shown."""
    together, apart = Detokenizer(TOKENIZER, []), Detokenizer(TOKENIZER, [])
    shown = ["", ""]
    for push in chunked(ids, sizes):
        shown[0] += together.push(push)
        shown[1] += "".join(apart.push([one]) for one in push)
        assert shown[0] == shown[1] and together.tokens_kept == apart.tokens_kept


def test_stop_string_matches_letters_of_a_special_token():
    stream = Detokenizer(TOKENIZER, [END])
    assert stream.push(list_byte_tokens(f"a{END}b".encode())) == "a"
    assert (stream.finished, stream.tokens_kept) == (True, len(f"a{END}"))


def test_plain_added_token_has_text_and_can_stop():
    backend = byte_level()
    backend.add_tokens([AddedToken("</think>", special=False)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("ab</think>c")
    assert backend.token_to_id("</think>") in ids
    assert run(Detokenizer(tokenizer, []), [ids]) == "ab</think>c"
    assert run(Detokenizer(tokenizer, ["</think>"]), [ids]) == "ab"
    assert run(Detokenizer(tokenizer, ["think"]), [ids]) == "ab</"


@every_kind
@pytest.mark.parametrize("special", [True, False])
def test_marker_is_its_token_and_never_its_letters(backend, special):
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.add_tokens([AddedToken("<|m|>", special=special)])
    tokenizer, mark = Tokenizer(backend), "\ud800"
    token = backend.token_to_id("<|m|>")
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "c <"))
    ids = [*before, token, *after, token]
    shown = f"{tokenizer.decode(before)}{mark}{added_text([*before], after, tokenizer)}{mark}"
    letters = [one for one in ids if one != token]
    for pushes in ([ids], [[one] for one in ids]):
        assert run(Detokenizer(tokenizer, [], markers={token: mark}), pushes) == shown
        assert run(Detokenizer(tokenizer, ["<|m|>"], markers={token: mark}), pushes) == tokenizer.decode(before)
    assert run(Detokenizer(tokenizer, [], markers={token: mark}), [letters]) == tokenizer.decode(letters)


class CountingDecoder:
    """A decoder of bytes that counts the tokens that it decodes."""

    decoded = 0
    longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("data", ["the cat 🎉".encode() * 100, b"\xff" * 1000, b"\x9f\xf0" * 500])
def test_decoding_work_per_token_is_bounded(data):
    counting = CountingDecoder()
    stream = IncrementalDecoder(counting.decode, {}, [])
    assert "".join([*(stream.push([one]) for one in data), stream.flush()]) == data.decode(errors="replace")
    assert counting.longest <= 2 * RESYNC_TOKENS + 1
    assert counting.decoded <= 3 * RESYNC_TOKENS * len(data)
