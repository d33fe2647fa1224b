"""Gated DeltaNet: the recurrent layers of hybrid targets (Yang et al. 2024), as in Qwen3.5, and their delta rule.

Attribute names follow the checkpoint's tensors. The sections of queries, keys and values inside a tensor are regrouped
by key head, so that devices can share the key heads.

B rows · T tokens of this call · H hidden · Q key heads · R value heads per key head · V = Q R · I key width
O value width · C channels of the convolution, grouped by key head: Q · (2 I + R O) · J rows of its window
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.compile.kernels.kernel_device import DeltaBlock, DeltaProjections
from dflash_aot.compile.models.layers import (
    INPUTS,
    OUTPUTS,
    LayerForm,
    Linear,
    ParameterSource,
    parameter,
    read,
)
from dflash_aot.compile.models.matmul import round_to

# -- the gated delta rule (Yang et al. 2024) over blocks of rows, in matrix products, with a float32 state
#
# Token by token a head's state S [I, O] becomes e^g · S, then u = β (v - Sᵀ k) is added along the key: S + k uᵀ; the
# result is Sᵀ q. In a block all u follow from the state S0 before the block: (I + A) U = β (V - e^G K S0), where G is
# the sum of g so far and A_ts = β_t (k_t · k_s) e^(G_t - G_s) for s < t. Only differences G_t - G_s ≤ 0 are
# exponentiated.
#
# B rows of a call · T tokens of a block · N blocks · Q key heads · V value heads, a multiple of Q
# I key width · O value width

BLOCK = 64  # tokens of a block of a prompt, as in the reference


class DeltaRows(NamedTuple):
    """What the rule takes of each token: all float32.

    Attributes:
        queries: [B, Q, T, I], of length I^-½.
        keys: [B, Q, T, I], of length 1.
        values: [B, V, T, O].
        strengths: β, [B, V, T]; 0 for padding.
        decays: g ≤ 0, [B, V, T]; 0 for padding.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    strengths: jax.Array
    decays: jax.Array


class BlockUpdates(NamedTuple):
    """What a block adds to the state, from which the state after any of its tokens follows (`fold`).

    Attributes:
        keys: [B, Q, T, I].
        updates: U, [B, V, T, O].
        decays: G, the sum of the decays up to each token, [B, V, T].
    """

    keys: jax.Array
    updates: jax.Array
    decays: jax.Array


class _SolvedBlock(NamedTuple):
    """A block whose equations are solved for any state before it: U = inverse · β (values - e^G keys · S0)."""

    keys: jax.Array  # [B, Q, T, I]
    readers: jax.Array  # keys, and after them the queries: [B, Q, 2T, I]
    values: jax.Array  # [B, V, T, O]
    strengths: jax.Array  # β, [B, V, T]
    inverse: jax.Array  # of I + A, [B, V, T, T]
    scores: jax.Array  # of the updates in the results, [B, V, T, T]
    decays: jax.Array  # G, [B, V, T]


def run_block(
    rows: DeltaRows, state: jax.Array, begun: jax.Array
) -> tuple[jax.Array, BlockUpdates]:
    """Results [B, V, T, O] of one block, and its updates.

    `state` [B, V, I, O] is the state before the block. In rows where `begun` [B] is False it counts as zeros.
    """
    return _apply(_solve(rows), state, begun)


