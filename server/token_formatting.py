"""Token formatting: tokens as text and bytes in log-probabilities and in the trace of rounds."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from dflash_aot.runtime.requests.request import Delta, TokenLogprob
from dflash_aot.runtime.text.tokenizer import Tokenizer

KEPT_TEXTS = 1 << 16


class TextOffsets:
    """Counts where the tokens of a text begin, in characters. Parts of a character begin where the character begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, data: bytes) -> int:
        """Returns where the next token begins. data: what the token adds to the text, b"" for nothing."""
        continues = bool(data) and 0x80 <= data[0] < 0xC0
        if data and not continues:  # an incomplete character before it stays incomplete
            self._characters += len(self._decoder.decode(b"", final=True))
        begin = self._characters
        self._characters += len(self._decoder.decode(data))
        return begin


class TokenFormatter:
    """Formats the tokens of a target, or without a tokenizer their ids. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        self._tokenizer = tokenizer
        self._read = lru_cache(maxsize=KEPT_TEXTS)(self._read_token)

    def to_bytes(self, token: int) -> bytes:
        return self._read(token)[0]

    def to_text(self, token: int) -> str:
        """The token's text, with U+FFFD for incomplete characters."""
        return self._read(token)[1]

    def to_unique_text(self, token: int) -> str:
        """The token's text; its bytes in hexadecimal where characters are incomplete, so that texts stay distinct."""
        return self._read(token)[2]

    def to_shown_bytes(self, token: int) -> bytes:
        """What the token adds to an answer, in which special tokens have no text."""
        return (
            b"" if self._tokenizer and self._tokenizer.is_skipped(token) else self.to_bytes(token)
        )

    def _read_token(self, token: int) -> tuple[bytes, str, str]:
        data = (
            self._tokenizer.token_bytes(token) if self._tokenizer else f"token_id:{token}".encode()
        )
        text = data.decode(errors="replace")
        try:
            return data, text, data.decode()
        except UnicodeDecodeError:
            return data, text, "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def join_texts(self, tokens: Iterable[int]) -> str:
        """The text of tokens, with U+FFFD for incomplete characters."""
        return b"".join(map(self.to_bytes, tokens)).decode(errors="replace")

    # -- log-probabilities

    def format_chat_logprobs(self, logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        """`logprobs` of a choice of /v1/chat/completions."""
        return {
            "content": [
                {
                    **self._format_logprob(chosen.token_id, chosen.logprob),
                    "top_logprobs": [self._format_logprob(*top) for top in chosen.top],
                }
                for chosen in logprobs
            ],
            "refusal": None,
        }

    def format_completion_logprobs(
        self, logprobs: Sequence[TokenLogprob | None], tokens: Sequence[int], offsets: Sequence[int]
    ) -> Mapping[str, Any]:
        """`logprobs` of a choice of /v1/completions; the likeliest tokens include the chosen token.

        logprobs: of each of `tokens`; None for the first token of an echoed prompt. offsets: where their texts begin.
        """
        texts = self.to_unique_text
        return {
            "tokens": [*map(texts, tokens)],
            "token_logprobs": [None if one is None else one.logprob for one in logprobs],
            "top_logprobs": [
                None
                if one is None
                else {texts(token): value for token, value in _list_candidates(one)}
                for one in logprobs
            ],
            "text_offset": list(offsets),
        }

    def format_prompt_logprobs(
        self, logprobs: Iterable[TokenLogprob | None]
    ) -> list[Mapping[str, Any] | None]:
        """`prompt_logprobs` as vLLM has them: candidates by token id, without their ranks."""
        return [None if score is None else self._format_candidates(score) for score in logprobs]

    def _format_candidates(self, score: TokenLogprob) -> Mapping[str, Any]:
        return {
            str(token): {"logprob": value, "decoded_token": self.to_text(token)}
            for token, value in _list_candidates(score)
        }

    def _format_logprob(self, token: int, logprob: float) -> Mapping[str, Any]:
        return {
            "token": self.to_text(token),
            "logprob": logprob,
            "bytes": list(self.to_bytes(token)),
        }

    # -- rounds

    def format_rounds(self, delta: Delta) -> list[Mapping[str, Any]]:
        """The rounds of a delta: drafted tokens, how many were accepted, and the committed tokens.

        A stop can leave fewer committed tokens than accepted + 1. A delta without rounds is the first token, which
        prefill produces.
        """
        left = iter(delta.token_ids)
        if delta.token_ids and not delta.rounds:
            return [
                {
                    "k": 0,
                    "accepted": 0,
                    "drafted": [],
                    "committed": self._format_tokens(left),
                    "prefill": True,
                }
            ]
        return [
            {
                "k": outcome.k,
                "accepted": outcome.accepted,
                "drafted": self._format_tokens(outcome.drafted),
                "committed": self._format_tokens(islice(left, outcome.accepted + 1)),
            }
            for outcome in delta.rounds
        ]

    def _format_tokens(self, tokens: Iterable[int]) -> list[Mapping[str, Any]]:
        return [{"id": token, "text": self.to_text(token)} for token in tokens]


def _list_candidates(chosen: TokenLogprob) -> Sequence[tuple[int, float]]:
    """The likeliest tokens and the chosen token, with their log-probabilities."""
    return (*chosen.top, (chosen.token_id, chosen.logprob))
