"""Gated DeltaNet as Pallas TPU kernels: the mixer of a layer, of a verified block or a prompt's chunk; and the commit.

XLA's operations (`models.gated_delta_net`) divide the mixer of a layer into some forty fusions, most of which lay out
the heads of all rows again. Here a grid step reads the states of a group of heads once, in their layout, and
everything else stays in VMEM. The commit rewrites the states in place.

L layers · N slots · B rows · T tokens of a block · Q key heads · R value heads per key head · V = Q R · I key width
O value width · W = 2 I + R O channels of a key head · J rows of a window
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.compile.kernels.kernel import (
    Kernel,
    Launch,
    Operand,
    find_largest_divisor,
    keep_in_hbm,
    multiply,
    name_references,
)
from dflash_aot.compile.kernels.kernel_device import (
    LANES,
    SUBLANES,
    DeltaBlock,
    DeltaCommit,
    DeltaSizes,
    DeltaUpdates,
    KernelDevice,
    round_up,
)

PASSES = 6  # of the MXU for a product of float32
MAX_BLOCK = 32  # tokens of a block, whose equations are solved token by token
STATE_BYTES = 3 * 2**19  # of recurrent states of a grid step; the commit holds four times as much
CHUNK_STATE_BYTES = 2**18  # the same, of a chunk of a prompt
CHUNK_BLOCK = 128  # tokens of a block of a chunk: whole registers
UNIT = 8  # of these, whose equations are solved token by token: the rows of a register
SPLIT_PASSES = 3  # of the MXU for a product of two sums of two parts

Parts = list[jax.Array]  # of one dtype, whose sum is meant


def choose_delta_heads(sizes: DeltaSizes, cores: int) -> int | None:
    """Key heads of a grid step of the Gated DeltaNet kernels on a device with `cores` TensorCores.

    None where the kernels do not fit: heads are not whole registers, or no group of heads fits in VMEM.
    """
    if sizes.key_dim % LANES or sizes.value_dim % LANES:
        return None

    def fits(heads: int) -> bool:
        values = heads * sizes.value_heads // sizes.key_heads
        # factors of a head are a sublane
        whole = heads == sizes.key_heads or values % SUBLANES == 0
        shared = sizes.key_heads // heads >= min(cores, sizes.key_heads)
        return whole and shared and 4 * values * sizes.key_dim * sizes.value_dim <= STATE_BYTES

    return find_largest_divisor(sizes.key_heads, fits)


def choose_delta_blocks(
    device: KernelDevice, sizes: DeltaSizes, tokens: int, window: int
) -> "DeltaBlocks | None":
    """The kernels for blocks of `tokens` tokens after windows of `window` rows; None where they do not fit."""
    heads = choose_delta_heads(sizes, device.cores)
    if heads is None or tokens > MAX_BLOCK or window > SUBLANES:
        return None
    return DeltaBlocks(heads, round_up(tokens, SUBLANES), device.interpret)


@dataclass(frozen=True)
class DeltaBlocks:
    """Both kernels, for blocks of one width on one device.

    Attributes:
        heads: key heads of a grid step.
        tokens: of a block, with padding.
        interpret: see `KernelDevice`.
    """

    heads: int
    tokens: int
    interpret: Any = False

    def mix(
        self, block: DeltaBlock, pending: DeltaUpdates, layer: int | jax.Array
    ) -> tuple[jax.Array, DeltaUpdates]:
        """The mixer's results [B, T, V O], normed and gated, and `pending` with the updates of the layer, in place.

        `pending` may have more tokens than T, a multiple of SUBLANES: no update comes from the tokens after the block.
        """
        T = block.channels.shape[1]
        padding = (0, pending.keys.shape[3] - T)
        index = jnp.asarray(layer, jnp.int32)
        tokens = [
            jnp.pad(array, ((0, 0), padding, (0, 0))) for array in (block.channels, block.gates)
        ]
        factors = [
            jnp.pad(array, ((0, 0), (0, 0), padding)) for array in (block.strengths, block.decays)
        ]
        conv = block.conv.reshape(-1, block.conv.shape[-1]).T
        kernel = MixDeltaBlock(self.heads, block.conv.shape[0], block.epsilon, block.norm_epsilon)
        scalars = (index.reshape(1), block.begun.astype(jnp.int32))
        stacks = map(keep_in_hbm, (block.windows, block.states, *pending))
        operands = (*scalars, *tokens, *factors, conv, block.norm[None], *stacks)
        results, *updates = kernel.call(operands, self.interpret)
        return results[:, :T], DeltaUpdates(*updates)

    def commit(self, commit: DeltaCommit) -> tuple[jax.Array, jax.Array]:
        """States [L, N, V, I, O] and windows [L, N, J, C] of the first B slots after their blocks, in place."""
        pending = commit.pending
        stacks = map(
            keep_in_hbm,
            (pending.keys, pending.updates, pending.channels, commit.windows, commit.states),
        )
        operands = (commit.begun.astype(jnp.int32), commit.counts, commit.factors, *stacks)
        windows, states = CommitDeltaBlocks(self.heads).call(operands, self.interpret)
        return states, windows


@dataclass(frozen=True)
class MixDelta(Kernel):
    """The mixer of a block or of a chunk.

    Attributes:
        heads: key heads of a grid step.
        key_heads: Q.
        epsilon: of the norm of results.
        norm_epsilon: of the norms of queries and keys.
    """

    heads: int
    key_heads: int
    epsilon: float
    norm_epsilon: float


@dataclass(frozen=True)
class MixDeltaBlock(MixDelta):
    """The mixer of a verified block."""

    name = "mix_delta_block"

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, begun, channels, gates, strengths, decays, conv, norm, windows, states, pending updates."""
        channels, gates, _, _, conv, norm, windows, states, *pending = operands[2:]
        B, T, _ = channels.shape
        taps = conv.shape[0]
        J, C = windows.shape[2:]
        V, I, O = states.shape[2:]  # noqa: E741
        groups = self.key_heads // self.heads
        W = C // self.key_heads
        values = self.heads * V // self.key_heads
        main_memory = pl.BlockSpec(memory_space=pl.ANY)

        def by_token(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, T, width), lambda row, group, *_: (row, 0, group))

        def by_head(*widths: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (None, *widths), lambda row, group, *_: (row, group, *(0,) * (len(widths) - 1))
            )

        def of_layer(*widths: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (None, None, *widths),
                lambda row, group, layer, *_: (layer[0], row, group, *(0,) * (len(widths) - 1)),
            )

        def rows_of_layer(rows: int) -> pl.BlockSpec:
            width = self.heads * W
            return pl.BlockSpec(
                (None, None, rows, width), lambda row, group, layer, *_: (layer[0], row, 0, group)
            )

        factor = by_head(values, T)
        item = channels.dtype.itemsize
        read = 2 * 2 * T * I * O + 2 * T * T * O
        return Launch(
            body=partial(_mix_heads, self),
            results=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (gates, *pending)],
            grid=(B, groups),
            axes=("parallel", "parallel"),
            scalars=2,
            inputs=[
                by_token(self.heads * W),
                by_token(values * O),
                factor,
                factor,
                pl.BlockSpec((taps, self.heads * W), lambda row, group, *_: (0, group)),
                pl.BlockSpec(norm.shape, lambda row, group, *_: (0, 0)),
                rows_of_layer(J),
                of_layer(values, I, O),
                *[main_memory] * 4,
            ],
            outputs=[
                by_token(values * O),
                of_layer(self.heads, T, I),
                of_layer(values, T, O),
                of_layer(values, T),
                rows_of_layer(T),
            ],
            scratch=[pltpu.VMEM((SUBLANES + T, W), jnp.float32)],
            aliases={10: 1, 11: 2, 12: 3, 13: 4},
            cost=pl.CostEstimate(
                flops=PASSES * B * (V * read + self.key_heads * 2 * 2 * T * T * I),
                transcendentals=B * T * (C + V * O),
                bytes_accessed=B * (4 * V * I * O + item * (2 * T * C + J * C + 2 * T * V * O))
                + 4 * B * T * (self.key_heads * I + V * O),
            ),
        )


