"""Program signatures: inputs and outputs of every program at every bucket, declared once, as data.

Lowering, allocation, checks, cache keys and the manifest are derived from these declarations.
B rows · K drafted tokens · P prompt tokens of a chunk
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.model_config.architecture import Decoder, Draft, GatedDeltaNet, Target
from dflash_aot.cache.sampling_state import (
    SAMPLING_COLUMNS,
    SamplingKind,
    SamplingMode,
    count_mask_words,
    count_top_logprobs,
    list_modes,
    needs_sampling_state,
)
from dflash_aot.cache.weight_recipe import ITEM_BYTES, Dtype, WeightRecipe

ProgramName = Literal[
    "prefill",
    "scored_prefill",
    "draft",
    "verify",
    "sampled_verify",
    "constrained_verify",
    "kv_write",
    "rounds",
    "sampled_rounds",
    "move",
    "admit",
]
# The program that verifies in each mode.
VERIFY_PROGRAMS: Mapping[SamplingMode, ProgramName] = {
    "greedy": "verify",
    "sample": "sampled_verify",
    "constrain": "constrained_verify",
}
# The program that runs several rounds in one dispatch. A constrained round needs the host: its masks follow the tokens.
MULTI_ROUND_PROGRAMS: Mapping[SamplingMode, ProgramName] = {
    "greedy": "rounds",
    "sample": "sampled_rounds",
}
SAMPLED_PROGRAMS: frozenset[ProgramName] = frozenset(
    {"sampled_verify", "constrained_verify", "sampled_rounds"}
)
INT = "int32"
FLOAT = "float32"
BOOL = "bool"
MAX_STOP_TOKENS = 8  # per row, checked on the device in multi-round steps; the host checks all
MESH_AXIS = "model"  # the axis along which tensor parallelism splits arrays
# The mesh axis that splits each dimension, or None; () if none is split.
MeshAxes = tuple[str | None, ...]
ExecutableId = tuple[str, tuple[int, ...]]  # program and the sizes of its bucket


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
    """Shape of one model's kv cache per slot and position: layers, kv_heads and head_dim (the width of a head)."""

    layers: int
    kv_heads: int
    head_dim: int


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
        target_kv, draft_kv: kv caches of the models.
        feature_width: width of the target's features (aux hidden states of all target_layer_ids).
        block: tokens of a block, anchor included.
        vocab: the target's tokens.
        dtype: of weights, kv and features.
        sampling: the modes of verification that are built, and whether prompts can be scored.
        recurrent: state of a hybrid target; None where all layers have keys and values.
    """

    target_kv: KvShape
    draft_kv: KvShape
    feature_width: int
    block: int
    vocab: int
    dtype: str
    sampling: tuple[SamplingKind, ...] = ("greedy",)
    recurrent: RecurrentShape | None = None

    @property
    def target_state(self) -> tuple[str, ...]:
        """Names of the state arrays that the target's forward reads and writes."""
        return (*TARGET_STATE, *(RECURRENT_STATE if self.recurrent else ()))

    @property
    def samples(self) -> bool:
        """Whether the programs have sampling state."""
        return needs_sampling_state(self.sampling)


def derive_pair_shapes(
    target: Target, draft: Draft, dtype: str, sampling: tuple[SamplingKind, ...]
) -> PairShapes:
    """Derives the shapes from the facts of both models."""
    return PairShapes(
        target_kv=_kv_shape(target.decoder, len(target.attention_layers)),
        draft_kv=_kv_shape(draft.decoder, draft.decoder.layers),
        feature_width=len(draft.target_layer_ids) * target.decoder.hidden,
        block=draft.block,
        vocab=target.decoder.vocab,
        dtype=dtype,
        sampling=sampling,
        recurrent=None if target.recurrent is None else _recurrent_shape(target.recurrent),
    )


def _kv_shape(decoder: Decoder, layers: int) -> KvShape:
    return KvShape(layers, decoder.attention.kv_heads, decoder.attention.head_dim)


def _recurrent_shape(sizes: GatedDeltaNet) -> RecurrentShape:
    return RecurrentShape(
        layers=len(sizes.layers),
        heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        window=sizes.kernel,  # one more than is needed: a TPU gives an array of 3 rows another layout, and copies it
        channels=sizes.channels,
    )


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs and outputs of one program at one bucket.

    Inputs in order: weights, state, arguments. Outputs in order: donated state, results.

    Attributes:
        program: name of the program.
        bucket: its sizes by axis.
        weights: names of the weight arguments.
        state: names of the state arrays, the donated ones first.
        donated: names of the state arrays that the program consumes and returns.
        arguments, results: the other inputs and outputs.
    """

    program: ProgramName
    bucket: dict[str, int]
    weights: tuple[str, ...]
    state: tuple[str, ...]
    donated: tuple[str, ...]
    arguments: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]

    @property
    def label(self) -> str:
        """Program and sizes for people, for example "verify batch=1 length=256 k=7"."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.bucket.items())
        return f"{self.program} {sizes}".rstrip()

    @property
    def executable_id(self) -> ExecutableId:
        """Program and sizes; unique in a bundle."""
        return self.program, tuple(self.bucket.values())


