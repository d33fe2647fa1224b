"""Text while its tokens arrive: whole characters, cut before a stop."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime.text import RESYNC_TOKENS, TextStream, Tokenizer

END = "<|end|>"
CORPUS = [
    "the cat ate the 🎉 at the café, 東京東京タワー 🎉🎊🎉🎊 naïve été\n",
    "a b c aaa bbb abab 東京 👩‍👩‍👧 ok\n",
] * 20
ALPHABET = "ab c\né東京タ🎉🎊👩‍👧\x00\ufffd"
VOCABULARY = 400


def train() -> tokenizers.Tokenizer:
    """Byte-level BPE without splitting at words: some of its tokens end or begin inside a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback() -> Tokenizer:
    """One token per byte, decoded as Gemma and Llama 2 do."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


BACKEND = train()
TOKENIZER = Tokenizer(BACKEND)


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


def obvious(ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int, bool]:
    """Text, tokens kept, stopped: everything decoded again after each token."""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count])
        for end in range(len(text) + 1):
            starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
            if starts:
                return text[: min(starts)], count, True
    return TOKENIZER.decode(ids), len(ids), False


texts = st.text(st.sampled_from(ALPHABET), max_size=60) | st.text(max_size=40)
any_ids = st.lists(st.integers(0, VOCABULARY + 3), max_size=80)
# Leads, continuations and bytes of no character: borders between characters become rare, or never come.
broken_ids = st.lists(st.sampled_from(byte_ids(b"\xe2\x82\xac\xf0\x9f\x8e\xff\xc0\xed\xa0\x41")), max_size=120)
many_ids = any_ids | broken_ids | texts.map(TOKENIZER.encode)
sizes = st.lists(st.integers(0, 9), max_size=12)
stop_texts = st.text(st.sampled_from(ALPHABET.replace("\ufffd", "")), min_size=1, max_size=4)


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


@given(st.text(st.sampled_from("aé東🎉"), max_size=40), sizes)
def test_byte_fallback_keeps_characters_whole(text, sizes):
    stream = TextStream(byte_fallback(), [])
    assert run(stream, chunked(list(text.encode()), sizes)) == text


class MeteredTokenizer(Tokenizer):
    """Counts the tokens it decodes."""

    decoded = 0
    longest = 0

    def decode(self, ids):
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)


@pytest.mark.parametrize("data", ["the cat 🎉".encode() * 100, b"\xff" * 1000, b"\x9f\xf0" * 500])
def test_the_work_for_a_token_does_not_grow(data):
    meter = MeteredTokenizer(BACKEND)
    ids = byte_ids(data)
    TextStream(meter, []).push(ids)
    assert meter.longest <= 2 * RESYNC_TOKENS + 1
    assert meter.decoded <= 3 * RESYNC_TOKENS * len(ids)


def test_special_tokens_are_read_in_and_left_out():
    ids = TOKENIZER.encode(f"ab{END}")
    assert ids[-1] == BACKEND.token_to_id(END)
    assert TOKENIZER.decode(ids) == "ab"


def test_the_tokenizers_own_frame_can_be_left_out():
    backend = train()
    frame = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))])
    backend.post_processor = frame
    tokenizer = Tokenizer(backend)
    framed = tokenizer.encode("ab")
    assert framed == [backend.token_to_id(END), *tokenizer.encode("ab", add_special_tokens=False)]


def test_a_lone_surrogate_is_refused():
    with pytest.raises(BadInput, match="lone surrogate"):
        TOKENIZER.encode("a\ud83cb")


def test_a_stored_truncation_cuts_no_prompt(tmp_path):
    backend = train()
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
    modules = imported("import dflash_aot.runtime.text")
    assert "tokenizers" in modules
    assert not modules & {"transformers", "flax", "torch"}
    assert "transformers" in imported("import dflash_aot.runtime.text, transformers")
