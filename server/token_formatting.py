"""Token formatting: tokens as text and bytes in log-probabilities and in the trace of rounds."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from dflash_aot.runtime.requests.request import Delta, TokenLogprob
from dflash_aot.runtime.text.tokenizer import Tokenizer


class TokenFormatter:
    """Formats the tokens of a target; without a tokenizer by their ids."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        self._tokenizer = tokenizer

    def to_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if self._tokenizer else f"token_id:{token}".encode()

    def to_text(self, token: int) -> str:
        """The token's text, with U+FFFD for incomplete characters."""
        return self.to_bytes(token).decode(errors="replace")

    def to_unique_text(self, token: int) -> str:
        """The token's text; its bytes in hexadecimal where characters are incomplete, so that texts stay distinct."""
        data = self.to_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

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
        self, logprobs: Sequence[TokenLogprob], offset: int, first: int | None = None
    ) -> Mapping[str, Any]:
        """`logprobs` of a choice of /v1/completions; the likeliest tokens include the chosen token.

        offset: of the first token's text, in characters. first: a token before all others, which has no
        log-probability: the first one of an echoed prompt.
        """
        begin = [] if first is None else [first]
        tokens = [*begin, *(chosen.token_id for chosen in logprobs)]
        lengths = accumulate((len(self.to_text(token)) for token in tokens), initial=offset)
        nothing = [None] * len(begin)
        return {
            "tokens": [*map(self.to_unique_text, tokens)],
            "token_logprobs": [*nothing, *(chosen.logprob for chosen in logprobs)],
            "top_logprobs": [
                *nothing,
                *({self.to_unique_text(token): value for token, value in _list_candidates(one)} for one in logprobs),
            ],
            "text_offset": list(lengths)[:-1],
        }

    def format_prompt_logprobs(self, logprobs: Iterable[TokenLogprob | None]) -> list[Mapping[str, Any] | None]:
        """`prompt_logprobs` as vLLM has them: candidates by token id, without their ranks."""
        return [None if score is None else self._format_candidates(score) for score in logprobs]

    def _format_candidates(self, score: TokenLogprob) -> Mapping[str, Any]:
        return {
            str(token): {"logprob": value, "decoded_token": self.to_text(token)}
            for token, value in _list_candidates(score)
        }

    def _format_logprob(self, token: int, logprob: float) -> Mapping[str, Any]:
        return {"token": self.to_text(token), "logprob": logprob, "bytes": list(self.to_bytes(token))}

    # -- rounds

    def format_rounds(self, delta: Delta) -> list[Mapping[str, Any]]:
        """The rounds of a delta: drafted tokens, how many were accepted, and the committed tokens.

        A stop can leave fewer committed tokens than accepted + 1. A delta without rounds is the first token, which
        prefill produces.
        """
        left = iter(delta.token_ids)
        if delta.token_ids and not delta.rounds:
            return [{"k": 0, "accepted": 0, "drafted": [], "committed": self._format_tokens(left), "prefill": True}]
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
    """The likeliest tokens and the chosen one, with their log-probabilities."""
    return (*chosen.top, (chosen.token_id, chosen.logprob))