def state_arrays(pair: PairShapes, grid: Grid) -> tuple[ArraySpec, ...]:
    """Returns the kv pools, and the other state of all slots for the largest batch.

    Both models have the same pages. Page 0 of the pools belongs to no request: rows and positions without a page write
    there.
    """

    def kv(name: str, shape: KvShape) -> ArraySpec:
        shape_ = (shape.layers, 1 + grid.pool_pages, shape.kv_heads, grid.page, shape.head_dim)
        return ArraySpec(name, shape_, pair.dtype, sharding=(None, None, MESH_AXIS, None, None))

    return (
        kv("target_k", pair.target_kv),
        kv("target_v", pair.target_kv),
        kv("draft_k", pair.draft_kv),
        kv("draft_v", pair.draft_kv),
        *(recurrent_arrays(pair.recurrent, grid.slots, pair.dtype) if pair.recurrent else ()),
        ArraySpec("lengths", (grid.slots,), INT),
        ArraySpec("anchors", (grid.slots,), INT),
        *(sampling_arrays(pair, grid.slots) if pair.samples else ()),
    )


def recurrent_arrays(shape: RecurrentShape, slots: int, dtype: str) -> tuple[ArraySpec, ...]:
    """Returns a hybrid target's recurrent state of all slots. Devices share the heads and their channels."""
    states = (shape.layers, slots, shape.heads, shape.key_dim, shape.value_dim)
    windows = (shape.layers, slots, shape.window, shape.channels)
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


KV_POOLS = ("target_k", "target_v", "draft_k", "draft_v")
TARGET_STATE = ("target_k", "target_v", "lengths", "anchors")
RECURRENT_STATE = ("recurrent_states", "conv_states")
DRAFT_STATE = ("draft_k", "draft_v")
# What the choice of a token reads in addition to the counts.
CHOOSING_STATE = ("sampling", "seeds", "bias", "prompted")
SAMPLING_STATE = ("sampling", "seeds", "bias", "prompted", "counts", "tops")

PENALISED = ArraySpec("penalised", (1,), BOOL)


class ProgramWeights(msgspec.Struct, frozen=True):
    """Names of weight arguments, in order: of the target forward, the draft forward and the context kv write.

    Attributes:
        target: of prefill and verify.
        draft: of draft.
        context: of kv_write.
    """

    target: tuple[str, ...]
    draft: tuple[str, ...]
    context: tuple[str, ...]


def list_signatures(pair: PairShapes, grid: Grid, weights: ProgramWeights) -> list[Signature]:
    """Returns the signatures of all executables of a grid."""
    buckets = grid.buckets()
    chunks = grid.chunks()
    writes = {(b.batch, b.k + 1) for b in buckets} | {(1, chunk.prefill) for chunk in chunks}
    verifications = {
        "greedy": verify_signature,
        "sample": sampled_verify_signature,
        "constrain": constrained_verify_signature,
    }
    together = (
        [mode for mode in list_modes(pair.sampling) if mode in MULTI_ROUND_PROGRAMS]
        if grid.rounds > 1
        else []
    )
    scored = chunks if "prompt_logprobs" in pair.sampling else []
    signatures = [
        *(prefill_signature(pair, chunk, weights) for chunk in chunks),
        *(scored_prefill_signature(pair, chunk, weights) for chunk in scored),
        *(draft_signature(pair, bucket, weights) for bucket in buckets if bucket.k),
        *(
            verifications[mode](pair, bucket, weights)
            for mode in list_modes(pair.sampling)
            for bucket in buckets
        ),
        *(kv_write_signature(pair, rows, width, weights) for rows, width in sorted(writes)),
        *(
            rounds_signature(pair, bucket, grid.rounds, weights, mode)
            for mode in together
            for bucket in buckets
        ),
        *([move_signature(pair)] if grid.slots > 1 else []),
        *([admit_signature(pair)] if pair.samples else []),
    ]
    return [_add_page_tables(signature, grid.row_pages) for signature in signatures]


def _add_page_tables(signature: Signature, row_pages: int) -> Signature:
    """Adds `pages` to the programs that use kv, as their first argument: the page table of each row.

    Its entries are pages of the pools in the order of the row's positions. Entry 0 stands for no page.
    """
    if not {"target_k", "draft_k"} & {*signature.state}:
        return signature
    rows = signature.bucket.get("batch", signature.bucket.get("rows", 1))
    pages = ArraySpec("pages", (rows, row_pages), INT)
    return msgspec.structs.replace(signature, arguments=(pages, *signature.arguments))


