"""What a request asks of the choice of its tokens, and how far it goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.sampling import MOST_TOP_LOGPROBS

MOST_BIAS = 100.0  # as OpenAI's interface has it: enough to ban a token or to force it
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
        at_least_1 = "a whole number of at least 1 is needed"
        at_least_0 = "a whole number of at least 0 is needed"
        self._check("max_tokens", self.max_tokens is None or whole(self.max_tokens, 1), at_least_1)
        self._check("temperature", number(self.temperature, 0, 1e4), "a number of at least 0 is needed")
        self._check("top_k", whole(self.top_k, 0), f"{at_least_0}, 0 for no limit")
        self._check(
            "top_p", number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and at most 1 is needed, 1 for all"
        )
        self._check("min_p", number(self.min_p, 0, 1), "a number from 0 to 1 is needed, 0 for no limit")
        self._check(
            "seed",
            self.seed is None or whole(self.seed, -SEEDS) and self.seed < SEEDS,
            "a whole number of 64 bits is needed",
        )
        self._check(
            "repetition_penalty",
            number(self.repetition_penalty, 0, 1e4) and self.repetition_penalty > 0,
            "a number above 0 is needed, 1 for none",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, number(getattr(self, name), -1e4, 1e4), "a number is needed, 0 for none")
        self._check("logit_bias", _is_bias(self.logit_bias), f"token ids with numbers from -{MOST_BIAS:g} to 100")
        self._check(
            "logprobs",
            self.logprobs is None or whole(self.logprobs, 0) and self.logprobs <= MOST_TOP_LOGPROBS,
            f"a whole number from 0 to {MOST_TOP_LOGPROBS} is needed",
        )
        self._check(
            "stop", _is_list(self.stop, str) and all(self.stop), "a list of texts is needed, none of them empty"
        )
        self._check(
            "stop_token_ids",
            self.stop_token_ids is None or _is_list(self.stop_token_ids, int),
            "a list of token ids is needed",
        )
        self._check("k", self.k is None or whole(self.k, 0), at_least_0)

    def _check(self, name: str, good: bool, needed: str) -> None:
        if not good:
            raise BadInput(f"{name} is {getattr(self, name)!r}: {needed}")

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


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_number(value: object, least: float, most: float) -> bool:
    """NaN is none: it compares with nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_list(values: object, kind: type) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(type(one) is kind for one in values)


def _is_bias(bias: object) -> bool:
    return bias is None or (
        isinstance(bias, Mapping)
        and all(_is_whole(token, 0) and _is_number(value, -MOST_BIAS, MOST_BIAS) for token, value in bias.items())
    )
