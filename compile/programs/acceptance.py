"""Acceptance: how many drafted tokens a verification keeps, and what a round commits to the state.

B rows · K drafted tokens · V vocabulary, or this device's part of it · F width of the features
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_aot.cache.signature import RECURRENT_STATE
from dflash_aot.compile.kernels.kernel_choice import DeltaKernels
from dflash_aot.compile.kernels.kernel_device import DeltaUpdates
from dflash_aot.compile.models.kv_cache import KvArrays
from dflash_aot.compile.models.recurrent_state import RecurrentState, commit_updates


class TargetForward(NamedTuple):
    """The target's forward pass over the blocks of a round.

    Attributes:
        lengths: int32 [B], tokens in the kv arrays before the round.
        anchors: int32 [B], the anchors before the round.
        block: int32 [B, K+1], the anchor and the drafted tokens.
        positions: int32 [B, K+1], the absolute positions of the block.
        logits: float32 [B, K+1, V], of the token after each token of the block.
        features: [B, K+1, F], the aux hidden states of the block.
        kv: the target's kv pools with the block written.
        pending: what the block adds to a hybrid's recurrent state; None for other targets.
        delta: the kernels that commit it, None where XLA's operations do.
    """

    lengths: jax.Array
    anchors: jax.Array
    block: jax.Array
    positions: jax.Array
    logits: jax.Array
    features: jax.Array
    kv: KvArrays
    pending: DeltaUpdates | None = None
    delta: DeltaKernels | None = None


def accept(block: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many drafted tokens are accepted, 0 … K, and the target's own token after them: both int32 [B].

    block [B, K+1] is the anchor and the drafted tokens; chosen [B, K+1] the target's choice after each of them. The
    accepted tokens are the longest prefix of drafted tokens that the target chose too.
    """
    matches = block[:, 1:] == chosen[:, :-1]
    accepted = jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    bonus = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    return accepted, bonus


def commit_round(
    arrays: Mapping[str, jax.Array], forward: TargetForward, chosen: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Accepts tokens and advances the active rows: accepted [B], and the outputs that all verifications share.

    `arrays` are the inputs of the program by name, chosen [B, K+1] is the target's choice after each token.
    """
    accepted, bonus = accept(forward.block, chosen)
    active, origin = arrays["active"], jnp.zeros((1,), jnp.int32)
    advanced = jnp.where(active, forward.lengths + accepted + 1, forward.lengths)
    recurrent: dict[str, jax.Array] = {}
    if forward.pending is not None:
        before = RecurrentState(*(arrays[name] for name in RECURRENT_STATE))
        counts = jnp.where(active, accepted + 1, 0)
        after = commit_updates(before, forward.pending, forward.lengths, counts, forward.delta)
        recurrent = dict(zip(RECURRENT_STATE, after, strict=True))
    return accepted, {
        **recurrent,
        "target_k": forward.kv[0],
        "target_v": forward.kv[1],
        "lengths": jax.lax.dynamic_update_slice(arrays["lengths"], advanced, origin),
        "anchors": jax.lax.dynamic_update_slice(arrays["anchors"], jnp.where(active, bonus, forward.anchors), origin),
        "features": forward.features,
        "starts": forward.lengths,
    }
