"""Gated MLPs as a Pallas TPU kernel: their matrices are streamed from the stack of all layers.

The MLPs are the experts of a mixture that some token chose, or the one MLP of a dense layer. A grid step
multiplies a part of an expert's width with all tokens, while the next part is copied to VMEM. As XLA's operations they
wait for each other: a product streams its own weight, but nothing is read between two products. Int8 matrices are
converted tile by tile; their products are multiplied by the scales of their rows.

E experts · X experts of all layers · M width of an expert · H hidden · n tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
    keep_in_hbm,
    multiply,
    name_references,
)
from dflash_aot.compile.kernels.kernel_device import (
    LANES,
    MAX_TOKENS,
    RESERVED_VMEM,
    SUBLANES,
    ChosenExperts,
    ExpertChoice,
    KernelDevice,
    RoutedTokens,
    Routing,
    RoutingSizes,
    is_chosen,
    round_up,
)

ROWS = {4: 16, 2: 16, 1: 32}  # of a memory tile, by bytes of a number
SCALE_ROWS = (
    SUBLANES  # of a memory tile of float32: so many rows of scales are copied to VMEM at a time
)
# of the three matrices in a grid step, at most: nothing hides the copy of the first
TILE_BYTES = 5 * 2**20
CLAMPED_BYTES = 5 * 2**19  # of the matrices in a grid step of `StreamClampedMlp`, at most
COPIED_BYTES = (
    2**28
)  # of all layers' matrices: where they are fewer, XLA would copy parts of them to VMEM
SHARES_VMEM = 2**18  # of RESERVED_VMEM, for shares of MAX_TOKENS tokens: they fill a register each


def stream_mlp(
    device: KernelDevice, tokens: jax.Array, chosen: ChosenExperts, expected: float
) -> jax.Array | None:
    """The sum of the experts' outputs by share: tokens [n, H] → float32 [n, H]; None if the sizes do not fit in VMEM.

    Args:
        device: that the kernel is lowered for.
        tokens: of any number.
        chosen: their experts.
        expected: number of chosen experts that the compiler's estimates assume.
    """
    if chosen.clamped is not None:
        return _stream_clamped_mlp(device, tokens, chosen, expected)
    n, H = tokens.shape
    M = chosen.down.shape[2]
    work = divide_work(n, H, M, (tokens.dtype.itemsize, chosen.down.dtype.itemsize), device)
    if work is None:
        return None
    transposed = is_transposed(M)
    padding = ((0, -n % work.rows), (0, 0))
    tokens = jnp.pad(tokens, padding)
    shares = jnp.pad(chosen.shares, padding)
    # At least one step, which writes the result.
    scalars = (jnp.maximum(chosen.count, 1), chosen.first.reshape(1), chosen.numbers)
    down = chosen.down.swapaxes(1, 2) if transposed else chosen.down
    matrices = [chosen.gate_up, chosen.gate_up, down]
    if chosen.gate_up.nbytes + down.nbytes <= COPIED_BYTES:
        matrices = [keep_in_hbm(one) for one in matrices]
    scales = [
        keep_in_hbm(one) for one in (chosen.gate_up_scale, chosen.down_scale) if one is not None
    ]
    kind = {one.activation: one for one in (StreamMlp, StreamGeluMlp)}[chosen.activation]
    kernel = kind(work.tile, transposed, expected, work.cores, device.vmem_bytes)

    def run(part: slice) -> jax.Array:
        operands = (*scalars, tokens[part], shares[part], *matrices, *scales)
        return kernel.call(operands, device.interpret).sum(axis=0)

    return jnp.concatenate(
        [run(slice(at, at + work.rows)) for at in range(0, len(tokens), work.rows)]
    )[:n]


@dataclass(frozen=True)
class ExpertWork:
    """How the work is divided: `rows` tokens of a call, `tile` of an expert's width of a grid step, over `cores`."""

    rows: int
    tile: int
    cores: int


