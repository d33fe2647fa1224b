"""Text while its tokens arrive: whole characters, cut before a stop."""

import os.path
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, processors

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime.text.detokenizer import RESYNC_TOKENS, CharacterStream
from dflash_aot.runtime.text.tokenizer import LONG_TEXT_CHARS, TextStream, Tokenizer
from tests.runtime.tokenizer_kinds import END, KINDS, VOCABULARY, byte_fallback, byte_level, stripped_byte_fallback

ALPHABET = "ab c\né東京タ🎉🎊👩‍👧e\u0301\x00\ufffd"
BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)
every_kind = pytest.mark.parametrize("backend", [make() for make in KINDS], ids=[make.__name__ for make in KINDS])


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    chars = {**{b: chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}}
    rest = (byte for byte in range(256) if byte not in chars)
    chars.update({byte: chr(256 + rank) for rank, byte in enumerate(rest)})
    return [BACKEND.token_to_id(chars[byte]) for byte in data]


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    pushes, at = [], 0
    for size in (*sizes, len(ids)):
        pushes.append(ids[at : at + size])
        at += size
    return pushes


def run(stream: TextStream, pushes: Sequence[Sequence[int]]) -> str:
    shown = []
    for push in pushes:
        shown.append(stream.push(push))
        if stream.finished:
            break
    return "".join([*shown, stream.flush()])


def obvious(ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer = TOKENIZER) -> tuple[str, int, bool]:
    """Text, tokens kept, stopped: everything decoded again after each token."""
    for count in range(1, len(ids) + 1):
        if END in stops and ids[count - 1] in tokenizer.encode(END, add_special_tokens=False):
            return tokenizer.decode(ids[: count - 1]), count, True
        text = tokenizer.decode(ids[:count])
        for end in range(len(text) + 1):
            starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
            if starts:
                return text[: min(starts)], count, True
    return tokenizer.decode(ids), len(ids), False


def added(prompt: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What `ids` add to the text of `prompt`."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    return whole[len(os.path.commonprefix([before, whole])) :]


texts = st.text(st.sampled_from(ALPHABET), max_size=60) | st.text(max_size=40)
any_ids = st.lists(st.integers(0, VOCABULARY + 3), max_size=80)
# Leads, continuations and bytes of no character: borders between characters become rare, or never come.
broken_ids = st.lists(st.sampled_from(byte_ids(b"\xe2\x82\xac\xf0\x9f\x8e\xff\xc0\xed\xa0\x41")), max_size=120)
many_ids = any_ids | broken_ids | texts.map(TOKENIZER.encode)
sizes = st.lists(st.integers(0, 9), max_size=12)
stop_texts = st.text(st.sampled_from(ALPHABET.replace("\ufffd", "")), min_size=1, max_size=4)


def ids_of(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=30)


@given(texts, sizes)
def test_stream_adds_up_to_the_text(text, sizes):
    assert run(TextStream(TOKENIZER, []), chunked(TOKENIZER.encode(text), sizes)) == text


@given(many_ids, sizes)
def test_stream_adds_up_to_what_decode_says(ids, sizes):
    assert run(TextStream(TOKENIZER, []), chunked(ids, sizes)) == TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    "pattern", [b"\xff", b"\x82", b"\xe2", b"\xe2\x82", b"\xf0\x9f\x8e", b"\x9f\x8e\xf0", b"\xef\xbf\xbd"]
)
@pytest.mark.parametrize("end", [b"", b"\x82", b"\xac", b"ok", "🎉".encode()])
def test_text_without_any_border_adds_up(pattern, end):
    ids = byte_ids(pattern * 100 + end)
    assert run(TextStream(TOKENIZER, []), [ids]) == TOKENIZER.decode(ids)


@given(many_ids, sizes, st.lists(stop_texts, max_size=3))
@example(TOKENIZER.encode("aaab"), [], ["aab"])
@example(TOKENIZER.encode("abab"), [], ["bab", "ab"])
def test_stops_as_the_obvious_path_finds_them(ids, sizes, stops):
    stream = TextStream(TOKENIZER, stops)
    text = run(stream, chunked(ids, sizes))
    assert (text, stream.tokens_kept, stream.finished) == obvious(ids, stops)


