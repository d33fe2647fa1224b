"""Layers of the models: linear, RMS norm, MLP, attention projections, rotary embedding.

Each parameter declares the checkpoint tensors that fill it.

B rows · T positions of this call · S kv positions · G kv heads · R query heads per kv head · D head width · H hidden
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dflash_aot.cache.model_config.architecture import (
    Activation,
    AttentionKind,
    KvPool,
    LayerKind,
    NormProduct,
    SlidingWindow,
    list_attention,
)
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.cache.weight_recipe import WeightFormat
from dflash_aot.compile.kernels.kernel_device import LANES, MAX_TOKENS, ChosenExperts
from dflash_aot.compile.models.backend import CPU, Backend
from dflash_aot.compile.models.matmul import ACTIVATIONS, add, multiply, round_to
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE, TensorParallel

OUTPUTS, INPUTS = 0, 1  # dimensions of a weight [out, in]
# How a loop over L layers holds a stacked parameter: [L, out, in], [L, in, out], or [L, out] of whole rows.
StackForm = Literal["matrices", "transposed", "rows"]


@dataclass(frozen=True)
class ParameterSource:
    """The tensors of a checkpoint that fill a parameter.

    Attributes:
        names: relative to the module.
        shape: of each tensor.
        axis: the tensors lie side by side along this axis of the parameter.
        sections: rows of the sections of one tensor, which lie side by side along `axis`; () for whole tensors.
        copies: how often each part of the parameter's first axis follows itself.
        interleaved: see `WeightRecipe`.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    axis: int = 0
    sections: tuple[int, ...] = ()
    copies: int = 1
    interleaved: bool = False


def parameter(
    shape: tuple[int, ...],
    dtype: str,
    source: ParameterSource,
    split: int | None = None,
    sliced: bool = True,
    stack_form: StackForm = "matrices",
) -> nnx.Param:
    """A parameter that is filled from checkpoint tensors.

    Args:
        shape: of the parameter.
        dtype: of the parameter.
        source: the tensors.
        split: the axis that devices share; None if each device holds the whole parameter.
        sliced: whether a loop over stacked layers takes the layer's slice out of the stack; False: the module gets the
            stack.
        stack_form: of the slices that the loop takes. The parameter's own shape is the same in each.
    """
    return nnx.Param(
        jnp.zeros(shape, dtype),
        tensors=tuple(source.names),
        stored=source.shape,
        axis=source.axis,
        split=split,
        sliced=sliced,
        stack_form=stack_form,
        sections=source.sections,
        copies=source.copies,
        interleaved=source.interleaved,
    )


@dataclass(frozen=True)
class LayerForm:
    """How the layers of a model are stored and computed.

    Attributes:
        dtype: of the activations, and of plain weights.
        format: of the linear layers: plain, or int8 with scales.
        tp: the devices that share the layers.
    """

    dtype: str
    format: WeightFormat = "plain"
    tp: TensorParallel = ONE_DEVICE

    @property
    def backend(self) -> Backend:
        """The backend of each device."""
        return self.tp.backend

    @property
    def plain(self) -> "LayerForm":
        """The form of layers that are never int8."""
        return replace(self, format="plain")

    def linear(
        self,
        shape: tuple[int, ...],
        source: ParameterSource,
        split: int | None = None,
        sliced: bool = True,
    ) -> tuple[nnx.Param, nnx.Param | None]:
        """A weight [*out, in] of a linear layer and its scales, float32 [*out]; None for a plain weight.

        Arguments are those of `parameter`. The scales of a weight `name` are the attribute `name_scale`.
        """
        if self.format == "plain":
            return parameter(shape, self.dtype, source, split, sliced), None
        values = parameter(shape, "int8", source, split, sliced)
        whole = split == len(shape) - 1  # a scale belongs to a whole row
        # Scales of several heads would be laid out anew in every layer.
        scale_split = None if whole else split
        scales = parameter(shape[:-1], "float32", source, scale_split, sliced, stack_form="rows")
        return values, scales


def read(parameter: nnx.Param | None) -> jax.Array | None:
    """The array of a parameter."""
    return None if parameter is None else parameter[...]


