"""The one place where layers multiply, so that the order of the operands stays a detail of it."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def multiply(weight: jax.Array, x: jax.Array, contracted: int = 1, dtype: DTypeLike | None = None) -> jax.Array:
    """W · x over the last `contracted` axes of both: weight [*out, *in] as stored, x [*rows, *in] → [*rows, *out].

    Accumulated in float32; the result has `dtype`, x's own unless given.
    """
    inner = weight.shape[weight.ndim - contracted :]
    outer = weight.shape[: weight.ndim - contracted]
    rows = x.shape[: x.ndim - contracted]
    width = 1
    for size in inner:
        width *= size
    flat = jnp.matmul(x.reshape(-1, width), weight.reshape(-1, width).T, preferred_element_type=jnp.float32)
    return flat.astype(dtype or x.dtype).reshape(*rows, *outer)
