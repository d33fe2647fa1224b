"""DFlash2's layers: the candidate selector, and a causal convolution whose coefficients depend on the input.

Each sublayer (attention or MLP) of a draft layer has two convolutions, one of its input and one of its output.

B blocks · T rows of a block · H hidden · G groups of channels · J taps, the rows that a result depends on
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import BlockConvolution, CandidateSelector
from dflash_aot.compile.kernels.kernel_device import InputConvolution
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.layers import (
    OUTPUTS,
    LayerForm,
    Linear,
    ParameterSource,
    parameter,
)
from dflash_aot.compile.models.matmul import round_to

# -- the candidate selector: chooses a path through the likeliest tokens of each position of a block
#
# A token's score is its logit and a transition from the token before it: Σ A[previous] · (P hidden) · S[token], with
# two codebooks A and S. The path is greedy: each position takes the best token after the one chosen before it.
#
# B rows · K drafted positions · C candidates of a position · R rank · H hidden · V vocabulary


class PathSelector(nnx.Module):
    """`candidate_selector` of the draft. Devices share the rows of the codebooks [V, R]."""

    def __init__(self, sizes: CandidateSelector, vocab: int, hidden: int, form: LayerForm):
        shape = (vocab, sizes.rank)
        self.hidden_projection = Linear(sizes.rank, hidden, form.plain)
        predecessors = ParameterSource(["predecessor_codebook"], shape)
        successors = ParameterSource(["successor_codebook"], shape)
        self.predecessor_codebook = parameter(shape, form.dtype, predecessors, split=OUTPUTS)
        self.successor_codebook = parameter(shape, form.dtype, successors, split=OUTPUTS)
        self.tp = form.tp

    def scores(
        self, hidden: jax.Array, logits: jax.Array, candidates: jax.Array, anchors: jax.Array
    ) -> jax.Array:
        """Scores of every candidate after every candidate of the position before it: float32 [B, K, C, C].

        Axis 2 is the token before, axis 3 the token. Before the first position there is only the anchor, the last of
        axis 2; the others there have no meaning.

        Args:
            hidden: [B, K, H], normed.
            logits: float32 [B, K, C], of the candidates.
            candidates: int32 [B, K, C].
            anchors: int32 [B].
        """
        B, K, C = candidates.shape
        following = candidates.reshape(B, -1)
        before = jnp.concatenate([anchors[:, None], following[:, : (K - 1) * C]], axis=1)
        # Each row of a codebook is read once for each place that needs it.
        codes = self.tp.look_up_each(
            (self.predecessor_codebook[...], before), (self.successor_codebook[...], following)
        )
        previous, token = (code.astype(jnp.float32) for code in codes)
        previous = jnp.pad(previous, ((0, 0), (C - 1, 0), (0, 0))).reshape(B, K, C, -1)
        projected = self.hidden_projection(hidden, jnp.float32)
        transitions = jnp.einsum(
            "BKPR,BKCR->BKPC",
            previous * projected[:, :, None],
            token.reshape(B, K, C, -1),
            precision=jax.lax.Precision.HIGHEST,
        )
        return logits[:, :, None] + transitions


def choose_path(scores: jax.Array, candidates: jax.Array) -> jax.Array:
    """The chosen candidate of each position, int32 [B, K].

    Each position takes the best candidate after the candidate chosen before it; the first position takes the best
    candidate after the last of axis 2. All choices are tabulated, and the tables of neighbours are
    composed: log K steps instead of K.

    Args:
        scores: float32 [B, K, C, C], as `PathSelector.scores` returns them; or [B, K, 1, C] if the candidate before
            does not matter.
        candidates: int32 [B, K, C].
    """
    # [B, K, C]: the choice after each candidate before
    table = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if scores.shape[2] == 1:
        return _pick(candidates, table[..., 0])
    K, C = table.shape[1:]
    unchanged = jnp.arange(C, dtype=jnp.int32)
    for step in (1 << bit for bit in range((K - 1).bit_length())):
        # The choice after each candidate that is `step` more positions before.
        before = jnp.pad(table, ((0, 0), (step, 0), (0, 0)), constant_values=-1)[:, :K]
        table = _pick(table[:, :, None], jnp.where(before < 0, unchanged, before))
    return _pick(candidates, table[..., -1])


def _pick(items: jax.Array, indices: jax.Array) -> jax.Array:
    """items [.., C] at indices [..], int32. A sum with one term, because gathers are slow on TPU."""
    return jnp.where(indices[..., None] == jnp.arange(items.shape[-1]), items, 0).sum(
        axis=-1, dtype=jnp.int32
    )


# -- the convolution


class SublayerConvolution(nnx.Module):
    """`attention_conv` or `mlp_conv` of a draft layer. Every device holds the whole module, as it does the hidden rows.

    `base_kernel` [2, J, H] holds the convolution before the sublayer, then the one after it. Tap j reads the row that
    is j rows earlier.
    """

    def __init__(self, sizes: BlockConvolution, hidden: int, form: LayerForm):
        shape = (2, sizes.kernel, hidden)
        groups = hidden // sizes.group
        # float32 in any case, because the TPU compiler would convert it in an operation of its own.
        self.base_kernel = parameter(
            shape, "float32", ParameterSource(["base_kernel"], shape), sliced=False
        )
        self.kernel_projection = Linear(2 * sizes.kernel * groups, hidden, form.plain, sliced=False)
        self.sizes = sizes
        self.backend = form.backend

    def convolve_input(self, h: jax.Array, layer: LayerIndex = 0) -> tuple[jax.Array, jax.Array]:
        """The sublayer's input, convolved h [B, T, H], and the coefficients for its output, float32 [J, B, T, H].

        Both from the normed h. `layer` tells which part of a stack to take; without a stack it is ignored.
        """
        weight = self.kernel_projection.weight[...]
        base = self.base_kernel[...]
        stacked = weight.ndim > 2
        if stacked and (kernels := self.backend.kernels):
            stack = InputConvolution(weight, base, jnp.asarray(layer, jnp.int32), self.sizes.group)
            if found := kernels.convolve_input(h, stack):
                return found
        if stacked:
            weight, base = (
                jax.lax.dynamic_index_in_dim(one, layer, keepdims=False) for one in (weight, base)
            )
        before, after = self._compute_coefficients(h, weight, base)
        return self.convolve(h, before), after

    def _compute_coefficients(
        self, h: jax.Array, weight: jax.Array, base: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Coefficients before and after the sublayer: float32 [J, B, T, H]."""
        J = self.sizes.kernel
        dynamic = jnp.moveaxis(
            self.backend.matmul(weight, h).reshape(*h.shape[:2], 2 * J, -1), 2, 0
        )
        both = base.reshape(2 * J, 1, 1, -1) + self.backend.spread_groups(dynamic, self.sizes.group)
        return both[:J], both[J:]

    def convolve(self, x: jax.Array, coefficients: jax.Array) -> jax.Array:
        """Convolves the rows of each block, x and result [B, T, H]: no row depends on a later row or on another block.

        Coefficients float32 [J, B, T, H] of each tap and row. The sum is float32 and rounded once. Rows before the
        first count as zeros.
        """
        total = coefficients[0] * x.astype(jnp.float32)
        for tap in range(1, coefficients.shape[0]):
            total += coefficients[tap] * self.backend.shift_rows(x, tap)
        return round_to(total, x.dtype)
