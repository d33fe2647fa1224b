"""The convolution of DFlash2: causal, over the rows of a block, with coefficients that depend on the input.

It frames a sublayer (attention or MLP) of a draft layer: one convolution of the sublayer's input, one of its output.

B blocks · T rows of a block · H hidden · G groups of channels · J taps, the rows that a result depends on
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_aot.cache.model_config.architecture import BlockConvolution
from dflash_aot.compile.kernels.kernel_choice import convolve_input
from dflash_aot.compile.kernels.kernel_device import InputConvolution, KernelDevice
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.layers import CheckpointTensors, Linear, WeightKind, parameter
from dflash_aot.compile.models.matmul import matmul
from dflash_aot.compile.models.rounding import round_to


class SublayerConvolution(nnx.Module):
    """`attention_conv` or `mlp_conv` of a draft layer. Every device holds the whole module, as it does the hidden rows.

    `base_kernel` [2, J, H] holds the convolution before the sublayer, then the one after it. Tap j reads the row that
    is j rows earlier.
    """

    def __init__(self, sizes: BlockConvolution, hidden: int, dtype: str, kernels: KernelDevice | None = None):
        shape, groups = (2, sizes.kernel, hidden), hidden // sizes.group
        # float32 in any case, because the TPU compiler would convert it in an operation of its own.
        self.base_kernel = parameter(shape, "float32", CheckpointTensors(["base_kernel"], shape), sliced=False)
        self.kernel_projection = Linear(2 * sizes.kernel * groups, hidden, WeightKind(dtype), sliced=False)
        self.sizes, self.kernels = sizes, kernels

    def convolve_input(self, h: jax.Array, layer: LayerIndex = 0) -> tuple[jax.Array, jax.Array]:
        """The sublayer's input, convolved h [B, T, H], and the coefficients for its output, float32 [J, B, T, H].

        Both from the normed h. `layer` tells which part of a stack to take; without a stack it is ignored.
        """
        weight, base = self.kernel_projection.weight[...], self.base_kernel[...]
        stacked = weight.ndim > 2
        if stacked and self.kernels:
            stack = InputConvolution(weight, base, jnp.asarray(layer, jnp.int32), self.sizes.group)
            if found := convolve_input(self.kernels, h, stack):
                return found
        if stacked:
            weight, base = (jax.lax.dynamic_index_in_dim(one, layer, keepdims=False) for one in (weight, base))
        before, after = self._compute_coefficients(h, weight, base)
        return convolve(h, before), after

    def _compute_coefficients(self, h: jax.Array, weight: jax.Array, base: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Coefficients before and after the sublayer: float32 [J, B, T, H]."""
        J = self.sizes.kernel
        dynamic = jnp.moveaxis(matmul(weight, h).reshape(*h.shape[:2], 2 * J, -1), 2, 0)
        both = base.reshape(2 * J, 1, 1, -1) + spread_groups(dynamic, self.sizes.group)
        return both[:J], both[J:]


def spread_groups(values: jax.Array, size: int) -> jax.Array:
    """Repeats each of the last axis's numbers `size` times: [.., G] → float32 [.., G · size].

    On TPU by a product with zeros and ones, which is exact: repeating lanes takes many times as long.
    """

    def multiply_ones(values: jax.Array) -> jax.Array:
        groups = values.shape[-1]
        group = np.arange(groups * size, dtype=np.int32) // size  # a constant: the compiler would divide in every call
        ones = (group == jnp.arange(groups)[:, None]).astype(values.dtype)
        precise = jax.lax.Precision.HIGHEST
        return jnp.matmul(values, ones, precision=precise, preferred_element_type=jnp.float32)

    def repeat(values: jax.Array) -> jax.Array:
        return jnp.repeat(values.astype(jnp.float32), size, axis=-1)

    return jax.lax.platform_dependent(values, tpu=multiply_ones, default=repeat)


def convolve(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Convolves the rows of each block, x and result [B, T, H]: no row depends on a later row or on another block.

    Coefficients float32 [J, B, T, H] of each tap and row. The sum is float32 and rounded once. Rows before the first
    count as zeros.
    """
    total = coefficients[0] * x.astype(jnp.float32)
    for tap in range(1, coefficients.shape[0]):
        total += coefficients[tap] * shift_rows(x, tap)
    return round_to(total, x.dtype)


def shift_rows(x: jax.Array, count: int) -> jax.Array:
    """Moves rows [B, T, H] by `count` to later places, float32; zeros take the first places.

    On TPU by a product with zeros and ones, which is exact: it is fused with the operations around it, and moving rows
    between sublanes is not.
    """

    def multiply_ones(x: jax.Array) -> jax.Array:
        place = jnp.arange(x.shape[1])
        ones = (place[:, None] - place == count).astype(x.dtype)
        precise = jax.lax.Precision.HIGHEST
        return jnp.einsum("ts,bsh->bth", ones, x, precision=precise, preferred_element_type=jnp.float32)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (count, 0), (0, 0)))[:, : x.shape[1]]

    return jax.lax.platform_dependent(x, tpu=multiply_ones, default=pad)
