"""API keys: what is one, where they come from, and whose a header holds."""

import hashlib

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.server.api_keys import ANYBODY, Keys, make_keys, read_keys

FIRST, SECOND = "sk-first-0123456789abcdef", "sk-second-0123456789abcdef"
KEYS = make_keys([FIRST, SECOND], "here")


@pytest.mark.parametrize(("key", "caller"), [(FIRST, 1), (SECOND, 2)])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_key_is_known_by_its_number(scheme, key, caller):
    assert KEYS.identify(f"{scheme} {key}") == caller


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        FIRST,
        f"Basic {FIRST}",
        f"Bearer{FIRST}",
        f"Bearer\t{FIRST}",
        f"Bearer  {FIRST}",
        f"Bearer {FIRST} ",
        f"Bearer {FIRST[:-1]}",
        f"Bearer {FIRST}0",
        f"Bearer {FIRST.upper()}",
        f"Bearer {FIRST}, Bearer {SECOND}",
        f"Bearer {FIRST}\x00",
        f"Bearer {hashlib.sha256(FIRST.encode()).hexdigest()}",
        "Bearer \xff\xfe",
        "Bearer \udcff",
    ],
)
def test_what_only_looks_like_a_key_is_nobodys(header):
    assert KEYS.identify(header) is None


@pytest.mark.parametrize("header", [None, "", f"Bearer {FIRST}"])
def test_where_there_are_no_keys_everybody_may_ask(header):
    assert not Keys()
    assert Keys().identify(header) == ANYBODY


def test_only_hashes_are_kept():
    assert KEYS.digests == tuple(hashlib.sha256(key.encode()).digest() for key in (FIRST, SECOND))
    assert FIRST not in repr(KEYS)


@pytest.mark.parametrize("key", ["", "two words", "tab\there", "a line\n", "schlüssel", "\x00", "\x7f"])
def test_what_no_header_can_hold_is_no_key(key):
    with pytest.raises(BadInput, match="DFLASH_API_KEY: the key is empty or holds what no header can") as refusal:
        make_keys([FIRST, key], "DFLASH_API_KEY")
    assert FIRST not in str(refusal.value)
    assert key.strip() == "" or key not in str(refusal.value)


def test_a_key_that_is_given_twice_is_refused_without_being_shown():
    with pytest.raises(BadInput, match="a key stands there twice") as refusal:
        make_keys([FIRST, SECOND, FIRST], "keys.txt")
    assert FIRST not in str(refusal.value)


def test_a_file_has_a_key_a_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"\ufeff# of the tests\n\n  {FIRST}  \r\n   # and\n{SECOND}")  # as some editors begin a file
    assert read_keys(path) == [FIRST, SECOND]


def test_a_key_of_a_file_that_no_header_can_hold_is_found_by_its_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the tests\n{FIRST}\n\ntwo words\n")
    with pytest.raises(BadInput, match="keys, line 4: the key is empty or holds what no header can") as refusal:
        read_keys(path)
    assert FIRST not in str(refusal.value) and "two words" not in str(refusal.value)


@pytest.mark.parametrize("text", [b"", b"\n \n", b"# nothing\n"])
def test_a_file_without_keys_is_refused_rather_than_open_to_all(tmp_path, text):
    path = tmp_path / "keys"
    path.write_bytes(text)
    with pytest.raises(BadInput, match="holds no API key: one a line is needed"):
        read_keys(path)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="binary, cannot be read: it is not UTF-8"):
        read_keys(binary)
    with pytest.raises(BadInput, match="none, cannot be read: No such file or directory"):
        read_keys(tmp_path / "none")
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_keys(tmp_path)
