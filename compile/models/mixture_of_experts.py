"""Mixture of experts: an MLP whose router sends each token through a few of many experts.

E experts · M width of an expert · H hidden · n tokens
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dflash_aot.cache.model_config.architecture import ClampedActivation, MixtureOfExperts
from dflash_aot.compile.kernels.kernel_device import (
    ChosenExperts,
    ExpertChoice,
    RoutedTokens,
    Routing,
    RoutingSizes,
    is_chosen,
)
from dflash_aot.compile.models.backend import Backend
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.layers import (
    LayerForm,
    Linear,
    Mlp,
    ParameterSource,
    RmsNorm,
    normalize,
    parameter,
    read,
)
from dflash_aot.compile.models.matmul import ACTIVATIONS, add, multiply, round_to, sigmoid


class ExpertStack(nnx.Module):
    """The experts of a layer, of which those run that some token chose; each expert runs on all tokens.

    Decoding is limited by the weights that are read: each chosen expert's, once. On TPU a kernel streams them
    (`kernels.streamed_mlp`); elsewhere a loop takes one expert after the other. `jax.lax.ragged_dot` copies all experts
    in every call on TPU (v5e, Qwen3-30B-A3B: 806 MB per layer and call), and on CPU it multiplies every row by every
    expert. A token's output is the sum over its own experts in a fixed order, so it does not depend on the other tokens
    of the batch.
    """

    def __init__(self, hidden: int, experts: MixtureOfExperts, form: LayerForm, place: str = ""):
        """`place` is the beginning of the tensors' names, relative to the module."""
        E = experts.count
        M = experts.width
        pair_names = [f"{place}{e}.{part}_proj.weight" for e in range(E) for part in ("gate", "up")]
        down_names = [f"{place}{e}.down_proj.weight" for e in range(E)]
        interleaved = experts.clamped is not None
        pairs = ParameterSource(pair_names, (M, hidden), interleaved=interleaved)
        downs = ParameterSource(down_names, (hidden, M), interleaved=interleaved)
        self.gate_up, self.gate_up_scale = form.linear(
            (2 * E, M, hidden), pairs, split=1, sliced=False
        )
        self.down, self.down_scale = form.linear((E, hidden, M), downs, split=2, sliced=False)
        self.experts = experts
        self.tp = form.tp

    def run_part(self, tokens: jax.Array, choice: ExpertChoice, layer: LayerIndex) -> jax.Array:
        """[n, H] → this device's part of the chosen experts' output, float32 [n, H].

        `layer` tells which experts of a stack to take; without a stack it is ignored.
        """
        return self._run(tokens, self._choose(choice, layer))

    def _run(self, tokens: jax.Array, chosen: ChosenExperts) -> jax.Array:
        expected = self.experts.expect_distinct(len(tokens))
        backend = self.tp.backend
        kernels = backend.kernels
        total = kernels.run_experts(tokens, chosen, expected) if kernels else None
        if total is not None:
            return total
        activate = ACTIVATIONS[self.experts.activation]
        return _run_in_turn(
            backend, tokens, chosen, lambda gate, up, expert: multiply(activate(gate), up)
        )

    def _choose(self, choice: ExpertChoice, layer: LayerIndex) -> ChosenExperts:
        """The experts that some token chose, of the layer or of the stack of all layers."""
        gate_up = self.gate_up[...]
        down = self.down[...]
        first = layer * self.experts.count if down.ndim > 3 else 0
        # All layers' experts along one axis, reshaped before any slice: on TPU a slice that is reshaped is copied.
        gate_up = gate_up.reshape(-1, 2 * gate_up.shape[-2], gate_up.shape[-1])
        down = down.reshape(-1, *down.shape[-2:])
        gate_up_scale, down_scale = (
            None if scale is None else scale.reshape(-1, scale.shape[-1])
            for scale in (read(self.gate_up_scale), read(self.down_scale))
        )
        return ChosenExperts(
            gate_up,
            down,
            jnp.int32(first),
            choice.numbers,
            choice.count,
            choice.shares,
            gate_up_scale,
            down_scale,
            activation=self.experts.activation,
        )


