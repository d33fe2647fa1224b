"""Sampling state of a slot on the device: its columns, and the verification modes that read it."""

from collections.abc import Sequence
from typing import Literal, get_args

from dflash_aot.cache.errors import BadInput

# Modes of verification that can be built: greedy, and sampled with penalties and filters. Greedy needs no sampling
# state. A bundle with only "sample" serves greedy requests with a temperature of 0.
SamplingMode = Literal["greedy", "sample"]
SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)
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


def count_top_logprobs(vocab: int) -> int:
    """Returns how many of the likeliest tokens a sampled verification reports: MAX_TOP_LOGPROBS or the vocabulary."""
    return min(MAX_TOP_LOGPROBS, vocab)


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
