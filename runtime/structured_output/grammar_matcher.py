"""Grammar matcher: where the answer of one request is in its grammar, and which tokens may follow."""

import math
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.sampling_state import ALL_ALLOWED, MASK_BITS, count_mask_words
from dflash_aot.runtime.structured_output.completion import CompletionFinder, StepBudget

MAX_SEARCHES = 8  # that find no completion, of one request
MAX_REQUEST_STEPS = 8192  # of all searches of one request
SPARE_TOKENS = 64  # completions are searched in the last tokens: so many, and twice the shortest answer


class GrammarMatcher:
    """The state of one request's grammar. One thread at a time uses it."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab: int,
        finder: CompletionFinder,
        shortest: Sequence[int] | None,
        ends: frozenset[int],
    ):
        """shortest: the shortest answer that was found; None if none was. ends: tokens that end any grammar."""
        self._matcher, self._words, self._finder = matcher, count_mask_words(vocab), finder
        self.shortest = self._completion = shortest
        self.ends, self._steps = ends, StepBudget(MAX_REQUEST_STEPS)
        self._watched = 2 * len(shortest or ()) + SPARE_TOKENS
        self._failures = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped()

    def needs_more(self, most: int) -> bool:
        """Whether it is proven that every answer has more than `most` tokens."""
        return len(self.shortest or ()) > most and self._finder.needs_more(self._matcher, most)

    def accept(self, token: int, room: float = math.inf) -> Sequence[int] | None:
        """The answer continues with `token`, unless it could not be completed in the `room` tokens after it.

        Returns None, or the tokens that complete the answer in its place. Towards the end of an answer, where a
        completion is known, only tokens are accepted after which another completion is found. The searches of a request
        take at most `MAX_REQUEST_STEPS`. Raises EngineFailed if the grammar does not allow the token.
        """
        before, self._completion = self._completion, None
        if before is not None and len(before) > room + 1:
            before = None
        if not self._matcher.consume_token(token):
            raise EngineFailed(f"the grammar cannot be followed: {quote_first_line(self._matcher.get_error())}")
        if self.is_complete or room > self._watched:
            return None
        self._completion = before[1:] if before and token == before[0] else self._find_completion(int(room))
        if self._completion is not None or before is None:
            return None
        self._matcher.rollback(1)
        return before

    def _find_completion(self, room: int) -> Sequence[int] | None:
        if self._failures >= MAX_SEARCHES:
            return None
        found = self._finder.find(self._matcher, room, self._steps)
        self._failures += found is None
        return found

    def mask_block(self, drafted: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """The drafted tokens to verify, and the tokens that each of the K+1 positions may choose.

        Follows the drafted tokens through the grammar. Where a token is not allowed and the grammar forces another
        token, this token is verified instead. After a token that cannot be accepted everything is allowed, because
        nothing that is chosen there is kept.

        Returns K tokens, and masks int32 [K+1, words] as the signature of `constrained_verify` has them. Where the
        grammar became too complex to follow, `accept` raises the error, so that only this request ends.
        """
        block, masks = list(drafted), np.full((len(drafted) + 1, self._words), ALL_ALLOWED, np.int32)
        taken = 0
        for position in range(len(block) + 1):
            if self._matcher.is_stopped():
                break
            fill_next_token_bitmask(self._matcher, masks, position)
            if position == len(block):
                break
            if not _allows(masks[position], block[position]):
                forced = self._matcher.compute_ff_tokens()
                if not forced or not _allows(masks[position], forced[0]):
                    break
                block[position] = forced[0]
            if not self._matcher.consume_token(block[position]):
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)
        return block, masks


def _allows(mask: np.ndarray, token: int) -> bool:
    word, bit = divmod(token, MASK_BITS)
    return bool(int(mask[word]) >> bit & 1)
