"""Tokens that must not come, in masks of allowed tokens."""

import numpy as np

from dflash_aot.cache.sampling_state import ALL_ALLOWED, MASK_BITS
from dflash_aot.runtime.dispatcher import forbid_tokens


def test_forbidden_tokens_lose_their_bits_unless_nothing_else_is_allowed():
    masks = np.full((2, 2), ALL_ALLOWED, np.int32)
    masks[1] = [0, 1 << 1]
    forbid_tokens(masks, [0, 31, MASK_BITS + 1])
    bits = (masks[:, :, None] >> np.arange(MASK_BITS) & 1).reshape(2, -1)
    assert np.flatnonzero(bits[0] == 0).tolist() == [0, 31, MASK_BITS + 1]
    assert np.flatnonzero(bits[1]).tolist() == [MASK_BITS + 1]
