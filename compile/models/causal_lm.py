"""The target model: a causal language model of any supported family, with aux hidden states for the draft.

Module and attribute names are the tensor names of the checkpoint.
B rows · T positions of this call · H hidden · V vocabulary, or this device's part of it
G kv heads · R query heads per kv head · D head width
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_aot.cache.model_config.architecture import (
    AttentionKind,
    AttentionShape,
    ClampedActivation,
    Decoder,
    DenseMlp,
    GatedDeltaNet,
    LayerKind,
    MixtureOfExperts,
    Scaling,
    Target,
)
from dflash_aot.compile.kernels.kernel_device import (
    STREAM_ROWS,
    SUBLANES,
    DeltaProjections,
    OutputWeights,
    StreamSizes,
    StreamWeights,
    round_up,
)
from dflash_aot.compile.models.backend import Kernels
from dflash_aot.compile.models.gated_delta_net import GatedDeltaMixer, MixerCall, MixerInputs
from dflash_aot.compile.models.layer_loop import LayeredModule, LayerIndex, LayerPlace
from dflash_aot.compile.models.layers import (
    OUTPUTS,
    Attention,
    AttentionInputs,
    LayerForm,
    Linear,
    Mlp,
    ParameterSource,
    RmsNorm,
    Rotations,
    make_rotations,
    parameter,
)
from dflash_aot.compile.models.matmul import add, multiply, sigmoid
from dflash_aot.compile.models.mixture_of_experts import (
    ClampedMlp,
    ExpertStack,
    RoutedMlp,
    ScaledRouter,
)
from dflash_aot.compile.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:  # Pallas takes 0.3 s
    from dflash_aot.compile.kernels.streamed_layer import (
        LayerParts,
        StreamDeltaInputs,
        StreamLayer,
        StreamOutputMlp,
    )

# what layers pass on: their keys and values, and of a hybrid also the recurrent state
Kv = TypeVar("Kv")
# Attends to what came before and to the block itself, and adds the block's keys and values to what is passed on:
# (kv, layer, inputs) → (mixed [B,G,R,T,D], kv)
Attend = Callable[[Kv, LayerIndex, AttentionInputs], tuple[jax.Array, Kv]]
# Runs the mixer of a layer: (kv, layer, its module, normed x [B,T,H]) → (mixed [B,T,H], kv)
Mix = Callable[[Kv, LayerIndex, Any, jax.Array], tuple[jax.Array, Kv]]
# Runs the delta rule of a recurrent layer on its state: (kv, layer, call) → (what the call outputs, kv)
Recur = Callable[[Kv, LayerIndex, MixerCall], tuple[jax.Array, Kv]]


def build_mixer(kind: LayerKind, decoder: Decoder, form: LayerForm) -> tuple[str, nnx.Module]:
    """The mixer of a layer, and its name in the checkpoint."""
    match kind.mixer:
        case AttentionKind() as attention:
            norm = decoder.norm
            return "self_attn", Attention(attention, decoder.hidden, decoder.epsilon, form, norm)
        case GatedDeltaNet() as sizes:
            return "linear_attn", GatedDeltaMixer(sizes, decoder.hidden, decoder.epsilon, form)


def build_mlp(kind: LayerKind, hidden: int, form: LayerForm) -> Mlp | RoutedMlp | ClampedMlp:
    """The MLP of a layer; the dense part where experts have norms of their own."""
    match kind.mlp:
        case DenseMlp() as dense:
            return Mlp(hidden, dense.width, form, dense.activation)
        case MixtureOfExperts(dense=width, activation=activation) if width:
            return Mlp(hidden, width, form, activation)
        case MixtureOfExperts(clamped=ClampedActivation() as activation) as experts:
            return ClampedMlp(hidden, experts, activation, form)
        case MixtureOfExperts() as experts:
            return RoutedMlp(hidden, experts, form)


def build_norm(decoder: Decoder, form: LayerForm) -> RmsNorm:
    """An RMS norm of hidden states."""
    return RmsNorm(decoder.hidden, decoder.epsilon, form.dtype, decoder.norm)


def scale_logits(head: jax.Array, scaling: Scaling) -> jax.Array:
    """The head's output [..] → logits [..]: scaled, then capped."""
    logits = head if scaling.logits == 1 else head * scaling.logits
    return logits if scaling.cap is None else jnp.tanh(logits / scaling.cap) * scaling.cap


