"""Tokenizer of a checkpoint: encodes prompts, decodes token ids and byte tokens. Streamed text: see the detokenizer."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.files.checkpoint_files import TOKENIZER_FILE, read_checkpoint_file

# -- byte tokens of a vocabulary: byte fallback (`<0x41>`, Llama 2 and Gemma) and byte-level BPE (GPT-2, Qwen)


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
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }


BYTE_LEVEL_LETTERS = _list_byte_level_letters()


# -- the tokenizer

PANIC = "PanicException"  # raised by the Rust code of tokenizers; a BaseException, so `except Exception` misses it
# Markers of tool calls, which some fine-tunes mark special. Without their text a call is not a call.
TEXT_MARKERS = ("<tool_call>", "</tool_call>")
THINKING_MARKERS = ("<think>", "</think>")  # chat templates look for them in earlier answers
ROLE_MARKER = re.compile(r"<[|｜][^<>]+[|｜]>")
# The parts of a tokenizer.json that may put a space before a text.
PREFIXING = ("normalizer", "pre_tokenizer")
BREAK = "\ufdd0"  # a code point that Unicode keeps for uses like this one, within a program


def _drop_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer of a tokenizer.json without the space that it puts before a text."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**step, "add_prefix_space": False}
        case {"type": "Sequence"}:
            return {key: _drop_prefixes(one) for key, one in step.items()}
    return step


def _drop_prefixes(steps: Any) -> Any:
    if not isinstance(steps, list):
        return steps
    return [kept for step in steps if (kept := _drop_prefix(step)) is not None]


def _match_starts(markers: Iterable[str]) -> re.Pattern[str]:
    """Matches the first letter of each marker in a text, also where markers overlap."""
    rest: dict[str, list[str]] = {}
    for marker in sorted(markers):
        if len(marker) > 1:
            rest.setdefault(marker[0], []).append(re.escape(marker[1:]))
    starts = (f"{re.escape(letter)}(?={'|'.join(ends)})" for letter, ends in rest.items())
    return re.compile("|".join(starts) or "(?!)")


class Tokenizer:
    """The tokenizer of a checkpoint, from its `tokenizer.json`. Threads may share an instance.

    Attributes:
        byte_values: token id -> byte of byte-fallback tokens; empty for a vocabulary without byte fallback.
        text_bytes: token id -> the bytes that it adds to a text, where a text is the bytes of its tokens one after the
            other, as byte-level BPE decodes them; b"" for tokens that `decode` skips. None for other decoders.
        added_tokens: token id -> text of the tokens outside the model's merges.
        special_tokens: those of them that have no text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, path: Path = Path(TOKENIZER_FILE)) -> None:
        """path: the file that `backend` was read from, for messages."""
        self._backend = backend
        self._path = path
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_tokens = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special and token.content not in TEXT_MARKERS
        }
        self._byte_level = backend.decoder is not None and backend.decoder.decode(["Ġ"]) == " "
        # Added tokens are text, also where their letters are letters of the byte alphabet, which the library's decoder
        # takes for bytes. A token of the model's own vocabulary is what the model writes for those bytes.
        self._literal = {
            token_id: token.content
            for token_id, token in added.items()
            if self._byte_level and backend.model.token_to_id(token.content) != token_id
        }
        self._is_misread = any(
            _read_byte_level(content) != content.encode() for content in self._literal.values()
        )
        self._with_text: set[int] = set()  # token ids known to have text
        # Some checkpoints store markers of roles as tokens that are not special (DeepSeek-R1-Distill).
        named = {one for one in self.added_tokens.values() if ROLE_MARKER.fullmatch(one)}
        markers = {*self.special_tokens.values(), *named} - {*THINKING_MARKERS}
        self._marker_starts = _match_starts(markers)
        self.byte_values = read_fallback_tokens(backend)
        is_plain = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.text_bytes: Mapping[int, bytes] | None = (
            _TextBytes(self._find_text_bytes) if is_plain else None
        )

    @classmethod
    def open(cls, directory: Path) -> "Tokenizer":
        """Reads `directory/tokenizer.json`. Raises BadCheckpoint if the file is missing, broken or no regular file."""
        path = directory / TOKENIZER_FILE
        remedy = (
            "Give token ids instead of text, or a directory with the tokenizer.json of the target"
        )
        if (content := read_checkpoint_file(path)) is None:
            raise BadCheckpoint(f"there is no {path}. {remedy}")
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
            # A tokenizer.json may hold truncation and padding of the training: they would silently cut prompts.
            backend.no_truncation()
            backend.no_padding()
            return cls(backend, path)
        except BaseException as error:
            if not (_is_failure(error) or isinstance(error, ValueError)):
                raise
            raise BadCheckpoint(
                f"{path} cannot be read as a tokenizer: {error}. {remedy}"
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Special tokens that are written out in the text become those tokens.

        add_special_tokens: whether to add what the tokenizer puts around a text, a BOS token for example. False for a
        rendered chat: the chat template has already written these tokens.

        The time has no limit but the length of the text: a regular expression of the checkpoint runs for up to 0.4 s
        per character, and a thread cannot be interrupted in it. Other threads go on.

        Raises BadInput if `text` is not valid Unicode; BadCheckpoint if the tokenizer fails at the text.
        """
        try:
            # Encoding a batch releases the GIL, so that the engine's thread can run. Encoding a single text does not.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        except TypeError as error:
            raise BadInput(
                f"not a text that UTF-8 can hold (a lone surrogate?): {ascii(text[:80])}"
            ) from error
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BadCheckpoint(
                f"{self._path} fails at a text of {len(text)} characters: {error}"
            ) from error

    def break_special_tokens(self, text: str) -> str:
        """Returns `text`, for a chat template, with a BREAK in each special token that is written out in it.

        `encode_chat` then takes the letters for letters: a message cannot write the markers of roles. Raises BadInput
        if `text` has a BREAK.
        """
        if BREAK in text:
            raise BadInput(f"a text has U+{ord(BREAK):04X}, which is not a character: leave it out")
        return self._marker_starts.sub(lambda start: start[0] + BREAK, text)

    def encode_chat(self, text: str) -> list[int]:
        """As `encode`, for a rendered chat whose messages `break_special_tokens` has prepared."""
        first, *rest = text.split(BREAK)
        ids = self.encode(first, add_special_tokens=False)
        for part in rest:
            found = self._added_starts.search(part)
            end = found.start() if found else len(part)
            ids += self._without_prefix.encode(part[:end], add_special_tokens=False)
            ids += self.encode(part[end:], add_special_tokens=False)
        return ids

    @cached_property
    def _added_starts(self) -> re.Pattern[str]:
        return _match_starts({*self.added_tokens.values()})

    @cached_property
    def _without_prefix(self) -> "Tokenizer":
        """This tokenizer without the space that it puts before a text, as Llama 2's does."""
        steps = (self._backend.normalizer, self._backend.pre_tokenizer)
        # Each on its own: the whole tokenizer has the vocabulary's megabytes.
        before = [step and json.loads(step.__getstate__()) for step in steps]
        after = [_drop_prefix(step) for step in before]
        if after == before:
            return self
        changed = json.loads(self.to_json()) | dict(zip(PREFIXING, after, strict=True))
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(changed)), self._path)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without special and unknown tokens; invalid bytes are U+FFFD."""
        joiner = ByteFallbackJoiner(self.byte_values)
        whole = joiner.push([token_id for token_id in ids if not self.is_skipped(token_id)])
        return self.decode_joined([*whole, *joiner.flush()])

    def decode_joined(self, ids: Sequence[int]) -> str:
        """Returns the text of ids that `decode` does not skip, with whole characters in byte-fallback tokens."""
        if self.text_bytes is not None and self._is_misread:
            return b"".join(self.text_bytes[one] for one in ids).decode(errors="replace")
        return self._decode(ids)

    def to_json(self) -> str:
        """Returns the tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` with the written form of special tokens; invalid bytes are U+FFFD."""
        if self.text_bytes is not None and self._is_misread:
            return b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BadCheckpoint(
                f"the decoder of {self._path} fails at tokens {list(ids)}: {error}"
            ) from error

    @property
    def max_token_chars(self) -> int:
        """Length of the longest token in the vocabulary: an upper bound of the characters per token of a text.

        A normalizer can shorten a text further before it is tokenized.
        """
        return max(map(len, self._backend.get_vocab()), default=0)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what one token adds in the middle of a text: maybe a part of a character.

        A special token gives its written form, an id outside the vocabulary b"".
        """
        special = self.special_tokens.get(token_id)
        return self._find_text_bytes(token_id) if special is None else special.encode()

    @property
    def has_byte_tokens(self) -> bool:
        """Whether any text can be written token by token: byte-level BPE, or byte fallback."""
        return self._byte_level or bool(self.byte_values)

    def list_text_bytes(self, count: int) -> list[bytes]:
        """What each of the first `count` ids adds to a text; b"" for tokens that `decode` skips."""
        return [
            b"" if self.is_skipped(token_id) else self._find_text_bytes(token_id)
            for token_id in range(count)
        ]

    def is_skipped(self, token_id: int) -> bool:
        """Whether `decode` skips this token: a special token, or an id outside the vocabulary."""
        if token_id in self._with_text:
            return False
        if token_id in self.special_tokens or self._backend.id_to_token(token_id) is None:
            return True
        self._with_text.add(token_id)
        return False

    def _find_text_bytes(self, token_id: int) -> bytes:
        """What one token adds in the middle of a text; b"" for a token that `decode` skips."""
        if (
            literal := self._literal.get(token_id)
        ) is not None and token_id not in self.special_tokens:
            return literal.encode()
        if (byte := self.byte_values.get(token_id)) is not None:
            return bytes([byte])
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self.special_tokens:
            return b""
        if self._byte_level:
            return _read_byte_level(token)
        # Decoders strip leading spaces of the first token, so take what a second token adds to the first.
        return self.decode_joined([token_id] * 2)[len(self.decode_joined([token_id])) :].encode()

    def find_special_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """Returns the special tokens whose written form is one of `texts`."""
        return frozenset(
            token_id for token_id, content in self.special_tokens.items() if content in texts
        )

    def last_text_tokens(self, ids: Sequence[int], count: int) -> list[int]:
        """Returns the last `count` tokens of `ids` that `decode` does not skip, in order."""
        with_text = (token_id for token_id in reversed(ids) if not self.is_skipped(token_id))
        return list(islice(with_text, count))[::-1]


class _TextBytes(dict[int, bytes]):
    """`Tokenizer.text_bytes`: each token is looked up in the tokenizer once."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._find(token_id)
        return found


def _read_byte_level(token: str) -> bytes:
    """The bytes of a token in GPT-2's letters; of a token with other letters, its own encoding, as decoders read it."""
    try:
        return bytes([BYTE_LEVEL_LETTERS[character] for character in token])
    except KeyError:
        return token.encode()


def _is_failure(error: BaseException) -> bool:
    """Whether the library raised an error of the tokenizer: a panic, or the base class of exceptions itself."""
    return type(error).__name__ == PANIC or type(error) is Exception