def divide_work(
    n: int, hidden: int, width: int, items: tuple[int, int], device: KernelDevice
) -> ExpertWork | None:
    """As few calls for n tokens, and as large tiles, as VMEM takes. `items`: bytes of a number of tokens, of matrices.

    None where not even the smallest fit, and for sizes that are not whole memory tiles.
    """
    for calls in range(-(-n // MAX_TOKENS), n + 1):
        rows = round_up(-(-n // calls), ROWS[items[0]])
        if tile := choose_tile(rows, hidden, width, items, device):
            return ExpertWork(rows, tile, min(device.cores, width // tile))
        if rows == ROWS[items[0]]:
            return None
    return None


def is_transposed(width: int) -> bool:
    """Whether arrays [.., H, M] lie in memory as [.., M, H], for H of whole vector registers.

    A kernel that read them in another order would have all of them copied. The compiler chooses the order that pads
    less (`memory_plan.choose_layout`).
    """
    return width % LANES != 0


def choose_tile(
    rows: int, hidden: int, width: int, items: tuple[int, int], device: KernelDevice
) -> int | None:
    """How much of an expert's width a grid step takes.

    None where no tile fits in VMEM, and for sizes that are not whole memory tiles.
    Cores divide the width and not the experts, so that a token's sum has the same order whatever others choose.
    Scales lie along the lanes, which a grid step takes in whole registers or all.
    """
    if hidden % LANES or width % ROWS[items[1]]:
        return None
    operands = _list_operands(rows, hidden, width, items)
    unit = ROWS[items[1]] if is_transposed(width) and items[1] > 1 else LANES
    fitting = [
        tile
        for tile in (width // parts for parts in range(1, width + 1) if width % parts == 0)
        if tile % ROWS[items[1]] == 0
        and (tile == width or tile % unit == 0)
        and StreamMlp(tile, is_transposed(width), 1, 1, 0).count_vmem(*operands)
        <= device.vmem_bytes + SHARES_VMEM
    ]
    small = [tile for tile in fitting if 3 * tile * hidden * items[1] <= TILE_BYTES] or fitting[-1:]
    shared = (tile for tile in small if width // tile % device.cores == 0)
    return next(shared, small[0] if small else None)


def _list_operands(rows: int, hidden: int, width: int, items: tuple[int, int]) -> list[Operand]:
    """The operands of the kernel, of a single expert."""
    tokens, stored = (DTYPES[item] for item in items)
    down = (1, width, hidden) if is_transposed(width) else (1, hidden, width)
    scales = [(2, width), (1, hidden)] if items[1] == 1 else []
    return describe_operands(
        (jnp.int32, [(), (1,), (1,)]),
        (tokens, [(rows, hidden)]),
        (jnp.float32, [(rows, 1)]),
        (stored, [(1, 2 * width, hidden), (1, 2 * width, hidden), down]),
        (jnp.float32, scales),
    )


@dataclass(frozen=True)
class StreamMlp(Kernel):
    """The kernel.

    Attributes:
        tile: width of an expert that a grid step takes.
        turned: whether `down` is [X, M, H], see `is_transposed`. (A new name would change every key.)
        expected: see `stream_mlp`.
        cores: that share each expert's width.
        vmem_bytes: see `KernelDevice`.
    """

    name = "stream_mlp"
    activation: ClassVar[str] = "silu"  # of `ChosenExperts`

    tile: int
    turned: bool
    expected: float
    cores: int
    vmem_bytes: int

    @staticmethod
    def activate(gate: jax.Array) -> jax.Array:
        """The activation of a gate, float32."""
        return gate * jax.nn.sigmoid(gate)

    def plan(self, *operands: Operand) -> Launch:
        """operands: count, first, numbers, tokens, shares, gate_up twice, down, and the scales of int8 matrices.

        The result is float32 [cores, n, H], to be summed.
        """
        count, _, _, tokens, shares, gate_up, _, down, *scales = operands
        n, H = tokens.shape
        M = gate_up.shape[1] // 2
        tiles = M // self.tile
        # of a core, at most: where tiles are left over, the last core has fewer
        share = -(-tiles // self.cores)

        def place(core: Any, tile: Any) -> Any:
            return jnp.minimum(core * share + tile, tiles - 1)

        def place_down(
            core: Any, step: Any, tile: Any, first: Any, numbers: Any
        ) -> tuple[Any, ...]:
            at = place(core, tile)
            return (first[0] + numbers[step], *((at, 0) if self.turned else (0, at)))

        whole = [
            pl.BlockSpec(array.shape, lambda core, step, tile, *_: (0, 0))
            for array in (tokens, shares)
        ]
        gate, up = (
            pl.BlockSpec(
                (None, self.tile, H),
                lambda core, step, tile, first, numbers, part=part: (
                    first[0] + numbers[step],
                    part * tiles + place(core, tile),
                    0,
                ),
            )
            for part in range(2)
        )
        down_tile = pl.BlockSpec(
            (None, self.tile, H) if self.turned else (None, H, self.tile), place_down
        )
        scale_tiles = (
            [_place_gate_up_scale(self.tile, place, scales[0].ndim), _place_down_scale(H)]
            if scales
            else []
        )
        width = self.cores * share * self.tile  # all cores wait for the one that has most
        return Launch(
            body=partial(_add_expert, self, (tiles, share)),
            results=jax.ShapeDtypeStruct((self.cores, n, H), jnp.float32),
            grid=(self.cores, count, share),
            axes=("parallel", "arbitrary", "arbitrary"),
            scalars=2,
            inputs=[*whole, gate, up, down_tile, *scale_tiles],
            outputs=pl.BlockSpec((None, n, H), lambda core, step, tile, *_: (core, 0, 0)),
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            # a product of each matrix; of int8 the tiles in the tokens' dtype
            value_bytes=4 * n * (2 * self.tile + H)
            + 3 * self.tile * H * tokens.dtype.itemsize * len(scales[:1]),
            cost=pl.CostEstimate(
                flops=int(self.expected * 6 * n * width * H),
                transcendentals=int(self.expected * n * width),
                bytes_accessed=3
                * H
                * down.dtype.itemsize
                * int(self.expected * width + self.cores * self.tile)
                + self.cores * n * H * (tokens.dtype.itemsize + 4),
            ),
        )


def _place_gate_up_scale(width: int, place: Callable[[Any, Any], Any], rank: int) -> pl.BlockSpec:
    """Where a grid step finds the scales of gate and up: [2X, M], or [X, 2, M] of dense layers."""
    if rank == 3:
        return pl.BlockSpec(
            (None, 2, width),
            lambda core, step, tile, first, numbers: (
                first[0] + numbers[step],
                0,
                place(core, tile),
            ),
        )
    pairs = SCALE_ROWS // 2
    return pl.BlockSpec(
        (SCALE_ROWS, width),
        lambda core, step, tile, first, numbers: (
            (first[0] + numbers[step]) // pairs,
            place(core, tile),
        ),
    )


def _place_down_scale(hidden: int) -> pl.BlockSpec:
    """Where a grid step finds the scales of down, [X, H]."""
    return pl.BlockSpec(
        (SCALE_ROWS, hidden),
        lambda core, step, tile, first, numbers: ((first[0] + numbers[step]) // SCALE_ROWS, 0),
    )


class StreamGeluMlp(StreamMlp):
    """The kernel for Gemma 4's MLPs: with another activation, and shares that may be negative."""

    name = "stream_gelu_mlp"
    activation = "gelu"

    @staticmethod
    def activate(gate: jax.Array) -> jax.Array:
        """See `StreamMlp.activate`."""
        return jax.nn.gelu(gate, approximate=True)


class _ExpertRefs(NamedTuple):
    """References of the kernel in order: scalars, then operands. The scales and the result follow."""

    first: Any
    numbers: Any
    tokens: Any
    shares: Any
    gate: Any
    up: Any
    down: Any


@name_references(*_ExpertRefs._fields, "*scales_and_out")
def _add_expert(kernel: StreamMlp, division: tuple[int, int], *refs: Any) -> None:
    """The kernel: one grid step adds a part of an expert's width. Rounds where `Mlp` and `RoutedMlp` do.

    division: tiles of an expert's width, and how many of them a core takes at most.
    """
    ref = _ExpertRefs(*refs[: len(_ExpertRefs._fields)])
    *scales, out = refs[len(_ExpertRefs._fields) :]
    tiles, most = division
    core, step, tile = (pl.program_id(axis) for axis in range(3))
    dtype = ref.tokens.dtype

    @pl.when((step == 0) & (tile == 0))
    def clear() -> None:
        out[...] = jnp.zeros_like(out)

    def add() -> None:
        gate_scale, up_scale, down_scale = _pick_scales(scales, ref.first[0] + ref.numbers[step])
        gated, raised = (
            _multiply(ref.tokens[...], part[...], scale).astype(dtype).astype(jnp.float32)
            for part, scale in ((ref.gate, gate_scale), (ref.up, up_scale))
        )
        opened = kernel.activate(gated).astype(dtype).astype(jnp.float32)
        output = _multiply(
            (opened * raised).astype(dtype),
            ref.down[...],
            down_scale,
            axis=0 if kernel.turned else 1,
        )
        mine = jax.lax.broadcasted_iota(jnp.int32, ref.shares.shape, 1) == ref.numbers[step]
        share = jnp.sum(jnp.where(mine, ref.shares[...], 0), axis=1, keepdims=True)
        out[...] += jnp.where(is_chosen(share, kernel.activation), share * output, 0)

    if tiles % kernel.cores:  # the last core has fewer tiles
        pl.when(core * most + tile < tiles)(add)
    else:
        add()


def _pick_scales(scales: Sequence[Any], expert: jax.Array) -> list[jax.Array | None]:
    """The scales of an expert's gate, up and down [1, out], from blocks of rows; None for plain matrices."""
    if not scales:
        return [None] * 3
    gate_up, down = scales
    pair = 2 * (expert % (gate_up.shape[0] // 2))
    return [
        gate_up[pl.ds(pair, 1), :],
        gate_up[pl.ds(pair + 1, 1), :],
        down[pl.ds(expert % SCALE_ROWS, 1), :],
    ]


def _multiply(
    rows: jax.Array, weight: jax.Array, scale: jax.Array | None, axis: int = 1
) -> jax.Array:
    """rows [n, in] times a weight [out, in], or [in, out] with `axis` 0, scale [1, out] → float32 [n, out]."""
    product = multiply(rows, weight.astype(rows.dtype), (1, axis))
    return product if scale is None else product * scale


# -- gpt-oss's experts: biases, another activation, and sizes that are no whole vector registers


def _stream_clamped_mlp(
    device: KernelDevice, tokens: jax.Array, chosen: ChosenExperts, expected: float
) -> jax.Array | None:
    """`stream_mlp` of clamped experts; not for devices of several cores, which would share a result."""
    assert chosen.clamped is not None
    assert chosen.gate_up_bias is not None
    n, H = tokens.shape
    M = chosen.down.shape[2]
    calls = -(-n // MAX_TOKENS)
    rows = round_up(-(-n // calls), ROWS[tokens.dtype.itemsize])
    items = tokens.dtype.itemsize, chosen.down.dtype.itemsize
    tiles = choose_clamped_tiles(rows, (H, M, chosen.shares.shape[1]), items, device)
    if tiles is None:
        return None
    padding = ((0, -n % rows), (0, 0))
    tokens = jnp.pad(tokens, padding)
    shares = jnp.pad(chosen.shares, padding)
    scalars = (jnp.maximum(chosen.count, 1), chosen.first.reshape(1), chosen.numbers)
    gate_up = chosen.gate_up.reshape(-1, M, H)
    scales = (chosen.gate_up_scale, chosen.down_scale)
    arrays = (gate_up, gate_up, chosen.down, chosen.gate_up_bias, *scales)
    weights = [keep_in_hbm(one) for one in arrays if one is not None]
    limit, slope = chosen.clamped
    kernel = StreamClampedMlp(tiles, limit, slope, expected, device.vmem_bytes)

    def run(part: slice) -> jax.Array:
        operands = (*scalars, tokens[part], shares[part], *weights)
        return kernel.call(operands, device.interpret)[:, :H]

    return jnp.concatenate([run(slice(at, at + rows)) for at in range(0, len(tokens), rows)])[:n]


def choose_clamped_tiles(
    rows: int, sizes: tuple[int, int, int], items: tuple[int, int], device: KernelDevice
) -> tuple[int, int] | None:
    """`StreamClampedMlp.tiles` for so many tokens. `sizes`: H, M, E; `items`: as of `divide_work`.

    None where none fit in VMEM, for sizes that are not whole rows of memory tiles, and for several cores.
    """
    H, M, E = sizes
    stored = items[1]
    if H % ROWS[stored] or M % ROWS[stored] or device.cores > 1:
        return None
    tokens, matrices = (DTYPES[item] for item in items)
    scales = [(2, M), (1, H)] if stored == 1 else []
    operands = describe_operands(
        (jnp.int32, [(), (1,), (1,)]),
        (tokens, [(rows, H)]),
        (jnp.float32, [(rows, E)]),
        (matrices, [(2, M, H), (2, M, H), (1, H, M)]),
        (jnp.float32, [(1, 2, M), *scales]),
    )
    widths = range(round_up(M, LANES), 0, -LANES)
    for width in (one for one in widths if 2 * one * H * stored <= CLAMPED_BYTES or one == LANES):
        outputs = min(2 * width, round_up(H, LANES))
        kernel = StreamClampedMlp((width, outputs), 0, 0, 1, 0)
        if kernel.count_vmem(*operands) <= device.vmem_bytes:
            return kernel.tiles
    return None


@dataclass(frozen=True)
class StreamClampedMlp(Kernel):
    """The kernel of gpt-oss's experts.

    First a grid step multiplies a part of an expert's gate and up, then a part of the rows of its down. The last part
    may reach beyond the matrix: what it adds there is cut off.

    Attributes:
        tiles: of an expert's width in a step of the first kind, and of its outputs in a step of the second kind.
        limit, slope: of `ChosenExperts.clamped`.
        expected: see `stream_mlp`.
        vmem_bytes: see `KernelDevice`.
    """

    name = "stream_clamped_mlp"

    tiles: tuple[int, int]
    limit: float
    slope: float
    expected: float
    vmem_bytes: int

    def plan(self, *operands: Operand) -> Launch:
        """operands: count, first, numbers, tokens, shares, gate_up twice [2X, M, H], down, bias [X, 2, M], and scales.

        The result is float32 [n, at least H].
        """
        count, _, _, tokens, shares, gate_up, _, down, _, *scales = operands
        n, H = tokens.shape
        M = gate_up.shape[1]
        width, outputs = self.tiles
        parts, rounds = -(-M // width), -(-H // outputs)

        def find(step: Any, first: Any, numbers: Any) -> Any:
            return first[0] + numbers[step]

        def place_part(at: Any) -> Any:
            return jnp.minimum(at, parts - 1)

        def place_round(at: Any) -> Any:
            return jnp.maximum(at - parts, 0)

        whole = [
            pl.BlockSpec(array.shape, lambda step, at, *_: (0, 0)) for array in (tokens, shares)
        ]
        gate, up = (
            pl.BlockSpec(
                (None, width, H),
                lambda step, at, *refs, half=half: (
                    2 * find(step, *refs) + half,
                    place_part(at),
                    0,
                ),
            )
            for half in range(2)
        )
        scale_tiles = [
            pl.BlockSpec(
                (SCALE_ROWS, width),
                lambda step, at, *refs: (2 * find(step, *refs) // SCALE_ROWS, place_part(at)),
            ),
            pl.BlockSpec(
                (SCALE_ROWS, outputs),
                lambda step, at, *refs: (find(step, *refs) // SCALE_ROWS, place_round(at)),
            ),
        ]
        inputs = [
            *whole,
            gate,
            up,
            pl.BlockSpec(
                (None, outputs, M), lambda step, at, *refs: (find(step, *refs), place_round(at), 0)
            ),
            pl.BlockSpec(
                (None, 2, width), lambda step, at, *refs: (find(step, *refs), 0, place_part(at))
            ),
            *scale_tiles[: len(scales)],
        ]
        return Launch(
            body=partial(_add_clamped_expert, self, (parts, M)),
            results=jax.ShapeDtypeStruct((n, rounds * outputs), jnp.float32),
            grid=(count, parts + rounds),
            axes=("arbitrary", "arbitrary"),
            scalars=2,
            inputs=inputs,
            outputs=pl.BlockSpec((n, rounds * outputs), lambda step, at, *_: (0, 0)),
            scratch=[pltpu.VMEM((n, parts * width), tokens.dtype)],
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            value_bytes=4 * n * (2 * width + outputs)
            + (2 * width * H + outputs * M) * tokens.dtype.itemsize * len(scales[:1]),
            cost=pl.CostEstimate(
                flops=int(self.expected * 6 * n * M * H),
                transcendentals=int(self.expected * n * M),
                bytes_accessed=int(self.expected * 3 * M * H * down.dtype.itemsize)
                + n * H * (tokens.dtype.itemsize + 4),
            ),
        )


class _ClampedRefs(NamedTuple):
    """References of the kernel in order: scalars, then operands. Scales, result and scratch memory follow."""

    first: Any
    numbers: Any
    tokens: Any
    shares: Any
    gate: Any
    up: Any
    down: Any
    bias: Any


@name_references(*_ClampedRefs._fields, "*scales_out_inner")
def _add_clamped_expert(kernel: StreamClampedMlp, sizes: tuple[int, int], *refs: Any) -> None:
    """The kernel: one grid step. Rounds where `ClampedMlp` does.

    sizes: steps of the first kind, and the width of an expert.
    """
    ref = _ClampedRefs(*refs[: len(_ClampedRefs._fields)])
    *scales, out, inner = refs[len(_ClampedRefs._fields) :]
    parts, M = sizes
    step, at = pl.program_id(0), pl.program_id(1)
    expert = ref.first[0] + ref.numbers[step]
    width, outputs = kernel.tiles
    dtype = ref.tokens.dtype

    @pl.when((step == 0) & (at == 0))
    def clear() -> None:
        out[...] = jnp.zeros_like(out)

    gate_scale, up_scale, down_scale = _pick_scales(scales, expert)

    def multiply_half(matrix: Any, scale: jax.Array | None, half: int) -> jax.Array:
        product = _multiply(ref.tokens[...], matrix[...], scale)
        return product.astype(dtype).astype(jnp.float32) + ref.bias[half : half + 1, :]

    @pl.when(at < parts)
    def open_part() -> None:
        gate = jnp.minimum(multiply_half(ref.gate, gate_scale, 0), kernel.limit)
        up = jnp.clip(multiply_half(ref.up, up_scale, 1), -kernel.limit, kernel.limit)
        opened = (up + 1) * gate * jax.nn.sigmoid(kernel.slope * gate)
        place = at * width + jax.lax.broadcasted_iota(jnp.int32, opened.shape, 1)
        columns = pl.ds(pl.multiple_of(at * width, LANES), width)
        inner[:, columns] = jnp.where(place < M, opened, 0).astype(dtype)

    @pl.when(at >= parts)
    def add_outputs() -> None:
        output = _multiply(inner[:, :M], ref.down[...], down_scale)
        mine = jax.lax.broadcasted_iota(jnp.int32, ref.shares.shape, 1) == ref.numbers[step]
        share = jnp.sum(jnp.where(mine, ref.shares[...], 0), axis=1, keepdims=True)
        columns = pl.ds(pl.multiple_of((at - parts) * outputs, LANES), outputs)
        out[:, columns] += jnp.where(share > 0, share * output, 0)


# -- which experts the tokens choose


def choose_experts(
    device: KernelDevice, scores: jax.Array, form: tuple[int, bool, str]
) -> ExpertChoice:
    """The experts that tokens choose by a router's scores, float32 [n, E].

    `form`: the first attributes of `ChooseExperts`.
    """
    n = len(scores)
    padded = jnp.pad(scores, ((0, -n % min(n, MAX_TOKENS)), (0, 0)))
    shares, numbers, count = ChooseExperts(*form, n).call((padded,), device.interpret)
    return ExpertChoice(shares[:n], numbers[0], count[0, 0])


@dataclass(frozen=True)
class ChooseExperts(Kernel):
    """The kernel of the choice. As XLA's operations it is a dozen small ones, one after the other.

    Attributes:
        chosen: experts of each token.
        normalized: whether their weights are scaled to sum to one.
        dtype: that the weights are rounded to.
        tokens: that choose. Later rows of the scores choose nothing.
    """

    name = "choose_experts"

    chosen: int
    normalized: bool
    dtype: str
    tokens: int

    def plan(self, *operands: Operand) -> Launch:
        """operands: scores. Results: `ExpertChoice`, with numbers int32 [1, E] and the count int32 [1, 1]."""
        (scores,) = operands
        n, E = scores.shape
        rows = pl.BlockSpec((min(n, MAX_TOKENS), E), lambda step: (step, 0))
        results = [
            jax.ShapeDtypeStruct((n, E), jnp.float32),
            jax.ShapeDtypeStruct((1, E), jnp.int32),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
        ]
        return Launch(
            body=partial(_choose_experts, self),
            results=results,
            grid=(-(-n // MAX_TOKENS),),
            axes=("arbitrary",),
            scalars=0,
            inputs=[rows],
            outputs=[rows, *(pl.BlockSpec((1, size), lambda step: (0, 0)) for size in (E, 1))],
            scratch=[pltpu.VMEM((SUBLANES, E), jnp.float32)],
            cost=pl.CostEstimate(
                flops=2 * SUBLANES * E * E + 6 * self.chosen * n * E,
                transcendentals=n * E,
                bytes_accessed=4 * (2 * n * E + E + 1),
            ),
        )


def _choose_experts(
    kernel: ChooseExperts, scores: Any, shares: Any, numbers: Any, count: Any, chosen: Any
) -> None:
    """The kernel. Of equal scores the lower expert is chosen first, as `jax.lax.top_k` does.

    `chosen`: 1 for experts that a token chose so far, in each row.
    """
    _choose_by_scores(kernel, scores[...], (shares, numbers, count), chosen)


def _choose_by_scores(
    kernel: ChooseExperts, found: jax.Array, results: tuple[Any, Any, Any], chosen: Any
) -> None:
    """`_choose_experts` of scores [rows, E]."""
    shares, numbers, count = results
    step = pl.program_id(0)
    rows, E = found.shape
    place = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1).astype(jnp.float32)
    weights = jnp.exp(found - jnp.max(found, axis=1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    left = weights
    kept = jnp.zeros_like(weights)
    total = jnp.zeros_like(weights[:, :1])
    for _ in range(kernel.chosen):
        best = jnp.max(left, axis=1, keepdims=True)
        at = jnp.min(jnp.where(left == best, place, float(E)), axis=1, keepdims=True)
        kept = jnp.where(place == at, weights, kept)
        left = jnp.where(place == at, -1.0, left)
        total += best
    kept = kept / total if kernel.normalized else kept
    rounded = kept.astype(kernel.dtype).astype(jnp.float32)
    if kernel.tokens % rows:
        token = step * rows + jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
        rounded = jnp.where(token < kernel.tokens, rounded, 0.0)
    shares[...] = rounded
    flags = jnp.max(jnp.where(rounded > 0, 1.0, 0.0), axis=0, keepdims=True)

    @pl.when(step == 0)
    def clear() -> None:
        chosen[...] = jnp.zeros_like(chosen)

    chosen[...] = jnp.maximum(chosen[...], flags)

    @pl.when(step + 1 == pl.num_programs(0))
    def list_chosen() -> None:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (E, E), axis) for axis in range(2))
        # how many experts up to each are chosen [E, 1]: products of zeros and ones are exact
        before = jnp.where(column <= row, 1.0, 0.0).astype(jnp.bfloat16)
        reached = multiply(before, chosen[...].astype(jnp.bfloat16), (1, 1))[:, :1]
        earlier = jnp.where(reached <= column.astype(jnp.float32), 1.0, 0.0)
        nth = jnp.sum(earlier, axis=0, keepdims=True)
        size = jnp.sum(chosen[:1, :], axis=1, keepdims=True)
        listed = jax.lax.broadcasted_iota(jnp.int32, (1, E), 1).astype(jnp.float32) < size
        numbers[...] = jnp.where(listed, nth, 0.0).astype(jnp.int32)
        count[...] = size.astype(jnp.int32)


# -- the norm before the experts, and the products of the router


def route_tokens(device: KernelDevice, routed: RoutedTokens, sizes: RoutingSizes) -> Routing:
    """Norms tokens and chooses their experts. `choose_routed_rows` must have found room for the sizes."""
    n = len(routed.rows)
    dtype = routed.rows.dtype
    most = choose_routed_rows(device, sizes, dtype.itemsize)
    assert most is not None, "the sizes were checked as the model was built"
    rows = min(most, round_up(n, ROWS[dtype.itemsize]))
    padded = jnp.pad(routed.rows, ((0, -n % rows), (0, 0)))
    stacks = [routed.router] if routed.shared is None else [routed.router, routed.shared]
    form = sizes.chosen, sizes.normalized, dtype.name, n
    kernel = RouteTokens(*form, rows, routed.epsilon, routed.rounded, device.vmem_bytes)
    operands = (routed.layer.reshape(1), padded, routed.norm[None], *map(keep_in_hbm, stacks))
    tokens, shares, numbers, count, *shared = kernel.call(operands, device.interpret)
    choice = ExpertChoice(shares[:n], numbers[0], count[0, 0])
    return Routing(tokens[:n], choice, shared[0][:n] if shared else None)


def choose_routed_rows(device: KernelDevice, sizes: RoutingSizes, item: int) -> int | None:
    """Tokens of a grid step of `RouteTokens`, of numbers of `item` bytes.

    None where none fit in VMEM, and for rows of no whole registers.
    """
    H, E = sizes.hidden, sizes.experts
    if H % LANES:
        return None
    for rows in (MAX_TOKENS, MAX_TOKENS // 2, MAX_TOKENS // 4, ROWS[item]):
        operands = describe_operands(
            (jnp.int32, [(1,)]),
            (DTYPES[item], [(rows, H)]),
            (jnp.float32, [(1, H)]),
            (DTYPES[item], [(1, E, H), (1, 1, H)]),
        )
        form = sizes.chosen, sizes.normalized, jnp.dtype(DTYPES[item]).name, rows
        kernel = RouteTokens(*form, rows, 0, rounded=False, vmem_bytes=0)
        if kernel.count_vmem(*operands) <= device.vmem_bytes:
            return rows
    return None


@dataclass(frozen=True)
class RouteTokens(ChooseExperts):
    """The kernel of norm, router and choice. As XLA's operations they are six small ones, one after the other.

    Attributes:
        rows: tokens of a grid step.
        epsilon: see `RoutedTokens`.
        rounded: see `RoutedTokens`.
        vmem_bytes: see `KernelDevice`.
    """

    name = "route_tokens"

    rows: int
    epsilon: float
    rounded: bool
    vmem_bytes: int

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, rows, norm, router, and perhaps the shared expert's gate.

        Results: normed tokens, those of `ChooseExperts`, and perhaps the shared expert's parts [n, 1].
        """
        _, tokens, norm, router, *shared = operands
        n, H = tokens.shape
        E = router.shape[1]
        rows = self.rows

        def by_token(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((rows, width), lambda step, *_: (step, 0))

        def of_layer(outputs: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, outputs, H), lambda step, layer: (layer[0], 0, 0))

        def whole(size: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, size), lambda step, *_: (0, 0))

        results = [
            jax.ShapeDtypeStruct((n, H), tokens.dtype),
            jax.ShapeDtypeStruct((n, E), jnp.float32),
            jax.ShapeDtypeStruct((1, E), jnp.int32),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
            *[jax.ShapeDtypeStruct((n, 1), jnp.float32) for _ in shared],
        ]
        item = tokens.dtype.itemsize
        return Launch(
            body=partial(_route_tokens, self),
            results=results,
            grid=(n // rows,),
            axes=("arbitrary",),
            scalars=1,
            inputs=[by_token(H), whole(H), of_layer(E), *[of_layer(1) for _ in shared]],
            outputs=[by_token(H), by_token(E), whole(E), whole(1), *[by_token(1) for _ in shared]],
            scratch=[pltpu.VMEM((SUBLANES, E), jnp.float32)],
            vmem_bytes=self.vmem_bytes + RESERVED_VMEM,
            value_bytes=4 * (3 * rows * H + 4 * rows * E + 4 * E * E),
            cost=pl.CostEstimate(
                flops=2 * n * E * H + 2 * SUBLANES * E * E + 6 * self.chosen * n * E,
                transcendentals=n * E,
                bytes_accessed=item * H * (2 * n + E) + 4 * (n * E + E),
            ),
        )


@name_references("_layer", "rows", "norm", "router", "*results_and_chosen")
def _route_tokens(kernel: RouteTokens, *refs: Any) -> None:
    """The kernel. Rounds where `RmsNorm`, `Linear` and `sigmoid` do."""
    _, rows, norm, router, *others, chosen = refs
    gates = others[: (len(others) - 4) // 2]
    tokens, shares, numbers, count, *parts = others[len(gates) :]
    dtype = tokens.dtype

    def round_once(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    wide = rows[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + kernel.epsilon)
    normed = round_once(wide * scale) if kernel.rounded else wide * scale
    normed = (normed * norm[...]).astype(dtype)
    tokens[...] = normed
    scores = round_once(multiply(normed, router[...], (1, 1)))
    _choose_by_scores(kernel, scores, (shares, numbers, count), chosen)
    for gate, part in zip(gates, parts, strict=True):
        products = normed.astype(jnp.float32) * gate[...].astype(jnp.float32)
        score = round_once(jnp.sum(products, axis=1, keepdims=True))
        part[...] = round_once(jax.nn.sigmoid(score))
