"""Text above the token-id engine: encode a prompt, decode an answer, show an answer while it is made."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import tokenizers

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime.text.detokenizer import RESYNC_TOKENS, ByteJoiner, CharacterStream

LONG_TEXT_CHARS = 4096  # characters: a few milliseconds of tokenizing
PANIC = "PanicException"  # of tokenizers' Rust: no Exception, so that it would end the engine and not one request


class Tokenizer:
    """The tokenizer of a checkpoint, from its `tokenizer.json`. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id: content for token_id, content in self._added.items() if added[token_id].special}
        self._byte_values = _read_byte_tokens(backend)
        self._byte_level = backend.decoder is not None and backend.decoder.decode(["Ġ"]) == " "

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
            if (
                len(text) > LONG_TEXT_CHARS
            ):  # as a batch, in which alone other threads of Python's, the engine's too, may go on
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise BadInput(f"not a text that UTF-8 can hold (a lone surrogate?): {ascii(text[:80])}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens and ids outside the vocabulary; U+FFFD for broken bytes."""
        joiner = ByteJoiner(self._byte_values)
        whole = [one for token_id in ids if not self.is_skipped(token_id) for one in joiner.push(token_id)]
        return self._decode([*whole, *joiner.flush()])

    @property
    def max_token_chars(self) -> int:
        """Characters of the longest token as the vocabulary writes it: no text is longer than so many per token, but
        for what a normalizer takes away."""
        return max(map(len, self._backend.get_vocab()))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, in the middle of a text: it may be a part of a character. Special tokens as they
        are written, b"" for ids outside the vocabulary."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        if (byte := self._byte_values.get(token_id)) is not None:
            return bytes([byte])
        if (token := self._backend.id_to_token(token_id)) is None:
            return b""
        if self._byte_level:
            return bytes(_BYTES[character] for character in token)
        # Decoders take spaces off the first token: what the second of two adds.
        return self._decode([token_id] * 2)[len(self._decode([token_id])) :].encode()

    def stream(self, context: Sequence[int]) -> CharacterStream:
        """The characters of what follows the tokens of `context`."""
        return CharacterStream(self._decode, self._byte_values, self._read_end(context))

    def is_skipped(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out: it is special, or outside the vocabulary."""
        return token_id in self._special or self._backend.id_to_token(token_id) is None

    def find_special_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """The special tokens that are written as one of `texts`."""
        return frozenset(token_id for token_id, content in self._special.items() if content in texts)

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=True)
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise BadCheckpoint(f"the decoder of tokenizer.json fails at tokens {list(ids)}: {error}") from error

    def _read_end(self, ids: Sequence[int]) -> list[int]:
        """The last tokens that have a text, as many as decoding needs to be in step."""
        heard = (token_id for token_id in reversed(ids) if not self.is_skipped(token_id))
        return list(islice(heard, RESYNC_TOKENS))[::-1]


def _list_byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in vocabularies of bytes: GPT-2's, itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _list_byte_letters()


def _read_byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Token → byte where the decoder turns byte tokens into bytes and there is one for each; else empty."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return {}
    tokens = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    values = {token_id: byte for token_id, byte in tokens if token_id is not None}
    return values if len(values) == 256 else {}


class TextStream:
    """The text of one request while its tokens arrive: whole characters only, cut before the first stop.

    Everything returned by `push` and, at the end, `flush` adds up to what the ids add to the text of `prompt`; with
    no prompt, to `tokenizer.decode(all ids)`. It ends earlier where it holds one of `stops`, or where a special
    token comes that is written as one of them, though it has no text. `BadInput` if a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._finder = _StopFinder(stops)
        self._stop_tokens = tokenizer.find_special_tokens(stops)
        self._characters = tokenizer.stream(prompt)
        self._kept = 0

    @property
    def finished(self) -> bool:
        """Whether a stop was hit; then nothing may be pushed any more."""
        return self._finder.found

    @property
    def tokens_kept(self) -> int:
        """How many of the pushed tokens belong to the output: up to the one that completed a stop."""
        return self._kept

    def push(self, ids: Sequence[int]) -> str:
        """The text that is safe to show now; the ids behind the one that completes a stop are ignored."""
        assert not self.finished
        shown = []
        for token_id in ids:
            self._kept += 1
            shown.append(self._push(token_id))
            if self.finished:
                break
        return "".join(shown)

    def flush(self) -> str:
        """What was held back, once generation has ended; "" after a stop.

        Only a stop string that holds U+FFFD can be completed, and `finished` set, by this call.
        """
        if self.finished:
            return ""
        return self._finder.push(self._characters.flush()) + self._finder.flush()

    def _push(self, token_id: int) -> str:
        if token_id in self._stop_tokens:
            text = self.flush()
            self._finder.found = True
            return text
        return "" if self._tokenizer.is_skipped(token_id) else self._finder.push(self._characters.push(token_id))


class _StopFinder:
    """Passes text on until it holds a stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise BadInput('an empty stop string ("") would end every answer before its first token: leave it out')
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, fresh: str) -> str:
        if not self._stops:
            return fresh
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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