class RoutedMlp(ExpertStack):
    """Qwen3MoeSparseMoeBlock, or with a shared expert, whose output is gated, Qwen3_5MoeSparseMoeBlock."""

    def __init__(self, hidden: int, experts: MixtureOfExperts, form: LayerForm):
        super().__init__(hidden, experts, form, "experts.")
        kernels = form.backend.kernels
        self.sizes = RoutingSizes(hidden, experts.count, experts.chosen, experts.normalized)
        self.kernels = (
            kernels if kernels and kernels.routes_tokens(self.sizes, form.dtype) else None
        )
        sliced = self.kernels is None
        self.gate = Linear(experts.count, hidden, form.plain, sliced=sliced)
        if experts.shared:
            self.shared_expert = Mlp(hidden, experts.shared, form)
            self.shared_expert_gate = Linear(1, hidden, form.plain, sliced=sliced)

    def __call__(self, x: jax.Array, norm: RmsNorm, layer: LayerIndex = 0) -> jax.Array:
        """[B, T, H], not normed → [B, T, H]. `norm` is that before the router and the experts.

        `layer` tells which experts of a stack to take; without a stack it is ignored.
        """
        tokens, choice, part = self._route(x, norm, layer)
        routed = self.run_part(tokens, choice, layer)
        if not self.experts.shared:
            return round_to(self.tp.sum(routed), x.dtype).reshape(x.shape)
        # One sum over the devices for both parts.
        parts = routed, self.shared_expert.run_part(tokens, layer)
        routed, shared = self.tp.sum_rounded(parts, x.dtype)
        gate = sigmoid(self.shared_expert_gate(tokens)) if part is None else part
        return add(routed, multiply(shared, gate)).reshape(x.shape)

    def _route(self, x: jax.Array, norm: RmsNorm, layer: LayerIndex) -> Routing:
        """The normed tokens and their experts; the shared expert's part only where a kernel computes it."""
        if self.kernels:
            return self.kernels.route_tokens(self._list_routed(x, norm, layer), self.sizes)
        tokens = norm(x).reshape(-1, x.shape[-1])
        scores = self.gate(tokens).astype(jnp.float32)
        return Routing(tokens, choose_experts(scores, self.experts, x.dtype, self.tp.backend), None)

    def _list_routed(self, x: jax.Array, norm: RmsNorm, layer: LayerIndex) -> RoutedTokens:
        H = x.shape[-1]
        router = self.gate.weight[...]
        gate = (
            self.shared_expert_gate.weight[...].reshape(-1, 1, H) if self.experts.shared else None
        )
        return RoutedTokens(
            rows=x.reshape(-1, H),
            norm=norm.widen_weight(),
            epsilon=norm.epsilon,
            rounded=norm.product == "rounded",
            router=router.reshape(-1, *router.shape[-2:]),
            shared=gate,
            layer=jnp.int32(layer if router.ndim > 2 else 0),
        )


class ClampedMlp(ExpertStack):
    """GptOssMLP: the router and all products have biases, and the activation has bounds."""

    def __init__(
        self, hidden: int, experts: MixtureOfExperts, activation: ClampedActivation, form: LayerForm
    ):
        super().__init__(hidden, experts, form, "experts.")
        E = experts.count
        M = experts.width
        self.router = Linear(E, hidden, form.plain)
        # gate and up alternate
        pair_bias = ParameterSource(["experts.gate_up_proj_bias"], (E, 2 * M))
        down_bias = ParameterSource(["experts.down_proj_bias"], (E, hidden))
        self.router_bias = parameter((E,), "float32", ParameterSource(["router.bias"], (E,)))
        self.gate_up_bias = parameter((E, M, 2), "float32", pair_bias, split=1, sliced=False)
        self.down_bias = parameter((E, hidden), "float32", down_bias)
        self.activation = activation

    def __call__(self, x: jax.Array, layer: LayerIndex = 0) -> jax.Array:
        """Normed x [.., H] → the experts' sum [.., H]. layer: which of a stack."""
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens, jnp.float32) + self.router_bias[...]
        choice = choose_experts(scores, self.experts, x.dtype, self.tp.backend)
        routed = self.tp.sum(self.run_part(tokens, choice, layer))
        bias = jnp.matmul(choice.shares, self.down_bias[...], precision=jax.lax.Precision.HIGHEST)
        return round_to(routed + bias, x.dtype).reshape(x.shape)

    def _run(self, tokens: jax.Array, chosen: ChosenExperts) -> jax.Array:
        """What the experts add up to before the biases of their outputs: tokens [n, H] → float32 [n, H]."""
        biases = self.gate_up_bias[...]
        biases = biases.reshape(-1, *biases.shape[-2:])
        clamped = self.activation.limit, self.activation.slope
        pairs = biases.swapaxes(1, 2)
        chosen = replace(chosen, clamped=clamped, gate_up_bias=pairs)
        backend = self.tp.backend
        expected = self.experts.expect_distinct(len(tokens))
        kernels = backend.kernels
        total = kernels.run_experts(tokens, chosen, expected) if kernels else None
        if total is not None:
            return total

        def activate(gate: jax.Array, up: jax.Array, expert: jax.Array) -> jax.Array:
            return self._activate(gate, up, _pick(biases, chosen.first + expert))

        return _run_in_turn(backend, tokens, chosen, activate)

    def _activate(self, gate: jax.Array, up: jax.Array, bias: jax.Array) -> jax.Array:
        """See `ClampedActivation`; gate and up [n, M], their biases [M, 2]."""
        limit, slope = self.activation.limit, self.activation.slope
        gates = jnp.minimum(gate.astype(jnp.float32) + bias[:, 0], limit)
        ups = jnp.clip(up.astype(jnp.float32) + bias[:, 1], -limit, limit)
        return round_to((ups + 1) * gates * jax.nn.sigmoid(slope * gates), gate.dtype)