class DecoderLayer(nnx.Module):
    """A decoder layer: a pre-norm mixer and a pre-norm MLP, each with a residual, and at the end perhaps a scalar."""

    def __init__(self, decoder: Decoder, kind: LayerKind, form: LayerForm):
        norm = partial(build_norm, decoder, form)
        self.input_layernorm = norm()
        self.mixer_name, mixer = build_mixer(kind, decoder, form)
        setattr(self, self.mixer_name, mixer)
        self.post_attention_layernorm = norm()
        self.mlp = build_mlp(kind, decoder.hidden, form)
        if decoder.scaled_layers:
            self.layer_scalar = parameter((1,), form.dtype, ParameterSource(["layer_scalar"], (1,)))

    @property
    def mixer(self) -> Any:
        """The module that mixes the tokens."""
        return getattr(self, self.mixer_name)

    def __call__(
        self, x: jax.Array, kv: Kv, layer: LayerIndex, mix: Mix[Kv]
    ) -> tuple[jax.Array, Kv]:
        """x [B, T, H] → x after the layer, and the kv that `mix` returned."""
        mixed, kv = mix(kv, layer, self.mixer, self.input_layernorm(x))
        return self.finish(x, mixed, layer), kv

    def finish(self, x: jax.Array, mixed: jax.Array, layer: LayerIndex) -> jax.Array:
        """x before the layer, and what its mixer made of it, both [B, T, H] → x after the layer."""
        x = add(x, mixed)
        return self.scale(add(x, self._feed(x, layer)))

    def _feed(self, x: jax.Array, layer: LayerIndex) -> jax.Array:
        """x → what the MLP adds to it. Where a router reads the normed tokens, the norm is part of its kernel."""
        norm = self.post_attention_layernorm
        if isinstance(self.mlp, RoutedMlp):
            return self.mlp(x, norm, layer)
        return self.mlp(norm(x), layer)

    @property
    def plain_mlp(self) -> Mlp | ClampedMlp:
        """The MLP of a layer whose norms are its own."""
        assert not isinstance(self.mlp, RoutedMlp)
        return self.mlp

    def scale(self, x: jax.Array) -> jax.Array:
        """The layer's output x, times its scalar if it has one."""
        return multiply(x, self.layer_scalar[...]) if hasattr(self, "layer_scalar") else x


class SandwichedLayer(DecoderLayer):
    """A decoder layer with norms before and after both parts (Gemma 4).

    Experts stand next to the dense MLP. Each has a norm before it and after it, and the router reads the residual.
    """

    def __init__(self, decoder: Decoder, kind: LayerKind, form: LayerForm):
        super().__init__(decoder, kind, form)
        norm = partial(build_norm, decoder, form)
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if isinstance(kind.mlp, MixtureOfExperts) and kind.mlp.dense:
            self.router = ScaledRouter(decoder.hidden, kind.mlp, decoder.epsilon, form)
            self.experts = ExpertStack(decoder.hidden, kind.mlp, form)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
        self.tp = form.tp

    def __call__(
        self, x: jax.Array, kv: Kv, layer: LayerIndex, mix: Mix[Kv]
    ) -> tuple[jax.Array, Kv]:
        """As `DecoderLayer`."""
        mixed, kv = mix(kv, layer, self.mixer, self.input_layernorm(x))
        x = add(x, self.post_attention_layernorm(mixed))
        h = self.pre_feedforward_layernorm(x)
        fed = self._run_both(x, h, layer) if hasattr(self, "experts") else self.plain_mlp(h, layer)
        return self.scale(add(x, self.post_feedforward_layernorm(fed))), kv

    def _run_both(self, x: jax.Array, h: jax.Array, layer: LayerIndex) -> jax.Array:
        """The dense MLP on h and the experts on x, both [B, T, H], each normed: their sum."""
        assert isinstance(self.mlp, Mlp)
        tokens = x.reshape(-1, x.shape[-1])
        choice = self.router(tokens)
        routed = self.experts.run_part(self.pre_feedforward_layernorm_2(tokens), choice, layer)
        dense = self.mlp.run_part(h.reshape(tokens.shape), layer)
        # One sum over the devices for both parts.
        dense, routed = self.tp.sum_rounded((dense, routed), x.dtype)
        both = add(
            self.post_feedforward_layernorm_1(dense), self.post_feedforward_layernorm_2(routed)
        )
        return both.reshape(x.shape)


