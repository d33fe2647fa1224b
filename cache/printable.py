"""Text that is printed and logged: text from outside is made safe, and byte counts get a unit.

Such a text could move the cursor of a terminal, reorder what is shown, or start a line that looks like one of ours.
Errors (`cache.errors`) and the output of commands (`bin.command_line`) pass every line through `escape_line`.
"""

import json
import re

# -- byte counts: the formatter of all rooms


def format_bytes(count: float) -> str:
    """Such as "512 B" or "1.3 GB", in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


# -- text from outside

LONGEST_LINE = 10_000  # characters
LONGEST_QUOTE = 1_000  # characters of another library's message
# Python counts the invisible characters of the categories C and Z as not printable. These are letters and marks that
# show nothing: Unicode's Default_Ignorable_Code_Point without those categories, and the blank Braille pattern.
BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def escape_line(text: str, limit: int = LONGEST_LINE) -> str:
    """Returns a text as one line of visible characters, at most `limit` of them (100 or more).

    Control characters, line breaks, bidirectional controls, zero-width and other invisible characters become escapes
    as in Python: `\\n`, `\\x1b`, `\\u202e`. Of a longer text the middle is left out. An escaped text stays as it is.
    """
    text = _cut_middle(text, limit)
    return text if _is_visible(text) else _cut_middle("".join(map(_escape, text)), limit)


def escape_json(text: str) -> str:
    """Returns JSON without line breaks with the same value, in which invisible characters are `\\uXXXX` escapes."""
    if _is_visible(text):
        return text
    return "".join(char if _is_visible(char) else json.dumps(char)[1:-1] for char in text)


def quote_first_line(text: str, limit: int = LONGEST_QUOTE) -> str:
    """Returns the first line that is not blank, cut at the limit before anything else looks at the text.

    A URL that the cut ends is left out from `://` on: its user and password end with an `@` that is not there.
    """
    lines = text[:limit].strip().splitlines()
    first = lines[0].rstrip() if lines else ""
    if len(text) <= limit or len(lines) > 1:
        return first
    before, scheme, address = first.rpartition("://")
    whole = f"{before}{scheme}" if scheme and not re.search(r"\s", address) else first
    return f"{whole}…"


def _cut_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    mark = f" … ({len(text)} characters) … "
    kept = limit - len(mark)
    return f"{text[: kept - kept // 2]}{mark}{text[len(text) - kept // 2 :]}"


def _is_visible(text: str) -> bool:
    return text.isprintable() and (text.isascii() or not BLANK.search(text))


def _escape(char: str) -> str:
    return char if _is_visible(char) else char.encode("unicode_escape").decode()
