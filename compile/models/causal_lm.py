"""The target, whatever its family. Module and parameter names are the checkpoint's tensor names."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_aot.cache.model_config.architecture import Decoder, MixtureOfExperts, Target
from dflash_aot.compile.models.layer_loop import LayerIndex, make_layers, run_layers
from dflash_aot.compile.models.layers import OUTPUTS, Attention, Linear, Mlp, RmsNorm, Rotation
from dflash_aot.compile.models.matmul import matmul
from dflash_aot.compile.models.mixture_of_experts import RoutedMlp
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE, TensorParallel

Kv = TypeVar("Kv")
# (kv, layer, queries [B,T,G,R,D], keys [B,G,T,D], values [B,G,T,D]) → (mixed [B,T,G,R,D], kv)
Attend = Callable[[Kv, LayerIndex, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kv]]


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, both with a residual."""

    def __init__(self, decoder: Decoder, dtype: str, tp: TensorParallel):
        self.input_layernorm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        self.self_attn = Attention(decoder.attention, decoder.hidden, decoder.epsilon, dtype, tp)
        self.post_attention_layernorm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        if isinstance(decoder.mlp, MixtureOfExperts):
            self.mlp: RoutedMlp | Mlp = RoutedMlp(decoder.hidden, decoder.mlp, dtype, tp)
        else:
            self.mlp = Mlp(decoder.hidden, decoder.mlp.width, dtype, tp)

    def __call__(
        self, x: jax.Array, rotation: Rotation, kv: Kv, layer: LayerIndex, attend: Attend[Kv]
    ) -> tuple[jax.Array, Kv]:
        h = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(h, rotation)
        mixed, kv = attend(kv, layer, self.self_attn.queries(h, rotation), keys, values)
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class DecoderStack(nnx.Module):
    """Embedding, layers and final norm: `model.*` of the checkpoint."""

    def __init__(self, decoder: Decoder, dtype: str, stacked: bool, tp: TensorParallel):
        self.embed_tokens = Linear(decoder.vocab, decoder.hidden, dtype, OUTPUTS)
        self.layers = make_layers(decoder.layers, lambda: DecoderLayer(decoder, dtype, tp), stacked)
        self.norm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)


class CausalLM(nnx.Module):
    """A causal language model with taps; its layers unrolled or `stacked` (see `layer_loop`), on `tp` devices."""

    def __init__(self, target: Target, dtype: str, stacked: bool = False, tp: TensorParallel = ONE_DEVICE):
        self.model = DecoderStack(target.decoder, dtype, stacked, tp)
        if not target.tied:
            self.lm_head = Linear(target.decoder.vocab, target.decoder.hidden, dtype, OUTPUTS)
        self.target, self.tp = target, tp

    def embed(self, ids: jax.Array) -> jax.Array:
        """[B, T] → [B, T, H]."""
        return self.tp.look_up(self.model.embed_tokens.weight[...], ids)

    def forward(
        self, ids: jax.Array, positions: jax.Array, taps: Sequence[int], kv: Kv, attend: Attend[Kv]
    ) -> tuple[jax.Array, jax.Array, Kv]:
        """ids, positions [B, T] → hidden states before the final norm [B, T, H], features [B, T, taps·H], kv.

        A tap is the output of that decoder layer, 0-based.
        """
        x = self.embed(ids)
        rotation = Rotation(self.target.decoder.rope, positions, x.dtype)
        layers = self.target.decoder.layers
        # A place for every tap, and one that all other layers write over.
        places = np.full(layers, len(taps), np.int32)
        places[list(taps)] = range(len(taps))

        def run(
            index: LayerIndex, layer: DecoderLayer, carry: tuple[jax.Array, Kv, jax.Array]
        ) -> tuple[jax.Array, Kv, jax.Array]:
            x, kv, tapped = carry
            x, kv = layer(x, rotation, kv, index, attend)
            return x, kv, jax.lax.dynamic_update_index_in_dim(tapped, x, jnp.asarray(places)[index], axis=2)

        tapped = jnp.zeros((*x.shape[:2], len(taps) + 1, x.shape[2]), x.dtype)
        x, kv, tapped = run_layers(self.model.layers, layers, run, (x, kv, tapped))
        return x, tapped[:, :, : len(taps)].reshape(*x.shape[:2], -1), kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states before the final norm [.., H] → float32 [.., V], or this device's share of V."""
        return self.head(self.model.norm(x))

    def head(self, normed: jax.Array) -> jax.Array:
        """Normed hidden states [.., H] → float32 [.., V] or a share of it; also the draft's head."""
        weight = self.model.embed_tokens.weight if self.target.tied else self.lm_head.weight
        return matmul(weight[...], normed, dtype=jnp.float32)
