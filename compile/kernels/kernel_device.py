"""Decides where programs use kernels instead of XLA's operations: by device, pair and sizes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.topology import Chip
from dflash_aot.compile.kernels.tiling import (
    LANES,
    SUBLANES,
    AttentionSizes,
    DeltaSizes,
    choose_delta_heads,
    choose_tiling,
    round_up,
)

KERNEL_VMEM = 30 * 2**20  # bytes that the kernel of MLPs may use, where nothing else is said
LESS_VMEM = {"TPU v4": 14 * 2**20}  # of 16 MiB; other TPUs have at least 64
MAX_TOKENS = 256  # of a call of that kernel: more of them take longer to multiply than matrices take to be read
MAX_BLOCK = 32  # tokens of a block of `DeltaKernels`, whose equations are solved token by token


@dataclass(frozen=True)
class KernelDevice:
    """The device that kernels are lowered for.

    Attributes:
        kind: JAX's name, which some lowering rules ask for.
        cores: TensorCores of a device.
        interpret: for tests on CPU, where kernels are interpreted: `pltpu.InterpretParams`.
        vmem_bytes: that the kernel of MLPs may use.
    """

    kind: str
    cores: int
    interpret: Any = False
    vmem_bytes: int = KERNEL_VMEM

    def describe(self) -> AbstractDevice:
        """The device as JAX's lowering rules ask for it."""
        return AbstractDevice(device_kind=self.kind, num_cores=self.cores, platform="tpu")


