"""The z-lab DFlash draft: one bidirectional pass over a block, conditioned on the target's features.

Embedding and head are the target's; this module holds the rest. Reference: z-lab/dflash `dflash/model.py`.
"""

from collections.abc import Callable

import jax
from flax import nnx

from dflash_aot.cache.architecture import Draft
from dflash_aot.compile.layers import Linear, RmsNorm, Rotation
from dflash_aot.compile.qwen3 import DecoderLayer

# (layer, queries [B,T,G,R,D], block keys [B,G,T,D], block values [B,G,T,D]) → mixed [B,T,G,R,D]
AttendContext = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


class DFlash(nnx.Module):
    """DFlashDraftModel with full attention in every layer."""

    def __init__(self, draft: Draft, dtype: str):
        decoder = draft.decoder
        self.fc = Linear(decoder.hidden, len(draft.taps) * draft.target_hidden, dtype)
        self.hidden_norm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        self.layers = nnx.List([DecoderLayer(decoder, dtype) for _ in range(decoder.layers)])
        self.norm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        self.draft = draft

    def context_keys_values(self, features: jax.Array, positions: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """features [B, T, taps·H_target] at absolute positions [B, T] → per layer keys, values [B, G, T, D].

        The layers' `input_layernorm` is not applied to the context.
        """
        context = self.hidden_norm(self.fc(features))
        rotation = Rotation(self.draft.decoder.rope, positions, context.dtype)
        return [layer.self_attn.keys_values(context, rotation) for layer in self.layers]

    def block_hidden(self, x: jax.Array, positions: jax.Array, attend: AttendContext) -> jax.Array:
        """Embedded block x [B, T, H] at absolute positions [B, T] → normed hidden states [B, T, H].

        Row i speaks of the token at its own position; row 0, the anchor's, of nothing.
        """
        rotation = Rotation(self.draft.decoder.rope, positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x, rotation, None, index, lambda kv, i, q, k, v: (attend(i, q, k, v), kv))
        return self.norm(x)
