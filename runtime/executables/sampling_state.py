"""Sampling state: writes a request's sampling parameters to its slot on the device."""

import secrets
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dflash_aot.cache.sampling_state import SAMPLING_COLUMNS
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.slots import RunningRequest

KEEP = -1  # as an anchor: the slot keeps its anchor and its length


class SamplingStateWriter:
    """Calls the `admit` executable. The empty bias and prompt mask of most requests are placed on the device once."""

    def __init__(self, get_admit: Callable[[], Executable], state: DeviceState, vocab: int):
        self._get_admit, self._state, self._vocab = get_admit, state, vocab
        self._no_bias = state.place(np.zeros((1, vocab), np.float32))
        self._no_mask = state.place(np.zeros((1, vocab), np.bool_))

    def write(self, running: RunningRequest, slot: int) -> None:
        """Dispatches the write. A sampled request then starts at the last token of its prompt; others stay."""
        params, prompt = running.request.params, running.request.prompt
        anchor = prompt[-1] if running.sampled else KEEP
        place = self._state.place
        self._get_admit()(
            self._state,
            place(np.array([slot], np.int32)),
            place(np.array([len(prompt) - 1], np.int32)),
            place(np.array([anchor], np.int32)),
            place(self._make_columns(params)),
            place(split_seed(secrets.randbits(64) if params.seed is None else params.seed)),
            self._make_bias(params),
            self._no_mask if params.repetition_penalty == 1 else self._make_prompt_mask(prompt),
            place(np.array([bool(params.logprobs)], np.int32)),
        )

    def _make_columns(self, params: SamplingParams) -> np.ndarray:
        """float32 [1, columns]. A top_k of the whole vocabulary is no limit, and may be too large for a float."""
        asked = {name: getattr(params, name) for name in SAMPLING_COLUMNS}
        asked["top_k"] = 0 if params.top_k >= self._vocab else params.top_k
        return np.array([list(asked.values())], np.float32)

    def _make_bias(self, params: SamplingParams) -> jax.Array:
        if not params.logit_bias:
            return self._no_bias
        bias = np.zeros((1, self._vocab), np.float32)
        bias[0, list(params.logit_bias)] = list(params.logit_bias.values())
        return self._state.place(bias)

    def _make_prompt_mask(self, prompt: Sequence[int]) -> jax.Array:
        mask = np.zeros((1, self._vocab), np.bool_)
        mask[0, prompt] = True
        return self._state.place(mask)


def split_seed(seed: int) -> np.ndarray:
    """64 bits → int32 [1, 2]: the high half, the low half."""
    halves = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
    return np.array([halves], np.uint32).view(np.int32)
