"""Completions: how an answer that follows a grammar can end within the tokens that are left.

llguidance says what may come next, not how far the end is. The search takes what the grammar forces and otherwise what
usually ends a part: a quotation mark within a text, a closing bracket, a short number. If that does not end, as in the
middle of an e-mail address, it tries other characters at random, with a fixed seed. What it finds character by
character is tokenized again, which makes it shorter. Each search has a limit of steps, so its time is bounded too.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from dflash_aot.cache.sampling_state import count_mask_words

ATTEMPTS = 8
MAX_STEPS = 400  # of a search, including those of what is found: some milliseconds
MASK_STEPS = 25  # as many as a mask of the whole vocabulary takes
MAX_TOKENS = 256  # of a completion
ENDS, STARTS = "@:}],Z", '0123456789ntf"-[{'  # `@` and `:` within addresses; elsewhere they are forced or not allowed
QUOTE, LETTER = '"', "q"  # where both may come, the grammar is within a text


@dataclass
class StepBudget:
    """Steps of search that are left: tokens to follow, and masks at `MASK_STEPS` each. Negative where it is spent."""

    left: int

    def limit(self, steps: int) -> "StepBudget":
        """A budget of at most `steps` of what is left."""
        return StepBudget(min(self.left, steps))


class CompletionFinder:
    """Finds completions for the grammars of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: LLTokenizer, vocab: int):
        """vocab: tokens of the target's head."""
        self._vocab, self._tokenizer = vocab, tokenizer
        self._tokens = {text: ids[0] for text in string.printable if len(ids := tokenizer.tokenize_str(text)) == 1}

    def find(self, matcher: LLMatcher, most: int, budget: StepBudget) -> list[int] | None:
        """Returns at most `most` tokens that complete the answer, none where it may end here; None if it finds none.

        Takes at most `MAX_STEPS` of the budget.
        """
        if matcher.is_stopped() or matcher.is_accepting():
            return []
        steps = budget.limit(MAX_STEPS)
        given, found = steps.left, None
        for attempt in range(ATTEMPTS):
            if found is not None or steps.left <= 0:
                break
            walked = self._walk(matcher.deep_copy(), most, random.Random(attempt) if attempt else None, steps)
            best = None if walked is None else self._shorten(matcher, walked)
            found = best if best is not None and len(best) <= most else None
        budget.left -= given - max(steps.left, 0)
        return found

    def find_shortest(self, matcher: LLMatcher, texts: Sequence[str]) -> list[int] | None:
        """The shortest answer that is found: of `texts`, where they are all that the grammar allows."""
        found = [] if texts else [self.find(matcher, MAX_TOKENS, StepBudget(MAX_STEPS))]
        found += [ids for text in texts for ids in self._tokenize(text.encode())]
        shortest = min((ids for ids in found if ids is not None), key=len, default=None)
        return None if shortest is None or len(shortest) > MAX_TOKENS else shortest

    def needs_more(self, matcher: LLMatcher, most: int) -> bool:
        """Whether no answer of at most `most` tokens exists. False also where that takes too many steps to prove."""
        steps, states = StepBudget(MAX_STEPS), {b"": matcher}
        for length in range(most + 1):
            if any(state.is_stopped() or state.is_accepting() for state in states.values()):
                return False
            if length == most:
                break
            states = self._advance(states, steps)
            if steps.left < 0:
                return False
        return True

    def _advance(self, states: dict[bytes, LLMatcher], steps: StepBudget) -> dict[bytes, LLMatcher]:
        """The states a token after others, by their texts; incomplete where the steps are spent."""
        reached: dict[bytes, LLMatcher] = {}
        for text, state in states.items():
            steps.left -= MASK_STEPS
            tokens = self._list_allowed(state)
            for token in tokens:
                steps.left -= 1
                if steps.left < 0:
                    return reached
                if (longer := text + self._tokenizer.decode_bytes([token])) not in reached:
                    copy = state.deep_copy()
                    copy.consume_token(token)
                    reached[longer] = copy
        return reached

    def _walk(self, matcher: LLMatcher, most: int, chance: random.Random | None, steps: StepBudget) -> list[int] | None:
        """One attempt. chance: None for the first, which goes on as far as it may fit when it is tokenized again."""
        taken: list[int] = []
        reach = min(most if chance else 4 * most + 4, MAX_TOKENS)
        while not (matcher.is_stopped() or matcher.is_accepting()):
            if steps.left <= 0:
                return None
            tokens = matcher.compute_ff_tokens() or self._choose(matcher, chance, steps)
            steps.left -= len(tokens)
            if not tokens or steps.left < 0 or len(taken) + len(tokens) > reach:
                return None
            if not matcher.consume_tokens(tokens):  # the grammar became too complex
                steps.left = 0
                return None
            taken += tokens
        return None if matcher.is_error() else taken

    def _shorten(self, matcher: LLMatcher, found: list[int]) -> list[int]:
        """The same text in fewer tokens, if the tokenizer has them."""
        others = self._tokenize(self._tokenizer.decode_bytes(found)) if len(found) > 1 else []
        for ids in sorted(others, key=len):
            if len(ids) < len(found) and matcher.validate_tokens(ids) == len(ids):
                copy = matcher.deep_copy()
                if copy.consume_tokens(ids) and (copy.is_stopped() or copy.is_accepting()):
                    return ids
        return found

    def _tokenize(self, data: bytes) -> list[list[int]]:
        """A text as the tokenizer writes it, and by the longest token at each place."""
        try:
            return [self._tokenizer.tokenize_bytes(data), self._tokenizer.greedy_tokenize(data.decode())]
        except UnicodeDecodeError:  # within a character
            return []

    def _choose(self, matcher: LLMatcher, chance: random.Random | None, steps: StepBudget) -> list[int]:
        if self._allows(matcher, QUOTE) and self._allows(matcher, LETTER):
            return [self._tokens[QUOTE]]
        order: Sequence[str] = [*ENDS, *QUOTE, *STARTS]
        if chance and chance.random() < 0.5:
            order = chance.sample([*self._tokens], len(self._tokens))
        found = next((text for text in order if self._allows(matcher, text)), None)
        if found is not None:
            return [self._tokens[found]]
        steps.left -= MASK_STEPS
        return self._list_allowed(matcher)[-1:]  # in a large vocabulary often a long token

    def _allows(self, matcher: LLMatcher, text: str) -> bool:
        token = self._tokens.get(text)
        return token is not None and matcher.validate_tokens([token]) == 1

    def _list_allowed(self, matcher: LLMatcher) -> list[int]:
        mask = np.zeros((1, count_mask_words(self._vocab)), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
