"""What a request asks of the choice of its tokens, and how far it goes."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.sampling_state import MOST_TOP_LOGPROBS

MOST_BIAS = 100.0  # as OpenAI's interface has it: enough to ban a token or to force it
# All of these are float32 on the device: what stands beyond changes nothing, or is no number there.
MOST, LEAST_TOP_P = 1e4, 1e-6
SEEDS = 1 << 63


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Probabilities are shaped in the order in which they stand here, as vLLM does it.

    max_tokens: at most so many new tokens; None: until a stop or the last position of the grid.
    temperature: 0 is greedy. top_k: so many of the most likely tokens, 0 for all. top_p: the smallest set of the most
    likely ones whose mass reaches it, 1 for all. min_p: those at least so likely relative to the likeliest, 0 for all.
    seed: the same seed and prompt give the same text, whatever K and whatever else is served; None draws one.
    repetition_penalty: logits of tokens in prompt or output are divided by it where positive, multiplied otherwise.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once or per occurrence.
    logit_bias: added to the logits of single tokens, before the penalties.
    logprobs: None for none; n for the log-probability of each chosen token and of the n likeliest, at most 20, before
    anything above is applied.
    stop: texts that end the output, left out of it. stop_token_ids: tokens that end it, kept; None means the
    target's own end-of-sequence tokens, and a sequence replaces them, so that () ends at nothing.
    k: tokens to verify per round, one of the grid's, instead of the engine's choice. Rows of one round share K, the
    largest that one of them asks for; it never changes the text.
    trace: also keep the drafted tokens of every round.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    trace: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        """Raises BadInput."""
        whole, number = _is_whole, _is_number
        self._check("max_tokens", self.max_tokens is None or whole(self.max_tokens, 1), "a whole number of at least 1")
        self._check("temperature", number(self.temperature, 0, MOST), f"a number from 0 to {MOST:g}, 0 for greedy")
        self._check("top_k", whole(self.top_k, 0), "a whole number of at least 0, 0 for no limit")
        self._check("top_p", number(self.top_p, LEAST_TOP_P, 1), f"a number from {LEAST_TOP_P:g} to 1, 1 for no limit")
        self._check("min_p", number(self.min_p, 0, 1), "a number from 0 to 1, 0 for no limit")
        self._check(
            "repetition_penalty",
            number(self.repetition_penalty, 1 / MOST, MOST),
            f"a number from {1 / MOST:g} to {MOST:g}, 1 for none",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            good = number(getattr(self, name), -MOST, MOST)
            self._check(name, good, f"a number from -{MOST:g} to {MOST:g}, 0 for none")
        self._check(
            "logit_bias", _is_bias(self.logit_bias), f"token ids with numbers from -{MOST_BIAS:g} to {MOST_BIAS:g}"
        )
        tops = self.logprobs is None or whole(self.logprobs, 0, MOST_TOP_LOGPROBS)
        self._check("logprobs", tops, f"a whole number from 0 to {MOST_TOP_LOGPROBS}")
        self._check("seed", self.seed is None or whole(self.seed, -SEEDS, SEEDS - 1), "a whole number of 64 bits")
        self._check("stop", _is_list(self.stop, str) and all(self.stop), "a list of texts, none of them empty")
        ends = self.stop_token_ids is None or _is_list(self.stop_token_ids, int)
        self._check("stop_token_ids", ends, "a list of token ids")
        self._check("k", self.k is None or whole(self.k, 0), "a whole number of at least 0")

    def _check(self, name: str, good: bool, needed: str) -> None:
        if not good:
            raise BadInput(f"{name} is {reprlib.repr(getattr(self, name))}: {needed} is needed")

    @property
    def plain(self) -> bool:
        """Greedy, of logits as they are, which nobody asks for: what the greedy executables compute."""
        return not self.shaped_by

    @property
    def shaped_by(self) -> tuple[str, ...]:
        """The parameters that take a sampled executable; top_k, top_p and min_p alone never change a greedy choice."""
        asked = {
            "temperature": self.temperature != 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "logit_bias": bool(self.logit_bias),
            "logprobs": self.logprobs is not None,
        }
        return tuple(name for name, given in asked.items() if given)


def _is_whole(value: object, least: int, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: object, least: float, most: float) -> bool:
    """NaN is none: it compares with nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_list(values: object, kind: type) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str | bytes | bytearray)
        and all(type(one) is kind for one in values)
    )


def _is_bias(bias: object) -> bool:
    return bias is None or (
        isinstance(bias, Mapping)
        and all(_is_whole(token, 0) and _is_number(value, -MOST_BIAS, MOST_BIAS) for token, value in bias.items())
    )
