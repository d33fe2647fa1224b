"""Byte tokens of a vocabulary: byte fallback (`<0x41>`, Llama 2 and Gemma) and byte-level BPE (GPT-2, Qwen)."""

import codecs
from collections.abc import Mapping, Sequence

import tokenizers


class ByteFallbackJoiner:
    """Turns runs of byte-fallback tokens into runs that decode to whole characters. Other tokens pass unchanged.

    Bytes that are not valid UTF-8 become the byte tokens of U+FFFD, as UTF-8 decoders replace them. Without this, the
    tokenizer's own decoder shows a whole run of bytes as U+FFFD if one byte in the run is invalid: characters that
    were already streamed would change.
    """

    def __init__(self, values: Mapping[int, int]):
        """values: token id -> byte of all 256 byte tokens; empty for a vocabulary without byte fallback."""
        self._values = values
        self._tokens = {byte: token_id for token_id, byte in values.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> int:
        """How many U+FFFD the held-back bytes would become: 0, 1, or 2 for the first bytes of a surrogate."""
        return len(self._decoder.getstate()[0].decode(errors="replace"))

    def push(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens whose text no later token changes."""
        return [one for token_id in ids for one in self._push(token_id)] if self._values else ids

    def _push(self, token_id: int) -> list[int]:
        if token_id not in self._values:
            return [*self.flush(), token_id]
        return self._to_tokens(self._decoder.decode(bytes([self._values[token_id]])))

    def flush(self) -> list[int]:
        """Returns the held-back bytes as tokens of U+FFFD."""
        return self._to_tokens(self._decoder.decode(b"", final=True))

    def _to_tokens(self, text: str) -> list[int]:
        return [self._tokens[byte] for byte in text.encode()]


def read_fallback_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Token id -> byte, if the decoder turns byte tokens into bytes and the vocabulary has all 256; otherwise empty."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return {}
    tokens = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    values = {token_id: byte for token_id, byte in tokens if token_id is not None}
    return values if len(values) == 256 else {}


def _list_byte_level_letters() -> dict[str, int]:
    """Letter -> byte of GPT-2's byte-level alphabet: a printable byte is its own letter."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_LEVEL_LETTERS = _list_byte_level_letters()
