"""What a program is made of: both models as programs call them, and its function, estimates and checks as one record.

Each program has a module here with a `BODY`, see `programs`.
B rows · T positions of this call · F width of the features
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import msgspec

from dflash_aot.cache.arrays import RING_STATE, PairShapes, RingShape
from dflash_aot.cache.model_config.architecture import Draft, KvPool
from dflash_aot.cache.signature import Mode, Program, Signature
from dflash_aot.compile.kernels.kernel_device import AttendingBlock
from dflash_aot.compile.models.attention import LayerWindows
from dflash_aot.compile.models.causal_lm import Attend, CausalLM, Recur
from dflash_aot.compile.models.dflash import AttendBlock, DFlash
from dflash_aot.compile.models.kv_cache import KvArrays, KvContext, KvRings, make_rows, put_rows
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.layers import AttentionInputs
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost

Arrays = Mapping[str, jax.Array]
Outputs = dict[str, jax.Array]
Recurrent = TypeVar("Recurrent")
# What the target's layers pass on: the keys and values of each part of the call by pools and layer, and the recurrent
# state or its updates.
TargetCarry = tuple[Sequence[Mapping[KvPool, KvArrays]], Recurrent]


class Blocks(NamedTuple):
    """A part of a call: blocks of equal width, those of the rows of a round or the chunk of a prompt.

    Attributes:
        ids: tokens, int32 [B, T].
        starts: the position where each block begins, int32 [B].
        tables: page tables of the rows, int32 [B, E].
        slots: of the rows, int32 [B]; None for the first slots.
        counts: how many tokens of each block are not padding, int32 [B]; None for all.
    """

    ids: jax.Array
    starts: jax.Array
    tables: jax.Array
    slots: jax.Array | None = None
    counts: jax.Array | None = None

    @property
    def positions(self) -> jax.Array:
        """Positions of the tokens, int32 [B, T]."""
        return self.starts[:, None] + jnp.arange(self.ids.shape[1])


class KvPools(NamedTuple):
    """Pools of keys and values, and where the rows of a call read and write in them.

    Attributes:
        names: of the pools among the state arrays.
        kv: the pools.
        read: page tables [B, E], where blocks start [B], and positions that are read at most.
        written: page tables [B, E], and where blocks start [B].
    """

    names: tuple[str, str]
    kv: KvArrays
    read: tuple[jax.Array, jax.Array, int]
    written: tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class PairModels:
    """The models of a pair; nothing is allocated.

    Attributes:
        target, draft: the models without weights.
        facts: of the draft.
        shapes: of both models, from which the signatures follow.
        tp: the devices that share both models, and their backend.
    """

    target: AbstractModel[CausalLM]
    draft: AbstractModel[DFlash]
    facts: Draft
    shapes: PairShapes
    tp: TensorParallel

    def bind_target(self, arrays: Arrays) -> CausalLM:
        """The target with its weights among `arrays`."""
        return self.target.bind(_weights_of("target", arrays))

    def bind_draft(self, arrays: Arrays) -> DFlash:
        """The draft with its weights among `arrays`."""
        return self.draft.bind(_weights_of("draft", arrays))

    def run_target(
        self,
        arrays: Arrays,
        target: CausalLM,
        parts: Sequence[Blocks],
        length: int,
        recurrent: Recurrent,
        recur: Recur[TargetCarry[Recurrent]] | None,
    ) -> tuple[jax.Array, jax.Array, Outputs, Recurrent]:
        """The target over all blocks, in one pass over the weights, and its kv with the blocks written.

        Returns hidden states before the final norm, features, kv by name, and what `recur` made of `recurrent`. Several
        parts are one block [1, N] there, one after the other, and must not share rows.
        """
        shapes = [part.ids.shape for part in parts]
        pools = [self._find_pools(arrays, part, length) for part in parts]
        ids = _join_tokens([part.ids for part in parts])
        positions = _join_tokens([part.positions for part in parts])
        attend = self._attend_causally(pools, shapes)
        room = [
            {name: make_rows(pool.kv, *shape) for name, pool in own.items()}
            for own, shape in zip(pools, shapes, strict=True)
        ]
        carry: TargetCarry[Recurrent] = room, recurrent
        x, features, (rows, recurrent) = target.forward(
            ids, positions, self.facts.target_layer_ids, carry, attend, recur
        )
        written: Outputs = {}
        for own, own_rows in zip(pools, rows, strict=True):
            for name, pool in own.items():
                keys, values = (written.get(one, arrays[one]) for one in pool.names)
                x, kv = self.tp.backend.write_block(
                    x, (keys, values), own_rows[name], *pool.written
                )
                written |= dict(zip(pool.names, kv, strict=True))
        return x, features, written, recurrent

    def _find_pools(self, arrays: Arrays, part: Blocks, length: int) -> dict[KvPool, KvPools]:
        """The pools of a part of a call."""
        paged = arrays["target_k"], arrays["target_v"]
        starts = part.starts
        tables = part.tables
        pools: dict[KvPool, KvPools] = {
            "pages": KvPools(
                ("target_k", "target_v"), paged, (tables, starts, length), (tables, starts)
            )
        }
        if rings := self.shapes.rings:
            pools["rings"] = self._find_rings(rings, arrays, part, length)
        return pools

    def _find_rings(self, shape: RingShape, arrays: Arrays, part: Blocks, length: int) -> KvPools:
        keys, values = (arrays[name] for name in RING_STATE)
        _, pages, _, page, _ = keys.shape
        starts = part.starts
        slots = jnp.arange(starts.shape[0], dtype=jnp.int32)
        if part.slots is not None:
            slots = part.slots
        seen = shape.count_seen_pages(page, length)
        rings = KvRings(slots, (pages - 1) // arrays["lengths"].shape[0], page, seen)
        tables, begins = rings.find_seen(starts)
        return KvPools(
            RING_STATE,
            (keys, values),
            (tables, begins, min(length, tables.shape[1] * page)),
            rings.find_written(starts, part.ids.shape[1], part.counts),
        )

    def _attend_causally(
        self, pools: Sequence[Mapping[KvPool, KvPools]], shapes: Sequence[tuple[int, ...]]
    ) -> Attend[TargetCarry[Any]]:
        """The target's attention, of each part on its own: see `attend_block`.

        The keys and values of the blocks go into the carry.
        """
        attend_blocks = [
            {name: self.attend_block(pool.kv, *pool.read) for name, pool in own.items()}
            for own in pools
        ]

        def attend(
            carry: TargetCarry[Any], layer: LayerIndex, inputs: AttentionInputs
        ) -> tuple[jax.Array, TargetCarry[Any]]:
            rows, recurrent = carry
            pool = inputs.pool
            parts = _split_inputs(inputs, shapes)
            mixed = [
                attend_parts[pool](layer, part)
                for attend_parts, part in zip(attend_blocks, parts, strict=True)
            ]
            written = [
                {**own, pool: put_rows(own[pool], layer, part.keys, part.values)}
                for own, part in zip(rows, parts, strict=True)
            ]
            return join_parts(mixed, inputs.queries.shape[-2]), (written, recurrent)

        return attend

    def attend_block(
        self, kv: KvArrays, tables: jax.Array, starts: jax.Array, length: int
    ) -> AttendBlock:
        """Attention of blocks at positions `starts` [B] to the kv positions before them, and to themselves.

        kv is read up to `length` positions per row, by the page tables [B, E].
        """

        def attend(layer: LayerIndex, inputs: AttentionInputs) -> jax.Array:
            seen = LayerWindows(inputs.windows, layer)
            block = AttendingBlock(
                inputs.queries,
                inputs.keys,
                inputs.values,
                starts,
                seen.limits(),
                seen.slides,
                inputs.sinks,
            )
            return self.tp.backend.attend(block, KvContext(*kv, layer, tables, length), seen)

        return attend

    def count_forward_collectives(self, written_layers: int) -> int:
        """Collectives of a forward: two sums per layer that is written out, the embedding, the choice of a token."""
        return 2 + 2 * written_layers

    def count_target_collectives(self) -> int:
        """Collectives of a target forward with the choice of a token."""
        return self.count_forward_collectives(self.target.module.model.count_written_layers())


def _join_tokens(parts: Sequence[jax.Array]) -> jax.Array:
    """Parts [B, T] as one block [1, N]; a single part as it is."""
    return parts[0] if len(parts) == 1 else jnp.concatenate([*map(jnp.ravel, parts)])[None]


def join_parts(parts: Sequence[jax.Array], tokens: int) -> jax.Array:
    """Parts [B, .., T, D] as one block [1, .., tokens, D], padded with zeros; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    rows = [jnp.moveaxis(part, 0, -3) for part in parts]
    joined = jnp.concatenate([one.reshape(*one.shape[:-3], -1, one.shape[-1]) for one in rows], -2)
    padding = [*[(0, 0)] * (joined.ndim - 2), (0, tokens - joined.shape[-2]), (0, 0)]
    return jnp.pad(joined, padding)[None]


