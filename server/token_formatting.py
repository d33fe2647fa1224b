"""Tokens as clients see them: in log-probabilities, and in what is told of rounds."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from dflash_aot.runtime.requests.logprobs import TokenLogprob
from dflash_aot.runtime.requests.request import Delta
from dflash_aot.runtime.text.tokenizer import Tokenizer


class Speller:
    """Of a target's tokens; without a tokenizer by their ids."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        self._tokenizer = tokenizer

    def spell(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if self._tokenizer else f"token_id:{token}".encode()

    def show(self, token: int) -> str:
        """Broken characters are U+FFFD."""
        return self.spell(token).decode(errors="replace")

    def name(self, token: int) -> str:
        """What is no whole character by its bytes, so that no two have one name."""
        spelled = self.spell(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    # -- log-probabilities

    def describe_chat(self, logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        """As /v1/chat/completions has them."""
        return {
            "content": [
                {**self._describe(one.token_id, one.logprob), "top_logprobs": [self._describe(*top) for top in one.top]}
                for one in logprobs
            ],
            "refusal": None,
        }

    def describe_completion(self, logprobs: Sequence[TokenLogprob], offset: int) -> Mapping[str, Any]:
        """As /v1/completions has them, the chosen token among the likeliest, too.

        offset: of the first token's text, in characters.
        """
        lengths = accumulate((len(self.show(one.token_id)) for one in logprobs), initial=offset)
        return {
            "tokens": [self.name(one.token_id) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                {self.name(token): value for token, value in (*one.top, (one.token_id, one.logprob))}
                for one in logprobs
            ],
            "text_offset": list(lengths)[:-1],
        }

    def _describe(self, token: int, logprob: float) -> Mapping[str, Any]:
        return {"token": self.show(token), "logprob": logprob, "bytes": list(self.spell(token))}

    # -- rounds

    def describe_rounds(self, delta: Delta) -> list[Mapping[str, Any]]:
        """Each round's draft, how much of it was accepted, and what it committed: less where an end cut it.

        A token that came by itself, before all rounds, is the one that the prompt gives.
        """
        left = iter(delta.token_ids)
        if delta.token_ids and not delta.rounds:
            return [{"k": 0, "accepted": 0, "drafted": [], "committed": self._show_all(left), "prefill": True}]
        return [
            {
                "k": one.k,
                "accepted": one.accepted,
                "drafted": self._show_all(one.drafted),
                "committed": self._show_all(islice(left, one.accepted + 1)),
            }
            for one in delta.rounds
        ]

    def _show_all(self, tokens: Iterable[int]) -> list[Mapping[str, Any]]:
        return [{"id": token, "text": self.show(token)} for token in tokens]
