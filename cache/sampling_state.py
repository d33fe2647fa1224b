"""What a request may ask of the choice of its tokens, as the device keeps it: one row of `sampling` per slot."""

from collections.abc import Sequence
from typing import Literal, get_args

from dflash_aot.cache.errors import BadInput

SamplingMode = Literal["greedy", "sample"]
SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)
MAX_TOP_LOGPROBS = 20  # of one token: as many as OpenAI's interface gives
# Columns of `sampling`, and the value with which each changes nothing.
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
    """How many of the likeliest tokens a sampled verification tells of: a small vocabulary has no more."""
    return min(MAX_TOP_LOGPROBS, vocab)


def check_sampling_modes(kinds: Sequence[str], source: str) -> tuple[SamplingMode, ...]:
    """Kinds of verification to build, in their own order. `source` names them in messages. Raises BadInput."""
    known = ", ".join(SAMPLING_MODES)
    if unknown := [kind for kind in kinds if kind not in SAMPLING_MODES]:
        raise BadInput(f"{source}: {', '.join(map(repr, unknown))} is no kind of verification; there are {known}")
    if len(set(kinds)) < len(kinds):
        raise BadInput(f"{source} names one twice")
    if not kinds:
        raise BadInput(f"{source} names none; there are {known}")
    return tuple(kind for kind in SAMPLING_MODES if kind in kinds)