def choose_kernel_device(chip: Chip | None, target: Target, draft: Draft) -> KernelDevice | None:
    """The device of a chip; None where the programs use XLA's operations.

    Kernels need a TPU whose figures are known, and heads of whole vector registers: 128 lanes, or a multiple. Memory
    tiles of narrower heads are padded, and a kernel would copy the padding.
    """
    if chip is None or any(model.decoder.attention.head_dim % LANES for model in (target, draft)):
        return None
    vmem_bytes = LESS_VMEM.get(chip.device_kind, KERNEL_VMEM)
    return KernelDevice(chip.device_kind, chip.cores // chip.devices, vmem_bytes=vmem_bytes)


@dataclass(frozen=True)
class InputConvolution:
    """The weights of the convolution before a sublayer, of all layers of a draft.

    L layers · J taps · G groups of channels · H hidden

    Attributes:
        projection: of the coefficients before and after the sublayer, [L, 2 J G, H].
        base: float32 [L, 2, J, H].
        layer: int32 scalar.
        group: channels of a group.
    """

    projection: jax.Array
    base: jax.Array
    layer: jax.Array
    group: int


def convolve_input(
    device: KernelDevice | None, h: jax.Array, convolution: InputConvolution
) -> tuple[jax.Array, jax.Array] | None:
    """The convolved rows of h [B, T, H], and the coefficients after the sublayer, float32 [J, B, T, H].

    None where there is no kernel: without a device for kernels, and for sizes that `run_input_convolution` refuses.
    """
    if device is None:
        return None
    from dflash_aot.compile.kernels.input_convolution import run_input_convolution  # noqa: PLC0415

    return run_input_convolution(h, convolution, device.interpret)


@dataclass(frozen=True)
class ChosenExperts:
    """The experts that tokens chose in a layer, and where their matrices lie.

    E experts · X experts of all layers · M width of an expert · H hidden · n tokens

    Attributes:
        gate_up: gate above up, of the experts of all layers [X, 2M, H].
        down: of the same [X, H, M].
        first: the layer's first expert, int32 scalar.
        numbers: the chosen experts of the layer in ascending order, int32 [E]; behind them anything below E.
        count: of chosen experts, int32 scalar.
        shares: float32 [n, E], the weight of each expert in each token's output; 0 for those that it did not choose.
        gate_up_scale: of int8 matrices, a float32 scale for each row [2X, M]: gate and up of each expert in turn. Or
            [X, 2, M]: a TPU lays out both forms differently, and would copy one that is made of the other.
        down_scale: of the same [X, H].
    """

    gate_up: jax.Array
    down: jax.Array
    first: jax.Array
    numbers: jax.Array
    count: jax.Array
    shares: jax.Array
    gate_up_scale: jax.Array | None = None
    down_scale: jax.Array | None = None


def run_experts(
    device: KernelDevice | None, tokens: jax.Array, chosen: ChosenExperts, expected: float
) -> jax.Array | None:
    """The sum of the experts' outputs by share, tokens [n, H] → float32 [n, H]; None where there is no kernel.

    That is without a device for kernels, and for sizes that `choose_tile` does not divide. `expected` is the number of
    chosen experts that the compiler's estimates assume.
    """
    if device is None:
        return None
    from dflash_aot.compile.kernels.streamed_mlp import stream_mlp  # noqa: PLC0415

    return stream_mlp(device, tokens, chosen, expected)


def streams_mlp(device: KernelDevice | None, hidden: int, width: int, dtypes: tuple[str, str]) -> bool:
    """Whether `run_experts` takes MLPs of these sizes with MAX_TOKENS tokens. `dtypes`: of tokens, of matrices."""
    if device is None:
        return False
    from dflash_aot.compile.kernels.streamed_mlp import choose_tile  # noqa: PLC0415

    tokens, matrices = (jnp.dtype(one).itemsize for one in dtypes)
    return choose_tile(MAX_TOKENS, hidden, width, (tokens, matrices), device) is not None


def attend_pages(
    device: KernelDevice | None,
    q: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    layer: int | jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    length: int,
    own: tuple[jax.Array, jax.Array],
    limits: jax.Array,
    windowed: bool,
) -> jax.Array | None:
    """`attend_kv` over the first `length` positions of each row, by its page table; None where there is no kernel.

    That is without a device for kernels, and for sizes that `choose_tiling` does not divide. tables: int32 [B, E].
    """
    _, G, R, T, D = q.shape
    page = kv[0].shape[3]
    sizes = AttentionSizes(T, G, R, D, q.dtype.itemsize, length, page)
    if device is None or (tiling := choose_tiling(sizes, device.cores)) is None:
        return None
    # Pallas takes 0.3 s to import, and programs without kernels need none of it.
    from dflash_aot.compile.kernels.kv_attention import PagedKv, attend_kv, divide_pages  # noqa: PLC0415

    parts = page // tiling.page
    pages = divide_pages(tables[:, : -(-length // page)], parts)
    paged = PagedKv(*kv, jnp.asarray(layer, jnp.int32), pages, parts, length)
    return attend_kv(q, paged, starts, own, limits, tiling, windowed, device.interpret)


@dataclass(frozen=True)
class DeltaBlock:
    """The blocks of a verification in one Gated DeltaNet layer, from its projections on.

    L layers · N slots · B rows · T tokens · Q key heads · R value heads per key head · V = Q R · I key width
    O value width · C = Q (2 I + R O) channels · J rows of a window

    Attributes:
        channels: what the convolution takes, [B, T, C].
        gates: z, [B, T, V O].
        strengths: β, float32 [B, V, T].
        decays: g, float32 [B, V, T].
        begun: [B]; elsewhere a slot's state and window count as zeros.
        conv: float32 [Q, 2 I + R O, taps].
        norm: float32 [O].
        windows: of all layers and slots [L, N, J, C].
        states: likewise, float32 [L, N, V, I, O].
        epsilon: of the norm of results.
        norm_epsilon: of the norms of queries and keys.
    """

    channels: jax.Array
    gates: jax.Array
    strengths: jax.Array
    decays: jax.Array
    begun: jax.Array
    conv: jax.Array
    norm: jax.Array
    windows: jax.Array
    states: jax.Array
    epsilon: float
    norm_epsilon: float


class DeltaUpdates(NamedTuple):
    """What the blocks of a verification add to the recurrent states, until their accepted tokens are known.

    L layers · the other letters as in `DeltaBlock`

    Attributes:
        keys: float32 [L, B, Q, T, I].
        updates: U of `models.delta_rule`, float32 [L, B, V, T, O].
        decays: the sum of the decays up to each token, float32 [L, B, V, T].
        channels: what the convolution took, [L, B, T, C].
    """

    keys: jax.Array
    updates: jax.Array
    decays: jax.Array
    channels: jax.Array


@dataclass(frozen=True)
class DeltaKernels:
    """The kernels of Gated DeltaNet layers for blocks of one width, on one device.

    Attributes:
        heads: key heads of a grid step.
        tokens: of a block, with padding.
        interpret: see `KernelDevice`.
    """

    heads: int
    tokens: int
    interpret: Any = False

    def mix(self, block: DeltaBlock, pending: DeltaUpdates, layer: int | jax.Array) -> tuple[jax.Array, DeltaUpdates]:
        """Runs the blocks of a layer: `gated_delta.mix_block`."""
        from dflash_aot.compile.kernels.gated_delta import mix_block  # noqa: PLC0415

        return mix_block(block, pending, jnp.asarray(layer, jnp.int32), self.heads, self.interpret)

    def commit(
        self,
        states: jax.Array,
        windows: jax.Array,
        pending: DeltaUpdates,
        factors: jax.Array,
        begun: jax.Array,
        counts: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Advances states and windows of all layers: `gated_delta.commit_blocks`."""
        from dflash_aot.compile.kernels.gated_delta import commit_blocks  # noqa: PLC0415

        return commit_blocks(states, windows, pending, factors, begun, counts, self.heads, self.interpret)


def choose_delta_kernels(
    device: KernelDevice | None, sizes: DeltaSizes, tokens: int, window: int
) -> DeltaKernels | None:
    """The kernels for blocks of `tokens` tokens behind windows of `window` rows; None where XLA's operations run them.

    That is without a device for kernels, and for sizes that `choose_delta_heads` does not divide.
    """
    if device is None or tokens > MAX_BLOCK or window > SUBLANES:
        return None
    heads = choose_delta_heads(sizes, device.cores)
    return None if heads is None else DeltaKernels(heads, round_up(tokens, SUBLANES), device.interpret)