class Linear(nnx.Module):
    """y = W · x, W [out, in]. Devices split W by `OUTPUTS`, by `INPUTS`, or not at all."""

    def __init__(
        self,
        outputs: int,
        inputs: int,
        form: LayerForm,
        split: int | None = None,
        tensor: str = "weight",
        sliced: bool = True,
    ):
        """`tensor` is the name in the checkpoint, relative to the module; `sliced` is that of `parameter`."""
        source = ParameterSource([tensor], (outputs, inputs))
        self.weight, self.weight_scale = form.linear(
            (outputs, inputs), source, split=split, sliced=sliced
        )
        self.row_parallel = split == INPUTS
        self.tp = form.tp

    def __call__(self, x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        """x [.., in] → [.., out] in `dtype`, by default that of x."""
        weight = self.weight[...]
        scale = read(self.weight_scale)
        if self.row_parallel:
            return self.tp.row_parallel_matmul(weight, x, scale)
        return self.tp.backend.matmul(weight, x, scale, dtype=dtype)


def normalize(x: jax.Array, epsilon: float) -> jax.Array:
    """x / rms(x) over the last axis, float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return wide * scale


class RmsNorm(nnx.Module):
    """x / rms(x) · weight over the last axis; for the kinds of `product` see `NormProduct`.

    With "float32" the weight is times `factor`.
    """

    def __init__(
        self,
        width: int,
        epsilon: float,
        dtype: str,
        product: NormProduct = "rounded",
        factor: float = 1.0,
    ):
        self.weight = parameter((width,), dtype, ParameterSource(["weight"], (width,)))
        self.epsilon = epsilon
        self.product = product
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = normalize(x, self.epsilon)
        if self.product == "rounded":
            return multiply(round_to(normed, x.dtype), self.weight[...])
        return round_to(normed * self.widen_weight(), x.dtype)

    @property
    def rule(self) -> tuple[float, bool]:
        """Epsilon, and whether a normed row is rounded before its product with the weight, as well as after it."""
        return self.epsilon, self.product == "rounded"

    def widen_weight(self) -> jax.Array:
        """The factors of x / rms(x), float32 [width]."""
        weight = self.weight[...].astype(jnp.float32)
        if self.product == "rounded":
            return weight
        return 1 + weight if self.product == "unit_offset" else weight * self.factor


class Mlp(nnx.Module):
    """The gated MLP: down(activation(gate x) · up x). Gate and up are one weight [2, M, H], of M outputs each.

    On TPU the kernel `streamed_mlp` streams the three matrices.
    """

    def __init__(self, hidden: int, width: int, form: LayerForm, activation: Activation = "silu"):
        stored = "int8" if form.format == "int8" else form.dtype
        dtypes = (form.dtype, stored)
        kernels = form.backend.kernels
        if kernels and not kernels.streams_mlp(hidden, width // form.tp.count, dtypes):
            kernels = None
        self.kernels = kernels
        sliced = self.kernels is None
        # A TPU lays out a stack by columns where rows would be padded. Its gate and up do not lie one above the other.
        whole = (width // form.tp.count) % LANES == 0
        self.parted = form.backend.stacks_layers and whole and hidden % LANES > 0
        pair = ParameterSource(["gate_proj.weight", "up_proj.weight"], (width, hidden))
        self.gate_up, self.gate_up_scale = form.linear(
            (2, width, hidden), pair, split=1, sliced=sliced and not self.parted
        )
        self.down_proj = Linear(hidden, width, form, INPUTS, sliced=sliced)
        self.activation = activation
        self.tp = form.tp

    def __call__(self, x: jax.Array, layer: int | jax.Array = 0) -> jax.Array:
        """[.., H] → [.., H]. `layer` tells which weights of a stack to take; without a stack it is ignored."""
        if (part := self._stream(x.reshape(-1, x.shape[-1]), layer)) is not None:
            return round_to(self.tp.sum(part), x.dtype).reshape(x.shape)
        inner, weight, scale = self._run_gate_up(x, layer)
        return self.tp.row_parallel_matmul(weight, inner, scale)

    def run_part(self, tokens: jax.Array, layer: int | jax.Array) -> jax.Array:
        """[n, H] → this device's part of the output, float32 [n, H], to be summed over the devices."""
        if (part := self._stream(tokens, layer)) is not None:
            return part
        inner, weight, scale = self._run_gate_up(tokens, layer)
        return self.tp.backend.matmul(weight, inner, scale, dtype=jnp.float32)

    def _stream(self, tokens: jax.Array, layer: int | jax.Array) -> jax.Array | None:
        """`run_part` by the kernel; None where it does not take these sizes."""
        if not self.kernels or len(tokens) > MAX_TOKENS:
            return None
        chosen = self._choose_all(len(tokens), layer)
        part = self.kernels.run_experts(tokens, chosen, expected=1.0)
        assert part is not None, "streams_mlp found that the kernel takes these sizes"
        return part

    def _run_gate_up(
        self, x: jax.Array, layer: int | jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """x [.., H] → activation(gate x) · up x [.., M], and weight [H, M] and scale of the layer's last product."""
        down = self.down_proj
        down_weight, down_scale = (
            _take_layer(one, rank, layer)
            for one, rank in ((down.weight, 2), (down.weight_scale, 1))
        )
        assert down_weight is not None
        multiply_gate_up = self._multiply_parts if self.parted else self._multiply_whole
        gate, up = multiply_gate_up(x, layer)
        return multiply(ACTIVATIONS[self.activation](gate), up), down_weight, down_scale

    def _multiply_whole(self, x: jax.Array, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """gate x and up x, each [.., M], by one product."""
        weight, scale = (
            _take_layer(one, rank, layer)
            for one, rank in ((self.gate_up, 3), (self.gate_up_scale, 2))
        )
        assert weight is not None
        # One product with the rows of both, split after it: a result [.., 2, M] would be laid out anew on TPU.
        both = self.tp.backend.matmul(weight.reshape(-1, x.shape[-1]), x, scale)
        gate, up = jnp.split(both, 2, axis=-1)
        return gate, up

    def _multiply_parts(self, x: jax.Array, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """`_multiply_whole`, by a product each."""
        stack = self.gate_up[...]
        first = 2 * layer if stack.ndim > 3 else 0
        matrices = stack.reshape(-1, *stack.shape[-2:])
        scales = read(self.gate_up_scale)

        def run(place: int | jax.Array) -> jax.Array:
            take = partial(jax.lax.dynamic_index_in_dim, index=place, keepdims=False)
            scale = None if scales is None else take(scales.reshape(-1, scales.shape[-1]))
            return self.tp.backend.matmul(take(matrices), x, scale)

        return run(first), run(first + 1)

    def _choose_all(self, tokens: int, layer: int | jax.Array) -> ChosenExperts:
        """The layer's MLP as an expert that all tokens chose."""
        gate_up = self.gate_up[...]
        down = self.down_proj.weight[...]
        H, M = down.shape[-2:]
        stacked = down.ndim > 2
        scales: tuple[jax.Array | None, jax.Array | None] = (None, None)
        if self.gate_up_scale is not None and self.down_proj.weight_scale is not None:
            scales = (
                self.gate_up_scale[...].reshape(-1, 2, M),
                self.down_proj.weight_scale[...].reshape(-1, H),
            )
        first = jnp.int32(layer if stacked else 0)
        numbers = jnp.zeros(1, jnp.int32)
        count = jnp.int32(1)
        shares = jnp.ones((tokens, 1), jnp.float32)
        gate_up = gate_up.reshape(-1, 2 * M, H)
        down = down.reshape(-1, H, M)
        kind = self.activation
        return ChosenExperts(gate_up, down, first, numbers, count, shares, *scales, activation=kind)


def _take_layer(parameter: nnx.Param | None, rank: int, layer: int | jax.Array) -> jax.Array | None:
    """A layer's array of `rank` dimensions, from a stack as matrices: on TPU a slice that is reshaped is copied."""
    array = read(parameter)
    if array is None or array.ndim == rank:
        return array
    matrices = array.reshape(len(array), -1, array.shape[-1])
    return jax.lax.dynamic_index_in_dim(matrices, layer, keepdims=False)


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer's attention is computed from.

    Attributes:
        queries: rotated [B, G, R, T, D].
        keys: rotated [B, G, T, D].
        values: [B, G, T, D].
        gates: of gated attention, of its result [B, G, R, T, D].
        sinks: scores [G, R] that take part in the softmax, None for none.
        windows: of the layers of its kind, see `AttentionKind`.
        pool: see `AttentionKind`.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    gates: jax.Array | None
    sinks: jax.Array | None
    windows: tuple[SlidingWindow | None, ...]
    pool: KvPool = "pages"


class Attention(nnx.Module):
    """Attention projections, with the norms per head and the biases of the family, and rotation.

    The caller computes the attention itself (see `attention`). Where there are more devices than kv heads, G counts
    the copies of each head, and R the queries of a copy.
    """

    def __init__(
        self,
        kind: AttentionKind,
        hidden: int,
        epsilon: float,
        form: LayerForm,
        norm: NormProduct = "rounded",
    ):
        shape = kind.shape
        copies = shape.count_copies(form.tp.count)
        stored = shape.kv_heads * shape.head_dim
        G = shape.count_kv_heads(form.tp.count)
        R = shape.heads // G
        D = shape.head_dim
        dtype = form.dtype
        width = 2 * D if shape.gated else D  # of each head: its query, then its gate
        queries = ParameterSource(["q_proj.weight"], (G * R * width, hidden))
        parts = ["k_proj.weight"] if shape.keys_as_values else ["k_proj.weight", "v_proj.weight"]
        keys_values = ParameterSource(parts, (stored, hidden), axis=1, copies=copies)
        self.q, self.q_scale = form.linear((G, R, width, hidden), queries, split=0)
        self.kv, self.kv_scale = form.linear((G, len(parts), D, hidden), keys_values, split=0)
        self.o_proj = Linear(hidden, G * R * D, form, INPUTS)
        if shape.biased:
            query_bias = ParameterSource(["q_proj.bias"], (G * R * width,))
            key_value_bias = ParameterSource(
                ["k_proj.bias", "v_proj.bias"], (stored,), axis=1, copies=copies
            )
            self.q_bias = parameter((G, R, width), dtype, query_bias, split=0)
            self.kv_bias = parameter((G, 2, D), dtype, key_value_bias, split=0)
            self.o_bias = parameter((hidden,), dtype, ParameterSource(["o_proj.bias"], (hidden,)))
        if shape.sinks:
            scores = ParameterSource(["sinks"], (G * R,))
            self.sinks = parameter((G, R), "float32", scores, split=0)
        if shape.normed:
            # Attention divides scores by the root of D. Where the model does not, queries are longer by it.
            self.q_norm = RmsNorm(D, epsilon, dtype, norm, 1.0 if shape.scaled else D**0.5)
            self.k_norm = RmsNorm(D, epsilon, dtype, norm)
        self.kind = kind
        self.epsilon = epsilon
        self.shape = shape
        self.backend = form.backend
        assert shape.scaled or norm == "float32", "the norm of queries takes the place of the scale"

    def inputs(self, x: jax.Array, rotations: "Rotations") -> AttentionInputs:
        """x [B, T, H], normed → what the layer's attention is computed from."""
        keys, values = self.keys_values(x, rotations)
        queries, gates = self._queries_gates(x, rotations[self.kind.rope])
        sinks = self.sinks[...] if self.shape.sinks else None
        windows = self.kind.windows
        return AttentionInputs(queries, keys, values, gates, sinks, windows, self.kind.pool)

    def _queries_gates(
        self, x: jax.Array, rotation: "Rotation"
    ) -> tuple[jax.Array, jax.Array | None]:
        q = self.backend.matmul(self.q[...], x, read(self.q_scale))
        q = (add(q, self.q_bias[...]) if self.shape.biased else q).transpose(0, 2, 3, 1, 4)
        q, gates = jnp.split(q, 2, axis=-1) if self.shape.gated else (q, None)
        return rotation(self.q_norm(q) if self.shape.normed else q), gates

    def keys_values(self, x: jax.Array, rotations: "Rotations") -> tuple[jax.Array, jax.Array]:
        """x [B, T, H] → rotated keys and values, each head-major [B, G, T, D]."""
        return self.turn_keys(self.project_keys_values(x), rotations)

    def project_keys_values(self, x: jax.Array) -> jax.Array:
        """x [B, T, H] → [B, T, G, 2, D], or [.., 1, D] where keys are also values; of a stack [B, T, L, G, .., D]."""
        return self.backend.matmul(self.kv[...], x, read(self.kv_scale))

    def turn_keys(self, both: jax.Array, rotations: "Rotations") -> tuple[jax.Array, jax.Array]:
        """What `project_keys_values` gives for a layer → `keys_values`."""
        rotation = rotations[self.kind.rope]
        both = (add(both, self.kv_bias[...]) if self.shape.biased else both).transpose(
            0, 2, 3, 1, 4
        )
        keys = both[:, :, :1]
        rotated = rotation(self.k_norm(keys) if self.shape.normed else keys)[:, :, 0]
        values = both[:, :, 0 if self.shape.keys_as_values else 1]
        if self.shape.normed_values:
            values = round_to(normalize(values, self.epsilon), values.dtype)
        return rotated, values

    def output(self, mixed: jax.Array) -> jax.Array:
        """Attention result [B, G, R, T, D] → [B, T, H]."""
        x = self.o_proj(merge_heads(mixed))
        return add(x, self.o_bias[...]) if self.shape.biased else x


def merge_heads(mixed: jax.Array) -> jax.Array:
    """Attention result [B, G, R, T, D] → [B, T, G · R · D]."""
    B, G, R, T, D = mixed.shape
    # Two axes are exchanged, of merged heads: the TPU compiler would pad tiles of R rows.
    return mixed.reshape(B, G * R, T, D).swapaxes(1, 2).reshape(B, T, -1)


class Rotation:
    """Rotary position embedding at given positions, in the half-split form of Hugging Face."""

    def __init__(
        self,
        rope: Rope,
        positions: jax.Array,
        dtype: jnp.dtype,
        backend: Backend = CPU,
        width: int | None = None,
    ):
        """positions [B, T] are absolute. Angles, sines and cosines are computed in float32, then rounded to `dtype`.

        `width` is that of heads. Where only a part of each head is rotated, a backend may rotate the rest by 0.
        """
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(
            rope.inverse_frequencies(), jnp.float32
        )
        angles = jnp.concatenate([angles, angles], axis=-1)[:, None, None]
        scale = rope.attention_factor
        both = round_to(jnp.cos(angles) * scale, dtype), round_to(jnp.sin(angles) * scale, dtype)
        self.rotated = angles.shape[-1]
        self.width = (width or self.rotated) if backend.rotates_whole else self.rotated
        if self.width > self.rotated:
            both = _widen(both[0], self.width, 1), _widen(both[1], self.width, 0)
        self.cos, self.sin = backend.hold(both)
        self.rotate_half = backend.make_rotate_half(self.rotated, dtype, self.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotates x [B, G, R, T, D], or the first part of each head if angles are for a part."""
        if self.width < x.shape[-1]:
            return jnp.concatenate([self(x[..., : self.width]), x[..., self.width :]], axis=-1)
        return add(multiply(x, self.cos), multiply(self.rotate_half(x), self.sin))


def _widen(x: jax.Array, width: int, value: int) -> jax.Array:
    """x [.., n] → [.., width] with `value` after it."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    return jnp.pad(x, padding, constant_values=value)


Rotations = Mapping[Rope, Rotation]


def make_rotations(
    kinds: Sequence[LayerKind], positions: jax.Array, dtype: jnp.dtype, backend: Backend
) -> Rotations:
    """The rotation by each rotary embedding of a model's layers; arguments are those of `Rotation`."""
    widths: dict[Rope, int] = {}
    for one in list_attention(kinds):
        width = one.shape.head_dim
        widths[one.rope] = min(width, widths.get(one.rope, width))
    return {
        rope: Rotation(rope, positions, dtype, backend, width) for rope, width in widths.items()
    }
