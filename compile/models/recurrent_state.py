"""Recurrent state of hybrid targets: arrays by layer and slot, like the kv cache, but of one size at any length.

L Gated DeltaNet layers · N slots · B rows of a call · T tokens · the heads and widths of `gated_delta_net`
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.compile.kernels.kernel_device import (
    DeltaCommit,
    DeltaSizes,
    DeltaUpdates,
)
from dflash_aot.compile.models.backend import Backend
from dflash_aot.compile.models.gated_delta_net import (
    BlockUpdates,
    MixerCall,
    MixerInputs,
    add_updates,
    run_block,
    run_blocks,
    weigh_updates,
)
from dflash_aot.compile.models.layer_loop import LayerIndex

if TYPE_CHECKING:
    from dflash_aot.compile.kernels.gated_delta import DeltaBlocks


class RecurrentState(NamedTuple):
    """The state of all slots.

    Attributes:
        states: of the delta rule, float32 [L, N, V, I, O].
        windows: the last inputs of the convolution, oldest first, [L, N, J, C].
    """

    states: jax.Array
    windows: jax.Array


def prefill_layer(
    state: RecurrentState,
    layer: LayerIndex,
    call: MixerCall,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, RecurrentState]:
    """Runs the first `count` of T prompt tokens of one slot, and advances its state: (the call's output, state).

    A prompt begins, at `start` 0, with zeros, whatever the slot held. Results after `count` are undefined.
    """
    begun = start[None] > 0
    mixer = call.mixer
    inputs = call.project()
    kernels = mixer.backend.kernels
    chunks = kernels and kernels.choose_delta_chunks(
        find_delta_sizes(state, mixer.sizes), state.windows.shape[2]
    )
    if chunks:
        block = mixer.describe_block(inputs, begun, state.windows, state.states)
        gated, windows, states = chunks.mix(block, layer, slot, count)
        return call.output(gated), RecurrentState(states, windows)
    rows = _prepend_window(_take(state.windows, layer, slot, 1), begun, inputs)
    taken = mixer.convolve(inputs, rows)
    valid = jnp.arange(inputs.channels.shape[1]) < count
    taken = taken._replace(
        strengths=jnp.where(valid, taken.strengths, 0), decays=jnp.where(valid, taken.decays, 0)
    )
    results, after = run_blocks(taken, _take(state.states, layer, slot, 1), begun)
    window = jax.lax.dynamic_slice_in_dim(rows, count, state.windows.shape[2], axis=1)
    return call.output(mixer.gate(results, inputs)), RecurrentState(
        _write(state.states, layer, slot, after), _write(state.windows, layer, slot, window)
    )


def choose_kernels(
    backend: Backend, state: RecurrentState, sizes: GatedDeltaNet, tokens: int
) -> "DeltaBlocks | None":
    """The kernels that verify blocks of `tokens` tokens and commit them; None where XLA's operations do."""
    if backend.kernels is None:
        return None
    return backend.kernels.choose_delta_kernels(
        find_delta_sizes(state, sizes), tokens, state.windows.shape[2]
    )


def find_delta_sizes(state: RecurrentState, sizes: GatedDeltaNet) -> DeltaSizes:
    """The sizes of the layers on this device, whose heads are those of its states."""
    heads = state.states.shape[2]
    key_heads = heads * sizes.key_heads // sizes.value_heads
    return DeltaSizes(key_heads, heads, sizes.key_dim, sizes.value_dim)


def make_pending(
    state: RecurrentState,
    sizes: GatedDeltaNet,
    batch: int,
    tokens: int,
    kernels: "DeltaBlocks | None",
) -> DeltaUpdates:
    """Room for the updates of blocks of `tokens` tokens, not initialised."""
    layers, _, heads, I, O = state.states.shape  # noqa: E741
    key_heads = heads * sizes.key_heads // sizes.value_heads
    width = kernels.tokens if kernels else tokens
    dtype = state.states.dtype
    rows = (layers, batch)
    return DeltaUpdates(
        keys=jax.lax.empty((*rows, key_heads, width, I), dtype),
        updates=jax.lax.empty((*rows, heads, width, O), dtype),
        decays=jax.lax.empty((*rows, heads, width), dtype),
        channels=jax.lax.empty((*rows, width, state.windows.shape[3]), state.windows.dtype),
    )


def verify_layer(
    state: RecurrentState,
    pending: DeltaUpdates,
    layer: LayerIndex,
    call: MixerCall,
    lengths: jax.Array,
    kernels: "DeltaBlocks | None",
) -> tuple[jax.Array, DeltaUpdates]:
    """Runs a block of the first B slots. The state stays; what the block adds to it is pending."""
    begun = lengths > 0
    mixer = call.mixer
    inputs = call.project()
    if kernels:
        gated, pending = kernels.mix(
            mixer.describe_block(inputs, begun, state.windows, state.states), pending, layer
        )
        return call.output(gated), pending
    batch = len(inputs.channels)
    rows = _prepend_window(_take(state.windows, layer, 0, batch), begun, inputs)
    results, added = run_block(
        mixer.convolve(inputs, rows), _take(state.states, layer, 0, batch), begun
    )
    stacks = zip(pending, (*added, inputs.channels), strict=True)
    return call.output(mixer.gate(results, inputs)), DeltaUpdates(
        *(jax.lax.dynamic_update_index_in_dim(stack, one, layer, 0) for stack, one in stacks)
    )


def commit_updates(
    state: RecurrentState,
    pending: DeltaUpdates,
    lengths: jax.Array,
    counts: jax.Array,
    kernels: "DeltaBlocks | None" = None,
) -> RecurrentState:
    """Advances the first B slots by the first `counts` tokens of their blocks, int32 [B]; 0 leaves a slot unchanged.

    One product per head, with the tokens that are not accepted masked. `lengths` are those before the block. (At length
    0 a window is cleared even if the count is 0: nothing reads it.)
    """
    batch = counts.shape[0]
    begun = lengths > 0
    kept = begun | (counts == 0)
    # of all layers: instructions inside the loop cost more
    weights = weigh_updates(pending.decays, counts)
    if kernels:
        of_states = jnp.where(kept[:, None], weights.state, 0)
        factors = jnp.concatenate([weights.updates, of_states[..., None]], axis=-1)
        return RecurrentState(
            *kernels.commit(
                DeltaCommit(state.states, state.windows, pending, factors, begun, counts)
            )
        )
    stacks = BlockUpdates(pending.keys, pending.updates, pending.decays)

    def commit_layer(layer: jax.Array, states: jax.Array) -> jax.Array:
        block, factors = jax.tree.map(
            lambda stack: jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False),
            (stacks, weights),
        )
        return _write(
            states, layer, 0, add_updates(_take(states, layer, 0, batch), block, factors, kept)
        )

    states = jax.lax.fori_loop(0, state.states.shape[0], commit_layer, state.states)
    return RecurrentState(states, _commit_windows(state.windows, pending.channels, begun, counts))


