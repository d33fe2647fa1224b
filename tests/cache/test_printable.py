"""Text from outside: escapes, limits, and the errors and JSON that hold it."""

import json
import pickle
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.printable import LONGEST_LINE, LONGEST_QUOTE, escape_json, escape_line, quote_first_line


def test_escape_line_escapes_what_is_invisible():
    for text, shown in [
        ("target, τ → ½, 日本語 😀", "target, τ → ½, 日本語 😀"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[2K\x7f\x9b1A", r"\x1b[2K\x7f\x9b1A"),
        ("\u202egpj\u2066.\u200e\u061c", r"\u202egpj\u2066.\u200e\u061c"),
        ("one\u2028two\u2029three\x85four", r"one\u2028two\u2029three\x85four"),
        ("\u3164\ufe0f\u00a0", r"\u3164\ufe0f\xa0"),
        (r"C:\new", r"C:\new"),
    ]:
        assert escape_line(text) == escape_line(escape_line(text)) == shown


def test_escape_line_leaves_no_control_separator_or_ignorable_character():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    left = set(escape_line(every, limit=20 * len(every)))
    assert {unicodedata.category(char) for char in left if char != " "}.isdisjoint(
        {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    )
    ignorable = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180f\u3164\ufe00\ufe0f\uffa0\U000e0100\U000e01ef"
    assert left.isdisjoint(ignorable)  # letters and marks that Unicode tells to show nothing for
    assert {char for char in every if char.isalnum() and char.isprintable()} <= {*left, *ignorable}


@given(st.text(st.characters(codec=None), max_size=400), st.integers(100, 300))
def test_escape_line_is_bounded_and_stable(text, limit):
    shown = escape_line(text, limit)
    assert len(shown) <= limit and shown.isprintable() and escape_line(shown, limit) == shown


def test_escape_line_keeps_both_ends_of_long_text():
    shown = escape_line(f"begin{'x' * LONGEST_LINE}end")
    assert shown.startswith("beginx") and shown.endswith("xend") and f" … ({LONGEST_LINE + 8} characters) … " in shown


@given(st.dictionaries(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)), max_size=2))
def test_escape_json_keeps_the_value(value):
    line = escape_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(line) == value and line.isprintable()


def test_quote_first_line_cuts_before_it_looks():
    for text, first in [
        ("", ""),
        (" \n\n no such bucket \u2028more", "no such bucket"),
        ("x" * LONGEST_QUOTE, "x" * LONGEST_QUOTE),
        ("x" * (LONGEST_QUOTE + 1), "x" * LONGEST_QUOTE + "…"),
        (f"first\n{'x' * LONGEST_QUOTE}", "first"),
        (f"at https://me:{'secret' * LONGEST_QUOTE}@host/", "at https://…"),
        (f"at https://host/a b{'x' * LONGEST_QUOTE}", f"at https://host/a b{'x' * (LONGEST_QUOTE - 19)}…"),
    ]:
        assert quote_first_line(text) == first


def test_error_message_has_the_lines_it_was_made_of():
    error = BuildFailed("two failed:", "  a: \x1b[1A", "  b\nc")
    assert str(error) == "two failed:\n  a: \\x1b[1A\n  b\\nc"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is BuildFailed and copy.args == error.args
    assert str(BadInput(f"because {error}")) == "because two failed:\\n  a: \\x1b[1A\\n  b\\nc"
    assert str(BadInput()) == ""
