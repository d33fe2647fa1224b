"""Facts of target and draft models: exactly what executables depend on, as read from `config.json`.

`target`, `draft` and `speculators_draft` fill these structs. The structs are stored in the manifest.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.rope import Rope, read_rope

# Far beyond any model, and small enough that a list with one item per layer or head position stays small.
MAX_LAYERS = 1 << 12
MAX_HEAD_DIM = 1 << 14
UNLIMITED_WINDOW = 1 << 30  # more than any distance between two positions
# config, head_dim, positions → rotary embedding
RopeReader = Callable[[ConfigFile, int, int], Rope]


@dataclass(frozen=True)
class WeightRows:
    """Weight rows of hidden width in a part of a layer, on all devices, for a call.

    Attributes:
        plain: of matrices that are never int8, such as routers and the gates of shared experts.
        read: of the others, how many a call reads.
        used: of those, how many each token uses.
    """

    plain: float
    read: float
    used: float

    def __add__(self, other: "WeightRows") -> "WeightRows":
        return WeightRows(self.plain + other.plain, self.read + other.read, self.used + other.used)


class AttentionShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one attention layer.

    Attributes:
        heads: query heads; heads · head_dim may differ from the hidden width.
        kv_heads: key and value heads.
        head_dim: width of a head.
        normed: queries and keys pass an RMS norm per head.
        biased: all four projections have a bias.
        gated: the result is multiplied by the sigmoid of a gate, which the query projection makes
            in addition to each head's query.
        sinks: a learned score per query head takes part in the softmax, without a value.
        keys_as_values: the values are what the key projection makes, before norm and rotation.
        normed_values: values pass an RMS norm without a weight.
        scaled: scores are divided by the root of head_dim.
    """

    heads: int
    kv_heads: int
    head_dim: int
    normed: bool = True
    biased: bool = False
    gated: bool = False
    sinks: bool = False
    keys_as_values: bool = False
    normed_values: bool = False
    scaled: bool = True

    def count_copies(self, devices: int) -> int:
        """How often each kv head is held, so that `devices` devices share them evenly.

        1 if the number of kv heads is a multiple. Devices that share the query heads evenly also share the queries of
        each copy evenly: if d divides G · R, then d / gcd(d, G) divides R.
        """
        return devices // math.gcd(devices, self.kv_heads)

    def count_kv_heads(self, devices: int) -> int:
        """Kv heads on all devices, copies included."""
        return self.kv_heads * self.count_copies(devices)

    @property
    def width(self) -> int:
        """Width of the queries of all heads, and of the results."""
        return self.heads * self.head_dim

    def count_kv(self, devices: int) -> int:
        """Elements of a position's keys and values, copies included."""
        return 2 * self.count_kv_heads(devices) * self.head_dim

    def count_kv_rows(self, devices: int) -> int:
        """Rows of the weights that make a position's keys and values, copies included."""
        return self.count_kv(devices) // (2 if self.keys_as_values else 1)

    def count_rows(self, devices: int) -> WeightRows:
        """Rows of the projections, copies included."""
        rows = (3 if self.gated else 2) * self.width + self.count_kv_rows(devices)
        return WeightRows(0, rows, rows)


# Of the gate of an MLP; gelu is its approximation by tanh.
Activation = Literal["silu", "gelu"]


class DenseMlp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dense"):
    """A gated MLP, down(activation(gate x) · up x).

    Attributes:
        width: its intermediate size.
        activation: of the gate.
    """

    width: int
    activation: Activation = "silu"

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width that devices share."""
        return (self.width,)

    def count_rows(self, tokens: int) -> WeightRows:
        """Rows of the three matrices, for a call with so many tokens."""
        return WeightRows(0, 3 * self.width, 3 * self.width)


class ClampedActivation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What gpt-oss's experts compute: (1 + up) · gate · sigmoid(slope · gate), with bounds on gate and up.

    Attributes:
        limit: gate is at most this, up at most this in magnitude.
        slope: of the sigmoid.
    """

    limit: float
    slope: float


