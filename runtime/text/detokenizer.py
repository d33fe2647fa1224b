"""From token ids to whole characters, one token at a time."""

import codecs
from collections.abc import Callable, Mapping, Sequence

# Decoders show a character that is not whole yet as one of it, at the end.
REPLACEMENT = "\ufffd"
# Bytes enough to cut anywhere: 3 until decoding is in step again, then the held character, of at most 3 bytes.
RESYNC_TOKENS = 6


class ByteJoiner:
    """Byte tokens (byte fallback: Llama 2, Gemma) as runs of whole characters; other tokens as they are.

    Bytes of no character become those of U+FFFD, as UTF-8 decoders do it. The tokenizer's own decoder shows a run of
    bytes as U+FFFD throughout if one of them is broken, the characters before it included, which have been shown.

    values: all 256 byte tokens and their bytes; empty without byte fallback.
    """

    def __init__(self, values: Mapping[int, int]):
        self._values = values
        self._tokens = {byte: token_id for token_id, byte in values.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> int:
        """The U+FFFD of bytes that are held back: one, or two of the beginning of a surrogate."""
        return len(self._decoder.getstate()[0].decode(errors="replace"))

    def push(self, token_id: int) -> list[int]:
        """The tokens whose text is certain now."""
        if not self._values:
            return [token_id]
        if token_id not in self._values:
            return [*self.flush(), token_id]
        return self._spell(self._decoder.decode(bytes([self._values[token_id]])))

    def flush(self) -> list[int]:
        """What was held back, as U+FFFD."""
        return self._spell(self._decoder.decode(b"", final=True))

    def _spell(self, text: str) -> list[int]:
        return [self._tokens[byte] for byte in text.encode()]


class CharacterStream:
    """The text that token ids add to a context, whole characters only.

    All of it together is decode(context + ids) without what it begins with in common with decode(context).

    decode: ids → text. values: see ByteJoiner. context: the last RESYNC_TOKENS tokens before, if there are so many.
    No token may be one that decode leaves out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], values: Mapping[int, int], context: Sequence[int]):
        self._joiner, self._window = ByteJoiner(values), _Window(decode, joined=bool(values))
        self._replaced = 0  # U+FFFD that the context's text ends in: new only if they turn into something else
        for token_id in context:
            self.push(token_id)
        self._replaced = self._joiner.pending or self._window.pending

    def push(self, token_id: int) -> str:
        """The text that no later token changes."""
        return self._new(self._window.push(self._joiner.push(token_id)))

    def flush(self) -> str:
        """What was held back, U+FFFD for a character that never came whole."""
        return self._new(self._window.push(self._joiner.flush()) + self._window.flush())

    def _new(self, text: str) -> str:
        if not (text and self._replaced):
            return text
        known = min(self._replaced, len(text) - len(text.lstrip(REPLACEMENT)))
        self._replaced = 0
        return text[known:]


class _Window:
    """The last few tokens, decoded again with each new one, to see what it adds to the text.

    The window begins one character border before the last: decoders treat the first token of a text specially.
    joined: whether what comes is whole characters already; else one that is not whole is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], joined: bool):
        self._decode, self._joined = decode, joined
        self._ids: list[int] = []
        self._bordered = 0  # tokens up to the last character border
        self._shown = 0  # characters of the decoded window that were returned
        self.pending = False

    def push(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        self._ids += ids
        text = self._decode(self._ids)
        self.pending = not self._joined and text.endswith(REPLACEMENT)
        fresh = self._show(text, len(text) - self.pending)
        if not self.pending:
            self._shorten(self._bordered, held=0)
            self._bordered = len(self._ids)
        elif len(self._ids) > 2 * RESYNC_TOKENS:
            self._shorten(len(self._ids) - RESYNC_TOKENS, held=len(text) - self._shown)
            self._bordered = 0
        return fresh

    def flush(self) -> str:
        text = self._decode(self._ids)
        self.pending = False
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def _shorten(self, start: int, held: int) -> None:
        self._ids = self._ids[start:]
        self._shown = len(self._decode(self._ids)) - held
