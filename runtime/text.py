"""Text above the token-id engine: encode a prompt, decode an answer, show an answer while it is made."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dflash_aot.cache.errors import BadCheckpoint, BadInput

# Byte-level shows an unfinished character as one U+FFFD. Byte fallback turns the window's bytes into one each: 4 of the
# character before, of which one was shown, and 3 of the unfinished one.
HELD_CHARACTERS = 6
# Bytes enough to cut anywhere: 3 until decoding is in step again, then the held characters, of at most 3 bytes each.
RESYNC_TOKENS = 3 + 3 * HELD_CHARACTERS


class Tokenizer:
    """The tokenizer of a checkpoint, from its `tokenizer.json`. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def open(cls, directory: Path) -> "Tokenizer":
        """Read `directory/tokenizer.json`; `BadCheckpoint` if it is missing or broken."""
        path = directory / "tokenizer.json"
        remedy = "Give token ids instead of text, or a directory with the tokenizer.json of the target"
        if not path.is_file():
            raise BadCheckpoint(f"there is no {path}. {remedy}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises the base class itself
            raise BadCheckpoint(f"{path} cannot be read as a tokenizer: {error}. {remedy}") from error
        # A tokenizer.json may carry the truncation and padding of its training: they would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, special tokens written out in it included; `BadInput` if it is not valid Unicode.

        `add_special_tokens=False` leaves out what the tokenizer puts around a text (a BOS, say): right for a
        rendered chat, whose template has written it already.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise BadInput(f"not a text that UTF-8 can hold (a lone surrogate?): {ascii(text[:80])}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens and ids outside the vocabulary."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out: it is special, or outside the vocabulary."""
        return token_id in self._special or self._backend.id_to_token(token_id) is None


class TextStream:
    """The text of one request while its tokens arrive: whole characters only, cut before the first stop string.

    Everything returned by `push` and, at the end, `flush` adds up to `tokenizer.decode(all ids)` if the tokenizer
    is byte-level and no stop string is hit. `BadInput` if a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._window = _Window(tokenizer)
        self._finder = _StopFinder(stops)
        self._kept = 0

    @property
    def finished(self) -> bool:
        """Whether a stop string was hit; then nothing may be pushed any more."""
        return self._finder.found

    @property
    def tokens_kept(self) -> int:
        """How many of the pushed tokens belong to the output: up to the one that completed a stop string."""
        return self._kept

    def push(self, ids: Sequence[int]) -> str:
        """The text that is safe to show now; the ids behind the one that completes a stop string are ignored."""
        assert not self.finished
        shown = []
        for token_id in ids:
            self._kept += 1
            shown.append(self._finder.push(self._window.push(token_id)))
            if self.finished:
                break
        return "".join(shown)

    def flush(self) -> str:
        """What was held back, once generation has ended; "" after a stop string.

        Only a stop string that holds U+FFFD can be completed, and `finished` set, by this call.
        """
        if self.finished:
            return ""
        return self._finder.push(self._window.flush()) + self._finder.flush()


class _Window:
    """The last few tokens, decoded again with each new one, to see what it adds to the text.

    The window begins one character border before the last: decoders treat the first token of a text specially.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._bordered = 0  # tokens up to the last character border
        self._shown = 0  # characters of the decoded window that were returned

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        unfinished = _unfinished(text)
        fresh = self._show(text, len(text) - unfinished)
        if not unfinished:
            self._shorten(self._bordered, held=0)
            self._bordered = len(self._ids)
        elif len(self._ids) > 2 * RESYNC_TOKENS:
            self._shorten(len(self._ids) - RESYNC_TOKENS, held=len(text) - self._shown)
            self._bordered = 0
        return fresh

    def flush(self) -> str:
        text = self._tokenizer.decode(self._ids)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def _shorten(self, start: int, held: int) -> None:
        self._ids = self._ids[start:]
        self._shown = len(self._tokenizer.decode(self._ids)) - held


class _StopFinder:
    """Passes text on until it holds a stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise BadInput('an empty stop string ("") would end every answer before its first token: leave it out')
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, fresh: str) -> str:
        text = self._held + fresh
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.found = bool(hits)
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        end = min(hits)[1] if hits else len(text) - held
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.found else held


def _unfinished(text: str) -> int:
    """Characters at the end of `text` that the next token may still replace."""
    return min(HELD_CHARACTERS, len(text) - len(text.rstrip("\ufffd")))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
