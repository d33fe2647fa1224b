"""Roofline: the least time of an executable, from its bytes and flops and the chip's peaks (Williams et al. 2009).

A bound and no measurement. It assumes that memory and arithmetic overlap fully, that every weight is read once, and
that exchanges between devices, norms, biases, scales of int8 weights and small arguments cost nothing.
B rows · T positions of this call · S kv positions · H hidden · V vocabulary
"""

from collections.abc import Iterable

import msgspec

from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.model_config.architecture import Decoder, Draft, MixtureOfExperts, Target
from dflash_aot.cache.sampling_state import count_mask_words
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.topology import Chip
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


class RoundBound(msgspec.Struct, frozen=True):
    """The least seconds of one round, by executable. A round without speculation has no draft.

    Attributes:
        draft: seconds.
        verify: seconds.
        kv_write: seconds.
    """

    draft: float
    verify: float
    kv_write: float

    @property
    def round(self) -> float:
        """Seconds of the whole round."""
        return self.draft + self.verify + self.kv_write


class Roofline:
    """Costs of a pair's executables for one grid, shared evenly by `devices`. Buckets are taken to be full."""

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        grid: Grid,
        devices: int = 1,
        formats: WeightFormats = PLAIN,
    ):
        self._target = target
        self._draft = draft
        self._grid = grid
        self._devices = devices
        self._item = ITEM_BYTES[dtype]
        self._formats = formats

    def bound_round(self, bucket: Bucket, chip: Chip) -> RoundBound:
        """The bound of a round in a bucket. If the grid has drafts, K = 0 has a kv_write, at most as often."""
        B = bucket.batch
        S = bucket.length
        K = bucket.k
        draft = self.draft(B, S, K).bound_seconds(chip) if K else 0.0
        written = self.kv_write(B, K + 1).bound_seconds(chip) if self._grid.k[-1] else 0.0
        return RoundBound(draft, self.verify(B, S, K).bound_seconds(chip), written)

    def cost(self, signature: Signature) -> RooflineCost:
        """The cost of the executable with this signature."""
        sizes = signature.bucket
        match signature.program:
            case "prefill":
                return self._forward(
                    1, sizes["prefill"], sizes["length"], logit_tokens=1, state_passes=2
                )
            case "scored_prefill":
                return self._forward(
                    1,
                    sizes["prefill"],
                    sizes["length"],
                    logit_tokens=sizes["prefill"],
                    state_passes=2,
                )
            case "draft":
                return self.draft(sizes["batch"], sizes["length"], sizes["k"])
            case "verify":
                return self.verify(sizes["batch"], sizes["length"], sizes["k"])
            case "sampled_verify":
                return self.sampled_verify(sizes["batch"], sizes["length"], sizes["k"])
            case "constrained_verify":
                return self.constrained_verify(sizes["batch"], sizes["length"], sizes["k"])
            case "kv_write":
                return self.kv_write(sizes["rows"], sizes["width"])
            case "rounds":
                return self.rounds(sizes["batch"], sizes["length"], sizes["k"], sizes["rounds"])
            case "sampled_rounds":
                return self.rounds(
                    sizes["batch"], sizes["length"], sizes["k"], sizes["rounds"], sampled=True
                )
            case "move":
                return self.move("bias" in signature.state)
            case "admit":
                return self.admit()

    def verify(self, B: int, S: int, K: int) -> RooflineCost:
        """The target over K+1 tokens of each row, with the logits of all of them."""
        return self._forward(B, K + 1, S, logit_tokens=B * (K + 1), state_passes=3)

    def sampled_verify(self, B: int, S: int, K: int) -> RooflineCost:
        """As `verify`, and each row's bias, prompt mask and counts are read; the counts are also written."""
        return self.verify(B, S, K) + self._row_state(B * (BIAS + PROMPTED + 2 * COUNTS))

    def constrained_verify(self, B: int, S: int, K: int) -> RooflineCost:
        """As `sampled_verify`, and a mask of allowed tokens is read for each position."""
        words = count_mask_words(self._target.decoder.vocab)
        return self.sampled_verify(B, S, K) + RooflineCost(
            B * (K + 1) * words * ITEM_BYTES["int32"], 0.0
        )

    def draft(self, B: int, S: int, K: int) -> RooflineCost:
        """The draft over the whole block of each row, with the logits of K tokens, and the parts of DFlash2."""
        decoder = self._draft.decoder
        T = self._draft.block
        vocab = self._draft.vocab or self._target.decoder.vocab
        head = self._formats.draft if self._draft.pruned else self._formats.target
        parts = (
            self._embed(decoder, B * T),
            self._layers(decoder, decoder.layers, self._formats.draft, B * T),
            self._attend(decoder, decoder.layers, B, T, S, S + T),
            self._head(decoder, vocab, head, B * K),
            self._convolve(B * T),
            self._select(B, K),
        )
        return _sum(parts)

    def _convolve(self, tokens: int) -> RooflineCost:
        """The convolutions of all layers, four in each: every device computes them whole."""
        decoder = self._draft.decoder
        sizes = self._draft.convolution
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        projected = 4 * sizes.kernel * (decoder.hidden // sizes.group)  # of both modules of a layer
        weights = decoder.layers * decoder.hidden * (projected + 4 * sizes.kernel)
        return RooflineCost(weights * self._item, 2 * tokens * weights)

    def _select(self, B: int, K: int) -> RooflineCost:
        """The selector's projection, and its codes of every candidate and anchor."""
        sizes = self._draft.selector
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        projection = sizes.rank * self._draft.decoder.hidden
        C = sizes.candidates
        codes = self._share(
            B * sizes.rank * (K * C + 1 + (K - 1) * C), 2 * B * K * C * C * sizes.rank
        )
        return RooflineCost(projection * self._item, 2 * B * K * projection) + codes

    def kv_write(self, rows: int, width: int) -> RooflineCost:
        """Features through `fc`, then keys and values of each layer, which are written."""
        decoder = self._draft.decoder
        tokens = rows * width
        features = len(self._draft.target_layer_ids) * self._draft.target_hidden
        weights = decoder.hidden * (features + decoder.layers * _kv_width(decoder))
        products = self._multiply(weights, self._formats.draft, 2 * tokens * weights)
        return (
            products
            + self._share(tokens * features, 0)
            + self._write(decoder, decoder.layers, tokens)
        )

    def rounds(self, B: int, S: int, K: int, rounds: int, sampled: bool = False) -> RooflineCost:
        """All rounds of a multi-round step. With K = 0 the draft's kv is written once, after the last round."""
        verify = self.sampled_verify(B, S, K) if sampled else self.verify(B, S, K)
        if not K:
            return _sum([verify] * rounds) + self.kv_write(B, rounds)
        return _sum([self.draft(B, S, K), verify, self.kv_write(B, K + 1)] * rounds)

    def move(self, samples: bool) -> RooflineCost:
        """A slot's recurrent state, and with sampling its bias, prompt mask and counts, read and written."""
        sampling = self._row_state(2 * (BIAS + PROMPTED + COUNTS) if samples else 0)
        return sampling + self._recur(1, 0, passes=2)

    def admit(self) -> RooflineCost:
        """A slot's bias, prompt mask and counts, written. Every device reads all of them."""
        whole = self._target.decoder.vocab * (BIAS + PROMPTED + COUNTS)
        return self._row_state(BIAS + PROMPTED + COUNTS) + RooflineCost(whole, 0.0)

    def _row_state(self, bytes_per_token: int) -> RooflineCost:
        """Sampling state with so many bytes for every token of the vocabulary."""
        return RooflineCost(self._target.decoder.vocab * bytes_per_token / self._devices, 0.0)

    def _forward(
        self, B: int, T: int, S: int, logit_tokens: int, state_passes: int
    ) -> RooflineCost:
        """The target over T tokens of each row, with `logit_tokens` logits. Every device writes all features.

        `state_passes`: how often a hybrid's recurrent state is read or written. A verification reads it twice, because
        it commits it only when the accepted tokens are known.
        """
        decoder = self._target.decoder
        features = B * T * len(self._draft.target_layer_ids) * decoder.hidden
        parts = (
            self._embed(decoder, B * T),
            self._layers(decoder, len(self._target.attention_layers), self._formats.target, B * T),
            self._recurrent_layers(B * T),
            self._recur(B, T, state_passes),
            self._write(decoder, len(self._target.attention_layers), B * T),
            self._attend(decoder, len(self._target.attention_layers), B, T, S, S),
            self._head(decoder, decoder.vocab, self._formats.target, logit_tokens),
            RooflineCost(features * self._item, 0.0),
        )
        return _sum(parts)

    def _embed(self, decoder: Decoder, tokens: int) -> RooflineCost:
        return self._share(tokens * decoder.hidden, 0)

    def _layers(
        self, decoder: Decoder, layers: int, format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        """Projections and MLPs of all layers with attention."""
        wide = 3 if decoder.attention.gated else 2  # queries, gates and results
        attention = wide * decoder.attention.heads * decoder.attention.head_dim + _kv_width(decoder)
        read, used = _mlp_rows(decoder, tokens)
        per_row = layers * decoder.hidden
        projections = self._multiply(per_row * attention, format_, 2 * tokens * per_row * attention)
        router = per_row * (decoder.mlp.count if isinstance(decoder.mlp, MixtureOfExperts) else 0)
        return _sum(
            (
                projections,
                self._multiply(router, "plain", 2 * tokens * router),
                self._multiply(per_row * read, format_, 2 * tokens * per_row * used),
            )
        )

    def _recurrent_layers(self, tokens: int) -> RooflineCost:
        """Projections and MLPs of a hybrid's other layers."""
        decoder = self._target.decoder
        sizes = self._target.recurrent
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        per_row = len(sizes.layers) * decoder.hidden
        small = per_row * 2 * sizes.value_heads  # never int8
        large = per_row * (
            sizes.channels + 2 * sizes.value_heads * sizes.value_dim + _mlp_rows(decoder, tokens)[0]
        )
        return self._multiply(small, "plain", 2 * tokens * small) + self._multiply(
            large, self._formats.target, 2 * tokens * large
        )

    def _recur(self, B: int, T: int, passes: int) -> RooflineCost:
        """The recurrent states of B slots, read or written `passes` times, and three products of a state per token."""
        sizes = self._target.recurrent
        if sizes is None:
            return RooflineCost(0.0, 0.0)
        numbers = len(sizes.layers) * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return RooflineCost(
            passes * B * numbers * ITEM_BYTES["float32"] / self._devices,
            3 * 2 * B * T * numbers / self._devices,
        )

    def _attend(
        self, decoder: Decoder, layers: int, B: int, T: int, S: int, seen: int
    ) -> RooflineCost:
        """Reads keys and values of S positions. Scores of `seen` positions, and as many flops to mix their values."""
        width = decoder.attention.heads * decoder.attention.head_dim
        return self._share(layers * B * S * _kv_width(decoder), 4 * layers * B * T * seen * width)

    def _write(self, decoder: Decoder, layers: int, tokens: int) -> RooflineCost:
        return self._share(layers * tokens * _kv_width(decoder), 0)

    def _head(
        self, decoder: Decoder, vocab: int, format_: WeightFormat, tokens: int
    ) -> RooflineCost:
        return self._multiply(vocab * decoder.hidden, format_, 2 * tokens * vocab * decoder.hidden)

    def _multiply(self, weights: float, format_: WeightFormat, flops: float) -> RooflineCost:
        """Products with so many numbers of weights, on one device."""
        item = ITEM_BYTES["int8"] if format_ == "int8" else self._item
        return RooflineCost(weights * item / self._devices, flops / self._devices)

    def _share(self, elements: float, flops: float) -> RooflineCost:
        """The cost on one device."""
        return RooflineCost(elements * self._item / self._devices, flops / self._devices)


def _mlp_rows(decoder: Decoder, tokens: int) -> tuple[float, float]:
    """Weight rows of hidden width in the MLP of a layer: how many a call reads, and how many each token uses.

    Without those of a router.
    """
    mlp = decoder.mlp
    if not isinstance(mlp, MixtureOfExperts):
        return 3 * mlp.width, 3 * mlp.width
    return mlp.expect_distinct(tokens) * 3 * mlp.width, mlp.chosen * 3 * mlp.width


def _kv_width(decoder: Decoder) -> int:
    """Elements of the keys and values of a position in one layer; also the rows of the weights that make them."""
    return 2 * decoder.attention.kv_heads * decoder.attention.head_dim


def _sum(costs: Iterable[RooflineCost]) -> RooflineCost:
    costs = tuple(costs)
    return RooflineCost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))