class _MixOperands(NamedTuple):
    """References that the mixer's kernel reads, in order: scalars, then arrays."""

    layer: Any
    begun: Any
    channels: Any
    gates: Any
    strengths: Any
    decays: Any
    conv: Any
    norm: Any
    windows: Any
    states: Any


class _MixResults(NamedTuple):
    """References that the mixer's kernel writes, in order: the results, then the updates of the layer.

    `sums` are the decays of `DeltaUpdates`, `kept` its channels.
    """

    out: Any
    keys: Any
    updates: Any
    sums: Any
    kept: Any


@name_references(
    "_layer",
    *_MixOperands._fields[1:],
    *(f"_{name}" for name in DeltaUpdates._fields),
    *_MixResults._fields,
    "rows",
)
def _mix_heads(kernel: MixDeltaBlock, *refs: Any) -> None:
    """The kernel: one grid step runs a group of key heads, and their value heads, of one row.

    refs: operands, the updates before the call, results, and as scratch the window and block of one key head.
    """
    ref = _MixOperands(*refs[: len(_MixOperands._fields)])
    written = _MixResults(*refs[-1 - len(_MixResults._fields) : -1])
    rows = refs[-1]
    T = ref.channels.shape[0]
    W = rows.shape[1]
    taps = ref.conv.shape[0]
    J = ref.windows.shape[0]
    values, I, O = ref.states.shape  # noqa: E741
    has_begun = ref.begun[pl.program_id(0)] > 0
    square = (T, T)
    t, s = (jax.lax.broadcasted_iota(jnp.int32, square, axis) for axis in range(2))
    written.kept[...] = ref.channels[...]

    def mix_key_head(head: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(head * W, LANES), W)
        # The window, and after it the block, in whole registers.
        rows[SUBLANES - J : SUBLANES, :] = jnp.where(
            has_begun, ref.windows[:, at].astype(jnp.float32), 0
        )
        rows[SUBLANES:, :] = ref.channels[:, at].astype(jnp.float32)
        first = SUBLANES - taps + 1
        mixed = sum(
            ref.conv[tap : tap + 1, at] * rows[first + tap : first + tap + T, :]
            for tap in range(taps)
        )
        mixed = _silu(mixed).astype(ref.channels.dtype).astype(jnp.float32)
        query, key = (_normalize(mixed[:, part : part + I], kernel.norm_epsilon) for part in (0, I))
        query *= I**-0.5
        written.keys[head] = key
        readers = jnp.concatenate([key, query], axis=0)
        scores = multiply(readers, key, (1, 1))
        for part in range(values // kernel.heads):
            mix_value_head(
                head * (values // kernel.heads) + part,
                mixed[:, 2 * I + part * O :][:, :O],
                readers,
                scores,
            )

    def mix_value_head(
        head: jax.Array, value: jax.Array, readers: jax.Array, scores: jax.Array
    ) -> None:
        decay, strength = (one[pl.ds(head, 1), :] for one in (ref.decays, ref.strengths))  # [1, T]
        # transposed: [T, 1]
        strength = jnp.sum(jnp.where(s == t, strength, 0), axis=1, keepdims=True)
        total = jnp.sum(jnp.where(s <= t, decay, 0), axis=1, keepdims=True)
        # transposed: [1, T]
        total_row = jnp.sum(jnp.where(s == t, total, 0), axis=0, keepdims=True)
        written.sums[pl.ds(head, 1), :] = total_row
        distance = jnp.where(s <= t, total - total_row, 0)  # masked before exp: it overflows
        faded = jnp.where(s <= t, jnp.exp(distance), 0)
        fading = jnp.exp(total)
        read = jnp.where(has_begun, multiply(readers, ref.states[head]), 0)
        update = strength * (value - fading * read[:T])
        lower = jnp.where(s < t, strength * scores[:T] * faded, 0)
        for token in range(T - 1):  # forward substitution: rows up to `token` are solved
            update -= lower[:, token : token + 1] * update[token : token + 1, :]
        result = fading * read[T:] + multiply(scores[T:] * faded, update)
        written.updates[head] = update
        at = pl.ds(pl.multiple_of(head * O, LANES), O)
        scale = jax.lax.rsqrt(jnp.mean(result * result, axis=1, keepdims=True) + kernel.epsilon)
        gate = _silu(ref.gates[:, at].astype(jnp.float32))
        written.out[:, at] = (result * scale * ref.norm[...] * gate).astype(written.out.dtype)

    jax.lax.fori_loop(0, kernel.heads, mix_key_head, None)


@dataclass(frozen=True)
class CommitDeltaBlocks(Kernel):
    """The commit; `heads`: key heads of a grid step."""

    name = "commit_delta_blocks"

    heads: int

    def plan(self, *operands: Operand) -> Launch:
        """operands: begun, counts, factors, keys, updates, channels, windows, states. The last two are the results."""
        keys, updates, channels, windows, states = operands[3:]
        L, B, Q, T, I = keys.shape  # noqa: E741
        J, C = windows.shape[2:]
        V = updates.shape[2]
        O = updates.shape[4]  # noqa: E741
        values = self.heads * V // Q
        width = self.heads * C // Q

        def by_head(*widths: int) -> pl.BlockSpec:
            zeros = (0,) * (len(widths) - 1)
            return pl.BlockSpec(
                (None, None, *widths), lambda layer, row, group, *_: (layer, row, group, *zeros)
            )

        def by_row(rows: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (None, None, rows, width), lambda layer, row, group, *_: (layer, row, 0, group)
            )

        results = [by_row(J), by_head(values, I, O)]
        heads = [by_head(values, T + 1), by_head(self.heads, T, I), by_head(values, T, O)]
        return Launch(
            body=partial(_commit_heads, self),
            results=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (windows, states)],
            grid=(L, B, Q // self.heads),
            axes=("parallel", "parallel", "parallel"),
            scalars=2,
            inputs=[*heads, by_row(T), *results],
            outputs=results,
            scratch=[pltpu.VMEM((rows, width), jnp.float32) for rows in (SUBLANES + T, J)],
            aliases={6: 0, 7: 1},
            cost=pl.CostEstimate(
                flops=PASSES * 2 * L * B * V * T * I * O,
                transcendentals=0,
                bytes_accessed=L
                * B
                * (
                    4 * (2 * V * I * O + Q * T * I + V * T * O)
                    + windows.dtype.itemsize * C * (T + 2 * J)
                ),
            ),
        )


class _CommitRefs(NamedTuple):
    """References of the commit's kernel, in order: scalars, operands, results, scratch.

    `rows` is a row's window and block, `after` the new window, float32.
    """

    begun: Any
    counts: Any
    factors: Any
    keys: Any
    updates: Any
    channels: Any
    windows: Any
    states: Any
    window_out: Any
    state_out: Any
    rows: Any
    after: Any


@name_references(*_CommitRefs._fields)
def _commit_heads(kernel: CommitDeltaBlocks, *refs: Any) -> None:
    """The kernel: one grid step rewrites the states and the window of a group of heads of one row and layer."""
    ref = _CommitRefs(*refs)
    values = ref.states.shape[0]
    T = ref.keys.shape[1]
    J = ref.windows.shape[0]
    row = pl.program_id(1)
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (T, T), axis) for axis in range(2))
    ref.rows[SUBLANES - J : SUBLANES, :] = jnp.where(
        ref.begun[row] > 0, ref.windows[...].astype(jnp.float32), 0
    )
    ref.rows[SUBLANES:, :] = ref.channels[...].astype(jnp.float32)
    for index in range(
        J
    ):  # one by one: the compiler loads several rows only from where registers begin
        ref.after[index : index + 1, :] = ref.rows[
            pl.ds(SUBLANES - J + ref.counts[row] + index, 1), :
        ]
    ref.window_out[...] = ref.after[...].astype(ref.window_out.dtype)

    def commit_value_head(head: jax.Array, _: None) -> None:
        factor = ref.factors[pl.ds(head, 1), :]  # [1, T+1]
        # transposed: [T, 1]
        weight = jnp.sum(jnp.where(s == t, factor[:, :T], 0), axis=1, keepdims=True)
        of_state = factor[:, T:]
        before = jnp.where(of_state > 0, of_state * ref.states[head], 0)
        key = ref.keys[jax.lax.div(head, values // kernel.heads)]
        ref.state_out[head] = before + multiply(weight * key, ref.updates[head], (0, 0))

    jax.lax.fori_loop(0, values, commit_value_head, None)


# -- a chunk of a prompt
#
# Blocks of CHUNK_BLOCK tokens run one after another, and the states stay in VMEM between them. The equations of a block
# are solved by the inverse of I + A, as in `models.gated_delta_net`: that of UNIT tokens by substitution, that of twice
# as many by those of both halves. Where a model is of bfloat16, products of float32 take half as many passes.


def choose_delta_chunks(
    device: KernelDevice, sizes: DeltaSizes, window: int
) -> "DeltaChunks | None":
    """The kernel for chunks of a prompt after windows of `window` rows; None where it does not fit."""
    if sizes.key_dim % LANES or sizes.value_dim % LANES or window > SUBLANES:
        return None
    state = 4 * sizes.value_heads // sizes.key_heads * sizes.key_dim * sizes.value_dim

    def fits(heads: int) -> bool:
        shared = sizes.key_heads // heads >= min(device.cores, sizes.key_heads)
        return shared and heads * state <= CHUNK_STATE_BYTES

    heads = find_largest_divisor(sizes.key_heads, fits)
    return None if heads is None else DeltaChunks(heads, device.interpret)


@dataclass(frozen=True)
class DeltaChunks:
    """The kernel on one device.

    Attributes:
        heads: key heads of a grid step.
        interpret: see `KernelDevice`.
    """

    heads: int
    interpret: Any = False

    def mix(
        self, chunk: DeltaBlock, layer: int | jax.Array, slot: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the first `count` of T tokens of one slot: (results [1, T, V O], windows, states), the stacks in place.

        The results are normed and gated; those after `count` are undefined, and finite. `slot` and `count` are int32
        scalars.
        """
        T = chunk.channels.shape[1]
        padding = (0, -T % CHUNK_BLOCK)
        tokens = [jnp.pad(array[0], (padding, (0, 0))) for array in (chunk.channels, chunk.gates)]
        factors = [
            jnp.pad(array[0], ((0, 0), padding)) for array in (chunk.strengths, chunk.decays)
        ]
        conv = chunk.conv.reshape(-1, chunk.conv.shape[-1]).T
        kernel = MixDeltaChunk(self.heads, chunk.conv.shape[0], chunk.epsilon, chunk.norm_epsilon)
        scalars = [
            jnp.asarray(one, jnp.int32).reshape(1) for one in (layer, slot, chunk.begun, count)
        ]
        stacks = map(keep_in_hbm, (chunk.windows, chunk.states))
        operands = (*scalars, *tokens, *factors, conv, chunk.norm[None], *stacks)
        results, windows, states = kernel.call(operands, self.interpret)
        return results[None, :T], windows, states


@dataclass(frozen=True)
class MixDeltaChunk(MixDelta):
    """The mixer of a chunk of a prompt."""

    name = "mix_delta_chunk"

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, slot, begun, count, channels, gates, strengths, decays, conv, norm, windows, states.

        Windows and states are results too, after the normed and gated results of the tokens.
        """
        channels, gates, _, _, conv, norm, windows, states = operands[4:]
        P = channels.shape[0]
        T = CHUNK_BLOCK
        taps = conv.shape[0]
        J, C = windows.shape[2:]
        V, I, O = states.shape[2:]  # noqa: E741
        width = self.heads * C // self.key_heads
        values = self.heads * V // self.key_heads

        def by_token(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((T, width), lambda group, block, *_: (block, group))

        factor = pl.BlockSpec((V, T), lambda group, block, *_: (0, block))
        window = pl.BlockSpec(
            (None, None, J, width),
            lambda group, block, layer, slot, *_: (layer[0], slot[0], 0, group),
        )
        state = pl.BlockSpec(
            (None, None, values, I, O),
            lambda group, block, layer, slot, *_: (layer[0], slot[0], group, 0, 0),
        )
        item = channels.dtype.itemsize
        # of a key head the scores; of a value head the reads, the inverse, the updates, and what takes them
        of_key = 2 * 2 * T * T * I
        of_value = 2 * T * (2 * I * O + 2 * T * (T - UNIT) + T * O + (T + I) * O)
        passes = PASSES if item == 4 else SPLIT_PASSES
        return Launch(
            body=partial(_mix_chunk, self),
            results=[
                jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (gates, windows, states)
            ],
            grid=(self.key_heads // self.heads, P // T),
            axes=("parallel", "arbitrary"),
            scalars=4,
            inputs=[
                by_token(width),
                by_token(values * O),
                factor,
                factor,
                pl.BlockSpec((taps, width), lambda group, *_: (0, group)),
                pl.BlockSpec(norm.shape, lambda *_: (0, 0)),
                window,
                state,
            ],
            outputs=[by_token(values * O), window, state],
            scratch=[pltpu.VMEM((width // LANES, SUBLANES + T, LANES), jnp.float32)],
            aliases={10: 1, 11: 2},
            cost=pl.CostEstimate(
                flops=passes * (P // T) * (V * of_value + self.key_heads * of_key),
                transcendentals=P * (C + V * O),
                bytes_accessed=2 * 4 * V * I * O
                + item * (P * C + 2 * J * C + 2 * P * V * O)
                + 4 * 2 * P * V,
            ),
        )


class _ChunkRefs(NamedTuple):
    """References of the kernel, in order: scalars, operands, results, and as scratch the last rows and the block."""

    layer: Any
    slot: Any
    begun: Any
    count: Any
    channels: Any
    gates: Any
    strengths: Any
    decays: Any
    conv: Any
    norm: Any
    windows: Any
    states: Any
    out: Any
    window_out: Any
    state_out: Any
    rows: Any


@name_references("_layer", "_slot", *_ChunkRefs._fields[2:])
def _mix_chunk(kernel: MixDeltaChunk, *refs: Any) -> None:
    """The kernel: one grid step runs a block of tokens in a group of key heads, and their value heads."""
    ref = _ChunkRefs(*refs)
    T, width = ref.channels.shape
    values, I, O = ref.states.shape  # noqa: E741
    dtype = ref.channels.dtype
    last = ref.count[0] - pl.program_id(1) * T  # 1 to T where the counted tokens end in this block
    _take_rows(ref, last)
    counted = jax.lax.broadcasted_iota(jnp.int32, (1, T), 1) < last
    columns = width // kernel.heads // LANES
    shared = values // kernel.heads
    heads = []
    for head in range(kernel.heads):
        mixed = jnp.concatenate(
            [_convolve(ref, head * columns + column) for column in range(columns)], axis=1
        )
        query, key = (_normalize(mixed[:, part : part + I], kernel.norm_epsilon) for part in (0, I))
        first = pl.program_id(0) * values + head * shared
        factors = [
            [
                jnp.where(counted, one[pl.ds(first + part, 1), :], 0)
                for one in (ref.strengths, ref.decays)
            ]
            for part in range(shared)
        ]
        states = [ref.state_out[head * shared + part] for part in range(shared)]
        heads += _prepare_heads(query * I**-0.5, key, mixed[:, 2 * I :], factors, states, dtype)
    # All heads take each step together: a head alone would wait for each of its products.
    inverses = _invert_unit_triangular([one.lower for one in heads], dtype)
    updates = [
        _multiply_parts(inverse, _split(one.wanted, dtype))
        for one, inverse in zip(heads, inverses, strict=True)
    ]
    taken = [
        _multiply_parts(_split(one.takers, dtype), _split(update, dtype))
        for one, update in zip(heads, updates, strict=True)
    ]
    for number, (one, sums) in enumerate(zip(heads, taken, strict=True)):
        ref.state_out[number] = one.fading * ref.state_out[number] + sums[T:]
        result = one.carried + sums[:T]
        at = slice(number * O, (number + 1) * O)
        scale = jax.lax.rsqrt(jnp.mean(result * result, axis=1, keepdims=True) + kernel.epsilon)
        gate = _silu(ref.gates[:, at].astype(jnp.float32))
        ref.out[:, at] = (result * scale * ref.norm[...] * gate).astype(dtype)


def _take_rows(ref: _ChunkRefs, last: jax.Array) -> None:
    """Puts the block after the rows before it, and keeps the window where the counted tokens end.

    Before the first block it clears the states and windows of a slot that has not begun.
    """
    T = ref.channels.shape[0]
    J = ref.windows.shape[0]
    block = pl.program_id(1)
    has_begun = ref.begun[0] > 0
    columns = [
        (number, slice(number * LANES, (number + 1) * LANES)) for number in range(len(ref.rows))
    ]

    @pl.when(block == 0)
    def begin() -> None:
        for number, at in columns:
            ref.rows[number, SUBLANES - J : SUBLANES, :] = jnp.where(
                has_begun, ref.windows[:, at].astype(jnp.float32), 0
            )
        ref.state_out[...] = jnp.where(has_begun, ref.states[...], 0)

    @pl.when(block > 0)
    def go_on() -> None:
        ref.rows[:, :SUBLANES, :] = ref.rows[:, T:, :]

    for number, at in columns:
        ref.rows[number, SUBLANES:, :] = ref.channels[:, at].astype(jnp.float32)

    @pl.when((last <= T) & ((last > 0) | (block == 0)))
    def keep_window() -> None:
        for number, at in columns:
            window = ref.rows[number, pl.ds(SUBLANES - J + last, J), :]
            ref.window_out[:, at] = window.astype(ref.window_out.dtype)


def _convolve(ref: _ChunkRefs, column: int) -> jax.Array:
    """LANES channels of all tokens after the convolution and its activation, rounded: float32 [T, LANES]."""
    T = ref.channels.shape[0]
    taps = ref.conv.shape[0]
    first = SUBLANES - taps + 1
    at = slice(column * LANES, (column + 1) * LANES)
    mixed = sum(
        ref.conv[tap : tap + 1, at] * ref.rows[column, first + tap : first + tap + T, :]
        for tap in range(taps)
    )
    return _silu(mixed).astype(ref.channels.dtype).astype(jnp.float32)


class _ChunkHead(NamedTuple):
    """A value head in a block whose equations are not solved; the letters are those of the delta rule.

    Attributes:
        wanted: the right sides of the equations: [T, O].
        lower: A, [T, T].
        carried: results of the state before the block, [T, O].
        takers: what takes the updates to the results, and after it what takes them to the state: [T + I, T].
        fading: e^G of the last token, [1, 1].
    """

    wanted: jax.Array
    lower: jax.Array
    carried: jax.Array
    takers: jax.Array
    fading: jax.Array


def _prepare_heads(
    query: jax.Array,
    key: jax.Array,
    mixed: jax.Array,
    factors: list[list[jax.Array]],
    states: list[jax.Array],
    dtype: Any,
) -> list[_ChunkHead]:
    """The R value heads of a key head.

    query, key [T, I], their values [T, R O]; of each a strength and a decay [1, T], and the state before the block.
    """
    T = key.shape[0]
    O = mixed.shape[1] // len(states)  # noqa: E741
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (T, T), axis) for axis in range(2))
    readers = _split(jnp.concatenate([key, query], axis=0), dtype)
    scores = _multiply_parts(readers, [one[:T] for one in readers], (1, 1))
    earlier = jnp.where(s < t, scores[:T], 0)
    seen = jnp.where(s <= t, scores[T:], 0)
    turned = key.T
    heads = []
    for part, ((strength_row, decay), state) in enumerate(zip(factors, states, strict=True)):
        # transposed: [T, 1]
        strength = jnp.sum(jnp.where(s == t, strength_row, 0), axis=1, keepdims=True)
        total = jnp.sum(jnp.where(s <= t, decay, 0), axis=1, keepdims=True)
        # transposed: [1, T]
        total_row = jnp.sum(jnp.where(s == t, total, 0), axis=0, keepdims=True)
        # The scores of later tokens are 0; their factors must not overflow.
        faded = jnp.exp(jnp.minimum(total - total_row, 0))
        fading = jnp.exp(total)
        to_state = turned * jnp.exp(total[T - 1 :] - total_row)
        read = _multiply_parts(readers, _split(state, dtype))
        value = mixed[:, part * O : (part + 1) * O]
        heads.append(
            _ChunkHead(
                wanted=strength * (value - fading * read[:T]),
                lower=strength * earlier * faded,
                carried=fading * read[T:],
                takers=jnp.concatenate([seen * faded, to_state], axis=0),
                fading=fading[T - 1 :],
            )
        )
    return heads


def _invert_unit_triangular(lowers: list[jax.Array], dtype: Any) -> list[Parts]:
    """The inverses of I + strictly lower triangles [T, T].

    Until they are whole, the inverses of the blocks on a diagonal lie side by side, [size, T]: a product of those with
    a block diagonal has as few rows.
    """
    T = lowers[0].shape[0]
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (UNIT, T), axis) for axis in range(2))
    columns = [_spread_columns(_put_beside(lower, 0, UNIT)) for lower in lowers]
    inverses = [(lane % UNIT == row).astype(jnp.float32)] * len(lowers)
    for step in range(UNIT - 1):  # forward substitution: rows up to `step` are solved
        at = slice(step * UNIT, (step + 1) * UNIT)
        inverses = [
            one - column[at] * one[step : step + 1]
            for one, column in zip(inverses, columns, strict=True)
        ]
    while len(inverses[0]) < T:
        inverses = _double(lowers, inverses, dtype)
    return [_split(one, dtype) for one in inverses]


def _put_beside(lower: jax.Array, below: int, size: int) -> jax.Array:
    """Blocks of [T, T] side by side, [size, T]: all on the diagonal, or with `below` 1 every second one below it."""
    T = lower.shape[0]
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, T), 1)
    found = jnp.zeros((size, T), jnp.float32)
    for at in range(0, T, (1 + below) * size):
        rows = lower[at + below * size : at + (1 + below) * size]
        found = jnp.where((lane >= at) & (lane < at + size), rows, found)
    return found


def _spread_columns(beside: jax.Array) -> jax.Array:
    """Each column but the last of units side by side [UNIT, T], in all lanes of its unit: [(UNIT - 1) UNIT, T]."""
    T = beside.shape[1]
    is_first = jax.lax.broadcasted_iota(jnp.int32, beside.shape, 1) % UNIT == 0
    turned = [beside, *(pltpu.roll(beside, T - step, 1) for step in range(1, UNIT - 1))]
    columns = jnp.concatenate([jnp.where(is_first, one, 0) for one in turned], axis=0)
    width = 1
    while width < UNIT:
        columns += pltpu.roll(columns, width, 1)
        width *= 2
    return columns


def _double(lowers: list[jax.Array], inverses: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """Inverses of twice the size, side by side: [[A, 0], [-D C A, D]] of A and D, and C below A in `lowers`."""
    size, T = inverses[0].shape
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, T), 1)
    is_first = lane % (2 * size) < size
    zeros = jnp.zeros((size, T), jnp.float32)

    def part(beside: jax.Array, side: int) -> Parts:
        """[T, T], with the blocks of first halves in the rows of first halves (`side` 0), or of second ones."""
        pieces = []
        for at in range(0, T, 2 * size):
            own = jnp.where((lane >= at) & (lane < at + size), beside, 0)
            pieces += [zeros, own] if side else [own, zeros]
        return _split(jnp.concatenate(pieces, axis=0), dtype)

    corners = [_split(_put_beside(lower, 1, size), dtype) for lower in lowers]
    firsts = [part(inverse, 0) for inverse in inverses]
    products = [_multiply_parts(*pair) for pair in zip(corners, firsts, strict=True)]
    seconds = [jnp.where(is_first, 0, inverse) for inverse in inverses]
    below = [
        _multiply_parts(_split(second, dtype), part(product, 1))
        for second, product in zip(seconds, products, strict=True)
    ]
    return [
        jnp.concatenate([jnp.where(is_first, inverse, 0), second - one], axis=0)
        for inverse, second, one in zip(inverses, seconds, below, strict=True)
    ]


def _split(x: jax.Array, dtype: Any) -> Parts:
    """float32 as a sum of arrays of `dtype`: itself, or two of bfloat16, which leave out less than 2^-15 of it."""
    if dtype == jnp.float32:
        return [x]
    # Not by conversion: XLA may remove conversions to bfloat16 and back.
    high = pltpu.bitcast(pltpu.bitcast(x, jnp.int32) & -(2**16), jnp.float32)
    return [high.astype(dtype), (x - high).astype(dtype)]


def _multiply_parts(left: Parts, right: Parts, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two sums, float32, without the product of their second parts."""
    first, *others = (
        multiply(one, other, contracted)
        for number, one in enumerate(left)
        for other in right[: len(left) - number]
    )
    return sum(others, start=first)


def _normalize(heads: jax.Array, epsilon: float) -> jax.Array:
    """Queries or keys [T, I] of length 1."""
    return heads * jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + epsilon)


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)