def split_parts(x: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The inverse of `join_parts`, for parts of `shapes` [B, T]."""
    if len(shapes) == 1:
        return [x]
    parts = []
    begin = 0
    for batch, width in shapes:
        end = begin + batch * width
        rows = x[0, ..., begin:end, :]
        parts.append(jnp.moveaxis(rows.reshape(*rows.shape[:-2], batch, width, -1), -3, 0))
        begin = end
    return parts


def _split_inputs(
    inputs: AttentionInputs, shapes: Sequence[tuple[int, ...]]
) -> list[AttentionInputs]:
    """The inputs of the attention of each part."""
    arrays = zip(
        *(split_parts(one, shapes) for one in (inputs.queries, inputs.keys, inputs.values)),
        strict=True,
    )
    return [
        replace(inputs, queries=queries, keys=keys, values=values)
        for queries, keys, values in arrays
    ]


def _weights_of(model: str, arrays: Arrays) -> dict[str, jax.Array]:
    """The weights of one model, without the prefix of its role."""
    prefix = f"{model}."
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


class BuildEstimate(msgspec.Struct, frozen=True):
    """What compiling takes.

    Attributes:
        seconds: of one core.
        bytes: on disk, compressed, of executable and program.
    """

    seconds: float
    bytes: float

    def __add__(self, other: "BuildEstimate") -> "BuildEstimate":
        return BuildEstimate(self.seconds + other.seconds, self.bytes + other.bytes)


class MeasuredBuild(NamedTuple):
    """Builds of a program on a platform: a fixed part in seconds of one core and bytes on disk, and a part per unit.

    On TPU the layers are a loop, and the unit is a token of the call. On CPU the layers are unrolled, and the unit is a
    layer. Seconds: processor time of whole builds, tracing and self-tests included, on an x86 server with two cores:
    Qwen3-4B and its draft for v5e (jax 0.12.0.1, libtpu 0.0.52), the embedded pair for CPU (jax 0.10.2 and 0.12.0.1).
    Bytes on CPU: of targets with 3 to 28 layers, jax 0.12.0.1.
    """

    seconds: float
    bytes: float
    unit_seconds: float = 0.0
    unit_bytes: float = 0.0

    def estimate(self, units: int) -> BuildEstimate:
        """What compiling an executable of so many units takes."""
        return BuildEstimate(
            self.seconds + units * self.unit_seconds, self.bytes + units * self.unit_bytes
        )


@dataclass(frozen=True)
class ModeFigures:
    """What was measured of a program in one mode, and how its executables are checked.

    Attributes:
        code_bytes: of a TPU executable: a fixed part, and a part per token of a call. Fitted to Qwen3-4B and its draft
            on v5e.
        tpu, cpu: builds for these platforms.
        rated: whether the estimated time is compared with its bound. Not where sampling takes much of it: the bound
            leaves out top_k and top_p.
        logits_arrays: float32 arrays of the size of the logits that the temporaries may hold in addition.
    """

    code_bytes: tuple[int, int]
    tpu: MeasuredBuild
    cpu: MeasuredBuild
    rated: bool = False
    logits_arrays: int = 0


def _nothing(*given: object) -> int:
    return 0


@dataclass(frozen=True)
class ProgramBody:
    """The compile half of a program.

    Attributes:
        program: the half in the catalogue of `cache`.
        function: inputs by name → donated state and results by name.
        cost: of a call, for the roofline.
        figures: by mode.
        count_tokens: how many tokens a call computes; the second argument is the tokens of a draft's block.
        estimate_temporaries: bytes on each of a number of TPU devices. A layer's intermediate results stay in VMEM, and
            features of verified tokens take the place of the logits. Fitted to Qwen3-4B, Qwen3-8B and their drafts on
            v5e, v5p and v6e.
        count_collectives: how many the program needs on several devices.
        layers_of: the model whose layers make a build on CPU longer.
        checks_temporaries: whether temporaries are checked.
        copies_state: whether it copies state on purpose.
    """

    program: Program
    function: Callable[[PairModels, Signature, Arrays], Outputs]
    cost: Callable[[PairCosts, Signature], RooflineCost]
    figures: Mapping[Mode, ModeFigures]
    count_tokens: Callable[[Signature, int], int] = _nothing
    estimate_temporaries: Callable[[Signature, PairShapes, int], int] = _nothing
    count_collectives: Callable[[PairModels, Signature], int] = _nothing
    layers_of: Literal["target", "draft"] = "target"
    checks_temporaries: bool = True
    copies_state: bool = False
