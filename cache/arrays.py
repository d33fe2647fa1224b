"""Arrays of programs: their declaration, the shapes of a checkpoint pair, and the state that programs share."""

import math
from collections.abc import Iterable

import msgspec

from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.architecture import (
    AttentionShape,
    Draft,
    GatedDeltaNet,
    SlidingLayers,
    Target,
)
from dflash_aot.cache.sampling_state import SAMPLING_COLUMNS, SamplingKind, needs_sampling_state
from dflash_aot.cache.weight_recipe import ITEM_BYTES, Dtype, WeightRecipe

INT = "int32"
FLOAT = "float32"
BOOL = "bool"
MESH_AXIS = "model"  # the axis along which tensor parallelism splits arrays
# The mesh axis that splits each dimension, or None; () if none is split.
MeshAxes = tuple[str | None, ...]

RING_STATE = ("sliding_k", "sliding_v")
KV_POOLS = ("target_k", "target_v", "draft_k", "draft_v")
TARGET_STATE = ("target_k", "target_v", "lengths", "anchors")
RECURRENT_STATE = ("recurrent_states", "conv_states")
DRAFT_STATE = ("draft_k", "draft_v")
# What the choice of a token reads in addition to the counts.
CHOOSING_STATE = ("sampling", "seeds", "bias", "prompted")
SAMPLING_STATE = ("sampling", "seeds", "bias", "prompted", "counts", "tops")


class ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a program.

    Attributes:
        name: unique among state, weights, arguments and results of a program.
        shape: of the whole array.
        dtype: as NumPy names it.
        sharding: the mesh axis that splits each dimension, () if the array is not split.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    sharding: MeshAxes = ()

    @property
    def bytes(self) -> int:
        """Size of the whole array in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def shard_shape(self, devices: int) -> tuple[int, ...]:
        """Returns the shape of the shard that each of `devices` devices holds."""
        split = self.sharding or (None,) * len(self.shape)
        return tuple(
            size // devices if axis else size for size, axis in zip(self.shape, split, strict=True)
        )

    def shard_bytes(self, devices: int) -> int:
        """Returns the size in bytes of the shard that each of `devices` devices holds."""
        return math.prod(self.shard_shape(devices)) * ITEM_BYTES[self.dtype]


class KvShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one model's kv cache per slot and position.

    Attributes:
        layers: with attention.
        kv_heads: of all devices: more than the model's where devices hold copies of a head.
        head_dim: width of a head.
    """

    layers: int
    kv_heads: int
    head_dim: int


class RingShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of the rings of kv pages of a target's sliding layers. A slot's ring holds the last positions only.

    Position p lies in page p // page modulo the ring's pages. What a block writes may be rejected, so it must not
    overwrite positions that the next block sees.

    Attributes:
        kv: of the sliding layers.
        window: positions that a query sees, its own included.
    """

    kv: KvShape
    window: int

    def count_pages(self, grid: Grid) -> int:
        """Pages of a slot's ring."""
        seen = self.count_seen_pages(grid.page, grid.capacity)
        return seen + count_touched_pages(grid.page, grid.k[-1] + 1)

    def count_seen_pages(self, page: int, length: int) -> int:
        """Pages that the window reaches back at most, counted from the page of a block's first position.

        The block has at most `length` positions before it.
        """
        return -(-min(self.window - 1, length) // page)


def count_touched_pages(page: int, tokens: int) -> int:
    """Pages that `tokens` neighbouring positions touch at most."""
    return 1 if tokens == 1 else 2 + (tokens - 2) // page


class RecurrentShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a hybrid target's recurrent state per slot, whatever the length of the text.

    Attributes:
        layers: Gated DeltaNet layers.
        heads, key_dim, value_dim: value heads, each with a float32 matrix [key_dim, value_dim].
        window, channels: the last inputs of the convolution, rows and channels, in the dtype of
            the activations.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    channels: int


class PairShapes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts of a checkpoint pair and the build options that determine the signatures.

    Attributes:
        target_kv, draft_kv: kv caches in the pools of the models; sliding layers with rings are in
            `rings`.
        feature_width: width of the target's features (aux hidden states of all target_layer_ids).
        block: tokens of a block, anchor included.
        vocab: the target's tokens.
        dtype: of weights, kv and features.
        sampling: the modes of verification that are built, and whether prompts can be scored.
        recurrent: state of a hybrid target; None where all layers have keys and values.
        rings: kv of the target's sliding layers; None where all kv is in pages of the pools.
    """

    target_kv: KvShape
    draft_kv: KvShape
    feature_width: int
    block: int
    vocab: int
    dtype: str
    sampling: tuple[SamplingKind, ...] = ("greedy",)
    recurrent: RecurrentShape | None = None
    rings: RingShape | None = None

    @property
    def target_state(self) -> tuple[str, ...]:
        """Names of the state arrays that the target's forward reads and writes."""
        return (*TARGET_STATE, *self.slot_state)

    @property
    def slot_state(self) -> tuple[str, ...]:
        """Names of the arrays with large state of each slot, in addition to kv pages."""
        recurrent = RECURRENT_STATE if self.recurrent else ()
        return (*recurrent, *(RING_STATE if self.rings else ()))

    @property
    def target_caches(self) -> tuple[KvShape, ...]:
        """The target's kv caches, in pages and in rings."""
        return (self.target_kv, *([self.rings.kv] if self.rings else []))

    @property
    def samples(self) -> bool:
        """Whether the programs have sampling state."""
        return needs_sampling_state(self.sampling)


def derive_pair_shapes(
    target: Target, draft: Draft, dtype: str, sampling: tuple[SamplingKind, ...], devices: int
) -> PairShapes:
    """Derives the shapes from the facts of both models and the number of devices that share them."""
    return PairShapes(
        target_kv=_kv_shape(target.decoder.attention, len(target.attention_layers), devices),
        draft_kv=_kv_shape(draft.decoder.attention, draft.decoder.layers, devices),
        feature_width=len(draft.target_layer_ids) * target.decoder.hidden,
        block=draft.block,
        vocab=target.decoder.vocab,
        dtype=dtype,
        sampling=sampling,
        recurrent=None if target.recurrent is None else _recurrent_shape(target.recurrent),
        rings=None if target.sliding is None else _ring_shape(target.sliding, devices),
    )


def _kv_shape(attention: AttentionShape, layers: int, devices: int) -> KvShape:
    return KvShape(layers, attention.count_kv_heads(devices), attention.head_dim)


def _ring_shape(sliding: SlidingLayers, devices: int) -> RingShape:
    return RingShape(_kv_shape(sliding.attention, len(sliding.layers), devices), sliding.window)


def _recurrent_shape(sizes: GatedDeltaNet) -> RecurrentShape:
    return RecurrentShape(
        layers=len(sizes.layers),
        heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        window=sizes.kernel,  # one more than is needed: a TPU gives an array of 3 rows another layout, and copies it
        channels=sizes.channels,
    )


def state_arrays(pair: PairShapes, grid: Grid) -> tuple[ArraySpec, ...]:
    """Returns the kv pools, and the other state of all slots for the largest batch.

    Both models have the same pages. Page 0 of the pools belongs to no request: rows and positions without a page write
    there. The pages of rings are pools of their own, with as many pages for each slot. Saved states come after the
    slots, and each has a page after those of the requests: for the kv of its last, partly filled page.
    """

    def kv(name: str, shape: KvShape, pages: int) -> ArraySpec:
        shape_ = (shape.layers, 1 + pages, shape.kv_heads, grid.page, shape.head_dim)
        return ArraySpec(name, shape_, pair.dtype, sharding=(None, None, MESH_AXIS, None, None))

    rings: tuple[ArraySpec, ...] = ()
    if pair.rings:
        pages = grid.slots * pair.rings.count_pages(grid)
        rings = tuple(kv(name, pair.rings.kv, pages) for name in RING_STATE)
    pool_pages = grid.pool_pages + grid.saved_states
    states = grid.slots + grid.saved_states
    return (
        kv("target_k", pair.target_kv, pool_pages),
        kv("target_v", pair.target_kv, pool_pages),
        kv("draft_k", pair.draft_kv, pool_pages),
        kv("draft_v", pair.draft_kv, pool_pages),
        *rings,
        *(recurrent_arrays(pair.recurrent, states, pair.dtype) if pair.recurrent else ()),
        ArraySpec("lengths", (grid.slots,), INT),
        ArraySpec("anchors", (grid.slots,), INT),
        *(sampling_arrays(pair, grid.slots) if pair.samples else ()),
    )


def count_saved_bytes(pair: PairShapes, grid: Grid) -> int:
    """Bytes of all saved states on all devices, the kv of their last pages included."""
    without = msgspec.structs.replace(grid, saved_states=0)
    kept, other = (sum(array.bytes for array in state_arrays(pair, one)) for one in (grid, without))
    return kept - other


# After so many bytes a step copies no further page, or state, to the host, or from it.
TRANSFER_BYTES = 32 << 20


def count_transfer_bytes(pair: PairShapes, grid: Grid) -> int:
    """Bytes on all devices of the copies that are on their way: those of two steps to the host, and from it."""
    if not grid.offload:
        return 0
    arrays = [one for one in state_arrays(pair, grid) if one.name in (*KV_POOLS, *RECURRENT_STATE)]
    return 4 * (TRANSFER_BYTES + sum(one.bytes // one.shape[1] for one in arrays))


def recurrent_arrays(shape: RecurrentShape, count: int, dtype: str) -> tuple[ArraySpec, ...]:
    """Returns `count` recurrent states of a hybrid target. Devices share the heads and their channels."""
    states = (shape.layers, count, shape.heads, shape.key_dim, shape.value_dim)
    windows = (shape.layers, count, shape.window, shape.channels)
    return (
        ArraySpec("recurrent_states", states, FLOAT, sharding=(None, None, MESH_AXIS, None, None)),
        ArraySpec("conv_states", windows, dtype, sharding=(None, None, None, MESH_AXIS)),
    )


def sampling_arrays(pair: PairShapes, slots: int) -> tuple[ArraySpec, ...]:
    """Returns the sampling state of all slots.

    sampling: SAMPLING_COLUMNS. seeds: high and low half of 64 bits. bias: added to each logit. prompted: whether a
    token is in the prompt. counts: how often a token is in the output. tops: 1 for slots that request the
    log-probabilities of the likeliest tokens.
    """
    vocab = (slots, pair.vocab)
    split = (None, MESH_AXIS)
    return (
        ArraySpec("sampling", (slots, len(SAMPLING_COLUMNS)), FLOAT),
        ArraySpec("seeds", (slots, 2), INT),
        ArraySpec("bias", vocab, FLOAT, sharding=split),
        ArraySpec("prompted", vocab, BOOL, sharding=split),
        ArraySpec("counts", vocab, INT, sharding=split),
        ArraySpec("tops", (slots,), INT),
    )


def arrays_by_name(
    state: Iterable[ArraySpec], weights: Iterable[WeightRecipe]
) -> dict[str, ArraySpec]:
    """Returns state and weight arrays by the names that signatures use."""
    made = (
        ArraySpec(recipe.name, recipe.shape, recipe.dtype, recipe.sharding) for recipe in weights
    )
    return {array.name: array for array in (*state, *made)}
