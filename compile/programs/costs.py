"""Roofline: the least time of an executable, from its bytes and flops and the chip's peaks (Williams et al. 2009).

A bound and no measurement. It assumes that memory and arithmetic overlap fully, that every weight is read once, and
that exchanges between devices, norms, biases, scales of int8 weights and small arguments cost nothing.
B rows · T positions of this call · S kv positions · H hidden · V vocabulary
"""

from collections.abc import Iterable

import msgspec

from dflash_aot.cache.chips import Chip
from dflash_aot.cache.model_config.architecture import (
    Decoder,
    DenseMlp,
    Draft,
    MixtureOfExperts,
    Target,
)
from dflash_aot.cache.weight_recipe import ITEM_BYTES, PLAIN, WeightFormat, WeightFormats

# Sampling state of a row: bytes for each token of the vocabulary.
BIAS, PROMPTED, COUNTS = (ITEM_BYTES[dtype] for dtype in ("float32", "bool", "int32"))


class RooflineCost(msgspec.Struct, frozen=True):
    """Cost of one call on one device.

    Attributes:
        bytes: device memory read and written.
        flops: floating point operations.
    """

    bytes: float
    flops: float

    def __add__(self, other: "RooflineCost") -> "RooflineCost":
        return RooflineCost(self.bytes + other.bytes, self.flops + other.flops)

    def bound_seconds(self, chip: Chip) -> float:
        """The least time of the call on a chip, in seconds."""
        bandwidth = chip.bytes_per_second / chip.devices
        peak = chip.flops_per_second / chip.devices
        return max(self.bytes / bandwidth, self.flops / peak)


