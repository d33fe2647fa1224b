"""The DFlash draft model: one bidirectional pass over a block, conditioned on the target's aux hidden states.

Drafts of z-lab use the embedding and the head of the target, drafts of speculators have their own. References:
z-lab/dflash `dflash/model.py`, vllm-project/speculators `models/dflash`.

B rows · T positions of this call · H hidden · V vocabulary, or this device's part of it · F width of the features
G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import Draft
from dflash_aot.compile.models.causal_lm import CausalLM, DecoderLayer, Kv
from dflash_aot.compile.models.layer_loop import LayerIndex, make_layers, run_layers
from dflash_aot.compile.models.layers import INPUTS, OUTPUTS, Linear, RmsNorm, Rotation, parameter
from dflash_aot.compile.models.matmul import matmul
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE, TensorParallel

# Attention over the draft context and the block itself:
# (layer, queries [B,G,R,T,D], block keys [B,G,T,D], block values [B,G,T,D]) → mixed [B,G,R,T,D]
AttendBlock = Callable[[LayerIndex, jax.Array, jax.Array, jax.Array], jax.Array]

# Writes the context keys and values of a layer:
# (kv, layer, keys [B,G,T,D], values [B,G,T,D]) → kv
WriteContext = Callable[[Kv, LayerIndex, jax.Array, jax.Array], Kv]


class DFlash(nnx.Module):
    """DFlashDraftModel. `stacked` and `tp` as in `CausalLM`."""

    def __init__(self, draft: Draft, dtype: str, stacked: bool = False, tp: TensorParallel = ONE_DEVICE):
        decoder = draft.decoder
        self.fc = Linear(decoder.hidden, len(draft.target_layer_ids) * draft.target_hidden, dtype, INPUTS, tp)
        self.hidden_norm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        self.layers = make_layers(decoder.layers, lambda: DecoderLayer(decoder, dtype, tp), stacked)
        self.norm = RmsNorm(decoder.hidden, decoder.epsilon, dtype)
        if draft.vocab is not None:
            self.embed_tokens = Linear(decoder.vocab, decoder.hidden, dtype, OUTPUTS)
            self.lm_head = Linear(draft.vocab, decoder.hidden, dtype, OUTPUTS)
            if draft.pruned:
                self.d2t = parameter((draft.vocab,), "int32", ["d2t"], (draft.vocab,))
        self.draft, self.tp = draft, tp

    def write_context(self, features: jax.Array, positions: jax.Array, write: WriteContext[Kv], kv: Kv) -> Kv:
        """Makes each layer's context keys and values of features [B, T, F] at absolute positions [B, T].

        `write` takes them. The layers' `input_layernorm` is not applied to the context.
        """
        context = self.hidden_norm(self.fc(self.tp.own_slice(features)))
        rotation = Rotation(self.draft.decoder.rope, positions, context.dtype)

        def run(index: LayerIndex, layer: DecoderLayer, kv: Kv) -> Kv:
            return write(kv, index, *layer.self_attn.keys_values(context, rotation))

        return run_layers(self.layers, self.draft.decoder.layers, run, kv)

    def block_hidden(self, x: jax.Array, positions: jax.Array, attend: AttendBlock) -> jax.Array:
        """Embedded block x [B, T, H] at absolute positions [B, T] → normed hidden states [B, T, H].

        Row i predicts the token at its own position. Row 0 is the anchor and predicts nothing.
        """
        rotation = Rotation(self.draft.decoder.rope, positions, x.dtype)

        def run(index: LayerIndex, layer: DecoderLayer, x: jax.Array) -> jax.Array:
            return layer(x, rotation, None, index, lambda kv, i, q, k, v: (attend(i, q, k, v), kv))[0]

        return self.norm(run_layers(self.layers, self.draft.decoder.layers, run, x))

    def embed(self, ids: jax.Array, target: CausalLM) -> jax.Array:
        """Token ids [B, T] → embeddings [B, T, H]."""
        return target.embed(ids) if self.draft.vocab is None else self.tp.look_up(self.embed_tokens.weight[...], ids)

    def logits(self, normed: jax.Array, target: CausalLM) -> jax.Array:
        """Normed hidden states [.., H] → float32 logits [.., V], over the draft's own vocabulary if it has one."""
        if self.draft.vocab is None:
            return target.head(normed)
        return matmul(self.lm_head.weight[...], normed, dtype=jnp.float32)

    def to_target(self, tokens: jax.Array) -> jax.Array:
        """Token ids of the draft's vocabulary → ids of the target's, int32. `d2t` holds offsets."""
        return tokens + self.d2t[...][tokens] if self.draft.pruned else tokens
