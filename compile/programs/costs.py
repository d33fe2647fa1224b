"""Roofline: the least time of an executable, from its bytes and flops and the chip's peaks (Williams et al. 2009).

A bound and no measurement. It assumes that memory and arithmetic overlap fully, that every weight is read once, and
that norms, biases, scales of int8 weights and small arguments cost nothing. The sums over the devices of layers and
embeddings are added: each layer waits for them. Their latency, and smaller exchanges, cost nothing.
B rows · T positions of this call · S kv positions · H hidden · V vocabulary
"""

from collections.abc import Iterable, Sequence

import msgspec

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.chips import Chip, find_slice
from dflash_aot.cache.model_config.architecture import (
    AttentionKind,
    Decoder,
    Draft,
    LayerKind,
    Target,
    list_attention,
)
from dflash_aot.cache.weight_recipe import ITEM_BYTES, PLAIN, WeightFormat, WeightFormats

# Sampling state of a row: bytes for each token of the vocabulary.
BIAS, PROMPTED, COUNTS = (ITEM_BYTES[dtype] for dtype in ("float32", "bool", "int32"))


class RooflineCost(msgspec.Struct, frozen=True):
    """Cost of one call on one device.

    Attributes:
        bytes: device memory read and written.
        flops: floating point operations.
        summed: bytes of the arrays that are summed over all devices.
    """

    bytes: float
    flops: float
    summed: float = 0.0

    def __add__(self, other: "RooflineCost") -> "RooflineCost":
        return sum_costs((self, other))

    def bound_seconds(self, chip: Chip, devices: int = 1) -> float:
        """The least time of the call on so many devices with a chip's figures, in seconds."""
        bandwidth = chip.bytes_per_second / chip.devices
        peak = chip.flops_per_second / chip.devices
        own = max(self.bytes / bandwidth, self.flops / peak)
        return own + self.exchange_seconds(chip, devices)

    def exchange_seconds(self, chip: Chip, devices: int) -> float:
        """The part of `bound_seconds` in which devices sum arrays; 0 where they are no whole slice."""
        topology = find_slice(chip, devices)
        return topology.all_reduce_seconds(self.summed) if topology else 0.0


