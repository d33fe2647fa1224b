"""The convolution of DFlash2: causal, over the rows of a block, with coefficients that depend on the input.

It frames a sublayer (attention or MLP) of a draft layer: one convolution of the sublayer's input, one of its output.

B blocks · T rows of a block · H hidden · G groups of channels · J taps, the rows that a result depends on
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import BlockConvolution
from dflash_aot.compile.models.layers import Linear, parameter
from dflash_aot.compile.models.matmul import matmul
from dflash_aot.compile.models.rounding import round_to


class Coefficients(NamedTuple):
    """Coefficients of a convolution: those of a row, tap and channel are the sum of both arrays.

    Attributes:
        base: float32 [J, H], equal for all rows.
        dynamic: float32 [B, T, J, G], equal for the channels of a group.
    """

    base: jax.Array
    dynamic: jax.Array


class SublayerConvolution(nnx.Module):
    """`attention_conv` or `mlp_conv` of a draft layer. Every device holds the whole module, as it does the hidden rows.

    `base_kernel` [2, J, H] holds the convolution before the sublayer, then the one after it. Tap j reads the row that
    is j rows earlier.
    """

    def __init__(self, sizes: BlockConvolution, hidden: int, dtype: str):
        shape, groups = (2, sizes.kernel, hidden), hidden // sizes.group
        self.base_kernel = parameter(shape, dtype, ["base_kernel"], shape)
        self.kernel_projection = Linear(2 * sizes.kernel * groups, hidden, dtype)
        self.sizes = sizes

    def coefficients(self, h: jax.Array) -> tuple[Coefficients, Coefficients]:
        """Coefficients before and after the sublayer, both from its normed input h [B, T, H]."""
        dynamic = matmul(self.kernel_projection.weight[...], h, dtype=jnp.float32)
        dynamic = dynamic.reshape(*h.shape[:2], 2, self.sizes.kernel, -1)
        base = self.base_kernel[...].astype(jnp.float32)
        return Coefficients(base[0], dynamic[:, :, 0]), Coefficients(base[1], dynamic[:, :, 1])


def convolve(x: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Convolves the rows of each block, x and result [B, T, H]: no row depends on a later row or on another block.

    The sum is float32 and rounded once. Rows before the first count as zeros.
    """
    group = x.shape[-1] // coefficients.dynamic.shape[-1]
    total = jnp.zeros((), jnp.float32)
    for tap, base in enumerate(coefficients.base):
        earlier = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]].astype(jnp.float32)
        total += (base + jnp.repeat(coefficients.dynamic[:, :, tap], group, axis=-1)) * earlier
    return round_to(total, x.dtype)