def run_blocks(rows: DeltaRows, state: jax.Array, begun: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Results [B, V, T, O] of any number of tokens, in blocks of BLOCK, and the state after the last one.

    Arguments as of `run_block`.
    """
    tokens = rows.keys.shape[2]
    if tokens <= BLOCK:
        results, updates = run_block(rows, state, begun)
        return results, fold(state, updates, jnp.full(begun.shape, tokens), begun)
    # Everything that does not depend on the state is solved for all blocks at once.
    solved = jax.vmap(_solve)(DeltaRows(*(_split_blocks(array) for array in rows)))

    def step(
        carry: tuple[jax.Array, jax.Array], block: _SolvedBlock
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, begun = carry
        results, updates = _apply(block, state, begun)
        after = fold(state, updates, jnp.full(begun.shape, BLOCK), begun)
        return (after, jnp.ones_like(begun)), results

    (state, _), results = jax.lax.scan(step, (state, begun), solved)
    results = jnp.moveaxis(results, 0, 2)
    return results.reshape(*results.shape[:2], -1, results.shape[-1])[:, :, :tokens], state


def fold(state: jax.Array, block: BlockUpdates, counts: jax.Array, begun: jax.Array) -> jax.Array:
    """The state after the first `counts` tokens of a block: counts int32 [B], 0 … T; states [B, V, I, O].

    `begun` as of `run_block`. A state with a count of 0 stays as it is, begun or not.
    """
    return add_updates(state, block, weigh_updates(block.decays, counts), begun | (counts == 0))


class UpdateWeights(NamedTuple):
    """Factors of what a state becomes by the counted tokens of a block, of one layer or of a stack of layers.

    Attributes:
        state: [.., B, V], of the state before the block.
        updates: [.., B, V, T]; 0 after the counted tokens.
    """

    state: jax.Array
    updates: jax.Array


def weigh_updates(decays: jax.Array, counts: jax.Array) -> UpdateWeights:
    """The weights of blocks whose `decays` [.., B, V, T] are those of `BlockUpdates`, up to the count of each row."""
    index = np.arange(decays.shape[-1])
    count = counts[:, None, None]
    last = jnp.where(index == count - 1, decays, 0).sum(axis=-1)
    taken = index < count
    faded = jnp.exp(jnp.where(taken, last[..., None] - decays, 0))
    return UpdateWeights(state=jnp.exp(last), updates=jnp.where(taken, faded, 0))


def add_updates(
    state: jax.Array, block: BlockUpdates, weights: UpdateWeights, kept: jax.Array
) -> jax.Array:
    """The state [B, V, I, O] after a block: the weighted state where `kept` [B] is True, and the weighted updates."""
    before = jnp.where(kept[:, None, None, None], weights.state[..., None, None] * state, 0)
    keys = weights.updates[..., None] * _repeat(block.keys, state)
    return before + jnp.einsum("BVTI,BVTO->BVIO", keys, block.updates)


def _solve(rows: DeltaRows) -> _SolvedBlock:
    total = jnp.cumsum(rows.decays, axis=-1)
    # a constant: in a loop over layers the compiler would compute it again
    index = np.arange(total.shape[-1])
    earlier = index[:, None] >= index
    # masked before exp: it overflows
    distance = jnp.where(earlier, total[..., :, None] - total[..., None, :], 0)
    faded = jnp.where(earlier, jnp.exp(distance), 0)
    products = _repeat(jnp.einsum("BQTI,BQSI->BQTS", rows.keys, rows.keys), rows.values)
    inverse = invert_unit_triangular(rows.strengths[..., None] * products * faded)
    return _SolvedBlock(
        keys=rows.keys,
        readers=jnp.concatenate([rows.keys, rows.queries], axis=2),
        values=rows.values,
        strengths=rows.strengths,
        inverse=inverse,
        scores=_repeat(jnp.einsum("BQTI,BQSI->BQTS", rows.queries, rows.keys), rows.values) * faded,
        decays=total,
    )


def _apply(
    block: _SolvedBlock, state: jax.Array, begun: jax.Array
) -> tuple[jax.Array, BlockUpdates]:
    # One product reads the state, as it lies: a state masked before it would be copied.
    read = jnp.einsum("BVTI,BVIO->BVTO", _repeat(block.readers, state), state)
    fading = jnp.exp(block.decays)[..., None]
    removed, carried = jnp.split(jnp.where(begun[:, None, None, None], read, 0), 2, axis=2)
    wanted = block.strengths[..., None] * (block.values - fading * removed)
    updates = jnp.einsum("BVTS,BVSO->BVTO", block.inverse, wanted)
    results = fading * carried + jnp.einsum("BVTS,BVSO->BVTO", block.scores, updates)
    return results, BlockUpdates(block.keys, updates, block.decays)


def _repeat(heads: jax.Array, values: jax.Array) -> jax.Array:
    """[B, Q, ..] of key heads for each of the value heads that `values` [B, V, ..] has."""
    return jnp.repeat(heads, values.shape[1] // heads.shape[1], axis=1)


def invert_unit_triangular(lower: jax.Array) -> jax.Array:
    """The inverse of I + the strictly lower triangle of `lower`: [.., T, T] → [.., T, T].

    Inverts the diagonal blocks of 1, 2, 4, … tokens, each from the two halves of the size before: forward substitution
    in blocks, without a loop over tokens. (A power series would need fewer products, and cancels in float32.)
    """
    tokens = lower.shape[-1]
    index = np.arange(tokens)
    size = 1
    inverse = jnp.broadcast_to(np.eye(tokens, dtype=lower.dtype), lower.shape)
    while size < tokens:
        half = index // size
        # the lower left quarter of a block of two halves
        below = (half[:, None] == half + 1) & (half % 2 == 0)
        quarter = jnp.where(below, lower, 0)
        inverse = inverse - (quarter if size == 1 else inverse @ quarter @ inverse)
        size *= 2
    return inverse


def _split_blocks(array: jax.Array) -> jax.Array:
    """Pads the axis of tokens with zeros to whole blocks and splits it: [B, V, T, ..] → [N, B, V, BLOCK, ..]."""
    rows, heads, tokens, *rest = array.shape
    padded = jnp.pad(array, [(0, 0), (0, 0), (0, -tokens % BLOCK), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(padded.reshape(rows, heads, -1, BLOCK, *rest), 2, 0)


# -- the mixer

NORM_EPSILON = 1e-6  # of queries and keys, added to the sum of squares


class MixerInputs(NamedTuple):
    """The projections of the tokens.

    Attributes:
        channels: what the convolution takes, [B, T, C].
        gates: z, [B, T, V O].
        strengths: β, float32 [B, T, V].
        decays: g, float32 [B, T, V].
    """

    channels: jax.Array
    gates: jax.Array
    strengths: jax.Array
    decays: jax.Array


class GatedDeltaMixer(nnx.Module):
    """`linear_attn` of a layer: projections, convolution, norms. The caller runs the delta rule on its state."""

    def __init__(self, sizes: GatedDeltaNet, hidden: int, epsilon: float, form: LayerForm):
        Q = sizes.key_heads
        R = sizes.value_heads // sizes.key_heads
        I = sizes.key_dim  # noqa: E741
        O = sizes.value_dim  # noqa: E741
        heads = sizes.value_heads
        width = 2 * I + R * O
        sections = (Q * I, Q * I, Q * R * O)
        projections = ParameterSource(
            ["in_proj_qkv.weight"], (sizes.channels, hidden), axis=1, sections=sections
        )
        self.qkv, self.qkv_scale = form.linear((Q, width, hidden), projections, split=0)
        self.in_proj_z = Linear(heads * O, hidden, form, OUTPUTS)
        # Small, and sensitive: they decide how fast the state changes. Never int8.
        self.in_proj_b = Linear(heads, hidden, form.plain, OUTPUTS)
        self.in_proj_a = Linear(heads, hidden, form.plain, OUTPUTS)
        taps = ParameterSource(
            ["conv1d.weight"], (sizes.channels, 1, sizes.kernel), axis=1, sections=sections
        )
        # Rows of a few taps would be laid out anew in every layer.
        shape = (Q, width, sizes.kernel)
        self.conv = parameter(shape, "float32", taps, split=0, stack_form="transposed")
        self.a_log = parameter((heads,), "float32", ParameterSource(["A_log"], (heads,)), split=0)
        self.dt_bias = parameter(
            (heads,), "float32", ParameterSource(["dt_bias"], (heads,)), split=0
        )
        self.norm = parameter((O,), "float32", ParameterSource(["norm.weight"], (O,)))
        self.out_proj = Linear(hidden, heads * O, form, INPUTS)
        self.sizes = sizes
        self.epsilon = epsilon
        self.backend = form.backend

    def project(self, x: jax.Array) -> MixerInputs:
        """x [B, T, H], normed."""
        channels = self.backend.matmul(self.qkv[...], x, read(self.qkv_scale))
        steps = jax.nn.softplus(self.in_proj_a(x, jnp.float32) + self.dt_bias[...])
        return MixerInputs(
            channels=channels.reshape(*x.shape[:2], -1),
            gates=self.in_proj_z(x),
            strengths=jax.nn.sigmoid(self.in_proj_b(x, jnp.float32)),
            decays=-jnp.exp(self.a_log[...]) * steps,
        )

    def list_projections(self, norm: jax.Array) -> DeltaProjections:
        """The projections of stacked layers; norm: factors of the norm before them, float32 [L, H]."""

        def as_matrices(weight: jax.Array) -> jax.Array:
            return weight.reshape(len(weight), -1, weight.shape[-1])

        scales = (read(self.qkv_scale), read(self.in_proj_z.weight_scale))
        return DeltaProjections(
            norm=norm,
            strengths=self.in_proj_b.weight[...],
            decays=self.in_proj_a.weight[...],
            biases=self.dt_bias[...][..., None],
            rates=-jnp.exp(self.a_log[...])[..., None],
            channels=as_matrices(self.qkv[...]),
            gates=self.in_proj_z.weight[...],
            scales=tuple(one.reshape(len(one), 1, -1) for one in scales if one is not None),
        )

    def convolve(self, inputs: MixerInputs, rows: jax.Array) -> DeltaRows:
        """Convolves over time and splits the channels into heads. `rows` [B, J+T, C]: the window, then the channels."""
        B, T, _ = inputs.channels.shape
        # the oldest row that the first token takes
        first = rows.shape[1] - T - self.sizes.kernel + 1
        kernel = self.conv[...].reshape(-1, self.sizes.kernel).T
        wide = rows.astype(jnp.float32)
        mixed = sum(
            kernel[tap] * wide[:, first + tap : first + tap + T] for tap in range(self.sizes.kernel)
        )
        mixed = round_to(jax.nn.silu(mixed), rows.dtype).astype(jnp.float32)
        I = self.sizes.key_dim  # noqa: E741
        O = self.sizes.value_dim  # noqa: E741
        width = 2 * I + self.sizes.value_heads // self.sizes.key_heads * O
        # split after this: head-major slices are whole tiles
        heads = mixed.reshape(B, T, -1, width).swapaxes(1, 2)
        values = heads[..., 2 * I :].reshape(B, heads.shape[1], T, -1, O).swapaxes(2, 3)
        return DeltaRows(
            queries=_normalize(heads[..., :I]) * I**-0.5,
            keys=_normalize(heads[..., I : 2 * I]),
            values=values.reshape(B, -1, T, O),
            strengths=inputs.strengths.swapaxes(1, 2),
            decays=inputs.decays.swapaxes(1, 2),
        )

    def describe_block(
        self, inputs: MixerInputs, begun: jax.Array, windows: jax.Array, states: jax.Array
    ) -> DeltaBlock:
        """The block of a verification, for a kernel that does what `convolve`, the delta rule and `gate` do.

        `begun` [B], windows and states of all layers and slots as in `DeltaBlock`.
        """
        return DeltaBlock(
            channels=inputs.channels,
            gates=inputs.gates,
            strengths=inputs.strengths.swapaxes(1, 2),
            decays=inputs.decays.swapaxes(1, 2),
            begun=begun,
            conv=self.conv[...],
            norm=self.norm[...],
            windows=windows,
            states=states,
            epsilon=self.epsilon,
            norm_epsilon=NORM_EPSILON,
        )

    def gate(self, results: jax.Array, inputs: MixerInputs) -> jax.Array:
        """Results of the delta rule [B, V, T, O] → [B, T, V O]: normed per head, and gated."""
        B, V, T, O = results.shape  # noqa: E741
        gates = inputs.gates.reshape(B, T, V, O).swapaxes(1, 2)
        scale = jax.lax.rsqrt(jnp.mean(results * results, axis=-1, keepdims=True) + self.epsilon)
        gated = results * scale * self.norm[...] * jax.nn.silu(gates.astype(jnp.float32))
        return round_to(gated, inputs.gates.dtype).swapaxes(1, 2).reshape(B, T, -1)


@dataclass(frozen=True)
class MixerCall:
    """A mixer between two others: what runs the delta rule calls `project`, and `output` with the gated results.

    Attributes:
        mixer: its module.
        project: gives what the mixer is computed from.
        output: gated results [B, T, V O] → what the layer goes on with.
    """

    mixer: GatedDeltaMixer
    project: Callable[[], MixerInputs]
    output: Callable[[jax.Array], jax.Array]

    @classmethod
    def of(cls, mixer: GatedDeltaMixer, x: jax.Array) -> "MixerCall":
        """The mixer as XLA's operations, of normed x [B, T, H]. It goes on with [B, T, H]."""
        return cls(mixer, partial(mixer.project, x), mixer.out_proj)


def _normalize(heads: jax.Array) -> jax.Array:
    """Queries or keys [.., I] of length 1."""
    return heads * jax.lax.rsqrt((heads * heads).sum(axis=-1, keepdims=True) + NORM_EPSILON)
