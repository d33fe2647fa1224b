"""Grammar matcher: where an answer is in its grammar, which tokens may follow, and how it can end in time."""

import math
import random
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.sampling_state import ALL_ALLOWED, MASK_BITS, count_mask_words

# -- completions: how an answer that follows a grammar can end within the tokens that are left
#
# llguidance says what may come next, not how far the end is. The search takes what the grammar forces and otherwise
# what usually ends a part: a quotation mark within a text, a closing bracket, a short number. If that does not end, as
# in the middle of an e-mail address, it tries other characters at random, with a fixed seed. What it finds character
# by character is tokenized again, which makes it shorter. Each search has a limit of steps, so its time is bounded
# too.

ATTEMPTS = 8
MAX_STEPS = 400  # of a search, including those of what is found: some milliseconds
COPY_STEPS = 4  # as many as a copy of a state takes
MASK_STEPS = 25  # as many as a mask of the whole vocabulary takes
MAX_TOKENS = 256  # of a completion
# `@` and `:` within addresses; elsewhere they are forced or not allowed
ENDS = "@:}],Z"
STARTS = '0123456789ntf"-[{'
QUOTE, LETTER = '"', "q"  # where both may come, the grammar is within a text
ARGUMENT_END = "\n</parameter>\n"  # after a text in calls that are written as XML


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
        self._vocab = vocab
        self._tokenizer = tokenizer
        self._tokens = {
            text: ids[0]
            for text in string.printable
            if len(ids := tokenizer.tokenize_str(text)) == 1
        }
        self._argument_end = tokenizer.tokenize_str(ARGUMENT_END)

    def find(self, matcher: LLMatcher, most: int, budget: StepBudget) -> list[int] | None:
        """Returns at most `most` tokens that complete the answer, none where it may end here; None if it finds none.

        Takes at most `MAX_STEPS` of the budget.
        """
        if matcher.is_stopped() or matcher.is_accepting():
            return []
        steps = budget.limit(MAX_STEPS)
        given = steps.left
        found = None
        for attempt in range(ATTEMPTS):
            if found is not None or steps.left <= 0:
                break
            walked = self._walk(
                matcher.deep_copy(), most, random.Random(attempt) if attempt else None, steps
            )
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
        steps = StepBudget(MAX_STEPS)
        states = {b"": matcher}
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
                steps.left -= COPY_STEPS
                if steps.left < 0:
                    return reached
                if (longer := text + self._tokenizer.decode_bytes([token])) not in reached:
                    copy = state.deep_copy()
                    copy.consume_token(token)
                    reached[longer] = copy
        return reached

    def _walk(
        self, matcher: LLMatcher, most: int, chance: random.Random | None, steps: StepBudget
    ) -> list[int] | None:
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
            found = [
                self._tokenizer.tokenize_bytes(data),
                self._tokenizer.greedy_tokenize(data.decode()),
            ]
        except UnicodeDecodeError:  # within a character
            return []
        return [ids for ids in found if self._tokenizer.decode_bytes(ids) == data]

    def _choose(
        self, matcher: LLMatcher, chance: random.Random | None, steps: StepBudget
    ) -> list[int]:
        if self._allows(matcher, QUOTE) and self._allows(matcher, LETTER):
            end = self._argument_end
            fits = end and matcher.validate_tokens(end) == len(end)
            return end if fits else [self._tokens[QUOTE]]
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


# -- the matcher

