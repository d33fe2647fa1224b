"""Sampling state of a slot on the device: its columns, and the verification modes that read it."""

from collections.abc import Sequence
from typing import Literal, get_args

from dflash_aot.cache.errors import BadInput

# Modes of verification that can be built: greedy, sampled with penalties and filters, and sampled under a mask of
# allowed tokens (structured output). Each can do what those before it do: a bundle with only "sample" serves greedy
# requests with a temperature of 0. Greedy alone needs no sampling state.
SamplingMode = Literal["greedy", "sample", "constrain"]
SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)
DEFAULT_SAMPLING: tuple[SamplingMode, ...] = ("greedy", "sample")
MASK_BITS = 32  # tokens per word of a mask of allowed tokens
ALL_ALLOWED = -1  # a word of a mask with every bit set
MAX_TOP_LOGPROBS = 20  # per token, the limit of OpenAI's API
# The columns of the state array `sampling`, each with the value that has no effect.
NEUTRAL_SAMPLING = {
    "temperature": 0.0,
    "top_k": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
SAMPLING_COLUMNS = tuple(NEUTRAL_SAMPLING)


def needs_sampling_state(modes: Sequence[SamplingMode]) -> bool:
    """Returns whether a bundle with these modes has sampling state: every verification but the greedy one reads it."""
    return any(mode != "greedy" for mode in modes)


def find_serving_mode(needed: SamplingMode, modes: Sequence[SamplingMode]) -> SamplingMode | None:
    """Returns the simplest of `modes` that can do what `needed` does; None if none can."""
    able = SAMPLING_MODES[SAMPLING_MODES.index(needed) :]
    return next((mode for mode in able if mode in modes), None)


def count_top_logprobs(vocab: int) -> int:
    """Returns how many of the likeliest tokens a sampled verification reports: MAX_TOP_LOGPROBS or the vocabulary."""
    return min(MAX_TOP_LOGPROBS, vocab)


def count_mask_words(vocab: int) -> int:
    """Returns how many words of MASK_BITS a mask of allowed tokens has."""
    return -(-vocab // MASK_BITS)


def check_sampling_modes(modes: Sequence[str], source: str) -> tuple[SamplingMode, ...]:
    """Returns the modes to build in their canonical order. `source` names them in messages. Raises BadInput."""
    known = ", ".join(SAMPLING_MODES)
    if unknown := [mode for mode in modes if mode not in SAMPLING_MODES]:
        raise BadInput(f"{source}: unknown sampling mode {', '.join(map(repr, unknown))}; known: {known}")
    if len(set(modes)) < len(modes):
        raise BadInput(f"{source} has a sampling mode twice")
    if not modes:
        raise BadInput(f"{source} has no sampling mode; known: {known}")
    return tuple(mode for mode in SAMPLING_MODES if mode in modes)