class MixtureOfExperts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="experts"):
    """Gated MLPs with a router.

    Attributes:
        count: number of experts.
        chosen: experts that the router takes for each token.
        width: intermediate size of one expert.
        normalized: the router's weights of the chosen experts are scaled to sum to one.
        shared: intermediate size of a further gated MLP, through which every token goes, times the
            sigmoid of a gate; 0 for none.
        clamped: the activation of gpt-oss's experts, whose products and router have biases; None
            for up · activation(gate) without biases.
        activation: of the experts' gates and that of `dense`.
        dense: intermediate size of a gated MLP next to the experts, through which every token goes;
            0 for none. Both parts and the router have norms of their own, and the router scales each
            expert (Gemma 4).
    """

    count: int
    chosen: int
    width: int
    normalized: bool
    shared: int = 0
    clamped: ClampedActivation | None = None
    activation: Activation = "silu"
    dense: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width that devices share."""
        return tuple(width for width in (self.width, self.shared, self.dense) if width)

    def expect_distinct(self, tokens: int) -> float:
        """How many distinct experts n tokens choose, if every choice is equally likely: E · (1 - (1 - c/E)^n)."""
        return self.count * (1 - (1 - self.chosen / self.count) ** tokens)

    def count_rows(self, tokens: int) -> WeightRows:
        """Rows of the router, of the experts that so many tokens choose, and of what every token goes through."""
        always = 3 * (self.shared + self.dense)
        return WeightRows(
            plain=self.count + (self.shared > 0),
            read=always + self.expect_distinct(tokens) * 3 * self.width,
            used=always + self.chosen * 3 * self.width,
        )


# What an RMS norm multiplies x / rms(x) with: its weight, after x / rms(x) is rounded ("rounded", Qwen3); or before
# that in float32 1 + weight ("unit_offset", Qwen3.5), or the weight ("float32", Gemma 4, gpt-oss).
NormProduct = Literal["rounded", "unit_offset", "float32"]


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part that target and draft have in common: pre-norm layers of attention and MLP.

    Attributes:
        layers: number of layers.
        hidden: hidden width.
        mlp, attention, rope: the same in every layer.
        epsilon: of the RMS norms.
        vocab: tokens.
        positions: `max_position_embeddings`.
        norm: of all RMS norms with a weight.
        sandwiched: norms follow attention and MLP too.
        scaled_layers: a layer ends with the product of its output and a learned scalar.
    """

    layers: int
    hidden: int
    mlp: DenseMlp | MixtureOfExperts
    attention: AttentionShape
    rope: Rope
    epsilon: float
    vocab: int
    positions: int
    norm: NormProduct = "rounded"
    sandwiched: bool = False
    scaled_layers: bool = False

    @property
    def reach(self) -> int:
        """The longest text: `positions`, or what YaRN reaches where a config with YaRN keeps the original number."""
        return max(self.positions, self.rope.reach)


class GatedDeltaNet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Gated DeltaNet layers of a hybrid target, which have a recurrent state instead of keys and values.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values and of the state, a multiple of key_heads.
        key_dim, value_dim: width of a key and of a value head; the state of a value head is a
            matrix of both.
        kernel: rows that a result of the convolution depends on, its own included.
        layers: which layers of the decoder these are, in ascending order. The others have full
            attention.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: tuple[int, ...]

    @property
    def channels(self) -> int:
        """Channels of the convolution: all heads' queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def divided(self) -> tuple[str, int]:
        """What devices share evenly: its name and size. The value heads follow."""
        return ("linear key heads", self.key_heads)

    def count_rows(self, devices: int) -> WeightRows:
        """Rows of the projections."""
        rows = self.channels + 2 * self.value_heads * self.value_dim
        return WeightRows(2 * self.value_heads, rows, rows)


class SlidingWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The positions that a layer attends to: a sliding window, or all earlier ones. Drafts read a window in four ways.

    For row q of a block that starts at position n, and context position k: visible if q - size < k, or, with
    `anchored` (speculators), if n - size ≤ k for all rows. For block position k: visible if k ≤ q with `causal`;
    otherwise if |k - q| < size, or always with `anchored`.

    Attributes:
        size: positions.
        causal: block rows see no later row.
        anchored: the window starts from the anchor for all rows.
    """

    size: int
    causal: bool
    anchored: bool = False

    @property
    def slides(self) -> bool:
        """Whether the window hides context. Otherwise it only makes the block causal."""
        return self.size < UNLIMITED_WINDOW


CAUSAL = SlidingWindow(UNLIMITED_WINDOW, causal=True)


# Keys and values of all positions in a request's pages, or of a window only in a ring of pages per slot.
KvPool = Literal["pages", "rings"]


class AttentionKind(NamedTuple):
    """Attention that several layers compute with parameters of the same shapes.

    Attributes:
        shape: of each layer.
        rope: of queries and keys.
        windows: one entry per layer, None for full attention: what it attends to.
        pool: where its keys and values are.
    """

    shape: AttentionShape
    rope: Rope
    windows: tuple[SlidingWindow | None, ...]
    pool: KvPool = "pages"

    @property
    def divided(self) -> tuple[str, int]:
        """What devices share evenly: its name and size. Kv heads are copied until they can be shared."""
        return ("query heads", self.shape.heads)

    def count_rows(self, devices: int) -> WeightRows:
        """Rows of the projections, copies included."""
        return self.shape.count_rows(devices)