MAX_SEARCHES = 8  # that find no completion, of one request
MAX_REQUEST_STEPS = 8192  # of all searches of one request
# rounds by which a grammar is tried, and the processor time that the masks of one may take
TRIED_WALKS = 2
TRIED_ROUNDS = 16
TRIED_K = 7
MAX_MEAN_SECONDS = 0.002
MAX_ROUND_SECONDS = 0.1
MAX_EXCESS_SECONDS = 0.25  # that the rounds of an answer may take beyond the mean, together
# completions are searched in the last tokens: so many, and twice the shortest answer
SPARE_TOKENS = 64


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
        self._matcher = matcher
        self._vocab = vocab
        self._words = count_mask_words(vocab)
        self._finder = finder
        self.shortest = self._completion = shortest
        self.ends = ends
        self._steps = StepBudget(MAX_REQUEST_STEPS)
        self._watched = 2 * len(shortest or ()) + SPARE_TOKENS
        self._failures = 0
        self._spent = 0.0  # seconds of masks beyond what rounds may take

    def is_made_with(self, finder: CompletionFinder) -> bool:
        """Whether it is of this finder's vocabulary."""
        return self._finder is finder

    def copy(self) -> "GrammarMatcher":
        """The matcher of another request."""
        matcher = self._matcher.deep_copy()
        return GrammarMatcher(matcher, self._vocab, self._finder, self.shortest, self.ends)

    def try_rounds(self) -> str | None:
        """Follows the grammar for some rounds, and returns why it cannot be followed in time; None if it can.

        The answers are the shortest that was found, and texts of tokens that are chosen at random, with a fixed seed.
        """
        total = worst = 0.0
        count = 0
        most = TRIED_WALKS * TRIED_ROUNDS * MAX_MEAN_SECONDS
        for walk in range(TRIED_WALKS):
            answer = self.copy()
            chance = random.Random(walk)
            ahead = [] if walk else [*(self.shortest or ())]
            for at in range(TRIED_ROUNDS):
                if answer.is_complete:
                    break
                took = answer._try_round(chance, ahead)
                worst = max(worst, took, 0.0 if at % 8 else answer._try_completion())
                total += took
                count += 1
                if worst > MAX_ROUND_SECONDS or total > most:
                    break
            if answer._matcher.is_error():
                return quote_first_line(answer._matcher.get_error())
        if worst <= MAX_ROUND_SECONDS and total <= max(count, TRIED_ROUNDS) * MAX_MEAN_SECONDS:
            return None
        return (
            f"the masks of a round take {1000 * total / count:.1f} ms, at most {1000 * worst:.0f}: "
            f"{1000 * MAX_MEAN_SECONDS:g} ms are allowed, and {1000 * MAX_ROUND_SECONDS:g} at most"
        )

    def _try_round(self, chance: random.Random, ahead: list[int]) -> float:
        """Takes the tokens `ahead`, or any, for a round. Returns seconds of processor time for its masks."""
        seconds = 0.0
        rows = 0
        while rows <= TRIED_K and not self.is_complete:
            began = time.thread_time()
            block, masks = self._mask([0] * (TRIED_K - rows))
            seconds += time.thread_time() - began
            count = int((masks != ALL_ALLOWED).any(axis=1).sum())
            found = self._choose(masks[count - 1], chance)
            if not count or found is None:
                break
            tokens = ahead[:count] or [*block[: count - 1], found]
            del ahead[:count]
            rows += count
            if not self._matcher.consume_tokens(tokens):
                break
        return seconds

    def _choose(self, mask: np.ndarray, chance: random.Random) -> int | None:
        """A token that the mask allows, and that ends nothing."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab]
        allowed = [token for token in np.flatnonzero(bits).tolist() if token not in self.ends]
        return chance.choice(allowed) if allowed else None

    def _try_completion(self) -> float:
        """Seconds of processor time that a search for the end of the answer takes."""
        began = time.thread_time()
        self._finder.find(self._matcher, SPARE_TOKENS, StepBudget(MAX_STEPS))
        return time.thread_time() - began

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped()

    def needs_more(self, most: int) -> bool:
        """Whether it is proven that every answer has more than `most` tokens."""
        return len(self.shortest or ()) > most and self._finder.needs_more(self._matcher, most)

    def accept(self, token: int, room: float = math.inf) -> Sequence[int] | None:
        """The answer continues with `token`, unless it could not be completed in the `room` tokens after it.

        Returns None, or the tokens that complete the answer instead of `token`. Towards the end of an answer, where a
        completion is known, only tokens are accepted after which another completion is found. The searches of a request
        take at most `MAX_REQUEST_STEPS`. Raises EngineFailed if the grammar does not allow the token.
        """
        if self._spent > MAX_EXCESS_SECONDS:
            raise EngineFailed("structured_outputs: its masks take too long: make it simpler")
        before = self._completion
        self._completion = None
        if before is not None and len(before) > room + 1:
            before = None
        if not self._matcher.consume_token(token):
            raise EngineFailed(
                "structured_outputs: the grammar cannot be followed: "
                f"{quote_first_line(self._matcher.get_error())}"
            )
        if self.is_complete or room > self._watched:
            return None
        self._completion = (
            before[1:] if before and token == before[0] else self._find_completion(int(room))
        )
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
        began = time.thread_time()
        # `accept` raises for an answer that has spent too much.
        found = self._mask([*drafted], is_open=self._spent > MAX_EXCESS_SECONDS)
        self._spent = max(0.0, self._spent + time.thread_time() - began - MAX_MEAN_SECONDS)
        return found

    def _mask(self, block: list[int], is_open: bool = False) -> tuple[list[int], np.ndarray]:
        """The block with forced tokens, and its masks; with `is_open`, masks that allow everything."""
        masks = np.full((len(block) + 1, self._words), ALL_ALLOWED, np.int32)
        if is_open:
            return block, masks
        taken = 0
        position = 0
        while position <= len(block) and not self._matcher.is_stopped():
            # What is forced is tokenized once for the round, which takes long for a long text.
            forced = self._matcher.compute_ff_tokens()[: len(masks) - position]
            for at, token in enumerate(forced, position):
                _allow_only(masks[at], token)
            if not forced:
                fill_next_token_bitmask(self._matcher, masks, position)
                if position == len(block) or not _allows(masks[position], block[position]):
                    break
            followed = forced[: len(block) - position] or block[position : position + 1]
            block[position : position + len(followed)] = followed
            if not self._matcher.consume_tokens(followed):
                break
            taken += len(followed)
            position += max(len(forced), 1)
        if taken:
            self._matcher.rollback(taken)
        return block, masks


def _allow_only(mask: np.ndarray, token: int) -> None:
    word, bit = divmod(token, MASK_BITS)
    mask[:] = 0
    mask.view(np.uint32)[word] = 1 << bit


def _allows(mask: np.ndarray, token: int) -> bool:
    word, bit = divmod(token, MASK_BITS)
    return bool(int(mask[word]) >> bit & 1)
