"""Sampling: what can be built to choose and to score tokens, and the columns of a slot's sampling state."""

from collections.abc import Sequence
from typing import Literal, get_args

from dflash_aot.cache.errors import BadInput

# Modes of verification that can be built: greedy, sampled with penalties and filters, and sampled under a mask of
# allowed tokens (structured output). Each can do what those before it do: a bundle with only "sample" serves greedy
# requests with a temperature of 0. Greedy alone needs no sampling state.
SamplingMode = Literal["greedy", "sample", "constrain"]
SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)
# What `--sampling` builds: modes of verification, and prefill chunks that score the tokens of a prompt.
SamplingKind = Literal[SamplingMode, "prompt_logprobs"]
SAMPLING_KINDS: tuple[SamplingKind, ...] = get_args(SamplingKind)
DEFAULT_SAMPLING: tuple[SamplingKind, ...] = ("greedy", "sample")
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


def list_modes(kinds: Sequence[SamplingKind]) -> tuple[SamplingMode, ...]:
    """Returns the modes of verification among `kinds`."""
    return tuple(mode for mode in SAMPLING_MODES if mode in kinds)


def needs_sampling_state(kinds: Sequence[SamplingKind]) -> bool:
    """Returns whether programs have sampling state: every verification but the greedy one reads it."""
    return any(mode != "greedy" for mode in list_modes(kinds))


def find_serving_mode(needed: SamplingMode, kinds: Sequence[SamplingKind]) -> SamplingMode | None:
    """Returns the simplest mode of `kinds` that can do what `needed` does; None if none can."""
    able = SAMPLING_MODES[SAMPLING_MODES.index(needed) :]
    return next((mode for mode in able if mode in kinds), None)


def count_top_logprobs(vocab: int) -> int:
    """Returns how many of the likeliest tokens programs report: MAX_TOP_LOGPROBS or the vocabulary."""
    return min(MAX_TOP_LOGPROBS, vocab)


def count_mask_words(vocab: int) -> int:
    """Returns how many words of MASK_BITS a mask of allowed tokens has."""
    return -(-vocab // MASK_BITS)


def check_sampling_kinds(kinds: Sequence[str], source: str) -> tuple[SamplingKind, ...]:
    """Returns what to build in canonical order. `source` names it in messages. Raises BadInput."""
    known = ", ".join(SAMPLING_KINDS)
    if unknown := [kind for kind in kinds if kind not in SAMPLING_KINDS]:
        raise BadInput(
            f"{source}: unknown sampling mode {', '.join(map(repr, unknown))}; known: {known}"
        )
    if len(set(kinds)) < len(kinds):
        raise BadInput(f"{source} has a sampling mode twice")
    if not set(kinds) & set(SAMPLING_MODES):
        raise BadInput(f"{source} has no sampling mode; known: {', '.join(SAMPLING_MODES)}")
    return tuple(kind for kind in SAMPLING_KINDS if kind in kinds)