class LayerKind(NamedTuple):
    """The layers of a model that have the same parameters.

    Attributes:
        stack: name of their stacked weights.
        mixer: what mixes the tokens.
        mlp: of each of them.
        numbers: the layers, in ascending order.
    """

    stack: str
    mixer: AttentionKind | GatedDeltaNet
    mlp: DenseMlp | MixtureOfExperts
    numbers: tuple[int, ...]

    def count_rows(self, tokens: int, devices: int) -> WeightRows:
        """Weight rows of one layer that a call with so many tokens reads and uses."""
        return self.mixer.count_rows(devices) + self.mlp.count_rows(tokens)


def list_attention(kinds: Iterable[LayerKind]) -> list[AttentionKind]:
    """Returns the attention of the kinds that have one."""
    return [kind.mixer for kind in kinds if isinstance(kind.mixer, AttentionKind)]


class SlidingLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of a target with a sliding window and attention of a shape of their own.

    Attributes:
        attention: of each of them.
        rope: of their queries and keys.
        window: positions, the query's included.
        layers: which layers of the decoder these are, in ascending order.
    """

    attention: AttentionShape
    rope: Rope
    window: int
    layers: tuple[int, ...]


class Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scalars around a model's layers.

    Attributes:
        embedding: factor of the embedding; of a draft, of the block's embedding.
        logits: factor of the head's output.
        cap: bounds the logits after that: cap · tanh(logits / cap). None for no bound.
    """

    embedding: float = 1.0
    logits: float = 1.0
    cap: float | None = None


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A target model.

    Attributes:
        tied: the embedding is also the head.
        recurrent: the Gated DeltaNet layers of a hybrid target; None where all layers have
            attention.
        windows: what each layer attends to; empty where every layer attends to all earlier positions.
        sliding: layers with other attention than that of `decoder`; None where all are alike.
        scaling: of the embedding and the logits.
    """

    decoder: Decoder
    tied: bool
    recurrent: GatedDeltaNet | None = None
    windows: tuple[SlidingWindow, ...] = ()
    sliding: SlidingLayers | None = None
    scaling: Scaling = Scaling()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have the attention of `decoder`, and keys and values in pages."""
        other = self.recurrent or self.sliding
        others = other.layers if other else ()
        return tuple(layer for layer in range(self.decoder.layers) if layer not in others)

    @property
    def caches_prefixes(self) -> bool:
        """Whether pages hold all that a prompt's beginning leaves: no layer has state per slot."""
        return self.recurrent is None and self.sliding is None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of its layers."""
        numbers = self.attention_layers
        windows = self.windows or (CAUSAL,) * len(numbers)
        kinds = [_attention_layers(self.decoder, numbers, windows)]
        if self.recurrent:
            others = self.recurrent.layers
            kinds.append(LayerKind("recurrent_layers", self.recurrent, self.decoder.mlp, others))
        if own := self.sliding:
            windows = (SlidingWindow(own.window, causal=True),) * len(own.layers)
            attention = AttentionKind(own.attention, own.rope, windows, pool="rings")
            kinds.append(LayerKind("sliding_layers", attention, self.decoder.mlp, own.layers))
        return tuple(kinds)


class BlockConvolution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The causal convolution of a DFlash2 draft, over the rows of a block.

    Attributes:
        kernel: rows that a result depends on, its own included.
        group: neighbouring channels that share the input-dependent part of a coefficient.
    """

    kernel: int
    group: int


class CandidateSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The selector of a DFlash2 draft, which chooses a path through the likeliest tokens of each position.

    Attributes:
        rank: width of a token's code.
        candidates: tokens to choose from at each position.
    """

    rank: int
    candidates: int


class MarkovHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Markov head of a DSpark draft: adds to each logit a bias that depends on the token before.

    Attributes:
        rank: width of a token's code.
    """

    rank: int


class ConfidenceHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A head that predicts acceptance. It is loaded, and no program uses it.

    Attributes:
        width: of its input: a hidden state, and the code of the token before if it reads one.
    """

    width: int


class DraftHeads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the hidden states of a block become drafted tokens.

    Attributes:
        vocab: tokens of the draft's own embedding and head, None if the draft uses the target's.
        predicts_next: row i predicts the token after its position, so that the anchor's row drafts too (anchor
            sampling). Otherwise row i predicts the token at its position, and row 0 nothing.
        k: tokens per round that the draft's makers suggest, None if they suggest none.
        selector: of a DFlash2 draft, None in others.
        markov: of a DSpark draft, None in others.
        confidence: None if there is none.
    """

    vocab: int | None = None
    predicts_next: bool = False
    k: int | None = None
    selector: CandidateSelector | None = None
    markov: MarkovHead | None = None
    confidence: ConfidenceHead | None = None

    @property
    def chains(self) -> bool:
        """Whether a drafted token depends on the one before it."""
        return self.selector is not None or self.markov is not None

    @property
    def first_row(self) -> int:
        """The first row of a block that predicts a token."""
        return 0 if self.predicts_next else 1


