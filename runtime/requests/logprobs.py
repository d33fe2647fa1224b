"""Log-probabilities of the tokens of a sampled round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one chosen token, and the likeliest tokens if they were requested.

    Both are of the target's own distribution: before temperature, penalties, bias and limits.

    Attributes:
        token_id: the chosen token.
        logprob: its log-probability.
        top: (token, log-probability) of the likeliest tokens, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RoundLogprobs:
    """Log-probabilities of one round, on the host.

    Attributes:
        chosen: of the chosen tokens, float32 [B, K+1].
        likeliest: ids int32 and log-probabilities float32 [B, K+1, n]; empty if no row requested them.
    """

    chosen: np.ndarray
    likeliest: Sequence[np.ndarray]

    def list_tokens(self, slot: int, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        """Returns the log-probabilities of the tokens that row `slot` committed, each with the `count` likeliest."""
        tops: Sequence[Sequence[tuple[int, float]]] = [()] * len(tokens)
        if count:
            ids, values = (array[slot, : len(tokens), :count].tolist() for array in self.likeliest)
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        values = self.chosen[slot, : len(tokens)].tolist()
        return [TokenLogprob(token, value, tuple(top)) for token, value, top in zip(tokens, values, tops, strict=True)]
