"""Recurrent state of hybrid targets: arrays by layer and slot, like the kv cache, but of one size at any length.

L Gated DeltaNet layers · N slots · B rows of a call · T tokens · the heads and widths of `gated_delta_net`
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.compile.models.delta_rule import BlockUpdates, fold, run_block, run_blocks
from dflash_aot.compile.models.gated_delta_net import GatedDeltaMixer
from dflash_aot.compile.models.kv_cache import keep_layout
from dflash_aot.compile.models.layer_loop import LayerIndex


class RecurrentState(NamedTuple):
    """The state of all slots.

    Attributes:
        states: of the delta rule, float32 [L, N, V, I, O].
        windows: the last inputs of the convolution, oldest first, [L, N, J, C].
    """

    states: jax.Array
    windows: jax.Array


class PendingUpdates(NamedTuple):
    """What a verified block adds to the state of each layer, until it is known how many of its tokens are accepted.

    Attributes:
        keys: [L, B, Q, T, I].
        updates: [L, B, V, T, O].
        decays: [L, B, V, T].
        channels: inputs of the convolution, [L, B, T, C].
    """

    keys: jax.Array
    updates: jax.Array
    decays: jax.Array
    channels: jax.Array


def prefill_layer(
    state: RecurrentState,
    layer: LayerIndex,
    mixer: GatedDeltaMixer,
    x: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, RecurrentState]:
    """Runs the first `count` of T prompt tokens x [1, T, H] of one slot, and advances its state: ([1, T, H], state).

    A prompt begins, at `start` 0, with zeros, whatever the slot held. Results behind `count` are undefined.
    """
    begun = start[None] > 0
    before, window = _read(state, layer, slot, 1, begun)
    inputs = mixer.project(x)
    rows = mixer.convolve(inputs, window)
    valid = jnp.arange(x.shape[1]) < count
    rows = rows._replace(strengths=jnp.where(valid, rows.strengths, 0), decays=jnp.where(valid, rows.decays, 0))
    results, after = run_blocks(rows, before, begun)
    return mixer.output(results, inputs), RecurrentState(
        _write(state.states, layer, slot, after),
        _write(state.windows, layer, slot, _advance(window, inputs.channels, count[None])),
    )


def read_layer(mixer: GatedDeltaMixer, x: jax.Array) -> jax.Array:
    """Runs whole texts x [B, T, H] from their beginning, without a state: [B, T, H]."""
    inputs = mixer.project(x)
    channels = inputs.channels
    window = jnp.zeros((x.shape[0], mixer.sizes.kernel - 1, channels.shape[-1]), channels.dtype)
    rows = mixer.convolve(inputs, window)
    state = jnp.zeros((*rows.values.shape[:2], mixer.sizes.key_dim, mixer.sizes.value_dim), jnp.float32)
    return mixer.output(run_blocks(rows, state, jnp.ones(x.shape[:1], jnp.bool_))[0], inputs)


def make_pending(state: RecurrentState, sizes: GatedDeltaNet, batch: int, tokens: int) -> PendingUpdates:
    """Room for the updates of blocks of `tokens` tokens, all zeros."""
    layers, _, heads, I, O = state.states.shape  # noqa: E741
    key_heads = heads * sizes.key_heads // sizes.value_heads
    return PendingUpdates(
        keys=jnp.zeros((layers, batch, key_heads, tokens, I), state.states.dtype),
        updates=jnp.zeros((layers, batch, heads, tokens, O), state.states.dtype),
        decays=jnp.zeros((layers, batch, heads, tokens), state.states.dtype),
        channels=jnp.zeros((layers, batch, tokens, state.windows.shape[-1]), state.windows.dtype),
    )


def verify_layer(
    state: RecurrentState,
    pending: PendingUpdates,
    layer: LayerIndex,
    mixer: GatedDeltaMixer,
    x: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, PendingUpdates]:
    """Runs a block x [B, T, H] of the first B slots. The state stays; what the block adds to it is pending."""
    begun = lengths > 0
    before, window = _read(state, layer, 0, x.shape[0], begun)
    inputs = mixer.project(x)
    rows = mixer.convolve(inputs, window)
    results, updates = run_block(rows, before, begun)
    added = zip(pending, (*updates, inputs.channels), strict=True)
    return mixer.output(results, inputs), PendingUpdates(
        *(jax.lax.dynamic_update_index_in_dim(stack, one, layer, 0) for stack, one in added)
    )


def commit_updates(
    state: RecurrentState, pending: PendingUpdates, lengths: jax.Array, counts: jax.Array
) -> RecurrentState:
    """Advances the first B slots by the first `counts` tokens of their blocks, int32 [B]; 0 leaves a slot unchanged.

    One product per head, with the tokens that are not accepted masked. `lengths` are those before the block.
    """

    def commit_layer(layer: jax.Array, state: RecurrentState) -> RecurrentState:
        keys, updates, decays, channels = (jax.lax.dynamic_index_in_dim(one, layer, keepdims=False) for one in pending)
        begun = lengths > 0
        before, window = _read(state, layer, 0, counts.shape[0], begun | (counts == 0))
        after = fold(before, BlockUpdates(keys, updates, decays), counts, begun)
        return RecurrentState(
            _write(state.states, layer, 0, after),
            _write(state.windows, layer, 0, _advance(window, channels, counts)),
        )

    return jax.lax.fori_loop(0, state.states.shape[0], commit_layer, state)


def copy_slot(array: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Copies one slot of states or windows [L, N, ..] over another, one layer at a time: only one is held besides."""

    def copy_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        return _write(array, layer, destination, _take(array, layer, source, 1))

    return jax.lax.fori_loop(0, array.shape[0], copy_layer, array)


def _read(
    state: RecurrentState, layer: LayerIndex, slot: jax.Array | int, batch: int, begun: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """State [B, V, I, O] as stored, and window [B, J, C] of neighbouring slots in one layer.

    A slot holds what its last request left: the window is zeros unless the new one has `begun` [B]. The delta rule
    clears the state, because it reads the state in place.
    """
    window = _take(state.windows, layer, slot, batch)
    return _take(state.states, layer, slot, batch), jnp.where(begun[:, None, None], window, 0)


def _take(array: jax.Array, layer: LayerIndex, slot: jax.Array | int, batch: int) -> jax.Array:
    at = (layer, slot, *(0,) * (array.ndim - 2))
    return jax.lax.dynamic_slice(keep_layout(array), at, (1, batch, *array.shape[2:]))[0]


def _write(array: jax.Array, layer: LayerIndex, slot: jax.Array | int, rows: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(keep_layout(array), rows[None], (layer, slot, *(0,) * (array.ndim - 2)))


def _advance(window: jax.Array, channels: jax.Array, counts: jax.Array) -> jax.Array:
    """The window behind the first `counts` of the tokens, int32 [B]: window [B, J, C], channels [B, T, C]."""
    rows = jnp.concatenate([window, channels], axis=1)

    def take(rows: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows, count, window.shape[1])

    return jnp.stack([take(rows[row], counts[row]) for row in range(rows.shape[0])])
