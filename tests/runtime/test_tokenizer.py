"""Tokenizer: encoding, decoding, the bytes of single tokens, broken files."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime.text.tokenizer import Tokenizer
from tests.runtime.tokenizer_kinds import ALPHABET, END, KINDS, byte_fallback, byte_level, list_byte_tokens

BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)
every_kind = pytest.mark.parametrize("backend", [make() for make in KINDS], ids=[make.__name__ for make in KINDS])


def test_panic_of_the_decoder_raises_bad_checkpoint(capfd):
    """The panic of tokenizers is a BaseException: it would end the engine's thread instead of one request."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(BadCheckpoint, match=r"decoder of tokenizer\.json fails at tokens \[\]"):
        Tokenizer(backend).decode([])


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


@pytest.mark.parametrize("framed", [True, False])
def test_text_gets_the_tokens_of_the_library(framed):
    backend = byte_level()
    frame = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))])
    backend.post_processor = frame
    text = f"ab c\u00e9\n{END}" * 100
    whole = backend.encode(text, add_special_tokens=framed).ids
    assert Tokenizer(backend).encode(text, add_special_tokens=framed) == whole


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


@pytest.mark.parametrize("pattern", [r"(a|a){17}b|.", None], ids=["slow expression", "long text"])
def test_encoding_releases_the_gil(tmp_path, pattern):
    """A thread that holds the GIL lets others run only between two texts: they would stand still with it."""
    tokenizer, text = TOKENIZER, "ab c" * 200_000
    if pattern:
        tokenizer, text = hostile_tokenizer(tmp_path, pattern), "a" * 50
    with ThreadPoolExecutor() as pool:
        encodings = [pool.submit(tokenizer.encode, text) for _ in range(3)]
        switches = 0
        while not all(encoding.done() for encoding in encodings):
            switches += 1
            time.sleep(0)  # releases the GIL
    assert switches > 8  # a busy machine gave 13


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "abc " * 5
    assert Tokenizer.open(tmp_path).encode(text) == TOKENIZER.encode(text)


def test_missing_tokenizer_file_raises(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"there is no .*tokenizer\.json.*token ids"):
        Tokenizer.open(tmp_path)


def test_broken_tokenizer_file_raises(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json cannot be read"):
        Tokenizer.open(tmp_path)


def imported(code: str) -> set[str]:
    listing = subprocess.run([sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True)
    return {name.partition(".")[0] for name in listing.stdout.decode().split()}


def test_text_package_imports_no_framework():
    modules = imported("import dflash_aot.runtime.text.detokenizer")
    assert "tokenizers" in modules
    assert not modules & {"transformers", "flax", "torch"}
    assert "transformers" in imported("import dflash_aot.runtime.text.tokenizer, transformers")


def test_token_outside_the_byte_level_alphabet_has_the_bytes_of_its_letters():
    backend = tokenizers.Tokenizer(models.BPE({"東a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).token_bytes(0).decode() == backend.decode([0]) == "東a"


@given(st.text(ALPHABET + END, max_size=12))
@example("🎉" + END)
def test_token_bytes_add_up_to_the_text(text):
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


@pytest.mark.parametrize("data", [b"\xf0\x9f", b" ", b"\x00\xad"])
def test_token_bytes_of_a_part_of_a_character(data):
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


@given(st.lists(st.integers(0, BACKEND.get_vocab_size() + 3), max_size=30))
def test_bytes_of_a_byte_level_text_are_those_of_its_tokens(ids):
    assert b"".join(TOKENIZER.text_bytes[one] for one in ids).decode(errors="replace") == TOKENIZER.decode(ids)


def test_only_byte_level_decoders_have_bytes_of_every_token():
    with_bytes = [make.__name__ for make in KINDS if Tokenizer(make()).text_bytes is not None]
    assert "byte_level" in with_bytes and "byte_fallback" not in with_bytes
