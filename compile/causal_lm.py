"""The target, whatever its family. Module and parameter names are the checkpoint's tensor names."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.architecture import Decoder, Experts, Target
from dflash_aot.compile.experts import RoutedMlp
from dflash_aot.compile.layers import Attention, Linear, Mlp, RmsNorm, Rotation, multiply

Kv = TypeVar("Kv")
# (kv, layer, queries [B,T,G,R,D], keys [B,G,T,D], values [B,G,T,D]) → (mixed [B,T,G,R,D], kv)
Attend = Callable[[Kv, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kv]]


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, both with a residual."""

    def __init__(self, decoder: Decoder, dtype: str):
        self.input_layernorm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        self.self_attn = Attention(decoder.attention, decoder.hidden, decoder.epsilon, dtype)
        self.post_attention_layernorm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        if isinstance(decoder.mlp, Experts):
            self.mlp: RoutedMlp | Mlp = RoutedMlp(decoder.hidden, decoder.mlp, dtype)
        else:
            self.mlp = Mlp(decoder.hidden, decoder.mlp.width, dtype)

    def __call__(
        self, x: jax.Array, rotation: Rotation, kv: Kv, layer: int, attend: Attend[Kv]
    ) -> tuple[jax.Array, Kv]:
        h = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(h, rotation)
        mixed, kv = attend(kv, layer, self.self_attn.queries(h, rotation), keys, values)
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Stack(nnx.Module):
    """Embedding, layers and final norm: `model.*` of the checkpoint."""

    def __init__(self, decoder: Decoder, dtype: str):
        self.embed_tokens = Linear(decoder.vocab, decoder.hidden, dtype)
        self.layers = nnx.List([DecoderLayer(decoder, dtype) for _ in range(decoder.layers)])
        self.norm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)


class CausalLM(nnx.Module):
    """A causal language model with taps."""

    def __init__(self, target: Target, dtype: str):
        self.model = Stack(target.decoder, dtype)
        if not target.tied:
            self.lm_head = Linear(target.decoder.vocab, target.decoder.hidden, dtype)
        self.target = target

    def embed(self, ids: jax.Array) -> jax.Array:
        """[B, T] → [B, T, H]."""
        return self.model.embed_tokens.weight[...][ids]

    def forward(
        self, ids: jax.Array, positions: jax.Array, taps: Sequence[int], kv: Kv, attend: Attend[Kv]
    ) -> tuple[jax.Array, jax.Array, Kv]:
        """ids, positions [B, T] → hidden states before the final norm [B, T, H], features [B, T, taps·H], kv.

        A tap is the output of that decoder layer, 0-based.
        """
        x = self.embed(ids)
        rotation = Rotation(self.target.decoder.rope, positions, x.dtype)
        tapped = {}
        for index, layer in enumerate(self.model.layers):
            x, kv = layer(x, rotation, kv, index, attend)
            tapped[index] = x
        return x, jnp.concatenate([tapped[tap] for tap in taps], axis=-1), kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states before the final norm [.., H] → float32 [.., V]."""
        return self.head(self.model.norm(x))

    def head(self, normed: jax.Array) -> jax.Array:
        """Normed hidden states [.., H] → float32 [.., V]; also the draft's head."""
        weight = self.model.embed_tokens.weight if self.target.tied else self.lm_head.weight
        return multiply(weight[...], normed, dtype=jnp.float32)