@given(st.data())
def test_stops_that_are_in_the_text(data):
    ids = data.draw(texts.filter(bool).map(TOKENIZER.encode))
    text = TOKENIZER.decode(ids)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    stream = TextStream(TOKENIZER, [stop])
    assert run(stream, chunked(ids, data.draw(sizes))) == text[: text.index(stop)]
    assert stream.finished


def test_a_character_comes_whole():
    stream = TextStream(TOKENIZER, [])
    assert [stream.push([i]) for i in byte_ids("a🎉é".encode())] == ["a", "", "", "", "🎉", "", "é"]


def test_a_byte_of_no_character_comes_when_later_ones_show_it():
    stream = TextStream(TOKENIZER, [])
    assert [stream.push([i]) for i in byte_ids(b"a\xffb")] == ["a", "", "\ufffdb"]


def test_a_cut_character_comes_at_flush():
    stream = TextStream(TOKENIZER, [])
    assert stream.push(byte_ids(b"a\xf0\x9f")) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize("silent", [BACKEND.token_to_id(END), VOCABULARY + 1])
def test_tokens_without_text_between_the_bytes_of_a_character(silent):
    first, *rest = byte_ids("🎉".encode())
    assert TextStream(TOKENIZER, []).push([first, *[silent] * 200, *rest]) == "🎉"


def test_a_stop_string_across_pushes():
    stream = TextStream(TOKENIZER, ["stop"])
    assert [stream.push(byte_ids(part)) for part in (b"go s", b"t", b"o")] == ["go ", "", ""]
    assert not stream.finished
    assert stream.push(byte_ids(b"pped")) == ""
    assert stream.finished
    assert stream.tokens_kept == len("go stop")
    assert stream.flush() == ""


def test_a_stop_string_in_the_middle_of_a_push():
    stream = TextStream(TOKENIZER, ["stop"])
    assert stream.push(byte_ids(b"go stop more")) == "go "
    assert (stream.finished, stream.tokens_kept) == (True, len("go stop"))


def test_what_only_looked_like_a_stop_string_is_shown():
    stream = TextStream(TOKENIZER, ["stop"])
    assert stream.push(byte_ids(b"a sto")) == "a "
    assert stream.push(byte_ids(b"ry s")) == "story "
    assert stream.flush() == "s"


def test_the_match_that_ends_first_counts():
    stream = TextStream(TOKENIZER, ["abcdef", "cd"])
    assert stream.push(byte_ids(b"abcdef")) == "ab"
    assert stream.tokens_kept == len("abcd")


def test_of_two_matches_that_end_together_none_is_shown():
    assert TextStream(TOKENIZER, ["cd", "bcd"]).push(byte_ids(b"abcd")) == "a"


def test_a_stop_string_completed_by_flush():
    stream = TextStream(TOKENIZER, ["a\ufffd"])
    assert stream.push(byte_ids(b"xa\xf0")) == "x"
    assert stream.flush() == ""
    assert stream.finished


def test_an_empty_stop_string_is_refused():
    with pytest.raises(BadInput, match="empty stop string"):
        TextStream(TOKENIZER, ["a", ""])


@every_kind
@given(data=st.data())
def test_every_kind_adds_up_and_stops_where_the_obvious_path_does(backend, data):
    """Ids of no token among them."""
    tokenizer, ids = Tokenizer(backend), data.draw(ids_of(backend))
    assert run(TextStream(tokenizer, []), chunked(ids, data.draw(sizes))) == tokenizer.decode(ids)
    stops = data.draw(st.lists(stop_texts | st.just(END), max_size=3))
    stream = TextStream(tokenizer, stops)
    text = run(stream, chunked(ids, data.draw(sizes)))
    assert (text, stream.tokens_kept, stream.finished) == obvious(ids, stops, tokenizer)


@every_kind
@given(data=st.data())
def test_every_kind_goes_on_where_the_prompt_ends(backend, data):
    tokenizer, prompt, ids = Tokenizer(backend), data.draw(ids_of(backend)), data.draw(ids_of(backend))
    assert run(TextStream(tokenizer, [], prompt), [ids]) == added(prompt, ids, tokenizer)