def prefill_signature(pair: PairShapes, chunk: Chunk, weights: ProgramWeights) -> Signature:
    """Target forward over `counts` of P prompt tokens of one slot; sets the slot's length.

    With `gives_first` it chooses the token after the chunk: `first`, which becomes the slot's anchor. Without it no
    logits are computed, `first` is 0 and the anchor stays.
    """
    P = chunk.prefill
    return Signature(
        program="prefill",
        bucket={"prefill": P, "length": chunk.length},
        weights=weights.target,
        state=pair.target_state,
        donated=pair.target_state,
        arguments=(
            ArraySpec("tokens", (1, P), INT),
            ArraySpec("slots", (1,), INT),
            ArraySpec("starts", (1,), INT),
            ArraySpec("counts", (1,), INT),
            ArraySpec("gives_first", (1,), BOOL),
        ),
        results=(
            ArraySpec("features", (1, P, pair.feature_width), pair.dtype),
            ArraySpec("first", (1,), INT),
        ),
    )


def scored_prefill_signature(pair: PairShapes, chunk: Chunk, weights: ProgramWeights) -> Signature:
    """As `prefill`, with the log-probability of each of `next_tokens` after its position, and the likeliest tokens."""
    plain = prefill_signature(pair, chunk, weights)
    P = chunk.prefill
    tops = count_top_logprobs(pair.vocab)
    return msgspec.structs.replace(
        plain,
        program="scored_prefill",
        arguments=(*plain.arguments, ArraySpec("next_tokens", (1, P), INT)),
        results=(
            *plain.results,
            ArraySpec("logprobs", (1, P), FLOAT),
            ArraySpec("top_tokens", (1, P, tops), INT),
            ArraySpec("top_logprobs", (1, P, tops), FLOAT),
        ),
    )


def draft_signature(pair: PairShapes, bucket: Bucket, weights: ProgramWeights) -> Signature:
    """Draft forward over a block of the trained width; returns the anchor and K drafted tokens of each row.

    Where the programs sample, `sampled` tells whether each slot's sampling state counts; otherwise drafting is greedy.
    `penalised` tells whether a row has a bias or penalties; without it they are not looked up.
    """
    B = bucket.batch
    K = bucket.k
    return Signature(
        program="draft",
        bucket={"batch": B, "length": bucket.length, "k": K},
        weights=weights.draft,
        state=(
            *DRAFT_STATE,
            "lengths",
            "anchors",
            *(("counts", *CHOOSING_STATE) if pair.samples else ()),
        ),
        donated=(),
        arguments=(ArraySpec("sampled", (1,), BOOL), PENALISED) if pair.samples else (),
        results=(ArraySpec("block", (B, K + 1), INT),),
    )


def verify_signature(pair: PairShapes, bucket: Bucket, weights: ProgramWeights) -> Signature:
    """Target forward over the block, greedy choice, acceptance, new lengths and anchors of the active rows.

    `verdict` is the round outcome, the only array that the host reads: [accepted, K drafted tokens, K+1 chosen tokens]
    per row. `starts` are the lengths before the round. With K = 0 there is no `block`: only the anchor is verified.
    """
    B = bucket.batch
    K = bucket.k
    block = (ArraySpec("block", (B, K + 1), INT),) if K else ()
    return Signature(
        program="verify",
        bucket={"batch": B, "length": bucket.length, "k": K},
        weights=weights.target,
        state=pair.target_state,
        donated=pair.target_state,
        arguments=(*block, ArraySpec("active", (B,), BOOL)),
        results=(
            ArraySpec("features", (B, K + 1, pair.feature_width), pair.dtype),
            ArraySpec("starts", (B,), INT),
            ArraySpec("verdict", (B, 2 * K + 2), INT),
        ),
    )


def sampled_verify_signature(
    pair: PairShapes, bucket: Bucket, weights: ProgramWeights
) -> Signature:
    """As `verify`, but tokens are sampled by their slot's sampling state, and committed tokens are counted in it.

    `verdict` has K+1 more columns: the log-probabilities of the chosen tokens, float32 with its bits as int32.
    `top_tokens` and `top_logprobs` are the likeliest tokens, zeros if no row of the batch requests them. All
    log-probabilities are of the target's distribution before temperature, penalties and filters.
    """
    B = bucket.batch
    K = bucket.k
    greedy = verify_signature(pair, bucket, weights)
    tops = (B, K + 1, count_top_logprobs(pair.vocab))
    features, starts, _ = greedy.results
    return msgspec.structs.replace(
        greedy,
        program="sampled_verify",
        state=(
            *pair.target_state,
            "counts",
            *(name for name in SAMPLING_STATE if name != "counts"),
        ),
        donated=(*pair.target_state, "counts"),
        results=(
            features,
            starts,
            ArraySpec("verdict", (B, 3 * K + 3), INT),
            ArraySpec("top_tokens", tops, INT),
            ArraySpec("top_logprobs", tops, FLOAT),
        ),
    )


