"""Grammar matcher: where the answer of one request is in its grammar, and which tokens may follow."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.sampling_state import ALL_ALLOWED, MASK_BITS, count_mask_words


class GrammarMatcher:
    """The state of one request's grammar. One thread at a time uses it."""

    def __init__(self, matcher: LLMatcher, vocab: int):
        self._matcher, self._words = matcher, count_mask_words(vocab)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """The answer goes on with `token`. Raises EngineFailed if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            raise EngineFailed(f"the grammar cannot be followed: {quote_first_line(self._matcher.get_error())}")

    def mask_block(self, drafted: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """The drafted tokens to verify, and the tokens that each of the K+1 positions may choose.

        Follows the drafted tokens through the grammar. Where one is not allowed, the token that the grammar forces is
        verified in its place, if there is one. Behind a token that cannot be accepted everything is allowed: nothing
        that is chosen there is kept.

        Returns K tokens, and masks int32 [K+1, words] as the signature of `constrained_verify` has them. Where the
        grammar became too complex to follow, `accept` raises the error, so that one request ends and not a batch.
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
