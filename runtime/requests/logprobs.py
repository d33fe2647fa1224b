"""What a sampled round tells of the probabilities of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLogprob:
    """One chosen token, and the likeliest ones where they were asked for, as (token, log-probability).

    Both are of the target's own distribution: before temperature, penalties, bias and limits.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RoundLogprobs:
    """Of the chosen tokens, float32 [B, K+1], and `likeliest`: their ids int32 and values float32 [B, K+1, n].

    The latter are fetched only where a row wants them.
    """

    chosen: np.ndarray
    likeliest: Sequence[np.ndarray]

    def list_tokens(self, slot: int, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        """Of one row's committed tokens, each with the `count` likeliest."""
        tops: Sequence[Sequence[tuple[int, float]]] = [()] * len(tokens)
        if count:
            ids, values = (array[slot, : len(tokens), :count].tolist() for array in self.likeliest)
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        values = self.chosen[slot, : len(tokens)].tolist()
        return [TokenLogprob(token, value, tuple(top)) for token, value, top in zip(tokens, values, tops, strict=True)]
