"""Gated DeltaNet: the recurrent layers of hybrid targets (Yang et al. 2024), as in Qwen3.5.

Attribute names follow the checkpoint's tensors. The sections of queries, keys and values inside a tensor are regrouped
by key head, so that devices can share the key heads.

B rows · T tokens of this call · H hidden · Q key heads · R value heads per key head · V = Q R · I key width
O value width · C channels of the convolution, grouped by key head: Q · (2 I + R O) · J rows of its window
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.compile.kernels.kernel_device import DeltaBlock
from dflash_aot.compile.models.delta_rule import DeltaRows
from dflash_aot.compile.models.layers import INPUTS, OUTPUTS, CheckpointTensors, Linear, WeightKind, parameter, read
from dflash_aot.compile.models.matmul import matmul
from dflash_aot.compile.models.rounding import round_to
from dflash_aot.compile.models.tensor_parallel import TensorParallel

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

    def __init__(self, sizes: GatedDeltaNet, hidden: int, epsilon: float, kind: WeightKind, tp: TensorParallel):
        Q, R, I, O = sizes.key_heads, sizes.value_heads // sizes.key_heads, sizes.key_dim, sizes.value_dim  # noqa: E741
        heads, width, sections = sizes.value_heads, 2 * I + R * O, (Q * I, Q * I, Q * R * O)
        projections = CheckpointTensors(["in_proj_qkv.weight"], (sizes.channels, hidden), axis=1, sections=sections)
        self.qkv, self.qkv_scale = kind.linear((Q, width, hidden), projections, split=0)
        self.in_proj_z = Linear(heads * O, hidden, kind, OUTPUTS)
        # Small, and sensitive: they decide how fast the state changes. Never int8.
        self.in_proj_b = Linear(heads, hidden, WeightKind(kind.dtype), OUTPUTS)
        self.in_proj_a = Linear(heads, hidden, WeightKind(kind.dtype), OUTPUTS)
        taps = CheckpointTensors(["conv1d.weight"], (sizes.channels, 1, sizes.kernel), axis=1, sections=sections)
        self.conv = parameter((Q, width, sizes.kernel), "float32", taps, split=0)
        self.a_log = parameter((heads,), "float32", CheckpointTensors(["A_log"], (heads,)), split=0)
        self.dt_bias = parameter((heads,), "float32", CheckpointTensors(["dt_bias"], (heads,)), split=0)
        self.norm = parameter((O,), "float32", CheckpointTensors(["norm.weight"], (O,)))
        self.out_proj = Linear(hidden, heads * O, kind, INPUTS, tp)
        self.sizes, self.epsilon = sizes, epsilon

    def project(self, x: jax.Array) -> MixerInputs:
        """x [B, T, H], normed."""
        channels = matmul(self.qkv[...], x, read(self.qkv_scale))
        steps = jax.nn.softplus(self.in_proj_a(x, jnp.float32) + self.dt_bias[...])
        return MixerInputs(
            channels=channels.reshape(*x.shape[:2], -1),
            gates=self.in_proj_z(x),
            strengths=jax.nn.sigmoid(self.in_proj_b(x, jnp.float32)),
            decays=-jnp.exp(self.a_log[...]) * steps,
        )

    def convolve(self, inputs: MixerInputs, rows: jax.Array) -> DeltaRows:
        """Convolves over time and splits the channels into heads. `rows` [B, J+T, C]: the window, then the channels."""
        B, T, _ = inputs.channels.shape
        first = rows.shape[1] - T - self.sizes.kernel + 1  # the oldest row that the first token takes
        kernel, wide = self.conv[...].reshape(-1, self.sizes.kernel).T, rows.astype(jnp.float32)
        mixed = sum(kernel[tap] * wide[:, first + tap : first + tap + T] for tap in range(self.sizes.kernel))
        mixed = round_to(jax.nn.silu(mixed), rows.dtype).astype(jnp.float32)
        I, O = self.sizes.key_dim, self.sizes.value_dim  # noqa: E741
        width = 2 * I + self.sizes.value_heads // self.sizes.key_heads * O
        heads = mixed.reshape(B, T, -1, width).swapaxes(1, 2)  # split after this: head-major slices are whole tiles
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
        """The block of a verification, for a kernel that does what `convolve`, the delta rule and `output` do.

        All but `out_proj`. `begun` [B], windows and states of all layers and slots as in `DeltaBlock`.
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

    def output(self, results: jax.Array, inputs: MixerInputs) -> jax.Array:
        """Results of the delta rule [B, V, T, O] → [B, T, H]: normed per head, gated, projected."""
        B, V, T, O = results.shape  # noqa: E741
        gates = inputs.gates.reshape(B, T, V, O).swapaxes(1, 2)
        scale = jax.lax.rsqrt(jnp.mean(results * results, axis=-1, keepdims=True) + self.epsilon)
        gated = results * scale * self.norm[...] * jax.nn.silu(gates.astype(jnp.float32))
        return self.out_proj(round_to(gated, inputs.gates.dtype).swapaxes(1, 2).reshape(B, T, -1))


def _normalize(heads: jax.Array) -> jax.Array:
    """Queries or keys [.., I] of length 1."""
    return heads * jax.lax.rsqrt((heads * heads).sum(axis=-1, keepdims=True) + NORM_EPSILON)
