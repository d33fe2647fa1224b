"""Tokenizer: encoding, decoding, the bytes of single tokens, broken files."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers, processors

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime.text.detokenizer import Detokenizer
from dflash_aot.runtime.text.tokenizer import Tokenizer
from tests.runtime.tokenizer_kinds import (
    ADDED_TOKENS,
    ALPHABET,
    END,
    KINDS,
    byte_fallback,
    byte_level,
    list_byte_tokens,
    stripped_byte_fallback,
    with_added_tokens,
)

BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)
every_kind = pytest.mark.parametrize("backend", [make() for make in KINDS], ids=[make.__name__ for make in KINDS])


def test_panic_of_the_decoder_raises_bad_checkpoint(capfd):
    """The panic of tokenizers is a BaseException: it would end the engine's thread instead of one request."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(BadCheckpoint, match=r"decoder of tokenizer\.json fails at tokens \[\]"):
        Tokenizer(backend).decode([])


@every_kind
def test_special_token_in_a_message_stays_letters(backend):
    tokenizer = Tokenizer(backend)
    message = f"a{END}{END[0]}{END}b"
    ids = tokenizer.encode_chat(f"ab{END}{tokenizer.break_special_tokens(message)}{END}")
    assert ids.count(backend.token_to_id(END)) == 2
    assert ids[-1] == backend.token_to_id(END)
    assert tokenizer.break_special_tokens("ab c <|en") == "ab c <|en"
    assert tokenizer.break_special_tokens(END[0] + END) == f"{END[0]}{END[0]}\ufdd0{END[1:]}"
    assert tokenizer.encode_chat(f"ab{END}c") == tokenizer.encode(f"ab{END}c", add_special_tokens=False)
    with pytest.raises(BadInput, match=r"U\+FDD0"):
        tokenizer.break_special_tokens("a\ufdd0")


def test_broken_special_token_has_no_space_between_its_letters():
    tokenizer = Tokenizer(stripped_byte_fallback())
    message = tokenizer.break_special_tokens(f"a{END}b")
    assert tokenizer.decode(tokenizer.encode_chat(f"{message}{END}the")) == f"a{END}b the"


def test_special_tokens_are_encoded_and_not_decoded():
    ids = TOKENIZER.encode(f"ab{END}")
    assert ids[-1] == BACKEND.token_to_id(END)
    assert TOKENIZER.decode(ids) == "ab"


def test_add_special_tokens_controls_the_added_tokens():
    backend = byte_level()
    frame = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))])
    backend.post_processor = frame
    tokenizer = Tokenizer(backend)
    framed = tokenizer.encode("ab")
    assert framed == [backend.token_to_id(END), *tokenizer.encode("ab", add_special_tokens=False)]


def test_lone_surrogate_raises():
    with pytest.raises(BadInput, match="lone surrogate"):
        TOKENIZER.encode("a\ud83cb")


def hostile_tokenizer(directory, pattern: str) -> Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.open(directory)


def test_panic_of_the_encoder_raises_bad_checkpoint(tmp_path):
    """The regular expression gives up after ten million steps, and the library panics."""
    tokenizer = hostile_tokenizer(tmp_path, r"(a+)+$")
    with pytest.raises(BadCheckpoint, match=rf"{tmp_path}/tokenizer\.json fails at a text of 61 characters: .*retry"):
        tokenizer.encode("a" * 60 + "b")
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "abc " * 5
    assert Tokenizer.open(tmp_path).encode(text) == TOKENIZER.encode(text)


def test_missing_or_broken_tokenizer_file_raises(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"there is no .*tokenizer\.json.*token ids"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json cannot be read"):
        Tokenizer.open(tmp_path)


@given(st.text(ALPHABET + END, max_size=12))
@example("🎉" + END)
def test_token_bytes_add_up_to_the_text(text):
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


def test_token_bytes_of_a_part_of_a_character(data=b"\xf0\x9f \x00\xad"):
    assert b"".join(map(TOKENIZER.token_bytes, list_byte_tokens(data))) == data
    fallback = Tokenizer(byte_fallback())
    assert b"".join(map(fallback.token_bytes, data)) == data  # the id of a byte token is the byte


@every_kind
def test_token_bytes_are_those_in_the_middle_of_a_text(backend):
    tokenizer = Tokenizer(backend)
    for token_id in tokenizer.encode("the cat a", add_special_tokens=False):
        alone, twice = tokenizer.decode([token_id]), tokenizer.decode([token_id] * 2)
        assert alone + tokenizer.token_bytes(token_id).decode() == twice
    (end,) = tokenizer.encode(END, add_special_tokens=False)
    assert tokenizer.token_bytes(end) == END.encode()
    assert tokenizer.token_bytes(10_000) == b""


@pytest.mark.parametrize("name", ADDED_TOKENS)
def test_added_tokens_are_text_whatever_their_letters(name):
    """Also letters of the byte alphabet; a token of the model's own vocabulary stands for its bytes."""
    backend = with_added_tokens(name)
    tokenizer = Tokenizer(backend)
    for text in ADDED_TOKENS[name][1]:
        token = backend.token_to_id(text)
        shown = text.replace("▁", " ")  # Gemma's spaces, which its model writes too
        assert tokenizer.decode([token]) == tokenizer.decode_with_special([token]) == shown
        assert tokenizer.token_bytes(token) == shown.encode()
        stream = Detokenizer(tokenizer, [])
        assert stream.push([token]) + stream.flush() == shown
    special = backend.token_to_id(ADDED_TOKENS[name][0][0])
    assert tokenizer.decode([special]) == "" and tokenizer.decode_with_special([special]) == ADDED_TOKENS[name][0][0]