@given(broken_ids, broken_ids, st.sampled_from([0, 1, 2, 200]))
def test_a_prompt_that_ends_in_mid_character_is_gone_on_with(prompt, ids, silent):
    prompt = prompt + [BACKEND.token_to_id(END)] * silent
    assert run(TextStream(TOKENIZER, [], prompt), [ids]) == added(prompt, ids, TOKENIZER)


def test_a_character_that_the_prompt_begins_comes_whole_in_the_answer():
    start, end = byte_ids("a🎉".encode())[:3], byte_ids("🎉b".encode())[2:]
    assert run(TextStream(TOKENIZER, [], start), [end]) == "🎉b"
    # What is whole in the prompt is none of the answer's, though it looks like a character that is not.
    assert run(TextStream(TOKENIZER, [], TOKENIZER.encode("a\ufffd")), [byte_ids(b"b")]) == "b"


def test_the_space_between_prompt_and_answer_is_not_lost():
    """A decoder takes it off the first token of a text, and an answer is none of its own."""
    tokenizer = Tokenizer(stripped_byte_fallback())
    prompt, answer = tokenizer.encode("the"), tokenizer.encode("cat")
    assert run(TextStream(tokenizer, []), [answer]) == "cat"
    assert run(TextStream(tokenizer, [], prompt), [answer]) == " cat"


def test_byte_fallback_shows_broken_bytes_alone_as_broken():
    tokenizer = Tokenizer(byte_fallback())
    ids = [*"é".encode(), 0xFF, *b"a", *"🎉".encode()[:3], *"東".encode(), 0xC3]
    assert tokenizer.decode(ids) == "é\ufffda\ufffd東\ufffd"
    stream = TextStream(tokenizer, [])
    assert [stream.push([token]) for token in ids] == ["", "é", "\ufffd", "a", "", "", "", "\ufffd", "", "東", ""]
    assert stream.flush() == "\ufffd"


@given(st.text(st.sampled_from("aé東🎉\u0301\ufffd"), max_size=40), sizes)
def test_byte_fallback_keeps_characters_whole(text, sizes):
    stream = TextStream(Tokenizer(byte_fallback()), [])
    assert run(stream, chunked(list(text.encode()), sizes)) == text


@pytest.mark.parametrize("end", [0, 1, 2])
def test_a_stop_that_is_a_special_token_ends_the_text_at_it(end):
    """It has no text; what was held back, for another stop or a character that is not whole, belongs to the answer."""
    token = BACKEND.token_to_id(END)
    before = byte_ids("a st🎉".encode()[: -2 - end])
    stream = TextStream(TOKENIZER, ["stop", END])
    assert stream.push([*before, token, *byte_ids(b"more")]) + stream.flush() == TOKENIZER.decode(before)
    assert (stream.finished, stream.tokens_kept) == (True, len(before) + 1)


def test_a_special_token_that_is_written_out_in_letters_is_a_stop_too():
    stream = TextStream(TOKENIZER, [END])
    assert stream.push(byte_ids(f"a{END}b".encode())) == "a"
    assert (stream.finished, stream.tokens_kept) == (True, len(f"a{END}"))


