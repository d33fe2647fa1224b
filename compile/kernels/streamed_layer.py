"""What lies between the attentions of two layers as a Pallas TPU kernel: all its matrices in one stream through VMEM.

The output projection of a layer, its MLP, and the projections of the next layer's queries, keys and values, with the
residuals, norms and rotations between them. A grid step multiplies a part of a matrix, while the next part is copied to
VMEM. As XLA's operations they wait for each other, and nothing is read while small ones run. Int8 matrices are
converted part by part; their products are multiplied by the scales of their rows.

L layers · H hidden · M width of the MLP · Q width of the attention's result · N query heads · G kv heads
D head width · n tokens
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.compile.kernels.kernel import (
    DTYPES,
    Kernel,
    Launch,
    Operand,
    describe_operands,
    find_largest_divisor,
    keep_in_hbm,
    multiply,
    name_references,
)
from dflash_aot.compile.kernels.kernel_device import (
    LANES,
    RESERVED_VMEM,
    STREAM_ROWS,
    SUBLANES,
    KernelDevice,
    StreamSizes,
    StreamWeights,
    round_up,
)

# of the matrices in a grid step, at most: nothing hides the copy of the first
TILE_BYTES = 2 * 2**20
MLP_TILE_BYTES = 5 * 2**20
VMEM = 50 * 2**20  # bytes that the kernel may use
X = 2  # the place of x among the operands
Counts = tuple[int, int, int, int]  # grid steps of the four stages
Streamed = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class StreamLayer(Kernel):
    """The kernel.

    Attributes:
        tiles: outputs of a grid step of the output projection, the MLP (of its width), queries, and keys and values.
        head: D.
        epsilon: of the norms.
        vmem_bytes: that the kernel may use.
    """

    name = "stream_layer"

    tiles: tuple[int, int, int, int]
    head: int
    epsilon: float
    vmem_bytes: int

    def run(
        self,
        x: jax.Array,
        mixed: jax.Array,
        weights: StreamWeights,
        rotation: tuple[jax.Array, jax.Array],
        layer: jax.Array,
        interpret: Any,
    ) -> Streamed:
        """x [n, H] after a layer, and of the next layer rotated queries [N, n, D] and keys [G, n, D], and values.

        These are undefined after the last layer.

        n is a number of tokens that `pad` gives.

        Args:
            x: before the layer [n, H].
            mixed: the result of its attention, by head [Q / D, n, D].
            weights: of all layers.
            rotation: cosines and sines, float32 [n, D].
            layer: its number, int32 scalar.
            interpret: see `KernelDevice`.
        """
        counts = self._count_steps(
            weights.output, weights.down, weights.queries, weights.keys_values
        )
        last = layer + 1 >= len(weights.down)
        steps = jnp.where(last, sum(counts[:2]), sum(counts)).astype(jnp.int32)
        matrices = (
            weights.output,
            weights.gate_up,
            weights.gate_up,
            weights.down,
            weights.queries,
            weights.keys_values,
        )
        operands = (
            steps,
            layer.reshape(1),
            mixed,
            x,
            weights.mlp_norm,
            weights.input_norm,
            *rotation,
            weights.query_norm,
            weights.key_norm,
            *(keep_in_hbm(one) for one in (*matrices, *weights.scales)),
        )
        x, queries, keys, values = self.call(operands, interpret)
        return x, queries, keys, values

    def pad(self, rows: jax.Array) -> jax.Array:
        """Rows [.., n, width] with zeros up to whole memory tiles."""
        whole = [(0, 0)] * (rows.ndim - 2)
        return jnp.pad(rows, (*whole, (0, -rows.shape[-2] % STREAM_ROWS), (0, 0)))

    def _count_steps(
        self, output: Operand, down: Operand, queries: Operand, keys_values: Operand
    ) -> Counts:
        sizes = output.shape[1], down.shape[2], queries.shape[1], keys_values.shape[1]
        first, second, third, fourth = (
            size // tile for size, tile in zip(sizes, self.tiles, strict=True)
        )
        return first, second, third, fourth

    def plan(self, *operands: Operand) -> Launch:
        """operands: those of `run`, with gate_up twice."""
        steps, _, mixed, x, mlp_norm, input_norm, cos, sin, *others = operands
        query_norm, key_norm, *matrices = others
        output, gate_up, _, down, queries, keys_values, *scales = matrices
        L, H, M = down.shape
        counts = self._count_steps(output, down, queries, keys_values)
        begins = [sum(counts[:stage]) for stage in range(len(counts))]
        n = len(x)
        D = self.head
        Q = len(mixed) * D

        def place(step: Any, stage: int) -> Any:
            """Which tile of a stage a step has in VMEM: before the stage its first, after it its last."""
            return jnp.clip(step - begins[stage], 0, counts[stage] - 1)

        def follow(layer: Any) -> Any:
            return jnp.minimum(layer[0] + 1, L - 1)

        def whole(array: Operand) -> pl.BlockSpec:
            return pl.BlockSpec(array.shape, lambda step, layer: (0,) * array.ndim)

        output_tile, mlp_tile, query_tile, kv_tile = self.tiles
        inputs = [
            whole(mixed),
            whole(x),
            pl.BlockSpec((SUBLANES, H), lambda step, layer: (layer[0] // SUBLANES, 0)),
            pl.BlockSpec((SUBLANES, H), lambda step, layer: (follow(layer) // SUBLANES, 0)),
            whole(cos),
            whole(sin),
            *(
                pl.BlockSpec((SUBLANES, D), lambda step, layer: (follow(layer) // SUBLANES, 0))
                for _ in range(2)
            ),
            pl.BlockSpec(
                (None, output_tile, Q),
                lambda step, layer: (layer[0], place(step, 0), 0),
            ),
            *(
                pl.BlockSpec(
                    (None, mlp_tile, H),
                    lambda step, layer, part=part: (
                        layer[0],
                        part * counts[1] + place(step, 1),
                        0,
                    ),
                )
                for part in range(2)
            ),
            pl.BlockSpec((None, H, mlp_tile), lambda step, layer: (layer[0], 0, place(step, 1))),
            pl.BlockSpec(
                (None, query_tile, H), lambda step, layer: (follow(layer), place(step, 2), 0)
            ),
            pl.BlockSpec(
                (None, kv_tile, H), lambda step, layer: (follow(layer), place(step, 3), 0)
            ),
        ]
        if scales:
            inputs += [
                pl.BlockSpec(
                    (None, 1, output_tile), lambda step, layer: (layer[0], 0, place(step, 0))
                ),
                pl.BlockSpec(
                    (None, 2, mlp_tile), lambda step, layer: (layer[0], 0, place(step, 1))
                ),
                pl.BlockSpec((None, 1, H), lambda step, layer: (layer[0], 0, 0)),
                pl.BlockSpec(
                    (None, 1, query_tile), lambda step, layer: (follow(layer), 0, place(step, 2))
                ),
                pl.BlockSpec(
                    (None, 1, kv_tile), lambda step, layer: (follow(layer), 0, place(step, 3))
                ),
            ]
        outputs = [
            pl.BlockSpec((n, H), lambda step, layer: (0, 0)),
            pl.BlockSpec((query_tile // D, n, D), lambda step, layer: (place(step, 2), 0, 0)),
            *(
                pl.BlockSpec((kv_tile // (2 * D), n, D), lambda step, layer: (place(step, 3), 0, 0))
                for _ in range(2)
            ),
        ]
        own = H * (Q + 3 * M)
        # of each layer but the last
        following = H * (queries.shape[1] + keys_values.shape[1]) * (L - 1) // L
        rows = 2 * H + Q + queries.shape[1] + keys_values.shape[1]
        return Launch(
            body=partial(_run_int8_step if scales else _run_step, self, counts),
            results=[
                jax.ShapeDtypeStruct((n, H), x.dtype),
                jax.ShapeDtypeStruct((queries.shape[1] // D, n, D), x.dtype),
                *[jax.ShapeDtypeStruct((keys_values.shape[1] // (2 * D), n, D), x.dtype)] * 2,
            ],
            grid=(steps,),
            axes=("arbitrary",),
            scalars=1,
            inputs=inputs,
            outputs=outputs,
            scratch=[
                pltpu.VMEM((n, Q), x.dtype),
                pltpu.VMEM((n, H), x.dtype),
                pltpu.VMEM((n, H), x.dtype),
                pltpu.VMEM((n, H), jnp.float32),
            ],
            aliases={X: 0},
            value_bytes=4 * n * (2 * mlp_tile + H),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            cost=pl.CostEstimate(
                flops=2 * n * (own + following),
                transcendentals=n * M,
                bytes_accessed=down.dtype.itemsize * (own + following)
                + x.dtype.itemsize * n * rows
                + 2 * 4 * (SUBLANES * (H + D) + n * D)
                + 4 * sum(one.size // L for one in scales),
            ),
        )


class _Refs(NamedTuple):
    """References of the kernel in order."""

    layer: Any
    mixed: Any
    x: Any
    mlp_norm: Any
    input_norm: Any
    cos: Any
    sin: Any
    query_norm: Any
    key_norm: Any
    output: Any
    gate: Any
    up: Any
    down: Any
    queries: Any
    keys_values: Any
    # of int8 matrices; None for others
    output_scale: Any
    gate_up_scale: Any
    down_scale: Any
    queries_scale: Any
    keys_values_scale: Any
    x_out: Any
    queries_out: Any
    keys_out: Any
    values_out: Any
    merged: Any  # the heads of the attention's result [n, Q]
    middle: Any  # x after the attention [n, H]
    normed: Any  # [n, H]
    total: Any  # float32, of the MLP [n, H]


SCALES = slice(_Refs._fields.index("output_scale"), _Refs._fields.index("x_out"))


@name_references(*_Refs._fields[: SCALES.start], *_Refs._fields[SCALES.stop :])
def _run_step(kernel: StreamLayer, counts: Counts, *refs: Any) -> None:
    """The kernel of plain matrices."""
    none = [None] * (SCALES.stop - SCALES.start)
    _multiply_tile(kernel, counts, _Refs(*refs[: SCALES.start], *none, *refs[SCALES.start :]))


@name_references(*_Refs._fields)
def _run_int8_step(kernel: StreamLayer, counts: Counts, *refs: Any) -> None:
    """The kernel of int8 matrices."""
    _multiply_tile(kernel, counts, _Refs(*refs))


def _multiply_tile(kernel: StreamLayer, counts: Counts, ref: _Refs) -> None:
    """One grid step multiplies a tile. Rounds where the layers do.

    counts: grid steps of the four stages.
    """
    step = pl.program_id(0)
    dtype = ref.x.dtype
    layer = ref.layer[0]
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]

    def norm(x: jax.Array, weights: Any, at: Any) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + kernel.epsilon)
        weight = weights[pl.ds(at % SUBLANES, 1), :]
        return ((wide * scale).astype(dtype).astype(jnp.float32) * weight).astype(dtype)

    def add(x: jax.Array, product: jax.Array) -> jax.Array:
        rounded = product.astype(dtype).astype(jnp.float32)
        return (x.astype(jnp.float32) + rounded).astype(dtype)

    def rescale(product: jax.Array, scale: Any, row: int = 0) -> jax.Array:
        return product if scale is None else product * scale[row : row + 1, :]

    def multiply_by(rows: jax.Array, matrix: Any) -> jax.Array:
        return multiply(rows, matrix[...].astype(dtype), (1, 1))

    def project(matrix: Any, scale: Any) -> list[jax.Array]:
        product = rescale(multiply_by(ref.normed[...], matrix), scale).astype(dtype)
        return jnp.split(product, matrix.shape[0] // kernel.head, axis=1)

    def rotate(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        half = kernel.head // 2
        turned = pltpu.roll(wide, half, 1)
        lane = jax.lax.broadcasted_iota(jnp.int32, turned.shape, 1)
        turned = jnp.where(lane < half, -turned, turned)
        parts = (
            (one * table[...]).astype(dtype).astype(jnp.float32)
            for one, table in ((wide, ref.cos), (turned, ref.sin))
        )
        return sum(parts, jnp.float32(0)).astype(dtype)

    @pl.when(step == 0)
    def merge_heads() -> None:
        for head in range(len(ref.mixed)):
            ref.merged[:, head * kernel.head : (head + 1) * kernel.head] = ref.mixed[head]

    @pl.when(step < ends[0])
    def project_output() -> None:
        tile = ref.output.shape[0]
        columns = pl.ds(pl.multiple_of(step * tile, LANES), tile)
        product = rescale(multiply_by(ref.merged[...], ref.output), ref.output_scale)
        ref.middle[:, columns] = add(ref.x[:, columns], product)

    @pl.when(step == ends[0] - 1)
    def norm_middle() -> None:
        ref.normed[...] = norm(ref.middle[...], ref.mlp_norm, layer)
        ref.total[...] = jnp.zeros_like(ref.total)

    @pl.when((step >= ends[0]) & (step < ends[1]))
    def run_mlp() -> None:
        gate, up = (
            rescale(multiply_by(ref.normed[...], part), ref.gate_up_scale, row)
            .astype(dtype)
            .astype(jnp.float32)
            for row, part in enumerate((ref.gate, ref.up))
        )
        opened = (gate * jax.nn.sigmoid(gate)).astype(dtype).astype(jnp.float32)
        ref.total[...] += multiply_by((opened * up).astype(dtype), ref.down)

    @pl.when(step == ends[1] - 1)
    def norm_result() -> None:
        x = add(ref.middle[...], rescale(ref.total[...], ref.down_scale))
        ref.x_out[...] = x
        ref.normed[...] = norm(x, ref.input_norm, layer + 1)  # after the last layer not used

    @pl.when((step >= ends[1]) & (step < ends[2]))
    def project_queries() -> None:
        for place, head in enumerate(project(ref.queries, ref.queries_scale)):
            ref.queries_out[place] = rotate(norm(head, ref.query_norm, layer + 1))

    @pl.when(step >= ends[2])
    def project_keys_values() -> None:
        heads = project(ref.keys_values, ref.keys_values_scale)
        for place, (key, value) in enumerate(zip(heads[::2], heads[1::2], strict=True)):
            ref.keys_out[place] = rotate(norm(key, ref.key_norm, layer + 1))
            ref.values_out[place] = value


def choose_stream(device: KernelDevice, sizes: StreamSizes, epsilon: float) -> StreamLayer | None:
    """The kernel for layers of these sizes.

    None where tiles are not whole vector registers or do not fit in VMEM, and for devices of several cores: each of
    them would need the sums of the others.
    """
    n, hidden, width = sizes.tokens, sizes.hidden, sizes.width
    head = sizes.head
    if device.cores > 1 or n > device.stream_tokens or head % LANES:
        return None
    inputs = (sizes.mixed, 3 * hidden, hidden, hidden)
    rows = [sizes.stored * width for width in inputs]
    limits = (TILE_BYTES, MLP_TILE_BYTES, TILE_BYTES, TILE_BYTES)
    outputs = (hidden, width, sizes.queries, sizes.keys_values)
    units = (LANES, LANES, head, 2 * head)
    found = [_choose_tile(*one) for one in zip(outputs, rows, limits, units, strict=True)]
    tiles = [tile for tile in found if tile]
    if len(tiles) < len(found) or hidden % LANES or sizes.mixed % LANES:
        return None
    output, mlp, queries, keys_values = tiles
    kernel = StreamLayer((output, mlp, queries, keys_values), head, epsilon, VMEM)
    return kernel if kernel.count_vmem(*_list_operands(sizes)) <= VMEM else None


def _list_operands(sizes: StreamSizes) -> list[Operand]:
    """The operands of the kernel, of a single layer."""
    n, H, M, D = round_up(sizes.tokens, STREAM_ROWS), sizes.hidden, sizes.width, sizes.head
    Q, P, K = sizes.mixed, sizes.queries, sizes.keys_values
    scales = [(1, 1, H), (1, 2, M), (1, 1, H), (1, 1, P), (1, 1, K)] if sizes.stored == 1 else []
    return describe_operands(
        (jnp.int32, [(), (1,)]),
        (DTYPES[sizes.item], [(Q // D, n, D), (n, H)]),
        (jnp.float32, [(1, H), (1, H), (n, D), (n, D), (1, D), (1, D)]),
        (DTYPES[sizes.stored], [(1, H, Q), *[(1, 2 * M, H)] * 2, (1, H, M), (1, P, H), (1, K, H)]),
        (jnp.float32, scales),
    )


def _choose_tile(outputs: int, row_bytes: int, limit: int, unit: int) -> int | None:
    """The largest divisor of `outputs`, a multiple of `unit` and of at most `limit` bytes."""
    return find_largest_divisor(
        outputs, lambda tile: tile % unit == 0 and tile * row_bytes <= limit
    )
