"""Backends: what one platform computes in another way than the others. A backend is chosen when programs are made.

B rows · T positions of this call · K drafted tokens of a block · H hidden · V vocabulary, or a device's part of it
G kv heads · R query heads per kv head · D head width
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice
from jax.typing import DTypeLike

from dflash_aot.cache.chips import Chip
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft, Target, list_attention
from dflash_aot.compile.kernels.kernel_device import (
    KERNEL_VMEM,
    LANES,
    MAX_TOKENS,
    PAGES,
    RESERVED_VMEM,
    AttendingBlock,
    ChosenExperts,
    DeltaProjections,
    DeltaSizes,
    ExpertChoice,
    InputConvolution,
    KernelDevice,
    OutputWeights,
    RoutedTokens,
    Routing,
    RoutingSizes,
    StreamSizes,
)
from dflash_aot.compile.models import attention
from dflash_aot.compile.models.attention import LayerWindows
from dflash_aot.compile.models.kv_cache import KvArrays, KvContext, write_kv
from dflash_aot.compile.models.matmul import (
    Found,
    find_best_in_tiles,
    find_index,
    find_largest,
    find_largest_in_tiles,
    find_largest_values,
    matmul_by_tile,
    matmul_padded_rows,
    matmul_rows_first,
    matmul_weight_first,
    round_to,
)

if TYPE_CHECKING:
    from dflash_aot.compile.kernels.gated_delta import DeltaBlocks, DeltaChunks
    from dflash_aot.compile.kernels.streamed_layer import (
        LayerParts,
        NormRule,
        StreamDeltaInputs,
        StreamLayer,
        StreamOutputMlp,
    )

RotateHalf = Callable[[jax.Array], jax.Array]
COPIED_TABLE = 2**20  # bytes of a table that `TpuBackend.look_up` does not copy
UNROLLED_ROWS = 64  # of `TpuBackend.look_up`: more of them take long to compile
PRECISE = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class Kernels(KernelDevice):
    """The kernels of a device. A call gives None for sizes that a kernel does not take."""

    # Kernels are imported where they are called: Pallas takes 0.3 s, and programs without kernels need none of it.

    def attend(
        self,
        block: AttendingBlock,
        kv: tuple[jax.Array, jax.Array],
        layer: int | jax.Array,
        tables: jax.Array,
        length: int,
    ) -> jax.Array | None:
        """`kv_attention.attend_pages`."""
        from dflash_aot.compile.kernels.kv_attention import attend_pages  # noqa: PLC0415

        return attend_pages(self, block, kv, layer, tables, length)

    def streams_mlp(self, hidden: int, width: int, dtypes: tuple[str, str]) -> bool:
        """Whether `run_experts` takes MLPs of these sizes with MAX_TOKENS tokens. `dtypes`: of tokens, of matrices."""
        from dflash_aot.compile.kernels.streamed_mlp import choose_tile  # noqa: PLC0415

        tokens, matrices = (jnp.dtype(one).itemsize for one in dtypes)
        return choose_tile(MAX_TOKENS, hidden, width, (tokens, matrices), self) is not None

    def run_experts(
        self, tokens: jax.Array, chosen: ChosenExperts, expected: float
    ) -> jax.Array | None:
        """`streamed_mlp.stream_mlp`."""
        from dflash_aot.compile.kernels.streamed_mlp import stream_mlp  # noqa: PLC0415

        return stream_mlp(self, tokens, chosen, expected)

    def choose_experts(
        self, scores: jax.Array, chosen: int, normalized: bool, dtype: str
    ) -> ExpertChoice:
        """`streamed_mlp.choose_experts`."""
        from dflash_aot.compile.kernels.streamed_mlp import choose_experts  # noqa: PLC0415

        return choose_experts(self, scores, (chosen, normalized, dtype))

    def routes_tokens(self, sizes: RoutingSizes, dtype: str) -> bool:
        """Whether `route_tokens` takes tokens of these sizes."""
        from dflash_aot.compile.kernels.streamed_mlp import choose_routed_rows  # noqa: PLC0415

        return choose_routed_rows(self, sizes, jnp.dtype(dtype).itemsize) is not None

    def route_tokens(self, routed: RoutedTokens, sizes: RoutingSizes) -> Routing:
        """`streamed_mlp.route_tokens`."""
        from dflash_aot.compile.kernels.streamed_mlp import route_tokens  # noqa: PLC0415

        return route_tokens(self, routed, sizes)

    def choose_stream(
        self, sizes: StreamSizes, epsilon: float, shared: bool
    ) -> "StreamLayer | LayerParts | None":
        """`streamed_layer.choose_stream`."""
        from dflash_aot.compile.kernels.streamed_layer import choose_stream  # noqa: PLC0415

        return choose_stream(self, sizes, epsilon, shared)

    def choose_delta_inputs(
        self,
        x: jax.ShapeDtypeStruct,
        rows: int,
        weights: DeltaProjections,
        norm: "NormRule",
    ) -> "StreamDeltaInputs | None":
        """`streamed_layer.choose_delta_inputs`."""
        from dflash_aot.compile.kernels.streamed_layer import choose_delta_inputs  # noqa: PLC0415

        return choose_delta_inputs(self, x, rows, weights, norm)

    def choose_output_mlp(
        self,
        mixed: jax.ShapeDtypeStruct,
        x: jax.ShapeDtypeStruct,
        weights: OutputWeights,
        norm: "NormRule",
    ) -> "StreamOutputMlp | None":
        """`streamed_layer.choose_output_mlp`."""
        from dflash_aot.compile.kernels.streamed_layer import choose_output_mlp  # noqa: PLC0415

        return choose_output_mlp(self, mixed, x, weights, norm)

    def convolve_input(
        self, h: jax.Array, convolution: InputConvolution
    ) -> tuple[jax.Array, jax.Array] | None:
        """`input_convolution.run_input_convolution`."""
        from dflash_aot.compile.kernels import input_convolution  # noqa: PLC0415

        return input_convolution.run_input_convolution(h, convolution, self.interpret)

    def choose_delta_kernels(
        self, sizes: DeltaSizes, tokens: int, window: int
    ) -> "DeltaBlocks | None":
        """`gated_delta.choose_delta_blocks`."""
        from dflash_aot.compile.kernels.gated_delta import choose_delta_blocks  # noqa: PLC0415

        return choose_delta_blocks(self, sizes, tokens, window)

    def choose_delta_chunks(self, sizes: DeltaSizes, window: int) -> "DeltaChunks | None":
        """`gated_delta.choose_delta_chunks`."""
        from dflash_aot.compile.kernels.gated_delta import choose_delta_chunks  # noqa: PLC0415

        return choose_delta_chunks(self, sizes, window)


def choose_device_kernels(chip: Chip | None, target: Target, draft: Draft) -> Kernels | None:
    """The kernels of a chip; None where the programs use XLA's operations.

    Kernels need a TPU whose figures are known. That of attention needs heads or pages of whole vector registers: 128
    lanes, or a multiple. Memory tiles would be padded otherwise, and a kernel would copy the padding.
    """
    if chip is None:
        return None
    attention = list_attention((*target.kinds, *draft.kinds))
    attends = all(one.shape.head_dim % LANES == 0 for one in attention)
    vmem_bytes = min(KERNEL_VMEM, chip.vmem_bytes - RESERVED_VMEM)
    balance = int(chip.flops_per_second / chip.bytes_per_second)  # tokens of bfloat16 per matrix
    return Kernels(
        chip.device_kind,
        chip.cores // chip.devices,
        vmem_bytes=vmem_bytes,
        stream_tokens=max(MAX_TOKENS, balance // LANES * LANES),
        attends=attends,
    )


@dataclass(frozen=True)
class Backend:
    """What a GPU computes, and where other backends differ.

    Attributes:
        platform: as JAX names it when it lowers: CUDA and ROCm, which are both "gpu" when it runs, by their own names.
        precision: of float32 products; by default TPU and GPU round their operands.
        stacks_layers: whether a model's layers are a loop over stacked weights (see `layer_loop`), or unrolled.
        kernels: of the device that programs are lowered for; None: XLA's operations only.
        sums_apart: whether devices sum several arrays without stacking them.
        rotates_whole: whether heads of which only a part is rotated are rotated as a whole, the rest by 0.
        shares_products: whether stacked layers multiply an input that they share in one product.
    """

    platform: ClassVar[str] = "cuda"
    sums_apart: ClassVar[bool] = False
    rotates_whole: ClassVar[bool] = False
    shares_products: ClassVar[bool] = False
    precision: ClassVar[str | None] = "highest"
    stacks_layers: bool = False
    kernels: Kernels | None = None

    # weight [out, in], rows [n, in] → float32 [n, out]
    multiply_rows: ClassVar[Callable[..., jax.Array]] = staticmethod(matmul_rows_first)
    # float32 [.., V] → the index of the largest, int32 [..]; the lowest of equals
    argmax: ClassVar[Callable[..., jax.Array]] = staticmethod(find_index)
    # as `attention.attend_context`
    attend_context: ClassVar[Callable[..., jax.Array]] = staticmethod(attention.attend_context)

    # -- products and searches

    def matmul(
        self,
        weight: jax.Array,
        x: jax.Array,
        scale: jax.Array | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """W · x over the last axis of both: weight [*out, in] as stored, x [*rows, in] → [*rows, *out].

        Accumulated in float32. With `scale`, float32 [*out], W is weight · scale of its row: the weight is int8 and is
        converted inside the product, whose float32 result is scaled. The result has `dtype`, by default that of x.
        """
        *outer, width = weight.shape
        rows = x.reshape(-1, width)
        flat = self.multiply_rows(weight.reshape(-1, width), rows)
        if scale is not None:
            flat = flat * scale.reshape(-1)
        return round_to(flat, dtype or x.dtype).reshape(*x.shape[:-1], *outer)

    def find_drafted(
        self,
        find: Callable[[jax.Array], Sequence[jax.Array]],
        hidden: jax.Array,
        k: int,
        first: int,
    ) -> Sequence[jax.Array]:
        """`find` [B, K, H] → arrays [B, K], of the K rows from `first` on, 0 or 1, of blocks [B, T, H]."""
        return find(hidden[:, first : first + k])

    def search_outputs(
        self, weight: jax.Array, x: jax.Array, scale: jax.Array | None, count: int
    ) -> Found:
        """The `count` largest of W · x, x [B, T, H], and their indices, each [B, T, count]; see `matmul`."""
        return find_largest_values(self.matmul(weight, x, scale, dtype=jnp.float32), count)

    def score_outputs(
        self, weight: jax.Array, rows: jax.Array, scale: jax.Array | None, count: int
    ) -> jax.Array:
        """W · x of rows [n, H], as `find_count_largest` and `find_best` read it: float32 [n, V], or in tiles."""
        return self.matmul(weight, rows, scale, dtype=jnp.float32)

    def find_count_largest(self, scores: jax.Array, rows: int, count: int) -> Found:
        """The `count` largest scores of each row and their indices, each [rows, count]."""
        return find_largest_values(scores, count)

    def find_best(self, scores: jax.Array, rows: int) -> Found:
        """The largest score of each row and its index, each [rows]; see `score_outputs`."""
        return self.find_largest(scores)

    def find_largest(self, values: jax.Array) -> Found:
        """The largest of float32 [.., V] and its index, the lowest of equals, each [..]."""
        best = self.argmax(values)
        return jnp.take_along_axis(values, best[..., None], axis=-1)[..., 0], best

    # -- rotation, and movements of numbers

    def hold(self, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """`tables`, which all layers read."""
        return tables

    def make_rotate_half(self, width: int, dtype: jnp.dtype, whole: int) -> RotateHalf:
        """The function [.., whole] → its second half with the other sign, then its first half.

        Where only the first `width` numbers are rotated, the halves are theirs, and the others become zeros.
        """
        assert whole == width, "parts of heads are rotated apart"
        return rotate_half_by_slices

    def spread_groups(self, values: jax.Array, size: int) -> jax.Array:
        """Repeats each of the last axis's numbers `size` times: [.., G] → float32 [.., G · size]."""
        return jnp.repeat(values.astype(jnp.float32), size, axis=-1)

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows of a table [V, H], of ids [..]: [.., H]."""
        return table[ids]

    def shift_rows(self, x: jax.Array, count: int) -> jax.Array:
        """Moves rows [B, T, H] by `count` to later places, float32; zeros take the first places."""
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (count, 0), (0, 0)))[:, : x.shape[1]]

    # -- keys and values

    def attend(self, block: AttendingBlock, context: KvContext, windows: LayerWindows) -> jax.Array:
        """Attention of blocks to the kv positions before them, and to themselves: [B, G, R, T, D]."""
        if self.kernels:
            kv = context.keys, context.values
            place = context.layer, context.tables, context.length
            if (mixed := self.kernels.attend(block, kv, *place)) is not None:
                return mixed
        positions = block.starts[:, None] + jnp.arange(block.q.shape[3])

        def mask(at: jax.Array) -> jax.Array:
            before = (at < block.starts[:, None])[:, None]
            return before & windows.context_mask(positions, at[None])

        own = block.keys, block.values, windows.block_mask(positions)
        return self.attend_context(block.q, context, mask, block.starts, own, sinks=block.sinks)

    def write_block(
        self, x: jax.Array, kv: KvArrays, rows: KvArrays, tables: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, KvArrays]:
        """The output `x` of layers that read kv, and kv with their rows written (`write_kv`).

        Nothing is written before the last layer has read: otherwise XLA copies the pools.
        """
        x, rows = jax.lax.optimization_barrier((x, rows))
        return x, write_kv(kv, rows, tables, self.delay(starts, x))

    def delay(self, starts: jax.Array, x: jax.Array) -> jax.Array:
        """`starts`, known only after `x`."""
        return starts

    # -- kernels

    @property
    def device(self) -> AbstractDevice | None:
        """The device of the kernels as JAX's lowering rules ask for it."""
        return self.kernels.describe() if self.kernels else None

    def check_page(self, page: int) -> None:
        """Raises BadInput if the kernels cannot copy pages of so many kv positions."""
        if self.kernels and self.kernels.attends and page % PAGES[-1]:
            raise BadInput(
                f"page={page}: the attention kernel for TPUs needs a multiple of {PAGES[-1]}"
            )