def constrained_verify_signature(
    pair: PairShapes, bucket: Bucket, weights: ProgramWeights
) -> Signature:
    """As `sampled_verify`, but each position chooses among its `allowed` tokens only.

    `allowed` has a bit per token of the vocabulary, the lowest bit of a word first. At least one is set per position.
    """
    sampled = sampled_verify_signature(pair, bucket, weights)
    allowed = ArraySpec("allowed", (bucket.batch, bucket.k + 1, count_mask_words(pair.vocab)), INT)
    return msgspec.structs.replace(
        sampled, program="constrained_verify", arguments=(*sampled.arguments, allowed)
    )


def kv_write_signature(
    pair: PairShapes, rows: int, width: int, weights: ProgramWeights
) -> Signature:
    """Writes the draft's context kv of each row for `width` positions from `starts`, computed from target features."""
    return Signature(
        program="kv_write",
        bucket={"rows": rows, "width": width},
        weights=weights.context,
        state=DRAFT_STATE,
        donated=DRAFT_STATE,
        arguments=(
            ArraySpec("features", (rows, width, pair.feature_width), pair.dtype),
            ArraySpec("starts", (rows,), INT),
        ),
        results=(),
    )


def rounds_signature(
    pair: PairShapes, bucket: Bucket, rounds: int, weights: ProgramWeights, mode: SamplingMode
) -> Signature:
    """Multi-round step: up to `count` rounds (draft, verify, kv_write) of the active rows in one dispatch.

    A row takes part until it has `left` tokens, or one of its `ends` (padded with -1). The step stops when no row is
    left, and with `stop_early` after the first round that completes an active row. `verdicts` has the outcome of
    `verify` per round and row, -1 where the row did not take part. `left_over` is what remains of `left`.

    Sampled rounds verify as `sampled_verify` does, and draft with `penalised` as `draft`. They report no
    log-probabilities.
    """
    B = bucket.batch
    K = bucket.k
    used = (*weights.target, *(weights.draft if K else ()), *weights.context)
    sampled = mode != "greedy"
    donated = (*pair.target_state, *DRAFT_STATE, *(("counts",) if sampled else ()))
    return Signature(
        program=MULTI_ROUND_PROGRAMS[mode],
        bucket={"batch": B, "length": bucket.length, "k": K, "rounds": rounds},
        weights=tuple(dict.fromkeys(used)),
        state=(*donated, *(CHOOSING_STATE if sampled else ())),
        donated=donated,
        arguments=(
            ArraySpec("count", (1,), INT),
            ArraySpec("left", (B,), INT),
            ArraySpec("ends", (B, MAX_STOP_TOKENS), INT),
            ArraySpec("active", (B,), BOOL),
            ArraySpec("stop_early", (1,), BOOL),
            *((PENALISED,) if sampled and K else ()),
        ),
        results=(
            ArraySpec("verdicts", (rounds, B, 2 * K + 2), INT),
            ArraySpec("left_over", (B,), INT),
        ),
    )


def move_signature(pair: PairShapes) -> Signature:
    """Copies all but kv of slot `source` to slot `destination`: kv pages stay where they are."""
    recurrent = RECURRENT_STATE if pair.recurrent else ()
    state = ("lengths", "anchors", *recurrent, *(SAMPLING_STATE if pair.samples else ()))
    return Signature(
        program="move",
        bucket={},
        weights=(),
        state=state,
        donated=state,
        arguments=(ArraySpec("source", (1,), INT), ArraySpec("destination", (1,), INT)),
        results=(),
    )


def admit_signature(pair: PairShapes) -> Signature:
    """Initialises the sampling state of one slot, with the counts of the output so far.

    With `anchor` ≥ 0 the slot also gets this anchor, and the length `starts`; below 0 both stay.
    """
    state = ("lengths", "anchors", *SAMPLING_STATE)
    vocab = (1, pair.vocab)
    return Signature(
        program="admit",
        bucket={},
        weights=(),
        state=state,
        donated=state,
        arguments=(
            ArraySpec("slots", (1,), INT),
            ArraySpec("starts", (1,), INT),
            ArraySpec("anchor", (1,), INT),
            ArraySpec("slot_sampling", (1, len(SAMPLING_COLUMNS)), FLOAT),
            ArraySpec("slot_seeds", (1, 2), INT),
            ArraySpec("slot_bias", vocab, FLOAT),
            ArraySpec("slot_prompted", vocab, BOOL),
            ArraySpec("slot_counts", vocab, INT),
            ArraySpec("slot_tops", (1,), INT),
        ),
        results=(),
    )