class DecoderStack(LayeredModule):
    """Embedding, layers and final norm: `model.*` of the checkpoint."""

    def __init__(self, target: Target, form: LayerForm):
        decoder = target.decoder
        self.embed_tokens = Linear(decoder.vocab, decoder.hidden, form.plain, OUTPUTS)
        layer_class = SandwichedLayer if decoder.sandwiched else DecoderLayer
        build = partial(layer_class, decoder, form=form)
        self.make_layers(target.kinds, build, form.backend.stacks_layers)
        self.norm = build_norm(decoder, form)


class CausalLM(nnx.Module):
    """A causal language model that also returns aux hidden states.

    An int8 model with tied embeddings has an int8 head in addition to the embedding, which is looked up in full
    precision.
    """

    def __init__(self, target: Target, form: LayerForm):
        vocab = target.decoder.vocab
        hidden = target.decoder.hidden
        self.model = DecoderStack(target, form)
        if not target.tied:
            self.lm_head = Linear(vocab, hidden, form, OUTPUTS)
        elif form.format == "int8":
            self.lm_head = Linear(vocab, hidden, form, OUTPUTS, tensor="/model.embed_tokens.weight")
        self.target, self.tp = target, form.tp

    def embed(self, ids: jax.Array) -> jax.Array:
        """Token ids [B, T] → embeddings [B, T, H]."""
        x = self.tp.look_up(self.model.embed_tokens.weight[...], ids)
        scale = self.target.scaling.embedding
        return x if scale == 1 else multiply(x, jnp.asarray(scale, x.dtype))

    def forward(
        self,
        ids: jax.Array,
        positions: jax.Array,
        target_layer_ids: Sequence[int],
        kv: Kv,
        attend: Attend[Kv],
        recur: Recur[Kv] | None = None,
    ) -> tuple[jax.Array, jax.Array, Kv]:
        """ids, positions [B, T] → hidden states before the final norm [B, T, H], features [B, T, A·H], kv.

        `recur` runs the recurrent layers of a hybrid target, on their part of `kv`. The features are the aux hidden
        states: the outputs of the A decoder layers `target_layer_ids` (0-based), side by side.
        """
        x = self.embed(ids)
        rotations = make_rotations(self.model.kinds, positions, x.dtype, self.tp.backend)
        mixes: dict[type, Mix[Kv]] = {Attention: mix_by_attention(rotations, attend)}
        hybrid = None
        if recur is not None:
            mixes[GatedDeltaMixer] = mix_by_recurrence(recur)
            hybrid = find_hybrid_stream(self.model, ids.shape, rotations, recur, attend)
        # One place per aux layer, and a last one that all other layers overwrite.
        places = np.full(self.target.decoder.layers, len(target_layer_ids), np.int32)
        places[list(target_layer_ids)] = range(len(target_layer_ids))

        def find_place(number: LayerIndex) -> jax.Array:
            if isinstance(number, int):
                return jnp.asarray(places)[number]
            at = jnp.int32(len(target_layer_ids))  # by comparisons: on TPU a look-up takes longer
            for place, aux_layer in enumerate(target_layer_ids):
                at = jnp.where(number == aux_layer, place, at)
            return at

        def keep(aux: jax.Array, place: LayerPlace, x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(aux, x, find_place(place.number), axis=0)

        def run(
            place: LayerPlace, layer: DecoderLayer, carry: tuple[jax.Array, Kv, jax.Array]
        ) -> tuple[jax.Array, Kv, jax.Array]:
            x, kv, aux = carry
            if hybrid:
                x, kv = hybrid.run(layer, place.rank, x, kv)
            else:
                x, kv = layer(x, kv, place.rank, mixes[type(layer.mixer)])
            return x, kv, keep(aux, place, x)

        aux = jnp.zeros((len(target_layer_ids) + 1, *x.shape), x.dtype)
        if stream := find_stream(self.model, ids.shape, rotations, causal=True):

            def stream_one(
                place: LayerPlace, layer: DecoderLayer, carry: tuple[Flow, Kv, jax.Array]
            ) -> tuple[Flow, Kv, jax.Array]:
                flow, kv, aux = carry
                flow, kv = stream.run(layer, place.rank, flow, partial(attend, kv, place.rank))
                return flow, kv, keep(aux, place, stream.read(flow))

            flow = stream.begin(self.model.first_layer(positions), x)
            flow, kv, aux = self.model.run_layers(stream_one, (flow, kv, aux))
            x = stream.read(flow)
        else:
            x, kv, aux = self.model.run_layers(run, (x, kv, aux))
        features = [*aux[:-1]] if target_layer_ids else [x[..., :0]]
        return x, jnp.concatenate(features, axis=-1), kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states before the final norm [.., H] → float32 logits [.., V]."""
        return scale_logits(self.head(self.model.norm(x)), self.target.scaling)

    def head(self, normed: jax.Array) -> jax.Array:
        """Normed hidden states [.., H] → float32 logits [.., V]."""
        return self.head_layer(normed, jnp.float32)

    @property
    def head_layer(self) -> Linear:
        """The layer of `head`. Drafts without a head of their own use it too."""
        return self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens


class Flow(NamedTuple):
    """What streamed layers pass on: x [n, H], and of the next layer queries [B, N, T, D], keys and values [B, G, T, D].

    n is the number of tokens, padded to whole memory tiles. Where rows do not fill such tiles, B is 1 and T is n.
    """

    x: jax.Array
    queries: jax.Array
    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class LayerStream:
    """Layers of one kind, of which everything but the attention is one kernel, or a few (`kernels.streamed_layer`).

    Attributes:
        kernel: of these sizes.
        weights: of all layers.
        kernels: of the device.
        tp: the devices that share the layers.
        batch: rows of the call, B.
        rows: B of the flow.
        width: positions of a row, T.
        padded: of a row in the flow, at least T. Later positions are of no use, and no position sees them.
        rotations: of the model.
        rotation: cosines and sines of the layers, float32 [n, D].
    """

    kernel: "StreamLayer | LayerParts"
    weights: StreamWeights
    kernels: Kernels
    tp: TensorParallel
    batch: int
    rows: int
    width: int
    padded: int
    rotations: Rotations
    rotation: tuple[jax.Array, jax.Array]

    @property
    def tokens(self) -> int:
        """Tokens of all rows in the flow, padding included."""
        return self.batch * self.padded

    def begin(self, layer: DecoderLayer, x: jax.Array) -> Flow:
        """The flow before the first layer, of x [B, T, H]."""
        inputs = layer.mixer.inputs(layer.input_layernorm(x), self.rotations)
        heads = (inputs.queries, inputs.keys, inputs.values)
        return Flow(_flatten(x, self.padded), *(self.join_rows(one) for one in heads))

    def join_rows(self, heads: jax.Array) -> jax.Array:
        """Heads [B, .., T, D] as the flow has them, with zeros where it is padded."""
        by_row = heads.reshape(self.batch, -1, *heads.shape[-2:])
        if self.rows == 1:
            return _flatten(by_row.swapaxes(0, 1), self.padded)[None]
        return jnp.pad(by_row, ((0, 0), (0, 0), (0, self.padded - by_row.shape[2]), (0, 0)))

    def part_rows(self, heads: jax.Array) -> jax.Array:
        """The flow's heads by row [B, N, T, D], with T padded."""
        if self.rows == self.batch:
            return heads[:, :, : self.padded]
        by_head = heads[0, :, : self.tokens]
        return by_head.reshape(len(by_head), self.batch, -1, by_head.shape[-1]).swapaxes(0, 1)

    def run(
        self,
        layer: DecoderLayer,
        number: LayerIndex,
        flow: Flow,
        attend: Callable[[AttentionInputs], tuple[jax.Array, Kv]],
    ) -> tuple[Flow, Kv]:
        """As `DecoderLayer`, with what `attend` makes of the layer's attention and kv."""
        attention = layer.mixer
        queries, keys, values = (self.part_rows(one) for one in flow[1:])
        queries = queries.reshape(*keys.shape[:2], -1, *keys.shape[2:])
        sinks = attention.sinks[...] if attention.shape.sinks else None
        kind = attention.kind
        inputs = AttentionInputs(queries, keys, values, None, sinks, kind.windows, kind.pool)
        mixed, kv = attend(inputs)
        rows = self.join_rows(mixed)
        place = jnp.asarray(number, jnp.int32)
        found = self.kernel.run(
            flow.x,
            rows,
            self.weights,
            self.rotation,
            place,
            self.kernels.interpret,
            self.tp.sum,
        )
        return Flow(*found), kv

    def read(self, flow: Flow) -> jax.Array:
        """x [B, T, H]."""
        x = flow.x[: self.tokens].reshape(self.batch, self.padded, flow.x.shape[-1])
        return x[:, : self.width]


def _flatten(rows: jax.Array, padded: int) -> jax.Array:
    *outer, batch, width, size = rows.shape
    whole = [(0, 0)] * (rows.ndim - 2)
    wide = jnp.pad(rows, (*whole, (0, padded - width), (0, 0)))
    return _pad_rows(wide.reshape(*outer, batch * padded, size))


def _pad_rows(rows: jax.Array) -> jax.Array:
    """Rows [.., n, width] with zeros up to whole memory tiles."""
    whole = [(0, 0)] * (rows.ndim - 2)
    return jnp.pad(rows, (*whole, (0, -rows.shape[-2] % STREAM_ROWS), (0, 0)))


def find_stream(
    model: LayeredModule, shape: tuple[int, ...], rotations: Rotations, causal: bool
) -> LayerStream | None:
    """How the layers of a model are streamed for blocks of a shape [B, T]; None where `DecoderLayer` runs them.

    They are streamed if all are plain, dense and of one kind, and of whole vector registers.
    Where positions are causal, rows are padded once, before the first layer, and not around every attention.
    """
    if isinstance(model.layers, nnx.List) or len(model.kinds) > 1:
        return None
    stack = getattr(model, model.kinds[0].stack)
    if type(stack) is not DecoderLayer or not isinstance(stack.mixer, Attention):
        return None
    mixer, mlp = stack.mixer, stack.mlp
    if not isinstance(mlp, Mlp) or not mlp.kernels or mlp.activation != "silu":
        return None
    norm = stack.input_layernorm
    heads = mixer.shape
    plain = AttentionShape(heads.heads, heads.kv_heads, heads.head_dim, sinks=heads.sinks)
    if heads != plain or norm.product != "rounded" or hasattr(stack, "layer_scalar"):
        return None
    if rotations[mixer.kind.rope].rotated != heads.head_dim:
        return None
    output, queries, keys_values = (
        one[...].reshape(len(one[...]), -1, one[...].shape[-1])
        for one in (mixer.o_proj.weight, mixer.q, mixer.kv)
    )
    down = mlp.down_proj.weight[...]
    L, H, M = down.shape
    mlp_norm, input_norm, query_norm, key_norm = (
        one.weight[...].astype(jnp.float32)
        for one in (
            stack.post_attention_layernorm,
            stack.input_layernorm,
            mixer.q_norm,
            mixer.k_norm,
        )
    )
    gate_up = mlp.gate_up[...].reshape(L, 2 * M, H)
    weights = StreamWeights(
        output,
        gate_up,
        down,
        queries,
        keys_values,
        mlp_norm,
        input_norm,
        query_norm,
        key_norm,
        _list_scales(mixer, mlp),
    )
    widths = output.shape[2], queries.shape[1], keys_values.shape[1]
    items = norm.weight[...].dtype.itemsize, down.dtype.itemsize
    batch, width = shape
    padded = pad_row(batch, width) if causal else width
    rows = 1 if padded % STREAM_ROWS else batch
    sizes = StreamSizes(batch * padded, rows, H, M, *widths, heads.head_dim, *items)
    kernel = mlp.kernels.choose_stream(sizes, norm.epsilon, shared=mlp.tp.count > 1)
    if kernel is None:
        return None
    tables = rotations[mixer.kind.rope]
    cos, sin = (
        _flatten(one.reshape(batch, width, -1).astype(jnp.float32), padded)
        for one in (tables.cos, tables.sin)
    )
    devices = mlp.kernels, mlp.tp
    shape = batch, rows, width, padded
    return LayerStream(kernel, weights, *devices, *shape, rotations, (cos, sin))


def pad_row(batch: int, width: int) -> int:
    """The width of rows that fill whole memory tiles together, where it takes no more of them."""
    tokens = round_up(batch * width, STREAM_ROWS)
    return tokens // batch if tokens % batch == 0 else width


def _list_scales(mixer: Attention, mlp: Mlp) -> tuple[jax.Array, ...]:
    """The scales of stacked int8 layers as `StreamWeights` holds them; () of plain layers."""
    parts = (
        (mixer.o_proj.weight_scale, 1),
        (mlp.gate_up_scale, 2),
        (mlp.down_proj.weight_scale, 1),
        (mixer.q_scale, 1),
        (mixer.kv_scale, 1),
    )
    return tuple(
        scale[...].reshape(len(scale[...]), rows, -1) for scale, rows in parts if scale is not None
    )


@dataclass(frozen=True)
class OutputStream:
    """Layers of one kind whose output projection and MLP are one kernel (`kernels.streamed_layer`).

    Attributes:
        kernel: of these sizes.
        weights: of all layers.
    """

    kernel: "StreamOutputMlp"
    weights: OutputWeights


@dataclass(frozen=True)
class HybridStream(Generic[Kv]):
    """Layers of several kinds, of which kernels run parts (`kernels.streamed_layer`).

    Attributes:
        recur: runs the delta rule.
        attend: runs the attention.
        rotations: of the model.
        interpret: see `KernelDevice`.
        padded: the width of a row for the kernels.
        inputs: of recurrent layers, with their weights; None where XLA's operations make them.
        outputs: by the class of the mixer; what is not there is left to XLA's operations.
    """

    recur: Recur[Kv]
    attend: Attend[Kv]
    rotations: Rotations
    interpret: Any
    padded: int
    inputs: "tuple[StreamDeltaInputs, DeltaProjections] | None"
    outputs: Mapping[type, OutputStream]

    def run(
        self, layer: DecoderLayer, number: LayerIndex, x: jax.Array, kv: Kv
    ) -> tuple[jax.Array, Kv]:
        """As `DecoderLayer`."""
        mixer = layer.mixer
        streamed = type(mixer) in self.outputs
        if isinstance(mixer, Attention):
            h = layer.input_layernorm(x)
            heads, kv = attend_heads(mixer, h, self.rotations, partial(self.attend, kv, number))
            mixed = heads.reshape(len(x), -1, *heads.shape[3:]) if streamed else mixer.output(heads)
        else:
            call = MixerCall(
                mixer,
                partial(self._project, *self.inputs, x, number)
                if self.inputs
                else partial(mixer.project, layer.input_layernorm(x)),
                (lambda gated: gated[:, None]) if streamed else mixer.out_proj,
            )
            mixed, kv = self.recur(kv, number, call)
        if streamed:
            return self._finish(self.outputs[type(mixer)], x, mixed, number), kv
        return layer.finish(x, mixed, number), kv

    def _project(
        self,
        kernel: "StreamDeltaInputs",
        weights: DeltaProjections,
        x: jax.Array,
        number: LayerIndex,
    ) -> MixerInputs:
        B, T, _ = x.shape
        place = jnp.asarray(number, jnp.int32)
        rows = _flatten(x, self.padded)
        channels, gates, *factors = kernel.run(rows, weights, place, self.interpret)
        channels, gates = (one.reshape(B, self.padded, -1)[:, :T] for one in (channels, gates))
        strengths, decays = (one[:, :, :T].swapaxes(1, 2) for one in factors)
        return MixerInputs(channels, gates, strengths, decays)

    def _finish(
        self, stream: OutputStream, x: jax.Array, mixed: jax.Array, number: LayerIndex
    ) -> jax.Array:
        """x [B, T, H] after a layer, of x before it, and of the heads of its mixer [B, N, T, D]."""
        B, T, H = x.shape
        place = jnp.asarray(number, jnp.int32)
        heads = jnp.pad(mixed, ((0, 0), (0, 0), (0, self.padded - T), (0, 0)))
        if self.padded % STREAM_ROWS:
            heads = heads.swapaxes(0, 1).reshape(1, heads.shape[1], -1, heads.shape[3])
        rows = _flatten(x, self.padded)
        found = stream.kernel.run(rows, heads, stream.weights, place, self.interpret)
        return found.reshape(B, self.padded, H)[:, :T]


def find_hybrid_stream(
    model: LayeredModule,
    shape: tuple[int, ...],
    rotations: Rotations,
    recur: Recur[Kv],
    attend: Attend[Kv],
) -> HybridStream[Kv] | None:
    """What kernels run of a model with recurrent layers, for blocks [B, T]; None where `DecoderLayer` runs all."""
    if isinstance(model.layers, nnx.List):
        return None
    stacks = {type(one.mixer): one for one in (getattr(model, kind.stack) for kind in model.kinds)}
    recurrent = stacks.get(GatedDeltaMixer)
    if recurrent is None or type(recurrent) is not DecoderLayer:
        return None
    kernels = recurrent.mixer.backend.kernels
    if kernels is None:
        return None
    norm = recurrent.input_layernorm
    weights = recurrent.mixer.list_projections(norm.widen_weight())
    batch, width = shape
    padded = round_up(width, STREAM_ROWS // math.gcd(batch, STREAM_ROWS // SUBLANES))
    tokens, hidden = batch * padded, norm.weight[...].shape[-1]
    x = jax.ShapeDtypeStruct((tokens, hidden), norm.weight[...].dtype)
    inputs = kernels.choose_delta_inputs(x, batch, weights, norm.rule)
    outputs: dict[type, OutputStream] = {}
    for kind, stack in stacks.items():
        if (own := list_output_weights(stack)) is None:
            continue
        head = stack.mixer.shape.head_dim if kind is Attention else own.output.shape[2]
        rows = 1 if padded % STREAM_ROWS else batch
        heads = (rows, own.output.shape[2] // head, tokens // rows, head)
        mixed = jax.ShapeDtypeStruct(heads, x.dtype)
        rule = stack.post_attention_layernorm.rule
        if kernel := kernels.choose_output_mlp(mixed, x, own, rule):
            outputs[kind] = OutputStream(kernel, own)
    if not inputs and not outputs:
        return None
    given = inputs and (inputs, weights)
    return HybridStream(recur, attend, rotations, kernels.interpret, padded, given, outputs)


def list_output_weights(stack: DecoderLayer) -> OutputWeights | None:
    """The weights of stacked layers from their mixers on; None where no kernel takes such layers."""
    mixer, mlp = stack.mixer, stack.mlp
    if not isinstance(mlp, Mlp) or not mlp.kernels or mlp.activation != "silu":
        return None
    if mlp.tp.count > 1 or hasattr(stack, "layer_scalar") or hasattr(mixer, "o_bias"):
        return None
    output = mixer.o_proj if isinstance(mixer, Attention) else mixer.out_proj
    down = mlp.down_proj
    L, H, M = down.weight[...].shape
    scales = ((output.weight_scale, 1), (mlp.gate_up_scale, 2), (down.weight_scale, 1))
    return OutputWeights(
        stack.post_attention_layernorm.widen_weight(),
        output.weight[...],
        mlp.gate_up[...].reshape(L, 2 * M, H),
        down.weight[...],
        tuple(one[...].reshape(L, rows, -1) for one, rows in scales if one is not None),
    )


def mix_by_recurrence(recur: Recur[Kv]) -> Mix[Kv]:
    """The mixing of recurrent layers."""
    return lambda kv, layer, mixer, h: recur(kv, layer, MixerCall.of(mixer, h))


def mix_by_attention(rotations: Rotations, attend: Attend[Kv]) -> Mix[Kv]:
    """The mixing of layers with attention."""

    def mix(kv: Kv, layer: LayerIndex, attention: Attention, h: jax.Array) -> tuple[jax.Array, Kv]:
        mixed, kv = attend_heads(attention, h, rotations, partial(attend, kv, layer))
        return attention.output(mixed), kv

    return mix


def attend_heads(
    attention: Attention,
    h: jax.Array,
    rotations: Rotations,
    attend: Callable[[AttentionInputs], tuple[jax.Array, Kv]],
) -> tuple[jax.Array, Kv]:
    """The attention of normed h [B, T, H] by head [B, G, R, T, D], times its gates, and what `attend` makes of kv."""
    inputs = attention.inputs(h, rotations)
    mixed, kv = attend(inputs)
    if inputs.gates is not None:
        mixed = multiply(mixed, sigmoid(inputs.gates))
    return mixed, kv