class ScaledRouter(nnx.Module):
    """Gemma4TextRouter: it has a norm and a scale of its own, and a scale for each expert."""

    def __init__(self, hidden: int, experts: MixtureOfExperts, epsilon: float, form: LayerForm):
        E = experts.count
        self.proj = Linear(E, hidden, form.plain)
        self.scale = parameter((hidden,), form.dtype, ParameterSource(["scale"], (hidden,)))
        per_expert = ParameterSource(["per_expert_scale"], (E,))
        self.per_expert_scale = parameter((E,), "float32", per_expert)
        self.experts = experts
        self.epsilon = epsilon
        self.backend = form.backend

    def __call__(self, x: jax.Array) -> ExpertChoice:
        """x [n, H], not normed → the experts that its tokens choose."""
        scale = self.scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5
        scores = self.proj(round_to(normalize(x, self.epsilon) * scale, x.dtype), jnp.float32)
        choice = choose_experts(scores, self.experts, jnp.float32, self.backend)
        return replace(choice, shares=choice.shares * self.per_expert_scale[...])


def choose_experts(
    scores: jax.Array, experts: MixtureOfExperts, dtype: DTypeLike, backend: Backend
) -> ExpertChoice:
    """A router's scores, float32 [n, E] → the experts that the tokens choose.

    The weights are rounded to `dtype`, as transformers does.
    """
    if backend.kernels:
        form = experts.chosen, experts.normalized, jnp.dtype(dtype).name
        return backend.kernels.choose_experts(scores, *form)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), experts.chosen)
    if experts.normalized:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    shares = round_to(shares, dtype).astype(jnp.float32)
    at = chosen[..., None] == jnp.arange(experts.count)
    weights = jnp.where(at, shares[..., None], 0).sum(axis=1)
    return ExpertChoice(weights, *_list_true((weights > 0).any(axis=0)))


# The products with gate and with up, each [n, M], and the number of the expert in its layer → [n, M]
Activate = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _run_in_turn(
    backend: Backend, tokens: jax.Array, chosen: ChosenExperts, activate: Activate
) -> jax.Array:
    """The sum of the experts' outputs by share, one expert after the other: tokens [n, H] → float32 [n, H]."""

    def add_expert(index: jax.Array, total: jax.Array) -> jax.Array:
        expert = chosen.numbers[index]
        output = _run_expert(backend, chosen, expert, tokens, activate)
        share = _pick(chosen.shares, expert, axis=1)[:, None]
        # Not `share * output` alone: for tokens that did not choose the expert, the output may overflow.
        return total + jnp.where(is_chosen(share, chosen.activation), share * output, 0)

    return jax.lax.fori_loop(0, chosen.count, add_expert, jnp.zeros(tokens.shape, jnp.float32))


def _run_expert(
    backend: Backend,
    chosen: ChosenExperts,
    number: jax.Array,
    tokens: jax.Array,
    activate: Activate,
) -> jax.Array:
    """An expert of the layer on tokens [n, H] → float32 [n, H]."""
    expert = chosen.first + number
    gate_up_scale = down_scale = None
    if chosen.gate_up_scale is not None and chosen.down_scale is not None:
        gate_up_scale = jax.lax.dynamic_slice_in_dim(chosen.gate_up_scale, 2 * expert, 2)
        down_scale = _pick(chosen.down_scale, expert)
    both = backend.matmul(_pick(chosen.gate_up, expert), tokens, gate_up_scale)
    gate, up = jnp.split(both, 2, axis=-1)
    down = _pick(chosen.down, expert)
    return backend.matmul(down, activate(gate, up, number), down_scale, dtype=jnp.float32)


def _list_true(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The indices of the true flags in ascending order, padded with zeros, and their number. Needs no sort."""
    reached = jnp.cumsum(flags, dtype=jnp.int32)
    nth = jnp.arange(1, flags.size + 1, dtype=jnp.int32)
    return jnp.argmax(reached >= nth[:, None], axis=1).astype(jnp.int32), reached[-1]


def _pick(array: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)
