"""What the models are made of. Each parameter declares the checkpoint tensors that fill it.

B rows · T positions of this call · S kv positions · G kv heads · R query heads per kv head · D head width · H hidden
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dflash_aot.cache.architecture import Attention as AttentionShape
from dflash_aot.cache.rope import Rope

MASKED = -1e30  # finite: a row that sees nothing must not become NaN


def parameter(
    shape: tuple[int, ...], dtype: str, tensors: Sequence[str], stored: tuple[int, ...], axis: int = 0
) -> nnx.Param:
    """A parameter made of `tensors` (names relative to the module), each stored as `stored`, laid along `axis`."""
    return nnx.Param(jnp.zeros(shape, dtype), tensors=tuple(tensors), stored=stored, axis=axis)


def multiply(weight: jax.Array, x: jax.Array, contracted: int = 1, dtype: DTypeLike | None = None) -> jax.Array:
    """W · x over the last `contracted` axes of both: weight [*out, *in] as stored, x [*rows, *in] → [*rows, *out].

    Accumulated in float32; the result has `dtype`, x's own unless given. The one place where layers multiply,
    so that the order of the operands stays a detail of it.
    """
    inner = weight.shape[weight.ndim - contracted :]
    outer = weight.shape[: weight.ndim - contracted]
    rows = x.shape[: x.ndim - contracted]
    width = 1
    for size in inner:
        width *= size
    flat = jnp.matmul(x.reshape(-1, width), weight.reshape(-1, width).T, preferred_element_type=jnp.float32)
    return flat.astype(dtype or x.dtype).reshape(*rows, *outer)


class Linear(nnx.Module):
    """y = W · x, W [out, in]."""

    def __init__(self, outputs: int, inputs: int, dtype: str):
        self.weight = parameter((outputs, inputs), dtype, ["weight"], (outputs, inputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return multiply(self.weight[...], x)


class RmsNorm(nnx.Module):
    """x / rms(x) · weight over the last axis, in float32 as Qwen3's (rounded to x.dtype before the product)."""

    def __init__(self, width: int, epsilon: float, dtype: str):
        self.weight = parameter((width,), dtype, ["weight"], (width,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return self.weight[...] * (wide * scale).astype(x.dtype)


class Mlp(nnx.Module):
    """down(silu(gate x) · up x)."""

    def __init__(self, hidden: int, width: int, dtype: str):
        self.gate_up = parameter((2, width, hidden), dtype, ["gate_proj.weight", "up_proj.weight"], (width, hidden))
        self.down_proj = Linear(hidden, width, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        both = multiply(self.gate_up[...], x)
        return self.down_proj(jax.nn.silu(both[..., 0, :]) * both[..., 1, :])


class Attention(nnx.Module):
    """Projections, with norms per head and biases where the family has them, and rotation.

    Who attends to what is the caller's business.
    """

    def __init__(self, shape: AttentionShape, hidden: int, epsilon: float, dtype: str):
        G, R, D = shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
        self.q = parameter((G, R, D, hidden), dtype, ["q_proj.weight"], (G * R * D, hidden))
        self.kv = parameter((G, 2, D, hidden), dtype, ["k_proj.weight", "v_proj.weight"], (G * D, hidden), axis=1)
        self.o = parameter((hidden, G, R, D), dtype, ["o_proj.weight"], (hidden, G * R * D))
        if shape.biased:
            self.q_bias = parameter((G, R, D), dtype, ["q_proj.bias"], (G * R * D,))
            self.kv_bias = parameter((G, 2, D), dtype, ["k_proj.bias", "v_proj.bias"], (G * D,), axis=1)
            self.o_bias = parameter((hidden,), dtype, ["o_proj.bias"], (hidden,))
        if shape.normed:
            self.q_norm = RmsNorm(D, epsilon, dtype)
            self.k_norm = RmsNorm(D, epsilon, dtype)
        self.shape = shape

    def queries(self, x: jax.Array, rotation: "Rotation") -> jax.Array:
        """[B, T, H] → rotated queries [B, T, G, R, D]."""
        q = multiply(self.q[...], x)
        q = q + self.q_bias[...] if self.shape.biased else q
        return rotation(self.q_norm(q) if self.shape.normed else q)

    def keys_values(self, x: jax.Array, rotation: "Rotation") -> tuple[jax.Array, jax.Array]:
        """[B, T, H] → rotated keys and values, head-major [B, G, T, D]."""
        both = multiply(self.kv[...], x)
        both = both + self.kv_bias[...] if self.shape.biased else both
        keys = both[..., :1, :]
        keys = rotation(self.k_norm(keys) if self.shape.normed else keys)[..., 0, :]
        return keys.swapaxes(1, 2), both[..., 1, :].swapaxes(1, 2)

    def output(self, mixed: jax.Array) -> jax.Array:
        """[B, T, G, R, D] → [B, T, H]."""
        x = multiply(self.o[...], mixed, contracted=3)
        return x + self.o_bias[...] if self.shape.biased else x


class Rotation:
    """Rotary position embedding at given positions, the half-split form of Hugging Face."""

    def __init__(self, rope: Rope, positions: jax.Array, dtype: jnp.dtype):
        """positions [B, T], absolute. Angles and their sines in float32."""
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope.inverse_frequencies(), jnp.float32)
        angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, None, :]
        scale = rope.attention_factor
        self.cos, self.sin = (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, G, R, D]."""
        low, high = jnp.split(x, 2, axis=-1)
        return x * self.cos + jnp.concatenate([-high, low], axis=-1) * self.sin


def attend(q: jax.Array, *parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Softmax attention over the union of `parts`, without copying their keys together.

    q [B, T, G, R, D]; a part is keys and values [B, G, S, D] and who sees them, bool, broadcastable to
    [B, T, S]. Scores and softmax in float32. Returns [B, T, G, R, D].
    """
    scale = q.shape[-1] ** -0.5
    scores = [
        jnp.where(
            seen[:, None, None],
            jnp.einsum("BTGRD,BGSD->BGRTS", q, keys, preferred_element_type=jnp.float32) * scale,
            MASKED,
        )
        for keys, _, seen in parts
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    start, mixed = 0, jnp.zeros((), q.dtype)
    for keys, values, _ in parts:
        part = jax.lax.slice_in_dim(weights, start, start + keys.shape[2], axis=-1)
        mixed = mixed + jnp.einsum("BGRTS,BGSD->BTGRD", part, values)
        start += keys.shape[2]
    return mixed
