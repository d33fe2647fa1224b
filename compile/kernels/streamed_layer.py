"""What lies between the attentions of two layers as Pallas TPU kernels: matrices in one stream through VMEM.

One kernel on a device with one core, three (`LayerParts`) where cores or devices share the layer.
The output projection of a layer, its MLP, and the projections of the next layer's queries, keys and values, with the
residuals, norms and rotations between them. A grid step multiplies a part of a matrix, while the next part is copied to
VMEM. As XLA's operations they wait for each other, and nothing is read while small ones run. Int8 matrices are
converted part by part; their products are multiplied by the scales of their rows.

L layers · H hidden · M width of the MLP · Q width of the attention's result · N query heads · G kv heads · D head width
P outputs of queries · K of keys and values · n tokens: B rows of the attention's arrays with T positions each
"""

from collections.abc import Callable, Sequence
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
    KERNEL_VMEM,
    LANES,
    RESERVED_VMEM,
    STREAM_ROWS,
    SUBLANES,
    DeltaProjections,
    KernelDevice,
    OutputWeights,
    StreamSizes,
    StreamWeights,
    round_up,
)

# of the matrices in a grid step, at most: nothing hides the copy of the first
TILE_BYTES = 2 * 2**20
MLP_TILE_BYTES = 5 * 2**20
CORE_MLP_TILE_BYTES = 3 * 2**20  # the same of each of several cores
DELTA_TILE_BYTES = 3 * 2**19  # of the inputs of a recurrent layer
VMEM = 50 * 2**20  # bytes that the kernel may use
X = 2  # the place of x among the operands
NormRule = tuple[float, bool]  # epsilon, and whether it rounds, see `_norm`
Counts = tuple[int, int, int, int]  # grid steps of the four stages
Streamed = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class StreamLayer(Kernel):
    """Output projection, MLP and the next layer's projections in one call.

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
        sum_parts: Callable[[jax.Array], jax.Array],
    ) -> Streamed:
        """x [n, H] after a layer; of the next layer rotated queries [B, N, T, D] and keys [B, G, T, D], and values.

        These are undefined after the last layer.

        n and T are multiples of STREAM_ROWS.

        Args:
            x: before the layer [n, H].
            mixed: the result of its attention [B, Q / D, T, D].
            weights: of all layers.
            rotation: cosines and sines, float32 [n, D].
            layer: its number, int32 scalar.
            interpret: see `KernelDevice`.
            sum_parts: not used, the device holds whole matrices.
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
        B, heads, T, D = mixed.shape
        Q = heads * D
        P = queries.shape[1]
        K = keys_values.shape[1]

        def place(step: Any, stage: int) -> Any:
            """Which tile of a stage a step has in VMEM: before the stage its first, after it its last."""
            return jnp.clip(step - begins[stage], 0, counts[stage] - 1)

        def follow(layer: Any) -> Any:
            return jnp.minimum(layer[0] + 1, L - 1)

        def whole(array: Operand) -> pl.BlockSpec:
            return pl.BlockSpec(array.shape, lambda step, layer: (0,) * array.ndim)

        output_tile, mlp_tile, query_tile, kv_tile = self.tiles
        ends = _list_end_parts((output_tile, mlp_tile), (Q, H, M), place)
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
            *ends[:4],
            pl.BlockSpec(
                (None, query_tile, H), lambda step, layer: (follow(layer), place(step, 2), 0)
            ),
            pl.BlockSpec(
                (None, kv_tile, H), lambda step, layer: (follow(layer), place(step, 3), 0)
            ),
        ]
        if scales:
            inputs += [
                *ends[4:],
                pl.BlockSpec(
                    (None, 1, query_tile), lambda step, layer: (follow(layer), 0, place(step, 2))
                ),
                pl.BlockSpec(
                    (None, 1, kv_tile), lambda step, layer: (follow(layer), 0, place(step, 3))
                ),
            ]
        outputs = [
            pl.BlockSpec((n, H), lambda step, layer: (0, 0)),
            *(
                pl.BlockSpec(
                    (B, count, T, D), lambda step, layer, stage=stage: (0, place(step, stage), 0, 0)
                )
                for count, stage in zip(_count_heads(*self.tiles[2:], D), (2, 3, 3), strict=True)
            ),
        ]
        own = H * (Q + 3 * M)
        # of each layer but the last
        following = H * (P + K) * (L - 1) // L
        rows = 2 * H + Q + P + K
        return Launch(
            body=partial(_run_int8_step if scales else _run_step, self, counts),
            results=[
                jax.ShapeDtypeStruct((n, H), x.dtype),
                *(
                    jax.ShapeDtypeStruct((B, count, T, D), x.dtype)
                    for count in _count_heads(P, K, D)
                ),
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
            value_bytes=4 * n * (2 * mlp_tile + H)
            + 3 * mlp_tile * H * x.dtype.itemsize * len(scales[:1]),
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


def _count_heads(queries: int, keys_values: int, width: int) -> tuple[int, int, int]:
    """Heads of queries, of keys and of values in so many outputs of their projections."""
    keys = keys_values // (2 * width)
    return queries // width, keys, keys


def _list_end_parts(
    tiles: tuple[int, int], sizes: tuple[int, int, int], place: Callable[[Any, int], Any]
) -> list[pl.BlockSpec]:
    """Parts of the matrices from a mixer to the end of its layer: output, gate, up, down, and of the scales.

    tiles: outputs of a grid step of the output projection, and of the MLP. sizes: Q, H, M. place: the tile of the first
    or second of these stages that a step has.
    """
    output_tile, mlp_tile = tiles
    Q, H, M = sizes
    return [
        pl.BlockSpec((None, output_tile, Q), lambda step, layer: (layer[0], place(step, 0), 0)),
        *(
            pl.BlockSpec(
                (None, mlp_tile, H),
                lambda step, layer, part=part: (
                    layer[0],
                    part * (M // mlp_tile) + place(step, 1),
                    0,
                ),
            )
            for part in range(2)
        ),
        pl.BlockSpec((None, H, mlp_tile), lambda step, layer: (layer[0], 0, place(step, 1))),
        pl.BlockSpec((None, 1, output_tile), lambda step, layer: (layer[0], 0, place(step, 0))),
        pl.BlockSpec((None, 2, mlp_tile), lambda step, layer: (layer[0], 0, place(step, 1))),
        pl.BlockSpec((None, 1, H), lambda step, layer: (layer[0], 0, 0)),
    ]


class _LayerRefs(NamedTuple):
    """References of `StreamLayer` in order. The scales are None for matrices that are not int8."""

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


@name_references(*(name for name in _LayerRefs._fields if not name.endswith("_scale")))
def _run_step(kernel: StreamLayer, counts: Counts, *refs: Any) -> None:
    """The kernel of plain matrices."""
    _multiply_tile(kernel, counts, _bind(_LayerRefs, refs))


@name_references(*_LayerRefs._fields)
def _run_int8_step(kernel: StreamLayer, counts: Counts, *refs: Any) -> None:
    """The kernel of int8 matrices."""
    _multiply_tile(kernel, counts, _bind(_LayerRefs, refs))


def _multiply_tile(kernel: StreamLayer, counts: Counts, ref: _LayerRefs) -> None:
    """One grid step multiplies a tile. Rounds where the layers do.

    counts: grid steps of the four stages.
    """
    step = pl.program_id(0)
    layer = ref.layer[0]
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    _run_output_mlp(ref, (step, ends[0], ends[1]), layer, kernel.epsilon)

    @pl.when(step == ends[1] - 1)
    def norm_result() -> None:
        x = _add(ref.middle[...], _rescale(ref.total[...], ref.down_scale))
        ref.x_out[...] = x
        # after the last layer not used
        ref.normed[...] = _norm(x, ref.input_norm, layer + 1, kernel.epsilon)

    @pl.when((step >= ends[1]) & (step < ends[2]))
    def project_queries() -> None:
        _project_queries(ref, layer, kernel.epsilon)

    @pl.when(step >= ends[2])
    def project_keys_values() -> None:
        _project_keys_values(ref, layer, kernel.epsilon)


# -- what a grid step computes


def _run_output_mlp(
    ref: Any, place: tuple[Any, int, int], layer: Any, epsilon: float, rounded: bool = True
) -> None:
    """The output projection, and the MLP without its residual.

    place: the grid step, the first one of the MLP, and the first one after it.
    """
    step, end, mlp_end = place

    @pl.when(step == 0)
    def merge_heads() -> None:
        _merge_heads(ref.mixed, ref.merged)

    @pl.when(step < end)
    def project_output() -> None:
        tile = ref.output.shape[0]
        columns = pl.ds(pl.multiple_of(step * tile, LANES), tile)
        product = _multiply(ref.merged[...], ref.output, ref.output_scale)
        ref.middle[:, columns] = _add(ref.x[:, columns], product)

    @pl.when(step == end - 1)
    def norm_middle() -> None:
        ref.normed[...] = _norm(ref.middle[...], ref.mlp_norm, layer, epsilon, rounded)
        ref.total[...] = jnp.zeros_like(ref.total)

    @pl.when((step >= end) & (step < mlp_end))
    def run_mlp() -> None:
        _add_mlp(ref)


def _norm(x: jax.Array, weights: Any, at: Any, epsilon: float, rounded: bool = True) -> jax.Array:
    """rounded: whether a normed row is rounded before its product with the weight, as well as after it."""
    dtype = x.dtype
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    weight = weights[pl.ds(at % SUBLANES, 1), :]
    normed = (wide * scale).astype(dtype).astype(jnp.float32) if rounded else wide * scale
    return (normed * weight).astype(dtype)


def _add(x: jax.Array, product: jax.Array) -> jax.Array:
    rounded = product.astype(x.dtype).astype(jnp.float32)
    return (x.astype(jnp.float32) + rounded).astype(x.dtype)


def _rescale(product: jax.Array, scale: Any, row: int = 0) -> jax.Array:
    return product if scale is None else product * scale[row : row + 1, :]


def _multiply(rows: jax.Array, matrix: Any, scale: Any, row: int = 0) -> jax.Array:
    return _rescale(multiply(rows, matrix[...].astype(rows.dtype), (1, 1)), scale, row)


def _merge_heads(mixed: Any, merged: Any) -> None:
    _, count, _, width = mixed.shape
    for head in range(count):
        merged[:, head * width : (head + 1) * width] = mixed[:, head].reshape(-1, width)


def _put_head(head: jax.Array, out: Any, place: int) -> None:
    """Writes [n, D] to [B, .., T, D]."""
    rows, _, *sizes = out.shape
    out[:, place] = head.reshape(rows, *sizes)


def _add_mlp(ref: Any) -> None:
    """Adds what a tile of the MLP's width gives, without the scale of `down`."""
    dtype = ref.normed.dtype
    gate, up = (
        _multiply(ref.normed[...], part, ref.gate_up_scale, row).astype(dtype).astype(jnp.float32)
        for row, part in enumerate((ref.gate, ref.up))
    )
    opened = (gate * jax.nn.sigmoid(gate)).astype(dtype).astype(jnp.float32)
    ref.total[...] += _multiply((opened * up).astype(dtype), ref.down, None)


def _project(rows: jax.Array, matrix: Any, scale: Any, head: int) -> list[jax.Array]:
    product = _multiply(rows, matrix, scale).astype(rows.dtype)
    return jnp.split(product, matrix.shape[0] // head, axis=1)


def _rotate(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
    dtype = x.dtype
    wide = x.astype(jnp.float32)
    width = x.shape[1]
    half = width // 2
    turned = pltpu.roll(wide, half, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, turned.shape, 1)
    turned = jnp.where(lane < half, -turned, turned)
    parts = (
        (one * table[...]).astype(dtype).astype(jnp.float32)
        for one, table in ((wide, cos), (turned, sin))
    )
    return sum(parts, jnp.float32(0)).astype(dtype)


def _project_queries(ref: Any, layer: Any, epsilon: float) -> None:
    width = ref.queries_out.shape[3]
    heads = _project(ref.normed[...], ref.queries, ref.queries_scale, width)
    for place, head in enumerate(heads):
        normed = _norm(head, ref.query_norm, layer + 1, epsilon)
        _put_head(_rotate(normed, ref.cos, ref.sin), ref.queries_out, place)


def _project_keys_values(ref: Any, layer: Any, epsilon: float) -> None:
    width = ref.keys_out.shape[3]
    heads = _project(ref.normed[...], ref.keys_values, ref.keys_values_scale, width)
    for place, (key, value) in enumerate(zip(heads[::2], heads[1::2], strict=True)):
        normed = _norm(key, ref.key_norm, layer + 1, epsilon)
        _put_head(_rotate(normed, ref.cos, ref.sin), ref.keys_out, place)
        _put_head(value, ref.values_out, place)


# -- several devices, or devices of several cores: a kernel up to each exchange between them


@dataclass(frozen=True)
class LayerParts:
    """`StreamLayer` as three kernels. The cores share the outputs of each, and read all outputs of the one before.

    Devices that share the layers sum the output projection and the MLP. The kernel after a sum adds it to x.
    """

    output: "StreamOutput"
    mlp: "StreamNormedMlp"
    inputs: "StreamInputs"

    def run(
        self,
        x: jax.Array,
        mixed: jax.Array,
        weights: StreamWeights,
        rotation: tuple[jax.Array, jax.Array],
        layer: jax.Array,
        interpret: Any,
        sum_parts: Callable[[jax.Array], jax.Array],
    ) -> Streamed:
        """As `StreamLayer.run`. `sum_parts` sums an array over the devices."""
        place = layer.reshape(1)
        matrices = (weights.output, weights.gate_up, weights.down, weights.queries)
        in_hbm = [keep_in_hbm(one) for one in (*matrices, weights.keys_values, *weights.scales)]
        output, gate_up, down, queries, keys_values, *scales = in_hbm

        def call(kernel: Kernel, *operands: jax.Array) -> Any:
            return kernel.call(operands, interpret)

        mlp = (weights.mlp_norm, gate_up, gate_up, down, *scales[1:2])
        if self.mlp.shared:
            part = call(self.output, place, mixed, output, *scales[:1])
            middle, totals = call(self.mlp, place, x, sum_parts(part), *mlp)
            total = sum_parts(totals.sum(axis=0, keepdims=True))
        else:
            middle = call(self.output, place, mixed, x, output, *scales[:1])
            total = call(self.mlp, place, middle, *mlp)
        steps = sum(self.inputs.count_steps(queries, keys_values))
        last = layer + 1 >= len(down)
        x, *heads = call(
            self.inputs,
            jnp.where(last, 1, steps).astype(jnp.int32),
            place,
            middle,
            total,
            weights.input_norm,
            *rotation,
            weights.query_norm,
            weights.key_norm,
            queries,
            keys_values,
            *scales[2:],
        )
        rotated, keys, values = heads
        return x, rotated, keys, values

    def count_vmem(self, *operands: Operand) -> int:
        """Bytes of VMEM of the largest kernel, by the operands of `StreamLayer`."""
        steps, layer, mixed, x, mlp_norm, input_norm, cos, sin, *others = operands
        query_norm, key_norm, output, gate_up, _, down, queries, keys_values, *scales = others
        shared = self.mlp.shared
        cores = 1 if shared else self.mlp.cores
        total = jax.ShapeDtypeStruct((cores, *x.shape), jnp.float32)
        summed = [jax.ShapeDtypeStruct(x.shape, jnp.float32)] if shared else []
        norms = (input_norm, cos, sin, query_norm, key_norm)
        mlp = (mlp_norm, gate_up, gate_up, down, *scales[1:2])
        return max(
            self.output.count_vmem(layer, mixed, *([] if shared else [x]), output, *scales[:1]),
            self.mlp.count_vmem(layer, x, *summed, *mlp),
            self.inputs.count_vmem(
                steps, layer, x, total, *norms, queries, keys_values, *scales[2:]
            ),
        )


def _bind(kind: Any, refs: Sequence[Any], without: Sequence[str] = ()) -> Any:
    """References by name. Those named by `without` are None, and those of scales where there are none."""
    names = [name for name in kind._fields if name not in without]
    if len(names) > len(refs):
        names = [name for name in names if not name.endswith("_scale")]
    return kind(**dict.fromkeys(kind._fields) | dict(zip(names, refs, strict=True)))


def _write_columns(core: jax.Array, x: jax.Array, out: Any, cores: int) -> None:
    """Each core writes its share of the columns."""
    for place, columns in enumerate(jnp.split(x, cores, axis=1)):

        @pl.when(core == place)
        def write(columns: jax.Array = columns) -> None:
            out[...] = columns


@dataclass(frozen=True)
class StreamOutput(Kernel):
    """The kernel of the output projection and its residual.

    Attributes:
        tile: outputs of a grid step.
        cores: that share the outputs.
        shared: whether devices share the layers: the result is this device's part of a sum, float32 [n, H].
        vmem_bytes: that the kernel may use.
    """

    name = "stream_output"

    tile: int
    cores: int
    shared: bool
    vmem_bytes: int

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, mixed [B, Q / D, T, D], x [n, H], the projection, and its scale. Result: x.

        Where devices share the layers, x is not among the operands.
        """
        _, mixed, *others = operands
        added = [] if self.shared else others[:1]
        output, *scales = others[len(added) :]
        B, _, T, _ = mixed.shape
        n = B * T
        _, H, Q = output.shape
        dtype = mixed.dtype
        result = jax.ShapeDtypeStruct((n, H), jnp.float32 if self.shared else dtype)
        tile = self.tile
        steps = H // (self.cores * tile)

        def place(core: Any, step: Any) -> Any:
            return core * steps + step

        columns = pl.BlockSpec((n, tile), lambda core, step, layer: (0, place(core, step)))
        inputs = [
            pl.BlockSpec(mixed.shape, lambda core, step, layer: (0, 0, 0, 0)),
            *[columns for _ in added],
            pl.BlockSpec(
                (None, tile, Q), lambda core, step, layer: (layer[0], place(core, step), 0)
            ),
            pl.BlockSpec(
                (None, 1, tile), lambda core, step, layer: (layer[0], 0, place(core, step))
            ),
        ]
        return Launch(
            body=partial(_project_output, self),
            results=result,
            grid=(self.cores, steps),
            axes=("parallel", "arbitrary"),
            scalars=1,
            inputs=inputs[: len(operands) - 1],
            outputs=columns,
            scratch=[pltpu.VMEM((n, Q), dtype)],
            value_bytes=4 * n * tile + tile * Q * dtype.itemsize * len(scales),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            cost=pl.CostEstimate(
                flops=2 * n * H * Q,
                transcendentals=0,
                bytes_accessed=output.dtype.itemsize * Q * (H + self.cores * tile)
                + dtype.itemsize * n * (self.cores * Q + len(added) * H)
                + n * H * result.dtype.itemsize,
            ),
        )


class _OutputRefs(NamedTuple):
    """References of `StreamOutput` in order."""

    layer: Any
    mixed: Any
    x: Any
    output: Any
    output_scale: Any
    out: Any
    merged: Any


def _project_output(kernel: StreamOutput, *refs: Any) -> None:
    """A grid step of `StreamOutput`."""
    ref = _bind(_OutputRefs, refs, ["x"] if kernel.shared else [])

    @pl.when(pl.program_id(1) == 0)
    def merge_heads() -> None:
        _merge_heads(ref.mixed, ref.merged)

    product = _multiply(ref.merged[...], ref.output, ref.output_scale)
    ref.out[...] = product if kernel.shared else _add(ref.x[...], product)


@dataclass(frozen=True)
class StreamNormedMlp(Kernel):
    """The kernel of the MLP and the norm before it.

    Attributes:
        tile: of the MLP's width in a grid step.
        cores: that share the width.
        shared: whether devices share the layers: a residual comes before the norm.
        epsilon: of the norm.
        vmem_bytes: that the kernel may use.
    """

    name = "stream_normed_mlp"

    tile: int
    cores: int
    shared: bool
    epsilon: float
    vmem_bytes: int

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, x [n, H], norm, gate_up twice, down, and the scale of gate_up.

        The result is float32 [cores, n, H], to be summed and multiplied by the scale of down. Where devices share the
        layers, after x comes what is added to it, float32 [n, H], and before the result x with it.
        """
        _, x, *others = operands
        added = others[: int(self.shared)]
        _, gate_up, _, down, *scales = others[len(added) :]
        n, H = x.shape
        M = down.shape[2]
        tile = self.tile
        tiles = M // tile
        steps = tiles // self.cores

        def place(core: Any, step: Any) -> Any:
            return core * steps + step

        inputs = [
            *(pl.BlockSpec((n, H), lambda core, step, layer: (0, 0)) for _ in (x, *added)),
            pl.BlockSpec((SUBLANES, H), lambda core, step, layer: (layer[0] // SUBLANES, 0)),
            *(
                pl.BlockSpec(
                    (None, tile, H),
                    lambda core, step, layer, part=part: (
                        layer[0],
                        part * tiles + place(core, step),
                        0,
                    ),
                )
                for part in range(2)
            ),
            pl.BlockSpec(
                (None, H, tile), lambda core, step, layer: (layer[0], 0, place(core, step))
            ),
            pl.BlockSpec(
                (None, 2, tile), lambda core, step, layer: (layer[0], 0, place(core, step))
            ),
        ]
        results = [jax.ShapeDtypeStruct((self.cores, n, H), jnp.float32)]
        outputs = [pl.BlockSpec((None, n, H), lambda core, step, layer: (core, 0, 0))]
        if self.shared:
            results.insert(0, jax.ShapeDtypeStruct((n, H), x.dtype))
            own = pl.BlockSpec((n, H // self.cores), lambda core, step, layer: (0, core))
            outputs.insert(0, own)
        return Launch(
            body=partial(_run_normed_mlp, self),
            results=results if self.shared else results[0],
            grid=(self.cores, steps),
            axes=("parallel", "arbitrary"),
            scalars=1,
            inputs=inputs[: len(operands) - 1],
            outputs=outputs if self.shared else outputs[0],
            scratch=[pltpu.VMEM((n, H), x.dtype)],
            value_bytes=4 * n * (2 * tile + H) + 3 * tile * H * x.dtype.itemsize * len(scales),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            cost=pl.CostEstimate(
                flops=6 * n * M * H,
                transcendentals=n * M,
                bytes_accessed=gate_up.dtype.itemsize * 3 * H * (M + self.cores * tile)
                + self.cores * n * H * (x.dtype.itemsize + 4 * (1 + len(added)))
                + len(added) * n * H * x.dtype.itemsize,
            ),
        )


class _MlpRefs(NamedTuple):
    """References of `StreamNormedMlp` in order."""

    layer: Any
    x: Any
    summed: Any
    mlp_norm: Any
    gate: Any
    up: Any
    down: Any
    gate_up_scale: Any
    x_out: Any
    total: Any
    normed: Any


def _run_normed_mlp(kernel: StreamNormedMlp, *refs: Any) -> None:
    """A grid step of `StreamNormedMlp`."""
    ref = _bind(_MlpRefs, refs, [] if kernel.shared else ["summed", "x_out"])
    core = pl.program_id(0)  # as in `_project_inputs`

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        x = ref.x[...]
        if kernel.shared:
            x = _add(x, ref.summed[...])
            _write_columns(core, x, ref.x_out, kernel.cores)
        ref.normed[...] = _norm(x, ref.mlp_norm, ref.layer[0], kernel.epsilon)
        ref.total[...] = jnp.zeros_like(ref.total)

    _add_mlp(ref)


@dataclass(frozen=True)
class StreamInputs(Kernel):
    """The kernel of the MLP's residual, and of the next layer's norms, projections and rotation.

    Attributes:
        tiles: outputs of a grid step of queries, and of keys and values.
        cores: that share the outputs.
        rows: B.
        head: D.
        epsilon: of the norms.
        vmem_bytes: that the kernel may use.
    """

    name = "stream_inputs"

    tiles: tuple[int, int]
    cores: int
    rows: int
    head: int
    epsilon: float
    vmem_bytes: int

    def count_steps(self, queries: Operand, keys_values: Operand) -> tuple[int, int]:
        """Grid steps of a core: of queries, and of keys and values."""
        first, second = self.tiles
        return (
            queries.shape[1] // (self.cores * first),
            keys_values.shape[1] // (self.cores * second),
        )

    def plan(self, *operands: Operand) -> Launch:
        """operands: steps, layer, x [n, H] and totals [.., n, H], norm, cosines and sines, norms of heads, matrices.

        After these the scales of down and of the matrices. The results are those of `StreamLayer.run`.
        """
        steps, _, x, totals, _, *others = operands
        queries, keys_values, *scales = others[4:]
        n, H = x.shape
        L, P, _ = queries.shape
        K = keys_values.shape[1]
        D = self.head
        B = self.rows
        T = n // B
        cores = self.cores
        counts = self.count_steps(queries, keys_values)
        query_tile, kv_tile = self.tiles

        def place(core: Any, step: Any, stage: int) -> Any:
            """Which tile of a stage a step has in VMEM."""
            at = step - counts[0] if stage else step
            return core * counts[stage] + jnp.clip(at, 0, counts[stage] - 1)

        def follow(layer: Any) -> Any:
            return jnp.minimum(layer[0] + 1, L - 1)

        def whole(*shape: int) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda core, step, layer: (0,) * len(shape))

        def norm(width: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (SUBLANES, width), lambda core, step, layer: (follow(layer) // SUBLANES, 0)
            )

        tiles = [*enumerate(self.tiles)]
        inputs = [
            whole(n, H),
            whole(*totals.shape),
            norm(H),
            whole(n, D),
            whole(n, D),
            norm(D),
            norm(D),
            *(
                pl.BlockSpec(
                    (None, tile, H),
                    lambda core, step, layer, stage=stage: (
                        follow(layer),
                        place(core, step, stage),
                        0,
                    ),
                )
                for stage, tile in tiles
            ),
            pl.BlockSpec((None, 1, H), lambda core, step, layer: (layer[0], 0, 0)),
            *(
                pl.BlockSpec(
                    (None, 1, tile),
                    lambda core, step, layer, stage=stage: (
                        follow(layer),
                        0,
                        place(core, step, stage),
                    ),
                )
                for stage, tile in tiles
            ),
        ]
        outputs = [
            pl.BlockSpec((n, H // cores), lambda core, step, layer: (0, core)),
            *(
                pl.BlockSpec(
                    (B, count, T, D),
                    lambda core, step, layer, stage=stage: (0, place(core, step, stage), 0, 0),
                )
                for count, stage in zip(_count_heads(*self.tiles, D), (0, 1, 1), strict=True)
            ),
        ]
        widest = max(self.tiles)
        read = H * ((P + K) * (L - 1) // L + cores * query_tile)
        return Launch(
            body=partial(_project_inputs, self, counts),
            results=[
                jax.ShapeDtypeStruct((n, H), x.dtype),
                *(
                    jax.ShapeDtypeStruct((B, count, T, D), x.dtype)
                    for count in _count_heads(P, K, D)
                ),
            ],
            grid=(cores, steps),
            axes=("parallel", "arbitrary"),
            scalars=1,
            inputs=inputs[: len(operands) - 2],
            outputs=outputs,
            scratch=[pltpu.VMEM((n, H), x.dtype)],
            value_bytes=4 * n * max(widest, H) + widest * H * x.dtype.itemsize * len(scales[:1]),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            cost=pl.CostEstimate(
                flops=2 * n * H * (P + K) * (L - 1) // L,
                transcendentals=0,
                bytes_accessed=queries.dtype.itemsize * read
                + x.dtype.itemsize * n * ((cores + 1) * H + P + K)
                + 4 * cores * n * (len(totals) * H + 2 * D),
            ),
        )


class _InputRefs(NamedTuple):
    """References of `StreamInputs` in order."""

    layer: Any
    x: Any
    totals: Any
    input_norm: Any
    cos: Any
    sin: Any
    query_norm: Any
    key_norm: Any
    queries: Any
    keys_values: Any
    down_scale: Any
    queries_scale: Any
    keys_values_scale: Any
    x_out: Any
    queries_out: Any
    keys_out: Any
    values_out: Any
    normed: Any


def _project_inputs(kernel: StreamInputs, counts: tuple[int, int], *refs: Any) -> None:
    """A grid step of `StreamInputs`. counts: grid steps of a core."""
    ref = _bind(_InputRefs, refs)
    core = pl.program_id(0)  # the emulation knows these outside of conditions only
    step = pl.program_id(1)
    layer = ref.layer[0]

    @pl.when(step == 0)
    def norm_result() -> None:
        total = sum((ref.totals[at] for at in range(1, len(ref.totals))), ref.totals[0])
        x = _add(ref.x[...], _rescale(total, ref.down_scale))
        ref.normed[...] = _norm(x, ref.input_norm, layer + 1, kernel.epsilon)
        _write_columns(core, x, ref.x_out, kernel.cores)

    @pl.when(step < counts[0])
    def project_queries() -> None:
        _project_queries(ref, layer, kernel.epsilon)

    @pl.when(step >= counts[0])
    def project_keys_values() -> None:
        _project_keys_values(ref, layer, kernel.epsilon)


# -- layers of several kinds: a kernel after the mixer of a layer, and one before


@dataclass(frozen=True)
class StreamOutputMlp(Kernel):
    """The first half of `StreamLayer`: the kernel from a mixer to the end of its layer.

    Attributes:
        tiles: outputs of a grid step of the output projection, and of the MLP (of its width).
        epsilon: of the norm.
        rounded: see `_norm`.
        vmem_bytes: that the kernel may use.
    """

    name = "stream_output_mlp"

    tiles: tuple[int, int]
    epsilon: float
    rounded: bool
    vmem_bytes: int

    def run(
        self,
        x: jax.Array,
        mixed: jax.Array,
        weights: OutputWeights,
        layer: jax.Array,
        interpret: Any,
    ) -> jax.Array:
        """x after a layer, of x before it [n, H] and of what its mixer made [B, Q / D, T, D].

        n and T are multiples of STREAM_ROWS. layer: int32 scalar.
        """
        norm, *stacks = weights.arrays
        matrices = map(keep_in_hbm, stacks)
        return self.call((layer.reshape(1), mixed, x, norm, *matrices), interpret)

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, mixed, x, and the arrays of `OutputWeights`."""
        _, mixed, x, _, output, gate_up, _, down, *scales = operands
        _, H, M = down.shape
        n = len(x)
        Q = output.shape[2]
        output_tile, mlp_tile = self.tiles
        begin = H // output_tile
        tiles = M // mlp_tile

        def place(step: Any, stage: int) -> Any:
            return jnp.maximum(step - begin, 0) if stage else jnp.minimum(step, begin - 1)

        def whole(array: Operand) -> pl.BlockSpec:
            return pl.BlockSpec(array.shape, lambda step, layer: (0,) * array.ndim)

        inputs = [
            whole(mixed),
            whole(x),
            pl.BlockSpec((SUBLANES, H), lambda step, layer: (layer[0] // SUBLANES, 0)),
            *_list_end_parts(self.tiles, (Q, H, M), place),
        ]
        item = x.dtype.itemsize
        return Launch(
            body=partial(_run_to_layer_end, self, (begin, begin + tiles)),
            results=jax.ShapeDtypeStruct((n, H), x.dtype),
            grid=(begin + tiles,),
            axes=("arbitrary",),
            scalars=1,
            inputs=inputs[: len(operands) - 1],
            outputs=whole(x),
            scratch=[
                pltpu.VMEM((n, Q), x.dtype),
                pltpu.VMEM((n, H), x.dtype),
                pltpu.VMEM((n, H), x.dtype),
                pltpu.VMEM((n, H), jnp.float32),
            ],
            aliases={X: 0},
            value_bytes=4 * n * (2 * mlp_tile + H) + 3 * mlp_tile * H * item * len(scales[:1]),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            cost=pl.CostEstimate(
                flops=2 * n * H * (Q + 3 * M),
                transcendentals=n * M,
                bytes_accessed=down.dtype.itemsize * (H * (Q + 3 * M) + output_tile * Q)
                + item * n * (Q + 2 * H)
                + 4 * SUBLANES * H,
            ),
        )


# of `_LayerRefs`, what `StreamOutputMlp` does not have
INPUT_REFS = ["input_norm", "cos", "sin", "query_norm", "key_norm", "queries", "keys_values"]
INPUT_REFS += ["queries_scale", "keys_values_scale", "queries_out", "keys_out", "values_out"]


def _run_to_layer_end(kernel: StreamOutputMlp, ends: tuple[int, int], *refs: Any) -> None:
    """A grid step of `StreamOutputMlp`. ends: of the output projection, and of the MLP."""
    ref = _bind(_LayerRefs, refs, INPUT_REFS)
    step = pl.program_id(0)
    _run_output_mlp(ref, (step, *ends), ref.layer[0], kernel.epsilon, kernel.rounded)

    @pl.when(step == ends[1] - 1)
    def add_residual() -> None:
        ref.x_out[...] = _add(ref.middle[...], _rescale(ref.total[...], ref.down_scale))


def choose_output_mlp(
    device: KernelDevice, mixed: Operand, x: Operand, weights: OutputWeights, norm: NormRule
) -> StreamOutputMlp | None:
    """The kernel for mixed [B, Q / D, T, D] and x [n, H]; None for several cores, and as `choose_delta_inputs`."""
    n, H = x.shape
    Q = weights.output.shape[2]
    if n > device.stream_tokens or device.cores > 1 or H % LANES or Q % LANES:
        return None
    item = weights.down.dtype.itemsize
    output = _choose_tile(H, Q * item, TILE_BYTES, LANES)
    mlp = _choose_tile(weights.down.shape[2], 3 * H * item, MLP_TILE_BYTES, LANES)
    if output is None or mlp is None:
        return None
    vmem = _count_usable_vmem(device)
    kernel = StreamOutputMlp((output, mlp), *norm, vmem)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32)
    return kernel if kernel.count_vmem(layer, mixed, x, *weights.arrays) <= vmem else None


@dataclass(frozen=True)
class StreamDeltaInputs(Kernel):
    """The kernel of the norm before a Gated DeltaNet, and of its projections.

    Attributes:
        tiles: outputs of a grid step of the channels, and of the gates.
        cores: that share the outputs.
        rows: B.
        epsilon: of the norm.
        rounded: see `_norm`.
        vmem_bytes: that the kernel may use.
    """

    name = "stream_delta_inputs"

    tiles: tuple[int, int]
    cores: int
    rows: int
    epsilon: float
    rounded: bool
    vmem_bytes: int

    def run(
        self, x: jax.Array, weights: DeltaProjections, layer: jax.Array, interpret: Any
    ) -> list[jax.Array]:
        """x [n, H] before the norm → channels [n, C], gates [n, V O], and float32 β and g, each [B, V, T].

        n is a multiple of STREAM_ROWS. layer: int32 scalar.
        """
        stacks = map(keep_in_hbm, weights.arrays)
        return self.call((layer.reshape(1), x, *stacks), interpret)

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, x, and the arrays of `DeltaProjections`."""
        _, x, _, strengths, *others = operands
        channels, gates, *scales = others[3:]
        n, H = x.shape
        V = strengths.shape[1]
        B = self.rows
        cores = self.cores
        heads = V // cores
        sizes = channels.shape[1], gates.shape[1]
        counts = [size // (cores * tile) for size, tile in zip(sizes, self.tiles, strict=True)]

        def place(core: Any, step: Any, stage: int) -> Any:
            """Which tile of a stage a step has in VMEM."""
            at = step - counts[0] if stage else step
            return core * counts[stage] + jnp.clip(at, 0, counts[stage] - 1)

        def by_head(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, heads, width), lambda core, step, layer: (layer[0], core, 0))

        tiles = [*enumerate(self.tiles)]
        inputs = [
            pl.BlockSpec((n, H), lambda core, step, layer: (0, 0)),
            pl.BlockSpec((SUBLANES, H), lambda core, step, layer: (layer[0] // SUBLANES, 0)),
            *(by_head(width) for width in (H, H, 1, 1)),
            *(
                pl.BlockSpec(
                    (None, tile, H),
                    lambda core, step, layer, stage=stage: (layer[0], place(core, step, stage), 0),
                )
                for stage, tile in tiles
            ),
            *(
                pl.BlockSpec(
                    (None, 1, tile),
                    lambda core, step, layer, stage=stage: (layer[0], 0, place(core, step, stage)),
                )
                for stage, tile in tiles
            ),
        ]
        outputs = [
            *(
                pl.BlockSpec(
                    (n, tile), lambda core, step, layer, stage=stage: (0, place(core, step, stage))
                )
                for stage, tile in tiles
            ),
            *[pl.BlockSpec((B, heads, n // B), lambda core, step, layer: (0, core, 0))] * 2,
        ]
        widest = max(self.tiles)
        item = x.dtype.itemsize
        return Launch(
            body=partial(_project_delta_inputs, self, counts),
            results=[
                *(jax.ShapeDtypeStruct((n, size), x.dtype) for size in sizes),
                *[jax.ShapeDtypeStruct((B, V, n // B), jnp.float32)] * 2,
            ],
            grid=(cores, sum(counts)),
            axes=("parallel", "arbitrary"),
            scalars=1,
            inputs=inputs[: len(operands) - 1],
            outputs=outputs,
            scratch=[pltpu.VMEM((n, H), x.dtype)],
            value_bytes=4 * n * max(widest, H) + widest * H * item * len(scales[:1]),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            cost=pl.CostEstimate(
                flops=2 * n * H * (sum(sizes) + 2 * V),
                transcendentals=3 * n * V,
                bytes_accessed=channels.dtype.itemsize * H * (sum(sizes) + cores * self.tiles[0])
                + item * (2 * V * H + n * (cores * H + sum(sizes)))
                + 2 * 4 * n * V,
            ),
        )


class _DeltaInputRefs(NamedTuple):
    """References of `StreamDeltaInputs` in order."""

    layer: Any
    x: Any
    norm: Any
    strengths: Any
    decays: Any
    biases: Any
    rates: Any
    channels: Any
    gates: Any
    channels_scale: Any
    gates_scale: Any
    channels_out: Any
    gates_out: Any
    strengths_out: Any
    decays_out: Any
    normed: Any


def _project_delta_inputs(kernel: StreamDeltaInputs, counts: Sequence[int], *refs: Any) -> None:
    """A grid step of `StreamDeltaInputs`. counts: grid steps of a core."""
    ref = _bind(_DeltaInputRefs, refs)
    step = pl.program_id(1)
    layer = ref.layer[0]
    last = sum(counts) - 1
    rows, _, width = ref.strengths_out.shape

    def put_rows(heads: jax.Array, out: Any) -> None:
        """Writes [V, n] to [B, V, T]."""
        for row in range(rows):
            out[row] = heads[:, row * width : (row + 1) * width]

    def project_heads(matrix: Any) -> jax.Array:
        return multiply(matrix[...], ref.normed[...], (1, 1))

    @pl.when(step == 0)
    def norm_rows() -> None:
        ref.normed[...] = _norm(ref.x[...], ref.norm, layer, kernel.epsilon, kernel.rounded)

    # in steps of their own: the copy of a tile hides so much
    @pl.when(step == min(1, last))
    def find_strengths() -> None:
        put_rows(jax.nn.sigmoid(project_heads(ref.strengths)), ref.strengths_out)

    @pl.when(step == min(2, last))
    def find_decays() -> None:
        steps = project_heads(ref.decays) + ref.biases[...]
        softplus = jnp.maximum(steps, 0) + jnp.log1p(jnp.exp(-jnp.abs(steps)))
        put_rows(ref.rates[...] * softplus, ref.decays_out)

    @pl.when(step < counts[0])
    def project_channels() -> None:
        product = _multiply(ref.normed[...], ref.channels, ref.channels_scale)
        ref.channels_out[...] = product.astype(ref.channels_out.dtype)

    @pl.when(step >= counts[0])
    def project_gates() -> None:
        product = _multiply(ref.normed[...], ref.gates, ref.gates_scale)
        ref.gates_out[...] = product.astype(ref.gates_out.dtype)


def choose_delta_inputs(
    device: KernelDevice, x: Operand, rows: int, weights: DeltaProjections, norm: NormRule
) -> StreamDeltaInputs | None:
    """The kernel for x [n, H] of B `rows`; None where tiles are not whole vector registers or do not fit in VMEM."""
    n, H = x.shape
    cores = device.cores
    heads = weights.strengths.shape[1]
    shared = heads % (cores * SUBLANES) == 0 or cores == 1
    if n > device.stream_tokens or H % LANES or not shared:
        return None
    row_bytes = H * weights.channels.dtype.itemsize
    limit = max(DELTA_TILE_BYTES, LANES * row_bytes)
    sizes = weights.channels.shape[1], weights.gates.shape[1]
    if any(size % cores for size in sizes):
        return None
    first, second = (_choose_tile(size // cores, row_bytes, limit, LANES) for size in sizes)
    if first is None or second is None:
        return None
    vmem = _count_usable_vmem(device)
    kernel = StreamDeltaInputs((first, second), cores, rows, *norm, vmem)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32)
    return kernel if kernel.count_vmem(layer, x, *weights.arrays) <= vmem else None


def _count_usable_vmem(device: KernelDevice) -> int:
    return VMEM if device.vmem_bytes == KERNEL_VMEM else device.vmem_bytes


def choose_stream(
    device: KernelDevice, sizes: StreamSizes, epsilon: float, shared: bool
) -> StreamLayer | LayerParts | None:
    """The kernel for layers of these sizes, or the kernels for a device of several cores or `shared` by devices.

    None where tiles are not whole vector registers or do not fit in VMEM.
    """
    n, hidden, width = sizes.tokens, sizes.hidden, sizes.width
    head, cores = sizes.head, device.cores
    if n > device.stream_tokens or head % LANES:
        return None
    inputs = (sizes.mixed, 3 * hidden, hidden, hidden)
    rows = [sizes.stored * width for width in inputs]
    mlp_limit = MLP_TILE_BYTES if cores == 1 else CORE_MLP_TILE_BYTES
    most = (TILE_BYTES // cores, mlp_limit, TILE_BYTES, TILE_BYTES)
    outputs = (hidden, width, sizes.queries, sizes.keys_values)
    if any(one % cores for one in outputs):
        return None
    shares = [one // cores for one in outputs]
    units = (LANES, LANES, head, 2 * head)
    # Wide rows may have only this one tile.
    limits = [max(limit, unit * row) for limit, unit, row in zip(most, units, rows, strict=True)]
    found = [_choose_tile(*one) for one in zip(shares, rows, limits, units, strict=True)]
    tiles = [tile for tile in found if tile]
    if len(tiles) < len(found) or hidden % (cores * LANES) or sizes.mixed % LANES:
        return None
    output, mlp, queries, keys_values = tiles
    operands = _list_operands(sizes)
    if cores == 1 and not shared:
        kernel = StreamLayer((output, mlp, queries, keys_values), head, epsilon, VMEM)
        return kernel if kernel.count_vmem(*operands) <= VMEM else None
    vmem = _count_usable_vmem(device)
    parts = LayerParts(
        StreamOutput(output, cores, shared, vmem),
        StreamNormedMlp(mlp, cores, shared, epsilon, vmem),
        StreamInputs((queries, keys_values), cores, sizes.rows, head, epsilon, vmem),
    )
    return parts if parts.count_vmem(*operands) <= vmem else None


def _list_operands(sizes: StreamSizes) -> list[Operand]:
    """The operands of the kernel, of a single layer."""
    n, H, M, D = round_up(sizes.tokens, STREAM_ROWS), sizes.hidden, sizes.width, sizes.head
    Q, P, K = sizes.mixed, sizes.queries, sizes.keys_values
    scales = [(1, 1, H), (1, 2, M), (1, 1, H), (1, 1, P), (1, 1, K)] if sizes.stored == 1 else []
    return describe_operands(
        (jnp.int32, [(), (1,)]),
        (DTYPES[sizes.item], [(sizes.rows, Q // D, n // sizes.rows, D), (n, H)]),
        (jnp.float32, [(1, H), (1, H), (n, D), (n, D), (1, D), (1, D)]),
        (DTYPES[sizes.stored], [(1, H, Q), *[(1, 2 * M, H)] * 2, (1, H, M), (1, P, H), (1, K, H)]),
        (jnp.float32, scales),
    )


def _choose_tile(outputs: int, row_bytes: int, limit: int, unit: int) -> int | None:
    """The largest divisor of `outputs`, a multiple of `unit` and of at most `limit` bytes."""
    return find_largest_divisor(
        outputs, lambda tile: tile % unit == 0 and tile * row_bytes <= limit
    )
