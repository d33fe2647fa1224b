"""Sums and products that are rounded to the dtype of the activations, once, and in every program alike.

XLA for TPU computes bfloat16 sums and products in float32, and leaves out roundings between those that it fuses. For
another number of rows it fuses others: verify with K = 0 and with K = 7 computed different numbers for 82 of the 128
features of a position (v5e, the golden pair, as `dflash-bundle verify --execute` runs them). Here the float32 and the
rounding are written out. By the compiler's estimate that costs 1 % of Qwen3-4B's verification, and 8 % of a kv_write.
`reduce_precision` is what XLA promises to keep; it may remove a conversion to bfloat16 and back.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 x in `dtype`, rounded to nearest even. A float32 stays as it is."""
    if jnp.dtype(dtype) == jnp.float32:
        return x
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y in the dtype of x."""
    return round_to(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """x · y in the dtype of x."""
    return round_to(x.astype(jnp.float32) * y.astype(jnp.float32), x.dtype)


def sigmoid(x: jax.Array) -> jax.Array:
    """sigmoid(x) in the dtype of x, computed in float32."""
    return round_to(jax.nn.sigmoid(x.astype(jnp.float32)), x.dtype)


def silu(x: jax.Array) -> jax.Array:
    """x · sigmoid(x) in the dtype of x, computed in float32."""
    return round_to(jax.nn.silu(x.astype(jnp.float32)), x.dtype)
