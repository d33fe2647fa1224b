"""Decides where programs use kernels instead of XLA's operations: by device and sizes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dflash_aot.compile.kernels.kernel_device import (
    MAX_TOKENS,
    SUBLANES,
    AttendingBlock,
    ChosenExperts,
    DeltaBlock,
    DeltaCommit,
    DeltaUpdates,
    InputConvolution,
    KernelDevice,
    round_up,
)

MAX_BLOCK = 32  # tokens of a block of `DeltaKernels`, whose equations are solved token by token


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


def run_experts(
    device: KernelDevice | None, tokens: jax.Array, chosen: ChosenExperts, expected: float
) -> jax.Array | None:
    """The sum of the experts' outputs by share, tokens [n, H] → float32 [n, H]; None where there is no kernel.

    There is none without a device for kernels, and for sizes that `choose_tile` does not divide. `expected` is the
    number of chosen experts that the compiler's estimates assume.
    """
    if device is None:
        return None
    from dflash_aot.compile.kernels.streamed_mlp import stream_mlp  # noqa: PLC0415

    return stream_mlp(device, tokens, chosen, expected)


def streams_mlp(
    device: KernelDevice | None, hidden: int, width: int, dtypes: tuple[str, str]
) -> bool:
    """Whether `run_experts` takes MLPs of these sizes with MAX_TOKENS tokens. `dtypes`: of tokens, of matrices."""
    if device is None:
        return False
    from dflash_aot.compile.kernels.streamed_mlp import choose_tile  # noqa: PLC0415

    tokens, matrices = (jnp.dtype(one).itemsize for one in dtypes)
    return choose_tile(MAX_TOKENS, hidden, width, (tokens, matrices), device) is not None


def attend_pages(
    device: KernelDevice | None,
    block: AttendingBlock,
    kv: tuple[jax.Array, jax.Array],
    layer: int | jax.Array,
    tables: jax.Array,
    length: int,
) -> jax.Array | None:
    """`kv_attention.attend_pages`; None where there is no kernel, as without a device for kernels."""
    if device is None:
        return None
    from dflash_aot.compile.kernels import kv_attention  # noqa: PLC0415

    return kv_attention.attend_pages(device, block, kv, layer, tables, length)


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

    def mix(
        self, block: DeltaBlock, pending: DeltaUpdates, layer: int | jax.Array
    ) -> tuple[jax.Array, DeltaUpdates]:
        """Runs the blocks of a layer: `gated_delta.mix_block`."""
        from dflash_aot.compile.kernels.gated_delta import mix_block  # noqa: PLC0415

        return mix_block(block, pending, jnp.asarray(layer, jnp.int32), self.heads, self.interpret)

    def commit(self, commit: DeltaCommit) -> tuple[jax.Array, jax.Array]:
        """Advances states and windows of all layers: `gated_delta.commit_blocks`."""
        from dflash_aot.compile.kernels.gated_delta import commit_blocks  # noqa: PLC0415

        return commit_blocks(commit, self.heads, self.interpret)


def choose_delta_kernels(
    device: KernelDevice | None, sizes: tuple[int, int, int, int], tokens: int, window: int
) -> DeltaKernels | None:
    """The kernels for blocks of `tokens` tokens after windows of `window` rows; None where XLA's operations run them.

    There are none without a device for kernels, and for sizes that `choose_delta_heads` does not divide.
    """
    if device is None or tokens > MAX_BLOCK or window > SUBLANES:
        return None
    # Pallas takes 0.3 s to import, and programs without kernels need none of it.
    from dflash_aot.compile.kernels.gated_delta import (  # noqa: PLC0415
        DeltaSizes,
        choose_delta_heads,
    )

    heads = choose_delta_heads(DeltaSizes(*sizes), device.cores)
    return (
        None if heads is None else DeltaKernels(heads, round_up(tokens, SUBLANES), device.interpret)
    )