@dataclass(frozen=True)
class CpuBackend(Backend):
    """A CPU multiplies with the weight as left operand, and copies what it gathers."""

    platform = "cpu"
    precision = None
    multiply_rows = staticmethod(matmul_weight_first)
    argmax = staticmethod(find_largest)
    attend_context = staticmethod(attention.attend_by_page)

    def find_drafted(
        self,
        find: Callable[[jax.Array], Sequence[jax.Array]],
        hidden: jax.Array,
        k: int,
        first: int,
    ) -> Sequence[jax.Array]:
        if not first:
            return find(hidden[:, :k])
        # With the anchor: K + 1 positions need no padding rows, which would be cut off all logits.
        return [found[:, 1:] for found in find(hidden[:, : k + 1])]

    def hold(self, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # XLA would compute them again for each head, in several operations of each layer.
        return jax.lax.optimization_barrier(tables)

    def delay(self, starts: jax.Array, x: jax.Array) -> jax.Array:
        # XLA's CPU compiler (JAX 0.10) drops barriers before it decides what to copy.
        first = x.reshape(-1)[0]
        never = jnp.isinf(first) & jnp.isnan(first)
        return starts + never.astype(starts.dtype)


@dataclass(frozen=True)
class TpuBackend(Backend):
    """A TPU. Moving numbers inside its registers takes long: exact products with zeros and ones move them."""

    platform = "tpu"
    sums_apart = True
    rotates_whole = True
    shares_products = True
    multiply_rows = staticmethod(matmul_padded_rows)
    stacks_layers: bool = True

    def search_outputs(
        self, weight: jax.Array, x: jax.Array, scale: jax.Array | None, count: int
    ) -> Found:
        B, T, width = x.shape
        scores = self.score_outputs(weight, x.reshape(-1, width), scale, count)
        values, tokens = self.find_count_largest(scores, B * T, count)
        return values.reshape(B, T, count), tokens.reshape(B, T, count)

    def score_outputs(
        self, weight: jax.Array, rows: jax.Array, scale: jax.Array | None, count: int
    ) -> jax.Array:
        # Tiles save reading all outputs again, if fewer than half of them are chosen.
        vocab = weight.shape[0]
        if vocab % LANES == 0 and vocab // LANES > 2 * count:
            return matmul_by_tile(weight, rows, scale, LANES)
        return super().score_outputs(weight, rows, scale, count)

    def find_count_largest(self, scores: jax.Array, rows: int, count: int) -> Found:
        if scores.ndim == 2:
            return super().find_count_largest(scores, rows, count)
        return find_largest_in_tiles(scores, rows, count)

    def find_best(self, scores: jax.Array, rows: int) -> Found:
        return (
            super().find_best(scores, rows)
            if scores.ndim == 2
            else find_best_in_tiles(scores, rows)
        )

    def make_rotate_half(self, width: int, dtype: jnp.dtype, whole: int) -> RotateHalf:
        place = jnp.arange(width)
        distance = place[:, None] - place
        half = width // 2
        signs = (distance == -half).astype(dtype) - (distance == half).astype(dtype)
        signs = signs if whole == width else jnp.pad(signs, (0, whole - width))
        return partial(rotate_half_by_product, signs=signs)

    def spread_groups(self, values: jax.Array, size: int) -> jax.Array:
        groups = values.shape[-1]
        # a constant: the compiler would divide in every call
        group = np.arange(groups * size, dtype=np.int32) // size
        ones = (group == jnp.arange(groups)[:, None]).astype(values.dtype)
        return jnp.matmul(values, ones, precision=PRECISE, preferred_element_type=jnp.float32)

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        # Rows that fill no whole vector registers lie along the columns, and a gather would copy the whole table.
        if table.shape[1] % LANES == 0 or ids.size == 1 or table.nbytes < COPIED_TABLE:
            return super().look_up(table, ids)
        flat = ids.reshape(-1)
        shape = (*ids.shape, table.shape[1])
        if flat.size <= UNROLLED_ROWS:
            found = [jax.lax.dynamic_slice_in_dim(table, one, 1) for one in flat]
            return jnp.concatenate(found).reshape(shape)

        def put(at: jax.Array, rows: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(table, flat[at], 1)
            return jax.lax.dynamic_update_slice_in_dim(rows, row, at, axis=0)

        rows = jnp.zeros((flat.size, table.shape[1]), table.dtype)
        return jax.lax.fori_loop(0, flat.size, put, rows).reshape(shape)

    def shift_rows(self, x: jax.Array, count: int) -> jax.Array:
        place = jnp.arange(x.shape[1])
        ones = (place[:, None] - place == count).astype(x.dtype)
        return jnp.einsum(
            "ts,bsh->bth", ones, x, precision=PRECISE, preferred_element_type=jnp.float32
        )


CPU = CpuBackend()
STACKED_CPU = CpuBackend(stacks_layers=True)  # for the weights of an emulated TPU
TPU = TpuBackend()


def choose_backend(platform: str, chip: Chip | None, target: Target, draft: Draft) -> Backend:
    """The backend of "cpu", "gpu" or "tpu", with kernels for a `chip` that has them (`choose_device_kernels`)."""
    match platform:
        case "cpu":
            return CPU
        case "tpu":
            return TpuBackend(kernels=choose_device_kernels(chip, target, draft))
        case _:
            return Backend()


def rotate_half_by_slices(x: jax.Array) -> jax.Array:
    """See `Backend.make_rotate_half`."""
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-high, low], axis=-1)


def rotate_half_by_product(x: jax.Array, signs: jax.Array) -> jax.Array:
    """`rotate_half_by_slices` as a product with a matrix [D, D] of 0, 1 and -1: exact, as each sum has one term.

    Slices inside vector registers are instructions of their own on TPU, while a product is fused with the norm before
    and the rotation after it.
    """
    return jax.lax.dot_general(
        x, signs, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=x.dtype
    )