class PairCosts:
    """Costs of the parts of a pair's programs, shared evenly by `devices`. Buckets are taken to be full.

    Attributes:
        target: facts of the target.
        draft: facts of the draft.
        formats: of the models' linear layers.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        devices: int = 1,
        formats: WeightFormats = PLAIN,
    ):
        self.target = target
        self.draft = draft
        self._devices = devices
        self._item = ITEM_BYTES[dtype]
        self.formats = formats

    def convolve(self, tokens: int) -> RooflineCost:
        """The convolutions of all layers, four in each: every device computes them whole."""
        decoder = self.draft.decoder
        sizes = self.draft.convolution
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        projected = 4 * sizes.kernel * (decoder.hidden // sizes.group)  # of both modules of a layer
        weights = decoder.layers * decoder.hidden * (projected + 4 * sizes.kernel)
        return RooflineCost(weights * self._item, 2 * tokens * weights)

    def select(self, B: int, K: int) -> RooflineCost:
        """The selector's projection, and its codes of every candidate and anchor."""
        sizes = self.draft.heads.selector
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        projection = sizes.rank * self.draft.decoder.hidden
        C = sizes.candidates
        codes = self.share(
            B * sizes.rank * (K * C + 1 + (K - 1) * C), 2 * B * K * C * C * sizes.rank
        )
        return RooflineCost(projection * self._item, 2 * B * K * projection) + codes

    def follow(self, B: int, K: int) -> RooflineCost:
        """The Markov head: one pass over its second table, and the codes of the tokens before."""
        sizes = self.draft.heads.markov
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        vocab = self.draft.heads.vocab or self.draft.decoder.vocab
        return self.share(sizes.rank * (vocab + B * K), 2 * B * K * sizes.rank * vocab)

    def row_state(self, bytes_per_token: int) -> RooflineCost:
        """Sampling state with so many bytes for every token of the vocabulary."""
        return RooflineCost(self.target.decoder.vocab * bytes_per_token / self._devices, 0.0)

    def forward(self, B: int, T: int, S: int, logit_tokens: int, state_passes: int) -> RooflineCost:
        """The target over T tokens of each row, with `logit_tokens` logits. Every device writes all features.

        `state_passes`: how often a hybrid's recurrent state is read or written. A verification reads it twice, because
        it commits it only when the accepted tokens are known.
        """
        decoder = self.target.decoder
        features = B * T * len(self.draft.target_layer_ids) * decoder.hidden
        parts = (
            self.embed(decoder, B * T),
            self.layers(decoder, len(self.target.attention_layers), self.formats.target, B * T),
            self._recurrent_layers(B * T),
            self.recur(B, T, state_passes),
            self.write(decoder, len(self.target.attention_layers), B * T),
            self.attend(decoder, len(self.target.attention_layers), B, T, S, S),
            self.head(decoder, decoder.vocab, self.formats.target, logit_tokens),
            RooflineCost(features * self._item, 0.0),
        )
        return sum_costs(parts)

    def embed(self, decoder: Decoder, tokens: int) -> RooflineCost:
        return self.share(tokens * decoder.hidden, 0)

    def layers(
        self, decoder: Decoder, layers: int, format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        """Projections and MLPs of all layers with attention."""
        wide = 3 if decoder.attention.gated else 2  # queries, gates and results
        attention = wide * decoder.attention.heads * decoder.attention.head_dim
        attention += self.kv_width(decoder)
        per_row = layers * decoder.hidden
        projections = self.multiply(per_row * attention, format_, 2 * tokens * per_row * attention)
        return projections + self._mlps(decoder, layers, format_, tokens)

    def _mlps(
        self, decoder: Decoder, layers: int, format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        """MLPs of so many layers, with routers and the gates of shared experts, which are never int8."""
        read, used = _mlp_rows(decoder, tokens)
        per_row = layers * decoder.hidden
        router = per_row * _count_router_rows(decoder.mlp)
        return self.multiply(router, "plain", 2 * tokens * router) + self.multiply(
            per_row * read, format_, 2 * tokens * per_row * used
        )

    def _recurrent_layers(self, tokens: int) -> RooflineCost:
        """Projections and MLPs of a hybrid's other layers."""
        decoder = self.target.decoder
        sizes = self.target.recurrent
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        per_row = len(sizes.layers) * decoder.hidden
        small = per_row * 2 * sizes.value_heads  # never int8
        large = per_row * (sizes.channels + 2 * sizes.value_heads * sizes.value_dim)
        projections = self.multiply(small, "plain", 2 * tokens * small) + self.multiply(
            large, self.formats.target, 2 * tokens * large
        )
        return projections + self._mlps(decoder, len(sizes.layers), self.formats.target, tokens)

    def recur(self, B: int, T: int, passes: int) -> RooflineCost:
        """The recurrent states of B slots, read or written `passes` times, and three products of a state per token."""
        sizes = self.target.recurrent
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        numbers = len(sizes.layers) * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return RooflineCost(
            passes * B * numbers * ITEM_BYTES["float32"] / self._devices,
            3 * 2 * B * T * numbers / self._devices,
        )

    def attend(
        self, decoder: Decoder, layers: int, B: int, T: int, S: int, seen: int
    ) -> RooflineCost:
        """Reads keys and values of S positions. Scores of `seen` positions, and as many flops to mix their values."""
        width = decoder.attention.heads * decoder.attention.head_dim
        return self.share(
            layers * B * S * self.kv_width(decoder), 4 * layers * B * T * seen * width
        )

    def write(self, decoder: Decoder, layers: int, tokens: int) -> RooflineCost:
        return self.share(layers * tokens * self.kv_width(decoder), 0)

    def head(
        self, decoder: Decoder, vocab: int, format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        return self.multiply(vocab * decoder.hidden, format_, 2 * tokens * vocab * decoder.hidden)

    def kv_width(self, decoder: Decoder) -> int:
        """Elements of a position's keys and values in one layer, copies included; also the rows of their weights."""
        attention = decoder.attention
        return 2 * attention.kv_heads * attention.count_copies(self._devices) * attention.head_dim

    def multiply(self, weights: float, format_: WeightFormat, flops: float) -> RooflineCost:
        """Products with so many numbers of weights, on one device."""
        item = ITEM_BYTES["int8"] if format_ == "int8" else self._item
        return RooflineCost(weights * item / self._devices, flops / self._devices)

    def share(self, elements: float, flops: float) -> RooflineCost:
        """The cost on one device."""
        return RooflineCost(elements * self._item / self._devices, flops / self._devices)


def _mlp_rows(decoder: Decoder, tokens: int) -> tuple[float, float]:
    """Weight rows of hidden width in the MLP of a layer: how many a call reads, and how many each token uses.

    Without those of a router.
    """
    mlp = decoder.mlp
    if not isinstance(mlp, MixtureOfExperts):
        return 3 * mlp.width, 3 * mlp.width
    shared = 3 * mlp.shared
    return (
        mlp.expect_distinct(tokens) * 3 * mlp.width + shared,
        mlp.chosen * 3 * mlp.width + shared,
    )


def _count_router_rows(mlp: DenseMlp | MixtureOfExperts) -> int:
    """Rows of the router, and of the gate of a shared expert."""
    return mlp.count + (mlp.shared > 0) if isinstance(mlp, MixtureOfExperts) else 0


def sum_costs(costs: Iterable[RooflineCost]) -> RooflineCost:
    costs = tuple(costs)
    return RooflineCost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))
