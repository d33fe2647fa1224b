"""API keys: reading, checking and identifying them."""

import hashlib

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.server.limits import WITHOUT_KEY, ApiKeys, make_keys, read_keys

FIRST, SECOND = "sk-first-0123456789abcdef", "sk-second-0123456789abcdef"
KEYS = make_keys([FIRST, SECOND], "here")


@pytest.mark.parametrize(("key", "number"), [(FIRST, 1), (SECOND, 2)])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_key_is_identified_by_its_number(scheme, key, number):
    assert KEYS.identify(f"{scheme} {key}") == number


OTHER_HEADERS = (
    *(None, "", "Bearer", "Bearer ", FIRST, f"Basic {FIRST}", f"Bearer{FIRST}", f"Bearer\t{FIRST}", f"Bearer  {FIRST}"),
    *(f"Bearer {FIRST} ", f"Bearer {FIRST[:-1]}", f"Bearer {FIRST}0", f"Bearer {FIRST.upper()}", f"Bearer {FIRST}\x00"),
    *(f"Bearer {FIRST}, Bearer {SECOND}", f"Bearer {hashlib.sha256(FIRST.encode()).hexdigest()}"),
    *("Bearer \xff\xfe", "Bearer \udcff"),
)


def test_other_authorization_headers_are_not_identified():
    for header in OTHER_HEADERS:
        assert KEYS.identify(header) is None


def test_without_keys_every_header_is_accepted():
    assert not ApiKeys()
    for header in (None, "", f"Bearer {FIRST}"):
        assert ApiKeys().identify(header) == WITHOUT_KEY


def test_salts_keep_the_prefixes_of_keys_apart():
    salts = [None, "", "a", "2, a", "key 2, a"]
    salted = [KEYS.salt_prefix(key, salt) for key in (1, 2) for salt in salts]
    assert len(set(salted)) == len(salted)
    for keys in (ApiKeys(), make_keys([FIRST, SECOND], "here", salts_prefixes=False)):
        assert [keys.salt_prefix(1, salt) for salt in salts] == salts


def test_only_hashes_of_keys_are_kept():
    assert KEYS.digests == tuple(hashlib.sha256(key.encode()).digest() for key in (FIRST, SECOND))
    assert FIRST not in repr(KEYS)


def test_key_that_no_header_can_hold_is_refused():
    for key in ("", "two words", "tab\there", "a line\n", "schlüssel", "\x00", "\x7f"):
        with pytest.raises(BadInput, match="DFLASH_API_KEY: the key is empty or cannot be sent in a header") as error:
            make_keys([FIRST, key], "DFLASH_API_KEY")
        assert FIRST not in str(error.value)
        assert key.strip() == "" or key not in str(error.value)


def test_duplicate_key_is_refused_without_showing_it():
    with pytest.raises(BadInput, match="a key is given twice") as error:
        make_keys([FIRST, SECOND, FIRST], "keys.txt")
    assert FIRST not in str(error.value)


def test_file_holds_one_key_per_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(
        f"\ufeff# of the tests\n\n  {FIRST}  \r\n   # and\n{SECOND}"
    )  # some editors write a byte order mark
    assert read_keys(path) == [FIRST, SECOND]


def test_invalid_key_in_a_file_is_reported_with_its_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the tests\n{FIRST}\n\ntwo words\n")
    with pytest.raises(BadInput, match="keys, line 4: the key is empty or cannot be sent in a header") as error:
        read_keys(path)
    assert FIRST not in str(error.value) and "two words" not in str(error.value)


def test_file_without_keys_is_refused(tmp_path):
    path = tmp_path / "keys"
    for text in (b"", b"\n \n", b"# nothing\n"):
        path.write_bytes(text)
        with pytest.raises(BadInput, match="holds no API key: write one per line"):
            read_keys(path)


def test_unreadable_file_is_refused_with_the_reason(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="binary, cannot be read: it is not UTF-8"):
        read_keys(binary)
    with pytest.raises(BadInput, match="none, cannot be read: No such file or directory"):
        read_keys(tmp_path / "none")
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_keys(tmp_path)
