"""Gated DeltaNet of a verified block as Pallas TPU kernels: the mixer of a layer, and the commit of all its updates.

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
class MixDeltaBlock(Kernel):
    """The mixer.

    Attributes:
        heads: key heads of a grid step.
        key_heads: Q.
        epsilon: of the norm of results.
        norm_epsilon: of the norms of queries and keys.
    """

    name = "mix_delta_block"

    heads: int
    key_heads: int
    epsilon: float
    norm_epsilon: float

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


def _normalize(heads: jax.Array, epsilon: float) -> jax.Array:
    """Queries or keys [T, I] of length 1."""
    return heads * jax.lax.rsqrt(jnp.sum(heads * heads, axis=1, keepdims=True) + epsilon)


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)
