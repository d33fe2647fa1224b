"""The target model: a causal language model of any supported family, with aux hidden states for the draft.

Module and attribute names are the tensor names of the checkpoint.
B rows · T positions of this call · H hidden · V vocabulary, or this device's part of it
G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_aot.cache.model_config.architecture import (
    Decoder,
    DenseMlp,
    GatedDeltaNet,
    MixtureOfExperts,
    Target,
)
from dflash_aot.compile.kernels.kernel_device import KernelDevice
from dflash_aot.compile.models.gated_delta_net import GatedDeltaMixer
from dflash_aot.compile.models.layer_loop import (
    LayerIndex,
    LayerPlace,
    find_period,
    run_mixed_layers,
    stack_layers,
)
from dflash_aot.compile.models.layers import (
    OUTPUTS,
    Attention,
    Linear,
    Mlp,
    RmsNorm,
    Rotation,
    WeightKind,
)
from dflash_aot.compile.models.matmul import add, multiply, sigmoid
from dflash_aot.compile.models.mixture_of_experts import RoutedMlp
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE, TensorParallel

# what layers pass on: their keys and values, and of a hybrid also the recurrent state
Kv = TypeVar("Kv")
# Attends to what came before and to the block itself, and adds the block's keys and values to what is passed on:
# (kv, layer, queries [B,G,R,T,D], keys [B,G,T,D], values [B,G,T,D]) → (mixed [B,G,R,T,D], kv)
Attend = Callable[[Kv, LayerIndex, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kv]]
# Runs a Gated DeltaNet on its state: (kv, layer, its module, normed x [B,T,H]) → (mixed [B,T,H], kv)
Mix = Callable[[Kv, LayerIndex, GatedDeltaMixer, jax.Array], tuple[jax.Array, Kv]]


class DecoderLayer(nnx.Module):
    """A decoder layer: pre-norm attention and pre-norm MLP, each with a residual."""

    def __init__(
        self,
        decoder: Decoder,
        kind: WeightKind,
        tp: TensorParallel,
        kernels: KernelDevice | None = None,
    ):
        offset = decoder.unit_offset
        self.input_layernorm = RmsNorm(decoder.hidden, decoder.epsilon, kind.dtype, offset)
        self.self_attn = Attention(
            decoder.attention, decoder.hidden, decoder.epsilon, kind, tp, offset
        )
        self.post_attention_layernorm = RmsNorm(decoder.hidden, decoder.epsilon, kind.dtype, offset)
        if isinstance(decoder.mlp, MixtureOfExperts):
            self.mlp: RoutedMlp | Mlp = RoutedMlp(decoder.hidden, decoder.mlp, kind, tp, kernels)
        else:
            self.mlp = Mlp(decoder.hidden, decoder.mlp.width, kind, tp, kernels)

    def __call__(
        self, x: jax.Array, rotation: Rotation, kv: Kv, layer: LayerIndex, attend: Attend[Kv]
    ) -> tuple[jax.Array, Kv]:
        """x [B, T, H] → x after the layer, and the kv that `attend` returned."""
        h = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(h, rotation)
        queries, gates = self.self_attn.queries_gates(h, rotation)
        mixed, kv = attend(kv, layer, queries, keys, values)
        if gates is not None:
            mixed = multiply(mixed, sigmoid(gates))
        x = add(x, self.self_attn.output(mixed))
        h = self.post_attention_layernorm(x)
        return add(x, self.mlp(h, layer)), kv


class RecurrentLayer(nnx.Module):
    """A layer with a Gated DeltaNet in place of attention."""

    def __init__(
        self,
        decoder: Decoder,
        sizes: GatedDeltaNet,
        kind: WeightKind,
        tp: TensorParallel,
        kernels: KernelDevice | None = None,
    ):
        assert isinstance(decoder.mlp, DenseMlp)
        self.input_layernorm = RmsNorm(
            decoder.hidden, decoder.epsilon, kind.dtype, decoder.unit_offset
        )
        self.linear_attn = GatedDeltaMixer(sizes, decoder.hidden, decoder.epsilon, kind, tp)
        self.post_attention_layernorm = RmsNorm(
            decoder.hidden, decoder.epsilon, kind.dtype, decoder.unit_offset
        )
        self.mlp = Mlp(decoder.hidden, decoder.mlp.width, kind, tp, kernels)

    def __call__(
        self, x: jax.Array, kv: Kv, layer: LayerIndex, mix: Mix[Kv]
    ) -> tuple[jax.Array, Kv]:
        """x [B, T, H] → x after the layer, and the state that `mix` returned."""
        mixed, kv = mix(kv, layer, self.linear_attn, self.input_layernorm(x))
        x = add(x, mixed)
        return add(x, self.mlp(self.post_attention_layernorm(x), layer)), kv


class DecoderStack(nnx.Module):
    """Embedding, layers and final norm: `model.*` of the checkpoint.

    Of a hybrid with stacked weights `layers` are those with attention and `recurrent_layers` the others.
    """

    def __init__(
        self,
        target: Target,
        kind: WeightKind,
        stacked: bool,
        tp: TensorParallel,
        kernels: KernelDevice | None,
    ):
        decoder = target.decoder
        recurrent = target.recurrent
        self.embed_tokens = Linear(decoder.vocab, decoder.hidden, WeightKind(kind.dtype), OUTPUTS)

        def build(layer: int) -> DecoderLayer | RecurrentLayer:
            if recurrent is None or layer not in recurrent.layers:
                return DecoderLayer(decoder, kind, tp, kernels)
            return RecurrentLayer(decoder, recurrent, kind, tp, kernels)

        kinds = [target.attention_layers, *([recurrent.layers] if recurrent else [])]
        stacks = (
            [stack_layers(numbers, partial(build, numbers[0])) for numbers in kinds]
            if stacked
            else []
        )
        layers: nnx.Module = (
            stacks[0] if stacked else nnx.List([build(layer) for layer in range(decoder.layers)])
        )
        self.layers = layers
        self.recurrent_layers = stacks[1] if stacks[1:] else None
        self.norm = RmsNorm(decoder.hidden, decoder.epsilon, kind.dtype, decoder.unit_offset)
        self.is_recurrent = tuple(
            layer not in target.attention_layers for layer in range(decoder.layers)
        )

    def count_written_layers(self) -> int:
        """How many layers a program spells out: those in the body of the loop over layers, or all."""
        return (
            len(self.layers)
            if isinstance(self.layers, nnx.List)
            else find_period(self.is_recurrent)
        )


class CausalLM(nnx.Module):
    """A causal language model that also returns aux hidden states.

    `stacked`: the layers are a loop over stacked weights (see `layer_loop`). `tp`: the devices that share the model.
    `kernels`: the device of kernels for MLPs and experts, None where XLA's operations run them. An int8 model with tied
    embeddings has an int8 head in addition to the embedding, which is looked up in full precision.
    """

    def __init__(
        self,
        target: Target,
        kind: WeightKind,
        stacked: bool = False,
        tp: TensorParallel = ONE_DEVICE,
        kernels: KernelDevice | None = None,
    ):
        vocab = target.decoder.vocab
        hidden = target.decoder.hidden
        self.model = DecoderStack(target, kind, stacked, tp, kernels)
        if not target.tied:
            self.lm_head = Linear(vocab, hidden, kind, OUTPUTS)
        elif kind.format == "int8":
            self.lm_head = Linear(vocab, hidden, kind, OUTPUTS, tensor="/model.embed_tokens.weight")
        self.target, self.tp = target, tp

    def embed(self, ids: jax.Array) -> jax.Array:
        """Token ids [B, T] → embeddings [B, T, H]."""
        return self.tp.look_up(self.model.embed_tokens.weight[...], ids)

    def forward(
        self,
        ids: jax.Array,
        positions: jax.Array,
        target_layer_ids: Sequence[int],
        kv: Kv,
        attend: Attend[Kv],
        mix: Mix[Kv] | None = None,
    ) -> tuple[jax.Array, jax.Array, Kv]:
        """ids, positions [B, T] → hidden states before the final norm [B, T, H], features [B, T, A·H], kv.

        `mix` runs the recurrent layers of a hybrid target, on the part of `kv` that is theirs. The features are the aux
        hidden states: the outputs of the A decoder layers `target_layer_ids` (0-based), side by side.
        """
        x = self.embed(ids)
        rotation = Rotation(self.target.decoder.rope, positions, x.dtype)
        layers = self.target.decoder.layers
        # One place per aux layer, and a last one that all other layers overwrite.
        places = np.full(layers, len(target_layer_ids), np.int32)
        places[list(target_layer_ids)] = range(len(target_layer_ids))

        def run(
            place: LayerPlace, layer: nnx.Module, carry: tuple[jax.Array, Kv, jax.Array]
        ) -> tuple[jax.Array, Kv, jax.Array]:
            x, kv, aux = carry
            if isinstance(layer, RecurrentLayer):
                assert mix is not None
                x, kv = layer(x, kv, place.rank, mix)
            else:
                x, kv = cast(DecoderLayer, layer)(x, rotation, kv, place.rank, attend)
            return (
                x,
                kv,
                jax.lax.dynamic_update_index_in_dim(
                    aux, x, jnp.asarray(places)[place.number], axis=0
                ),
            )

        aux = jnp.zeros((len(target_layer_ids) + 1, *x.shape), x.dtype)
        stacks = (self.model.layers, self.model.recurrent_layers)
        x, kv, aux = run_mixed_layers(*stacks, self.model.is_recurrent, run, (x, kv, aux))
        features = [*aux[:-1]] if target_layer_ids else [x[..., :0]]
        return x, jnp.concatenate(features, axis=-1), kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states before the final norm [.., H] → float32 logits [.., V]."""
        return self.head(self.model.norm(x))

    def head(self, normed: jax.Array) -> jax.Array:
        """Normed hidden states [.., H] → float32 logits [.., V]."""
        return self.head_layer(normed, jnp.float32)

    @property
    def head_layer(self) -> Linear:
        """The layer of `head`. Drafts without a head of their own use it too."""
        return self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
