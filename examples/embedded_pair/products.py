"""Products of training in bfloat16, forwards and backwards: a CPU that can multiply it takes half of the time."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from dflash_aot.compile.models.backend import CpuBackend


@contextmanager
def multiply_in_bfloat16() -> Iterator[None]:
    """What is traced inside rounds the operands of its linear layers to bfloat16; weights and sums stay in float32.

    The function of the models is replaced because a served program must never round so: its dtype decides.
    """
    before = CpuBackend.multiply_rows
    CpuBackend.multiply_rows = staticmethod(_multiply)
    try:
        yield
    finally:
        CpuBackend.multiply_rows = staticmethod(before)


def _product(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    axes = (contracted[:1], contracted[1:])
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _multiply(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """rows · Wᵀ: weight [out, in], rows [n, in] → float32 [n, out]."""
    return _product(rows, weight, (1, 1))


def _forwards(weight: jax.Array, rows: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply(weight, rows), (weight, rows)


def _backwards(
    operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    weight, rows = operands
    return _product(gradient, rows, (0, 0)), _product(gradient, weight, (1, 0))


_multiply.defvjp(_forwards, _backwards)
