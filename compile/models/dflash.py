"""The DFlash draft model: one bidirectional pass over a block, conditioned on the target's aux hidden states.

A draft uses the embedding and the head of the target, or its own. DFlash2 drafts have a causal convolution around every
sublayer, whose coefficients depend on the input; DFlash2 and DSpark drafts choose a token by the token before it
(`transitions`). References: z-lab/dflash `dflash/model.py`, vllm-project/speculators `models/dflash`,
deepseek-ai/DeepSpec.

B rows · T positions of this call · H hidden · V vocabulary, or this device's part of it · F width of the features
G kv heads · R query heads per kv head · D head width · J taps of a convolution, the rows that a result depends on
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import (
    BlockConvolution,
    Decoder,
    Draft,
    LayerKind,
)
from dflash_aot.compile.kernels.kernel_device import InputConvolution
from dflash_aot.compile.models.causal_lm import (
    CausalLM,
    DecoderLayer,
    Flow,
    Kv,
    Mix,
    find_stream,
    mix_by_attention,
    scale_logits,
)
from dflash_aot.compile.models.kv_cache import KvArrays
from dflash_aot.compile.models.layer_loop import (
    LayeredModule,
    LayerIndex,
    LayerPlace,
    LayerStack,
)
from dflash_aot.compile.models.layers import (
    INPUTS,
    OUTPUTS,
    AttentionInputs,
    LayerForm,
    Linear,
    ParameterSource,
    RmsNorm,
    make_rotations,
    parameter,
    read,
)
from dflash_aot.compile.models.matmul import add, round_to
from dflash_aot.compile.models.transitions import (
    ConfidenceLayer,
    MarkovTables,
    PathSelector,
    choose_path,
)

# Attention over the draft context and the block itself:
# (layer, inputs) → mixed [B,G,R,T,D]
AttendBlock = Callable[[LayerIndex, AttentionInputs], jax.Array]

# Takes the context keys and values of a layer:
# (kv, layer, keys [B,G,T,D], values [B,G,T,D]) → kv
WriteContext = Callable[[Kv, LayerIndex, jax.Array, jax.Array], Kv]

# Changes scores [B, K, P, C] of tokens [B, K, C].
AdjustScores = Callable[[jax.Array, jax.Array], jax.Array]
# Tokens among which a DFlash draft draws. The others together have little probability, unless the temperature is high
# and the draft uncertain. Then leaving them out is accepted more often: of a capped draft's first tokens at temperature
# 1, 0.15 instead of at most 0.08.
DRAWN_CANDIDATES = 32
# Tokens of each position among which a DSpark draft guesses its path. On the golden runs it is the path through all
# tokens in nine blocks of ten.
GUESSED_CANDIDATES = 16


class SublayerConvolution(nnx.Module):
    """`attention_conv` or `mlp_conv` of a draft layer. Every device holds the whole module, as it does the hidden rows.

    `base_kernel` [2, J, H] holds the convolution before the sublayer, then the one after it. Tap j reads the row that
    is j rows earlier.
    """

    def __init__(self, sizes: BlockConvolution, hidden: int, form: LayerForm):
        shape = (2, sizes.kernel, hidden)
        groups = hidden // sizes.group
        # float32 in any case, because the TPU compiler would convert it in an operation of its own.
        self.base_kernel = parameter(
            shape, "float32", ParameterSource(["base_kernel"], shape), sliced=False
        )
        self.kernel_projection = Linear(2 * sizes.kernel * groups, hidden, form.plain, sliced=False)
        self.sizes = sizes
        self.backend = form.backend

    def convolve_input(self, h: jax.Array, layer: LayerIndex = 0) -> tuple[jax.Array, jax.Array]:
        """The sublayer's input, convolved h [B, T, H], and the coefficients for its output, float32 [J, B, T, H].

        Both from the normed h. `layer` tells which part of a stack to take; without a stack it is ignored.
        """
        weight = self.kernel_projection.weight[...]
        base = self.base_kernel[...]
        stacked = weight.ndim > 2
        if stacked and (kernels := self.backend.kernels):
            stack = InputConvolution(weight, base, jnp.asarray(layer, jnp.int32), self.sizes.group)
            if found := kernels.convolve_input(h, stack):
                return found
        if stacked:
            weight, base = (
                jax.lax.dynamic_index_in_dim(one, layer, keepdims=False) for one in (weight, base)
            )
        before, after = self._compute_coefficients(h, weight, base)
        return self.convolve(h, before), after

    def _compute_coefficients(
        self, h: jax.Array, weight: jax.Array, base: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Coefficients before and after the sublayer: float32 [J, B, T, H]."""
        J = self.sizes.kernel
        dynamic = jnp.moveaxis(
            self.backend.matmul(weight, h).reshape(*h.shape[:2], 2 * J, -1), 2, 0
        )
        both = base.reshape(2 * J, 1, 1, -1) + self.backend.spread_groups(dynamic, self.sizes.group)
        return both[:J], both[J:]

    def convolve(self, x: jax.Array, coefficients: jax.Array) -> jax.Array:
        """Convolves the rows of each block, x and result [B, T, H]: no row depends on a later row or on another block.

        Coefficients float32 [J, B, T, H] of each tap and row. The sum is float32 and rounded once. Rows before the
        first count as zeros.
        """
        total = coefficients[0] * x.astype(jnp.float32)
        for tap in range(1, coefficients.shape[0]):
            total += coefficients[tap] * self.backend.shift_rows(x, tap)
        return round_to(total, x.dtype)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions before and after attention and MLP."""

    def __init__(self, sizes: BlockConvolution, decoder: Decoder, kind: LayerKind, form: LayerForm):
        super().__init__(decoder, kind, form)
        self.attention_conv, self.mlp_conv = (
            SublayerConvolution(sizes, decoder.hidden, form) for _ in range(2)
        )

    def __call__(
        self, x: jax.Array, kv: Kv, layer: LayerIndex, mix: Mix[Kv]
    ) -> tuple[jax.Array, Kv]:
        """As `DecoderLayer`."""
        h, after = self.attention_conv.convolve_input(self.input_layernorm(x), layer)
        mixed, kv = mix(kv, layer, self.mixer, h)
        x = add(x, self.attention_conv.convolve(mixed, after))
        h, after = self.mlp_conv.convolve_input(self.post_attention_layernorm(x), layer)
        return self.scale(add(x, self.mlp_conv.convolve(self.plain_mlp(h, layer), after))), kv


class DFlash(LayeredModule):
    """DFlashDraftModel, DFlash2DraftModel, or a DSpark draft."""

    def __init__(self, draft: Draft, form: LayerForm, head: LayerForm | None = None):
        """`head` is the form of the draft's own head, if it has one and is not of the same form."""
        decoder = draft.decoder
        self.fc = Linear(
            decoder.hidden, len(draft.target_layer_ids) * draft.target_hidden, form, INPUTS
        )
        self.hidden_norm = RmsNorm(decoder.hidden, decoder.epsilon, form.dtype)
        build: Callable[[LayerKind], DecoderLayer] = partial(DecoderLayer, decoder, form=form)
        if draft.convolution is not None:
            build = partial(ConvolvedLayer, draft.convolution, decoder, form=form)
        self.make_layers(draft.kinds, build, form.backend.stacks_layers)
        self.norm = RmsNorm(decoder.hidden, decoder.epsilon, form.dtype)
        heads = draft.heads
        drafted = heads.vocab or decoder.vocab
        if heads.vocab is not None:
            self.embed_tokens = Linear(decoder.vocab, decoder.hidden, form.plain, OUTPUTS)
            self.lm_head = Linear(heads.vocab, decoder.hidden, head or form, OUTPUTS)
            if draft.pruned:
                self.d2t = parameter((drafted,), "int32", ParameterSource(["d2t"], (drafted,)))
        if heads.selector is not None:
            self.candidate_selector = PathSelector(
                heads.selector, decoder.vocab, decoder.hidden, form
            )
        if heads.markov is not None:
            self.markov_head = MarkovTables(heads.markov, decoder.vocab, drafted, form)
        if heads.confidence is not None:
            self.confidence_head = ConfidenceLayer(heads.confidence, form)
        self.draft, self.tp = draft, form.tp

    def write_context(
        self, features: jax.Array, positions: jax.Array, write: WriteContext[Kv], kv: Kv
    ) -> Kv:
        """Makes each layer's context keys and values of features [B, T, F] at absolute positions [B, T].

        `write` takes them. The layers' `input_layernorm` is not applied to the context.
        """
        context = self.hidden_norm(self.fc(self.tp.own_slice(features)))
        rotations = make_rotations(self.kinds, positions, context.dtype, self.tp.backend)

        def run(place: LayerPlace, layer: DecoderLayer, kv: Kv) -> Kv:
            return write(kv, place.rank, *layer.mixer.keys_values(context, rotations))

        return self.run_layers(run, kv)

    def project_context(self, features: jax.Array, positions: jax.Array) -> KvArrays | None:
        """Keys and values of all layers as `write_context` makes them, each [L, B, G, T, D], by a single product.

        None where layers are unrolled or of several kinds.
        """
        if isinstance(self.layers, nnx.List) or len(self.kinds) > 1:
            return None
        context = self.hidden_norm(self.fc(self.tp.own_slice(features)))
        rotations = make_rotations(self.kinds, positions, context.dtype, self.tp.backend)
        stack = getattr(self, self.kinds[0].stack)
        both = jnp.moveaxis(stack.mixer.project_keys_values(context), 2, 0)
        return LayerStack(stack).run_at_once(
            lambda layer, own: layer.mixer.turn_keys(own, rotations), both
        )

    def block_hidden(self, x: jax.Array, positions: jax.Array, attend: AttendBlock) -> jax.Array:
        """Embedded block x [B, T, H] at absolute positions [B, T] → normed hidden states [B, T, H].

        `DraftHeads.predicts_next` tells which token a row predicts. Row 0 is the anchor.
        """
        rotations = make_rotations(self.kinds, positions, x.dtype, self.tp.backend)
        mix: Mix[None] = mix_by_attention(rotations, lambda kv, *block: (attend(*block), kv))

        def run(place: LayerPlace, layer: DecoderLayer, x: jax.Array) -> jax.Array:
            return layer(x, None, place.rank, mix)[0]

        if stream := find_stream(self, x.shape[:2], rotations, causal=False):

            def stream_one(place: LayerPlace, layer: DecoderLayer, flow: Flow) -> Flow:
                def mix_one(inputs: AttentionInputs) -> tuple[jax.Array, None]:
                    return attend(place.rank, inputs), None

                return stream.run(layer, place.rank, flow, mix_one)[0]

            flow = self.run_layers(stream_one, stream.begin(self.first_layer(positions), x))
            return self.norm(stream.read(flow))
        return self.norm(self.run_layers(run, x))

    def embed(self, ids: jax.Array, target: CausalLM) -> jax.Array:
        """Token ids [B, T] of a block → embeddings [B, T, H]."""
        own = self.draft.heads.vocab is not None
        x = self.tp.look_up(self.embed_tokens.weight[...], ids) if own else target.embed(ids)
        scale = self.draft.scaling.embedding
        return x if scale == 1 else round_to(x.astype(jnp.float32) * scale, x.dtype)

    def propose(
        self,
        hidden: jax.Array,
        anchors: jax.Array,
        target: CausalLM,
        k: int,
        adjust: AdjustScores | None = None,
        adjusts: jax.Array | None = None,
    ) -> jax.Array:
        """Normed hidden states [B, T, H] of the blocks of anchors [B] → the first K drafted tokens, int32 [B, K].

        With `adjust` the largest adjusted score decides; without it, the largest score. `adjusts`, a scalar bool, tells
        a DSpark draft whether `adjust` changes anything in this call.
        """
        heads = self.draft.heads
        if heads.markov is not None:
            return self._walk(hidden, anchors, target, k, adjust, adjusts)
        if heads.selector is None and adjust is None:
            return self.to_target(self._choose_likeliest(hidden, target, k))
        tokens, scores = self.score_candidates(hidden, anchors, target, k)
        return choose_path(scores if adjust is None else adjust(scores, tokens), tokens)

    def _walk(
        self,
        hidden: jax.Array,
        anchors: jax.Array,
        target: CausalLM,
        k: int,
        adjust: AdjustScores | None,
        adjusts: jax.Array | None,
    ) -> jax.Array:
        """The path of a DSpark draft: through all tokens, or with adjusted scores through the likeliest of them."""
        head = self.head_layer(target)
        width = len(head.weight)
        count = min(
            GUESSED_CANDIDATES if adjust is None else DRAWN_CANDIDATES, self.count_drafted()
        )
        rows = self._drafting_rows(hidden, k).reshape(-1, hidden.shape[-1])
        logits = self.tp.backend.score_outputs(
            head.weight[...], rows, read(head.weight_scale), count
        )
        found = self.tp.top_scores(logits, width, len(rows), count)
        values, candidates = (one.reshape(len(anchors), k, count) for one in found)
        tokens = self.to_target(candidates)
        scores = self.markov_head.scores(values, candidates, tokens, anchors)
        path = choose_path(scores if adjust is None else adjust(scores, tokens), tokens)
        wanted = jnp.bool_(True) if adjusts is None else ~adjusts
        return self.markov_head.settle_path(logits, path, anchors, self.to_target, wanted, count)

    def _drafting_rows(self, hidden: jax.Array, k: int) -> jax.Array:
        """The rows of blocks [B, T, H] that predict the first K drafted tokens: [B, K, H]."""
        first = self.draft.heads.first_row
        return hidden[:, first : first + k]

    def count_drafted(self) -> int:
        """Tokens that the draft can draft."""
        return self.draft.heads.vocab or self.draft.decoder.vocab

    def _choose_likeliest(self, hidden: jax.Array, target: CausalLM, k: int) -> jax.Array:
        """The outputs of the head with the largest logits, int32 [B, K]: a scale and a cap keep the order."""

        def find(drafted: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.tp.find_best(self.head(drafted, target))

        values, tokens = self.tp.backend.find_drafted(find, hidden, k, self.draft.heads.first_row)
        return self.tp.choose_best((values, tokens))

    def score_candidates(
        self, hidden: jax.Array, anchors: jax.Array, target: CausalLM, k: int
    ) -> tuple[jax.Array, jax.Array]:
        """The candidates of each position, int32 [B, K, C], and their scores float32 [B, K, P, C].

        Arguments are those of `propose`. With a selector P is C, as in `PathSelector.scores`; otherwise the scores are
        the logits, whatever token comes before, and P is 1.
        """
        selector = self.draft.heads.selector
        head = self.head_layer(target)
        # The other positions are dropped before the product: a draft of 8 rows takes 4 to 8 % less time by the
        # compiler's estimates for v5e, v5p and v6e, and a tenth of the memory with K = 3.
        drafted = self._drafting_rows(hidden, k)
        count = min(DRAWN_CANDIDATES, self.count_drafted())
        values, tokens = self.tp.top_outputs(
            head.weight[...],
            drafted,
            read(head.weight_scale),
            count if selector is None else selector.candidates,
        )
        logits = self.scale_logits(values)
        if selector is None:
            return self.to_target(tokens), logits[:, :, None]
        return tokens, self.candidate_selector.scores(drafted, logits, tokens, anchors)

    def head(self, normed: jax.Array, target: CausalLM) -> jax.Array:
        """Normed hidden states [.., H] → the head's output, float32 [.., V], over the draft's own vocabulary if any."""
        return self.head_layer(target)(normed, jnp.float32)

    def head_layer(self, target: CausalLM) -> Linear:
        """The layer of `head`: the target's, unless the draft has its own."""
        return target.head_layer if self.draft.heads.vocab is None else self.lm_head

    def scale_logits(self, head: jax.Array) -> jax.Array:
        """See `causal_lm.scale_logits`."""
        return scale_logits(head, self.draft.scaling)

    def logits(self, normed: jax.Array, target: CausalLM) -> jax.Array:
        """Normed hidden states [.., H] → float32 logits [.., V], over the draft's own vocabulary if it has one."""
        return self.scale_logits(self.head(normed, target))

    def to_target(self, tokens: jax.Array) -> jax.Array:
        """Token ids of the draft's vocabulary → ids of the target's, int32. `d2t` holds offsets."""
        return tokens + self.d2t[...][tokens] if self.draft.pruned else tokens
