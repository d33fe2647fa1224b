"""What a request asks of the choice of its tokens, brought to its slot on the device."""

import secrets
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dflash_aot.cache.sampling_state import SAMPLING_COLUMNS
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.slots import RunningRequest

KEEP = -1  # as an anchor: the slot's own stays, and its length too


class SamplingStateWriter:
    """Calls the `admit` executable. What most requests leave empty is on the device once and for all."""

    def __init__(self, find_admit: Callable[[], Executable], state: DeviceState, vocab: int):
        self._find_admit, self._state, self._vocab = find_admit, state, vocab
        self._no_bias = state.place(np.zeros((1, vocab), np.float32))
        self._no_tokens = state.place(np.zeros((1, vocab), np.bool_))

    def admit(self, row: RunningRequest, slot: int) -> None:
        """Enqueues it. A sampled row starts at the last token of its prompt; any other one goes on where it is."""
        params, prompt = row.request.params, row.request.prompt
        anchor = prompt[-1] if row.sampled else KEEP
        place = self._state.place
        self._find_admit()(
            self._state,
            place(np.array([slot], np.int32)),
            place(np.array([len(prompt) - 1], np.int32)),
            place(np.array([anchor], np.int32)),
            place(self._columns(params)),
            place(split_seed(secrets.randbits(64) if params.seed is None else params.seed)),
            self._bias(params),
            self._no_tokens if params.repetition_penalty == 1 else self._tokens(prompt),
            place(np.array([bool(params.logprobs)], np.int32)),
        )
        row.admitted = True

    def _columns(self, params: SamplingParams) -> np.ndarray:
        """A top_k of all tokens and more is no limit, and may be too large for a float."""
        asked = {name: getattr(params, name) for name in SAMPLING_COLUMNS}
        asked["top_k"] = 0 if params.top_k >= self._vocab else params.top_k
        return np.array([list(asked.values())], np.float32)

    def _bias(self, params: SamplingParams) -> jax.Array:
        if not params.logit_bias:
            return self._no_bias
        bias = np.zeros((1, self._vocab), np.float32)
        bias[0, list(params.logit_bias)] = list(params.logit_bias.values())
        return self._state.place(bias)

    def _tokens(self, prompt: Sequence[int]) -> jax.Array:
        stands = np.zeros((1, self._vocab), np.bool_)
        stands[0, prompt] = True
        return self._state.place(stands)


def split_seed(seed: int) -> np.ndarray:
    """64 bits → int32 [1, 2]: the high half, the low half."""
    halves = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
    return np.array([halves], np.uint32).view(np.int32)
