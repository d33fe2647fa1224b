"""Incremental detokenizer: streamed token ids to text, in whole characters, cut before the first stop string."""

import codecs
from collections.abc import Callable, Mapping, Sequence

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.text.tokenizer import ByteFallbackJoiner, Tokenizer

# Decoders show an incomplete character at the end of a text as this character.
REPLACEMENT = "\ufffd"
# Enough tokens of context to start decoding anywhere: up to 3 until decoding is in step, plus the up to 3 bytes of an
# incomplete character.
RESYNC_TOKENS = 6


class Detokenizer:
    """The text of one request while its tokens arrive: whole characters only, cut before the first stop string.

    The texts that `push` and, at the end, `flush` return add up to what the ids add to the text of `prompt`; without
    a prompt, to `tokenizer.decode(all ids)`. The text ends earlier at a stop string, or at a special token whose
    written form is a stop string, although special tokens have no text.

    Attributes:
        can_stop: whether there are stop strings.
        finished: whether a stop was found; then `push` must not be called any more.
        tokens_kept: how many of the pushed tokens belong to the output: all up to the token that completed a stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        """Starts after a prompt. Raises BadInput for an empty stop.

        Args:
            tokenizer: of the target.
            stops: stop strings.
            prompt: the token ids before the first pushed token.
            min_tokens: stops are looked for only after this number of pushed tokens.
            markers: token id -> the character that stands for the token in the text: a lone surrogate, which no other
                token can write.
        """
        self._tokenizer = tokenizer
        self._finder = _StopStringFinder(stops)
        self._markers = markers or {}
        self._stop_tokens = tokenizer.find_special_tokens(stops) | {
            token_id for token_id in self._markers if tokenizer.added_tokens.get(token_id) in stops
        }
        self.can_stop = bool(stops)  # otherwise all pushed tokens are decoded together
        context = tokenizer.last_text_tokens(prompt, RESYNC_TOKENS)
        self._decoder: ByteLevelDecoder | IncrementalDecoder
        if tokenizer.text_bytes is None:
            self._decoder = IncrementalDecoder(
                tokenizer.decode_joined, tokenizer.byte_values, context
            )
        else:
            self._decoder = ByteLevelDecoder(tokenizer.text_bytes, context)
        self.finished = False
        self.tokens_kept = 0
        self._min_tokens = min_tokens

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that no later token changes. Ids after the token that completes a stop are ignored."""
        assert not self.finished
        if not self.can_stop:
            self.tokens_kept += len(ids)
            if not self._markers.keys().isdisjoint(ids):
                return "".join([self._decode(one) for one in ids])
            if self._tokenizer.text_bytes is None:
                ids = [one for one in ids if not self._tokenizer.is_skipped(one)]
            return self._decoder.push(ids)
        shown = []
        for token_id in ids:
            self.tokens_kept += 1
            shown.append(self._push(token_id))
            self.finished = self._finder.found
            if self.finished:
                break
        return "".join(shown)

    def flush(self) -> str:
        """Returns the held-back text once generation has ended; "" after a stop.

        This call can complete a stop string that contains U+FFFD, and so set `finished`.
        """
        if self.finished:
            return ""
        text = self._finder.push(self._decoder.flush()) + self._finder.flush()
        self.finished = self._finder.found
        return text

    def _push(self, token_id: int) -> str:
        if self.tokens_kept <= self._min_tokens:
            return self._decode(token_id)
        if token_id in self._stop_tokens:
            text = self.flush()
            self._finder.found = True
            return text
        return self._finder.push(self._decode(token_id))

    def _decode(self, token_id: int) -> str:
        if (marker := self._markers.get(token_id)) is not None:
            return self._decoder.flush() + marker
        return "" if self._tokenizer.is_skipped(token_id) else self._decoder.push([token_id])


class _StopStringFinder:
    """Passes text through until a stop string appears; holds back text that may be the beginning of a stop string.

    Attributes:
        found: whether a stop string has appeared.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise BadInput(
                'an empty stop string ("") would end every answer before its first token: leave it out'
            )
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, fresh: str) -> str:
        """Returns the text before the first completed stop string, without a possible beginning of a stop string."""
        if not self._stops:
            return fresh
        text = self._held + fresh
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.found = bool(hits)
        held = max((_overlap_chars(text, stop) for stop in self._stops), default=0)
        end = min(hits)[1] if hits else len(text) - held
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Returns the held-back text, "" after a stop."""
        held = self._held
        self._held = ""
        return "" if self.found else held


def _overlap_chars(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


class ByteLevelDecoder:
    """`IncrementalDecoder` of a tokenizer whose texts are the bytes of its tokens: decodes every token once."""

    def __init__(self, text_bytes: Mapping[int, bytes], context: Sequence[int]):
        """text_bytes: of every token id, see `Tokenizer`. context: as of `IncrementalDecoder`."""
        # held: of a character that is not complete
        self._bytes = text_bytes
        self._held = b""
        self._replaced = 0  # U+FFFD at the end of the context's text: new only if later ids complete the character
        self.push(context)
        self._replaced = len(self._held.decode(errors="replace"))

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """As `IncrementalDecoder.push`. final: nothing is held back."""
        data = self._held + b"".join([self._bytes[one] for one in ids])
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._held = data[used:]
        if self._replaced and text:
            text = _drop_replaced(text, self._replaced)
            self._replaced = 0
        return text

    def flush(self) -> str:
        """As `IncrementalDecoder.flush`."""
        return self.push([], final=True)


class IncrementalDecoder:
    """The text that token ids add to a context, in whole characters only.

    All returned texts together are decode(context + ids) without its common beginning with decode(context).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        values: Mapping[int, int],
        context: Sequence[int],
    ):
        """decode: ids -> text; it must not skip any of the ids. values: see `ByteFallbackJoiner`.

        context: the last RESYNC_TOKENS tokens before the first pushed id, or fewer if there are not so many.
        """
        self._joiner = ByteFallbackJoiner(values)
        self._window = _DecodeWindow(decode, joined=bool(values))
        self._replaced = 0  # U+FFFD at the end of the context's text: new only if later ids complete the character
        self.push(context)
        self._replaced = self._joiner.pending or self._window.pending

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that no later token changes: the same in total, however ids are divided into calls."""
        return self._drop_known(self._window.push(self._joiner.push(ids)))

    def flush(self) -> str:
        """Returns the held-back text, with U+FFFD for a character that was never completed."""
        return self._drop_known(self._window.push(self._joiner.flush()) + self._window.flush())

    def _drop_known(self, text: str) -> str:
        if not (text and self._replaced):
            return text
        text = _drop_replaced(text, self._replaced)
        self._replaced = 0
        return text


def _drop_replaced(text: str, count: int) -> str:
    """The text without up to `count` U+FFFD at its beginning."""
    return text[min(count, len(text) - len(text.lstrip(REPLACEMENT))) :]


class _DecodeWindow:
    """The last few tokens, decoded again with those that are pushed, to find out what these add to the text.

    The window begins one character boundary before the last: decoders treat the first token of a text specially.

    Attributes:
        pending: whether an incomplete character is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], joined: bool):
        """joined: the pushed ids always form whole characters; otherwise an incomplete character is held back."""
        self._decode = decode
        self._joined = joined
        self._ids: list[int] = []
        self._bordered = 0  # tokens up to the last character boundary
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
