"""The one place where layers multiply, so that the order of the operands stays a detail of it."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def multiply(weight: jax.Array, x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """W · x over the last axis of both: weight [*out, in] as stored, x [*rows, in] → [*rows, *out].

    Accumulated in float32; the result has `dtype`, x's own unless given.
    """
    *outer, width = weight.shape
    flat = jnp.matmul(x.reshape(-1, width), weight.reshape(-1, width).T, preferred_element_type=jnp.float32)
    return flat.astype(dtype or x.dtype).reshape(*x.shape[:-1], *outer)