def _commit_windows(
    windows: jax.Array, channels: jax.Array, begun: jax.Array, counts: jax.Array
) -> jax.Array:
    """The windows [L, N, J, C] after the first `counts` tokens of the blocks' channels [L, B, T, C]."""
    windows = _keep_layout(windows)
    for slot in range(counts.shape[0]):
        before = windows[:, slot : slot + 1]
        block = channels[:, slot : slot + 1]
        rows = jnp.concatenate([jnp.where(begun[slot], before, 0), block], axis=2)
        window = jax.lax.dynamic_slice_in_dim(rows, counts[slot], windows.shape[2], axis=2)
        windows = jax.lax.dynamic_update_slice(windows, window, (0, slot, 0, 0))
    return windows


def copy_slot(array: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Copies one slot of states or windows [L, N, ..] over another, layer by layer: only one layer is held twice."""

    def copy_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        return _write(array, layer, destination, _take(array, layer, source, 1))

    return jax.lax.fori_loop(0, array.shape[0], copy_layer, array)


def _take(array: jax.Array, layer: LayerIndex, slot: jax.Array | int, batch: int) -> jax.Array:
    """States [B, V, I, O] or windows [B, J, C] of neighbouring slots in one layer, as stored."""
    at = (layer, slot, *(0,) * (array.ndim - 2))
    return jax.lax.dynamic_slice(_keep_layout(array), at, (1, batch, *array.shape[2:]))[0]


def _write(
    array: jax.Array, layer: LayerIndex, slot: jax.Array | int, rows: jax.Array
) -> jax.Array:
    return jax.lax.dynamic_update_slice(
        _keep_layout(array), rows[None], (layer, slot, *(0,) * (array.ndim - 2))
    )


def _prepend_window(window: jax.Array, begun: jax.Array, inputs: MixerInputs) -> jax.Array:
    """What the convolution takes [B, J+T, C]. A slot that has not `begun` [B] holds the window of its last request."""
    return jnp.concatenate([jnp.where(begun[:, None, None], window, 0), inputs.channels], axis=1)


def _keep_layout(array: jax.Array) -> jax.Array:
    """Constrains the array to the memory layout of the arguments: major to minor. The API is experimental in JAX.

    Without it XLA gives an array that a loop carries the layout that suits the loop's body, and copies the whole array
    before and after the loop.
    """
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))
