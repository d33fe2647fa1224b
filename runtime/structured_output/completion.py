"""Completions: how an answer that follows a grammar can end within the tokens that are left.

llguidance says what may come next, not how far the end is. The search takes what the grammar forces and otherwise what
usually ends a part: a quotation mark within a text, a closing bracket, a short number. If that does not end, as in the
middle of an e-mail address, it tries other characters at random, always the same ones.
"""

import random
import string
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from dflash_aot.cache.sampling_state import count_mask_words

ATTEMPTS = 8
MAX_STEPS = 400  # of all attempts of a search, beside those of what is found: some milliseconds
ENDS, STARTS = "@:}],Z", '0123456789ntf"-[{'  # `@` and `:` within addresses; elsewhere they are forced or not allowed
QUOTE, LETTER = '"', "q"  # where both may come, the grammar is within a text


class CompletionFinder:
    """Finds completions for the grammars of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: LLTokenizer, vocab: int):
        """vocab: tokens of the target's head."""
        self._vocab = vocab
        self._tokens = {text: ids[0] for text in string.printable if len(ids := tokenizer.tokenize_str(text)) == 1}

    def find(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Returns at most `most` tokens that complete the answer, none where it may end here; None if it finds none."""
        steps = MAX_STEPS + most
        for attempt in range(ATTEMPTS):
            found = self._walk(matcher.deep_copy(), min(most, steps), random.Random(attempt) if attempt else None)
            if isinstance(found, list):
                return found
            steps -= found
            if steps <= 0:
                break
        return None

    def _walk(self, matcher: LLMatcher, most: int, chance: random.Random | None) -> list[int] | int:
        """One attempt: a completion, or after how many tokens it was given up. chance: None for the first one."""
        taken: list[int] = []
        while not (ended := matcher.is_stopped() or matcher.is_accepting()) and len(taken) < most:
            tokens = matcher.compute_ff_tokens() or self._choose(matcher, chance)
            if not matcher.consume_tokens(tokens):  # the grammar became too complex
                return MAX_STEPS
            taken += tokens
        return taken if ended and len(taken) <= most and not matcher.is_error() else max(len(taken), 1)

    def _choose(self, matcher: LLMatcher, chance: random.Random | None) -> list[int]:
        if self._allows(matcher, QUOTE) and self._allows(matcher, LETTER):
            return [self._tokens[QUOTE]]
        order: Sequence[str] = [*ENDS, *QUOTE, *STARTS]
        if chance and chance.random() < 0.5:
            order = chance.sample([*self._tokens], len(self._tokens))
        found = next((text for text in order if self._allows(matcher, text)), None)
        return self._choose_any(matcher) if found is None else [self._tokens[found]]

    def _allows(self, matcher: LLMatcher, text: str) -> bool:
        token = self._tokens.get(text)
        return token is not None and matcher.validate_tokens([token]) == 1

    def _choose_any(self, matcher: LLMatcher) -> list[int]:
        """The last token that may come, of a large vocabulary often a long one."""
        mask = np.zeros((1, count_mask_words(self._vocab)), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1:].tolist()
