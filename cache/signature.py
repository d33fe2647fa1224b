"""Programs and their signatures, declared once, as data.

Lowering, allocation, checks, keys and the manifest are derived from what stands here.
L layers · N slots · G kv heads · C capacity + slack · D head width · F feature width · V the target's vocabulary
"""

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from dflash_aot.cache.bundle.weight_recipe import ITEM_BYTES, Dtype, WeightRecipe
from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.model_config.architecture import Decoder, Draft, Target
from dflash_aot.cache.sampling_state import SAMPLING_COLUMNS, SamplingMode, count_top_logprobs

ProgramName = Literal["prefill", "draft", "verify", "sampled_verify", "kv_write", "rounds", "move", "admit"]
INT, FLOAT, BOOL = "int32", "float32", "bool"
MAX_STOP_TOKENS = 8  # tokens that end a row, at most, which the device knows of; the host knows all
MESH_AXIS = "model"  # of the mesh: what tensor parallelism splits
MeshAxes = tuple[str | None, ...]  # the mesh axis that splits each dimension; () where nothing does
ExecutableId = tuple[str, tuple[int, ...]]  # program and the sizes of its bucket


class ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, shape and dtype of one array, whole; `sharding` says which dimension the devices split, if any."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    sharding: MeshAxes = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def shard_shape(self, devices: int) -> tuple[int, ...]:
        """The shape of what each of `devices` holds of it."""
        split = self.sharding or (None,) * len(self.shape)
        return tuple(size // devices if axis else size for size, axis in zip(self.shape, split, strict=True))

    def shard_bytes(self, devices: int) -> int:
        """What each of `devices` holds of it."""
        return math.prod(self.shard_shape(devices)) * ITEM_BYTES[self.dtype]


class KvShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model's kv per slot and position."""

    layers: int
    kv_heads: int
    head_dim: int


class PairShapes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What signatures depend on of the two models."""

    target_kv: KvShape
    draft_kv: KvShape
    feature_width: int
    block: int
    vocab: int
    dtype: str
    sampling: tuple[SamplingMode, ...] = ("greedy",)

    @property
    def samples(self) -> bool:
        """Whether there is sampling state, and what reads it."""
        return "sample" in self.sampling


def derive_pair_shapes(target: Target, draft: Draft, dtype: str, sampling: tuple[SamplingMode, ...]) -> PairShapes:
    """From the facts of both models."""
    return PairShapes(
        target_kv=_kv_shape(target.decoder),
        draft_kv=_kv_shape(draft.decoder),
        feature_width=len(draft.target_layer_ids) * target.decoder.hidden,
        block=draft.block,
        vocab=target.decoder.vocab,
        dtype=dtype,
        sampling=sampling,
    )


def _kv_shape(decoder: Decoder) -> KvShape:
    return KvShape(decoder.layers, decoder.attention.kv_heads, decoder.attention.head_dim)


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One program at one bucket. Inputs in order: weights, state, arguments; outputs: donated state, results.

    `donated` names the state arrays that the program consumes and returns; `state` those that it reads, the
    donated ones first.
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
        sizes = " ".join(f"{axis}={size}" for axis, size in self.bucket.items())
        return f"{self.program} {sizes}".rstrip()

    @property
    def executable_id(self) -> ExecutableId:
        """The id of this program's executable for this bucket, unique in a bundle."""
        return self.program, tuple(self.bucket.values())


def state_arrays(pair: PairShapes, grid: Grid) -> tuple[ArraySpec, ...]:
    """Everything that a slot is, for the largest batch. The slack keeps a clamped write off valid positions."""

    def kv(name: str, shape: KvShape) -> ArraySpec:
        positions = grid.capacity + grid.widest_write
        shape_ = (shape.layers, grid.slots, shape.kv_heads, positions, shape.head_dim)
        return ArraySpec(name, shape_, pair.dtype, sharding=(None, None, MESH_AXIS, None, None))

    return (
        kv("target_k", pair.target_kv),
        kv("target_v", pair.target_kv),
        kv("draft_k", pair.draft_kv),
        kv("draft_v", pair.draft_kv),
        ArraySpec("lengths", (grid.slots,), INT),
        ArraySpec("anchors", (grid.slots,), INT),
        *(sampling_arrays(pair, grid.slots) if pair.samples else ()),
    )


def sampling_arrays(pair: PairShapes, slots: int) -> tuple[ArraySpec, ...]:
    """How each slot chooses its tokens.

    `sampling` as SAMPLING_COLUMNS, `seeds` the high and low half of 64 bits, `bias` what is added to each logit,
    `prompted` the tokens that stand in the prompt, `counts` how often each stands in the output, `tops` 1 where the
    log-probabilities of the likeliest tokens are wanted.
    """
    vocab, split = (slots, pair.vocab), (None, MESH_AXIS)
    return (
        ArraySpec("sampling", (slots, len(SAMPLING_COLUMNS)), FLOAT),
        ArraySpec("seeds", (slots, 2), INT),
        ArraySpec("bias", vocab, FLOAT, sharding=split),
        ArraySpec("prompted", vocab, BOOL, sharding=split),
        ArraySpec("counts", vocab, INT, sharding=split),
        ArraySpec("tops", (slots,), INT),
    )


def arrays_by_name(state: Iterable[ArraySpec], weights: Iterable[WeightRecipe]) -> dict[str, ArraySpec]:
    """State and weights by name, as signatures refer to them."""
    made = (ArraySpec(recipe.name, recipe.shape, recipe.dtype, recipe.sharding) for recipe in weights)
    return {array.name: array for array in (*state, *made)}


TARGET_STATE = ("target_k", "target_v", "lengths", "anchors")
DRAFT_STATE = ("draft_k", "draft_v")
SAMPLING_STATE = ("sampling", "seeds", "bias", "prompted", "counts", "tops")


class ProgramWeights(msgspec.Struct, frozen=True):
    """Names of the weight arguments that each program takes, in order."""

    target: tuple[str, ...]
    draft: tuple[str, ...]
    context: tuple[str, ...]


def list_signatures(pair: PairShapes, grid: Grid, weights: ProgramWeights) -> list[Signature]:
    """Every program at every bucket that the grid needs."""
    buckets, chunks = grid.buckets(), grid.chunks()
    writes = {(b.batch, b.k + 1) for b in buckets} | {(1, chunk.prefill) for chunk in chunks}
    greedy = buckets if "greedy" in pair.sampling else []
    return [
        *(prefill_signature(pair, chunk, weights) for chunk in chunks),
        *(draft_signature(bucket, weights) for bucket in buckets if bucket.k),
        *(verify_signature(pair, bucket, weights) for bucket in greedy),
        *(sampled_verify_signature(pair, bucket, weights) for bucket in (buckets if pair.samples else [])),
        *(kv_write_signature(pair, rows, width, weights) for rows, width in sorted(writes)),
        *(rounds_signature(bucket, grid.rounds, weights) for bucket in greedy if _runs_rounds(bucket, grid)),
        *([move_signature(pair)] if grid.slots > 1 else []),
        *([admit_signature(pair)] if pair.samples else []),
    ]


def _runs_rounds(bucket: Bucket, grid: Grid) -> bool:
    return bucket.batch == 1 and grid.rounds > 1


def prefill_signature(pair: PairShapes, chunk: Chunk, weights: ProgramWeights) -> Signature:
    """Target forward over `counts` of P prompt tokens of one slot; leaves length and anchor behind its last one."""
    P = chunk.prefill
    return Signature(
        program="prefill",
        bucket={"prefill": P, "length": chunk.length},
        weights=weights.target,
        state=TARGET_STATE,
        donated=TARGET_STATE,
        arguments=(
            ArraySpec("tokens", (1, P), INT),
            ArraySpec("slots", (1,), INT),
            ArraySpec("starts", (1,), INT),
            ArraySpec("counts", (1,), INT),
        ),
        results=(ArraySpec("features", (1, P, pair.feature_width), pair.dtype), ArraySpec("first", (1,), INT)),
    )


def draft_signature(bucket: Bucket, weights: ProgramWeights) -> Signature:
    """Block forward at the trained width; the anchor and K drafted tokens of each row."""
    B, K = bucket.batch, bucket.k
    return Signature(
        program="draft",
        bucket={"batch": B, "length": bucket.length, "k": K},
        weights=weights.draft,
        state=(*DRAFT_STATE, "lengths", "anchors"),
        donated=(),
        arguments=(),
        results=(ArraySpec("block", (B, K + 1), INT),),
    )


def verify_signature(pair: PairShapes, bucket: Bucket, weights: ProgramWeights) -> Signature:
    """Target forward over the block, greedy choice, acceptance, new lengths and anchors of the active rows.

    `verdict` is all that the host reads of a round: [accepted, the K drafted tokens, the K+1 chosen ones] per row.
    `starts` are the lengths before the round. With K = 0 there is no block: the anchor is all of it.
    """
    B, K = bucket.batch, bucket.k
    block = (ArraySpec("block", (B, K + 1), INT),) if K else ()
    return Signature(
        program="verify",
        bucket={"batch": B, "length": bucket.length, "k": K},
        weights=weights.target,
        state=TARGET_STATE,
        donated=TARGET_STATE,
        arguments=(*block, ArraySpec("active", (B,), BOOL)),
        results=(
            ArraySpec("features", (B, K + 1, pair.feature_width), pair.dtype),
            ArraySpec("starts", (B,), INT),
            ArraySpec("verdict", (B, 2 * K + 2), INT),
        ),
    )


def sampled_verify_signature(pair: PairShapes, bucket: Bucket, weights: ProgramWeights) -> Signature:
    """As `verify`, each token chosen as its slot's sampling state says, the committed ones counted there.

    `verdict` holds K+1 columns more: the log-probabilities of the chosen tokens, float32 as int32 of the same bits.
    `top_tokens` and `top_logprobs` are the likeliest tokens, zeros where no row of the batch wants them. All
    log-probabilities are of the target's own distribution, before anything is asked of it.
    """
    B, K = bucket.batch, bucket.k
    greedy, tops = verify_signature(pair, bucket, weights), (B, K + 1, count_top_logprobs(pair.vocab))
    features, starts, _ = greedy.results
    return msgspec.structs.replace(
        greedy,
        program="sampled_verify",
        state=(*TARGET_STATE, "counts", *(name for name in SAMPLING_STATE if name != "counts")),
        donated=(*TARGET_STATE, "counts"),
        results=(
            features,
            starts,
            ArraySpec("verdict", (B, 3 * K + 3), INT),
            ArraySpec("top_tokens", tops, INT),
            ArraySpec("top_logprobs", tops, FLOAT),
        ),
    )


def kv_write_signature(pair: PairShapes, rows: int, width: int, weights: ProgramWeights) -> Signature:
    """Features of `width` positions from `starts` on → draft context keys and values of the named slots."""
    return Signature(
        program="kv_write",
        bucket={"rows": rows, "width": width},
        weights=weights.context,
        state=DRAFT_STATE,
        donated=DRAFT_STATE,
        arguments=(
            ArraySpec("features", (rows, width, pair.feature_width), pair.dtype),
            ArraySpec("slots", (rows,), INT),
            ArraySpec("starts", (rows,), INT),
        ),
        results=(),
    )


def rounds_signature(bucket: Bucket, rounds: int, weights: ProgramWeights) -> Signature:
    """Up to `count` rounds of one slot, draft, verify and kv_write each, until nothing is `left` to be generated.

    A token that is one of `ends`, which are padded with -1, leaves nothing. `verdicts` are those of `verify`, one per
    round; -1 from the first round on that did not run.
    """
    B, K = bucket.batch, bucket.k
    used = (*weights.target, *(weights.draft if K else ()), *weights.context)
    state = (*TARGET_STATE, *DRAFT_STATE)
    return Signature(
        program="rounds",
        bucket={"batch": B, "length": bucket.length, "k": K, "rounds": rounds},
        weights=tuple(dict.fromkeys(used)),
        state=state,
        donated=state,
        arguments=(
            ArraySpec("count", (1,), INT),
            ArraySpec("left", (1,), INT),
            ArraySpec("ends", (MAX_STOP_TOKENS,), INT),
        ),
        results=(ArraySpec("verdicts", (rounds, 2 * K + 2), INT), ArraySpec("left_over", (1,), INT)),
    )


def move_signature(pair: PairShapes) -> Signature:
    """Copies everything that one slot is to another."""
    state = (*TARGET_STATE, *DRAFT_STATE, *(SAMPLING_STATE if pair.samples else ()))
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
    """How one slot chooses its tokens from now on; nothing of its output is counted yet.

    An `anchor` of at least 0 becomes the slot's, and `starts` its length; below 0 both stay.
    """
    state, vocab = ("lengths", "anchors", *SAMPLING_STATE), (1, pair.vocab)
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
            ArraySpec("slot_tops", (1,), INT),
        ),
        results=(),
    )