class PairCosts:
    """Costs of the parts of a pair's programs, shared evenly by `devices`. Buckets are taken to be full.

    Attributes:
        target: facts of the target.
        draft: facts of the draft.
        formats: of the models' linear layers.
        ring: positions of a slot's ring of a sliding layer; 0 without rings.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        devices: int = 1,
        formats: WeightFormats = PLAIN,
        ring: int = 0,
    ):
        self.target = target
        self.draft = draft
        self._devices = devices
        self._item = ITEM_BYTES[dtype]
        self.formats = formats
        self.ring = ring

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

    def forward(
        self, blocks: Sequence[tuple[int, int]], S: int, logit_tokens: int, state_passes: int
    ) -> RooflineCost:
        """The target over `blocks` of B rows and T tokens each, with `logit_tokens` logits.

        Every device writes all features.
        `state_passes`: how often a hybrid's recurrent state is read or written. A verification reads it twice, because
        it commits it only when the accepted tokens are known.
        """
        decoder = self.target.decoder
        kinds = self.target.kinds
        tokens = sum(B * T for B, T in blocks)
        features = tokens * len(self.draft.target_layer_ids) * decoder.hidden
        parts = (
            self.embed(decoder, tokens),
            self.layers(decoder.hidden, kinds, self.formats.target, tokens),
            *(self.recur(B, T, state_passes) for B, T in blocks),
            self.write(kinds, tokens),
            *(self.attend(kinds, B, T, S, S) for B, T in blocks),
            self.head(decoder, decoder.vocab, self.formats.target, logit_tokens),
            RooflineCost(features * self._item, 0.0),
        )
        return sum_costs(parts)

    def embed(self, decoder: Decoder, tokens: int) -> RooflineCost:
        return self.share(tokens * decoder.hidden, 0) + self.sum(
            tokens * decoder.hidden * self._item
        )

    def layers(
        self, hidden: int, kinds: Sequence[LayerKind], format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        """Projections and MLPs of all layers. A layer sums its mixer's output and its MLP's, in float32."""

        def cost(kind: LayerKind) -> RooflineCost:
            rows = kind.count_rows(tokens, self._devices)
            per_row = len(kind.numbers) * hidden
            return self.multiply(
                per_row * rows.plain, "plain", 2 * tokens * per_row * rows.plain
            ) + self.multiply(per_row * rows.read, format_, 2 * tokens * per_row * rows.used)

        sums = 2 * sum(len(kind.numbers) for kind in kinds)
        exchanged = self.sum(sums * tokens * hidden * ITEM_BYTES["float32"])
        return sum_costs((*map(cost, kinds), exchanged))

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

    def attend(self, kinds: Sequence[LayerKind], B: int, T: int, S: int, seen: int) -> RooflineCost:
        """Reads keys and values of S positions. Scores of `seen` positions, and as many flops to mix their values.

        Where rings hold a window only, of no more positions than that.
        """

        def cost(one: AttentionKind) -> RooflineCost:
            most = _count_ring_positions(one) or max(S, seen)
            width = len(one.windows) * one.shape.width
            read = B * min(S, most) * self._count_kv_of(one)
            return self.share(read, 4 * B * T * min(seen, most) * width)

        return sum_costs(map(cost, list_attention(kinds)))

    def copy_rings(self) -> RooflineCost:
        """A slot's rings, read and written."""
        kinds = [one for one in list_attention(self.target.kinds) if one.pool == "rings"]
        return self.share(2 * self.ring * sum(map(self._count_kv_of, kinds)), 0)

    def copy_arrays(self, arrays: Iterable[ArraySpec]) -> RooflineCost:
        """Arrays, read and written."""
        return RooflineCost(2 * sum(one.shard_bytes(self._devices) for one in arrays), 0.0)

    def write(self, kinds: Sequence[LayerKind], tokens: int) -> RooflineCost:
        return self.share(tokens * self.count_kv(kinds), 0)

    def head(
        self, decoder: Decoder, vocab: int, format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        return self.multiply(vocab * decoder.hidden, format_, 2 * tokens * vocab * decoder.hidden)

    def count_kv(self, kinds: Sequence[LayerKind]) -> int:
        """Elements of the keys and values of a position in all layers; of a draft also the rows of their weights."""
        return sum(map(self._count_kv_of, list_attention(kinds)))

    def _count_kv_of(self, kind: AttentionKind) -> int:
        return len(kind.windows) * kind.shape.count_kv(self._devices)

    def multiply(self, weights: float, format_: WeightFormat, flops: float) -> RooflineCost:
        """Products with so many numbers of weights, on one device."""
        item = ITEM_BYTES["int8"] if format_ == "int8" else self._item
        return RooflineCost(weights * item / self._devices, flops / self._devices)

    def sum(self, size: float) -> RooflineCost:
        """Sums arrays of so many bytes over the devices."""
        return RooflineCost(0.0, 0.0, size if self._devices > 1 else 0.0)

    def share(self, elements: float, flops: float) -> RooflineCost:
        """The cost on one device."""
        return RooflineCost(elements * self._item / self._devices, flops / self._devices)


def _count_ring_positions(kind: AttentionKind) -> int:
    """Positions that a ring holds for a window; 0 for layers without rings."""
    window = kind.windows[0]
    return window.size if kind.pool == "rings" and window else 0


def sum_costs(costs: Iterable[RooflineCost]) -> RooflineCost:
    costs = tuple(costs)
    return RooflineCost(
        sum(cost.bytes for cost in costs),
        sum(cost.flops for cost in costs),
        sum(cost.summed for cost in costs),
    )