Dialect = Literal["z-lab", "speculators", "open-spec"]


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A DFlash draft or a relative: a DFlash2 draft has a convolution and a selector, a DSpark draft a Markov head.

    Attributes:
        block: tokens of a block as trained, anchor included.
        mask_token: the token id of the positions to draft.
        target_layer_ids: the target layers, counted from 0, whose output hidden states are the
            draft's features (aux hidden states).
        target_hidden: the target's hidden width.
        windows: one entry per layer, None for full attention.
        dialect: the format of the config file.
        scaling: of the block's embedding and of the logits.
        convolution: in every layer, before and after attention and MLP; None in a DFlash draft.
        heads: which rows draft, and how.
    """

    decoder: Decoder
    block: int
    mask_token: int
    target_layer_ids: tuple[int, ...]
    target_hidden: int
    windows: tuple[SlidingWindow | None, ...]
    dialect: Dialect = "z-lab"
    scaling: Scaling = Scaling()
    convolution: BlockConvolution | None = None
    heads: DraftHeads = DraftHeads()

    @property
    def kinds(self) -> tuple[LayerKind]:
        """The kind of all its layers."""
        return (_attention_layers(self.decoder, tuple(range(self.decoder.layers)), self.windows),)

    @property
    def generation(self) -> str:
        """The kind of draft as its makers name it: "DFlash", "DFlash2" or "DSpark"."""
        if self.heads.markov is not None:
            return "DSpark"
        return "DFlash" if self.heads.selector is None else "DFlash2"

    @property
    def pruned(self) -> bool:
        """Whether the head covers only part of the target's vocabulary, and maps its tokens (`d2t`)."""
        return self.heads.vocab not in (None, self.decoder.vocab)

    @property
    def max_k(self) -> int:
        """The most tokens that a block drafts: one per row that predicts."""
        return self.block - self.heads.first_row

    @property
    def verified_block(self) -> int:
        """The longest block that a round verifies: the anchor and `max_k` drafted tokens."""
        return self.max_k + 1

    @property
    def default_k(self) -> int:
        """K unless the user sets it: the makers' suggestion, otherwise `max_k`."""
        return self.heads.k or self.max_k


def _attention_layers(
    decoder: Decoder, numbers: tuple[int, ...], windows: tuple[SlidingWindow | None, ...]
) -> LayerKind:
    attention = AttentionKind(decoder.attention, decoder.rope, windows)
    return LayerKind("layers", attention, decoder.mlp, numbers)


def default_target_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Returns the layer ids of a draft whose config has none (z-lab/dflash `build_target_layer_ids`)."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(draft_layers))


def read_decoder(
    config: ConfigFile,
    mlp: DenseMlp | MixtureOfExperts,
    normed: bool,
    head_dim: int,
    read_rope: RopeReader = read_rope,
) -> Decoder:
    """Reads the keys that targets and drafts have in common. Raises BadCheckpoint; a missing key has no default.

    What a family computes in addition is replaced in the result.
    """
    if (activation := config.require("hidden_act", str)) != "silu":
        raise config.refusal("hidden_act", activation, "only 'silu' is supported")
    attention = AttentionShape(
        heads=config.positive("num_attention_heads"),
        kv_heads=config.positive("num_key_value_heads"),
        head_dim=head_dim,
        normed=normed,
        biased=bool(config.optional("attention_bias", bool)),
    )
    check_attention(config, attention)
    positions = config.positive("max_position_embeddings")
    return Decoder(
        layers=config.positive("num_hidden_layers", most=MAX_LAYERS),
        hidden=config.positive("hidden_size"),
        mlp=mlp,
        attention=attention,
        rope=read_rope(config, head_dim, positions),
        epsilon=config.number_within("rms_norm_eps", 1e-30, 1.0),
        vocab=config.positive("vocab_size"),
        positions=positions,
    )


def check_attention(
    config: ConfigFile, attention: AttentionShape, head_dim_key: str = "head_dim"
) -> None:
    """Raises BadCheckpoint for heads that cannot be grouped, or cannot be rotated."""
    head_dim = attention.head_dim
    if attention.heads % attention.kv_heads:
        raise config.refusal(
            "num_attention_heads",
            attention.heads,
            f"not a multiple of {attention.kv_heads} kv heads",
        )
    if head_dim > MAX_HEAD_DIM:
        raise config.refusal(head_dim_key, head_dim, f"expected at most {MAX_HEAD_DIM}")
    if head_dim % 2:
        raise config.refusal(head_dim_key, head_dim, "rotary embedding needs an even width")


def read_dense_mlp(config: ConfigFile) -> DenseMlp:
    """Reads the MLP of a dense model. Raises BadCheckpoint."""
    return DenseMlp(config.positive("intermediate_size"))