def test_an_added_token_that_is_not_special_has_a_text_and_can_be_a_stop():
    backend = byte_level()
    backend.add_tokens([AddedToken("</think>", special=False)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("ab</think>c")
    assert backend.token_to_id("</think>") in ids
    assert run(TextStream(tokenizer, []), [ids]) == "ab</think>c"
    assert run(TextStream(tokenizer, ["</think>"]), [ids]) == "ab"
    assert run(TextStream(tokenizer, ["think"]), [ids]) == "ab</"


class Meter:
    """A decoder of bytes that counts what it decodes."""

    decoded = 0
    longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("data", ["the cat 🎉".encode() * 100, b"\xff" * 1000, b"\x9f\xf0" * 500])
def test_the_work_for_a_token_does_not_grow(data):
    meter = Meter()
    stream = CharacterStream(meter.decode, {}, [])
    assert "".join([*map(stream.push, data), stream.flush()]) == data.decode(errors="replace")
    assert meter.longest <= 2 * RESYNC_TOKENS + 1
    assert meter.decoded <= 3 * RESYNC_TOKENS * len(data)


def test_a_decoder_that_panics_is_an_error_of_ours(capfd):
    """What tokenizers raises is no Exception: it would end the engine's thread, and not one request."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(BadCheckpoint, match=r"decoder of tokenizer\.json fails at tokens \[\]"):
        Tokenizer(backend).decode([])


def test_special_tokens_are_read_in_and_left_out():
    ids = TOKENIZER.encode(f"ab{END}")
    assert ids[-1] == BACKEND.token_to_id(END)
    assert TOKENIZER.decode(ids) == "ab"


def test_the_tokenizers_own_frame_can_be_left_out():
    backend = byte_level()
    frame = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))])
    backend.post_processor = frame
    tokenizer = Tokenizer(backend)
    framed = tokenizer.encode("ab")
    assert framed == [backend.token_to_id(END), *tokenizer.encode("ab", add_special_tokens=False)]


@pytest.mark.parametrize("length", [0, LONG_TEXT_CHARS])
def test_a_lone_surrogate_is_refused(length):
    with pytest.raises(BadInput, match="lone surrogate"):
        TOKENIZER.encode("a\ud83cb" + "a" * length)


@pytest.mark.parametrize("framed", [True, False])
def test_a_long_text_has_the_tokens_that_it_would_have_in_any_case(framed):
    backend = byte_level()
    frame = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))])
    backend.post_processor = frame
    text = f"ab c\u00e9\n{END}" * LONG_TEXT_CHARS
    whole = backend.encode(text, add_special_tokens=framed).ids
    assert Tokenizer(backend).encode(text, add_special_tokens=framed) == whole


def test_other_threads_go_on_while_a_long_text_is_tokenized():
    """One that has the interpreter to itself leaves them a moment between two texts."""
    with ThreadPoolExecutor() as pool:
        encodings = [pool.submit(TOKENIZER.encode, "ab c" * 50 * LONG_TEXT_CHARS) for _ in range(3)]
        moments = 0
        while not all(encoding.done() for encoding in encodings):
            moments += 1
            time.sleep(0)  # which gives the interpreter away
    assert moments > 100


def test_a_stored_truncation_cuts_no_prompt(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "abc " * 5
    assert Tokenizer.open(tmp_path).encode(text) == TOKENIZER.encode(text)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"there is no .*tokenizer\.json.*token ids"):
        Tokenizer.open(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json cannot be read"):
        Tokenizer.open(tmp_path)


def imported(code: str) -> set[str]:
    listing = subprocess.run([sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True)
    return {name.partition(".")[0] for name in listing.stdout.decode().split()}


def test_the_text_layer_imports_no_framework():
    modules = imported("import dflash_aot.runtime.text.tokenizer")
    assert "tokenizers" in modules
    assert not modules & {"transformers", "flax", "torch"}
    assert "transformers" in imported("import dflash_aot.runtime.text.tokenizer, transformers")


@given(st.text(ALPHABET + END, max_size=12))
@example("🎉" + END)
def test_spelled_bytes_add_up_to_the_text(text):
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


@pytest.mark.parametrize("data", [b"\xf0\x9f", b" ", b"\x00\xad"])
def test_a_part_of_a_character_is_spelled_by_its_bytes(data):
    assert b"".join(map(TOKENIZER.token_bytes, byte_ids(data))) == data
    fallback = Tokenizer(byte_fallback())
    assert b"".join(map(fallback.token_bytes, data)) == data  # there the token of a byte is its number


@every_kind
def test_a_token_is_spelled_as_it_goes_on_with_a_text(backend):
    tokenizer = Tokenizer(backend)
    for token_id in tokenizer.encode("the cat a", add_special_tokens=False):
        alone, twice = tokenizer.decode([token_id]), tokenizer.decode([token_id] * 2)
        assert alone + tokenizer.token_bytes(token_id).decode() == twice
    (end,) = tokenizer.encode(END, add_special_tokens=False)
    assert tokenizer.token_bytes(end) == END.encode()
    assert tokenizer.token_bytes(10_000) == b""
