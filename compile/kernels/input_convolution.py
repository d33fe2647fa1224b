"""The convolution before a sublayer of a DFlash2 draft as a Pallas TPU kernel, from the coefficients' product on.

A grid step computes the coefficients of some groups of channels and convolves those channels, while the weights of the
next groups are copied to VMEM. As XLA's operations the product waits for its first weights, then for its last, and the
coefficients are written and read twice.

L layers · T rows of all blocks · H hidden · G groups of channels · J taps
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.compile.kernels.kernel_device import InputConvolution
from dflash_aot.compile.kernels.tiling import LANES, SUBLANES

NAME = "convolve_input"
GROUP_UNIT = 16  # groups of a grid step: rows of whole memory tiles, of any dtype
TILE_BYTES = 2**20  # of the weights of a grid step
VMEM_BYTES = 14 * 2**20  # of the 16 MiB that the compiler gives a kernel by default
MAX_ROWS = 256  # of all blocks: their shift is a product with a square matrix


def run_input_convolution(
    h: jax.Array, convolution: InputConvolution, interpret: Any = False
) -> tuple[jax.Array, jax.Array] | None:
    """The convolved rows, as h [B, rows, H], and the coefficients after the sublayer, float32 [J, B, rows, H].

    None for sizes that the kernel does not divide, or that do not fit in VMEM.
    """
    B, rows, H = h.shape
    taps = convolution.base.shape[2]
    groups = H // convolution.group
    item = h.dtype.itemsize
    step = choose_groups(groups, convolution.group, 2 * taps * H * item)
    if step is None or B * rows % SUBLANES or B * rows > MAX_ROWS:
        return None
    if count_vmem(B * rows, H, taps, step, step * convolution.group, item) > VMEM_BYTES:
        return None
    facts = _ConvolutionFacts(step, convolution.group)
    # XLA would copy the weights of all layers to VMEM, where they fit.
    weight, base = (
        pltpu.with_memory_space_constraint(one, pltpu.HBM)
        for one in (convolution.projection, convolution.base)
    )
    flat = h.reshape(B * rows, H)
    shifts = jnp.asarray(make_shifts(B, rows, taps, h.dtype))
    operands = convolution.layer.reshape(1), flat, flat, shifts, base, *[weight] * 2 * taps
    convolved, after = _call_kernel(facts, operands, interpret)
    return convolved.reshape(h.shape), after.reshape(taps, B, rows, H)


def choose_groups(groups: int, size: int, group_bytes: int) -> int | None:
    """Groups of a grid step, of `size` channels each; None where no number of them is whole memory tiles.

    `group_bytes` are those of a group's weights.
    """
    divisors = [one for one in range(1, groups + 1) if groups % one == 0]
    whole = [one for one in divisors if one % GROUP_UNIT == 0 and one * size % LANES == 0]
    return max(
        (one for one in whole if one * group_bytes <= TILE_BYTES), default=min(whole, default=None)
    )


def count_vmem(rows: int, hidden: int, taps: int, groups: int, width: int, item: int) -> int:
    """Bytes of VMEM: two buffers of weights, rows, shifts and results, and some arrays of a grid step's channels."""
    weights = 2 * taps * groups * hidden * item
    shifts = (taps - 1) * rows * rows * item
    ends = rows * (hidden * item + width * (2 * item + 4 * taps))
    return 2 * (weights + shifts + ends) + 4 * 4 * rows * width


def make_shifts(blocks: int, rows: int, taps: int, dtype: Any) -> np.ndarray:
    """Matrices [taps - 1 or 1, T, T] of zeros and ones that move the rows of each block by 1, 2, … to later places."""
    place = np.arange(blocks * rows)
    from_place = place[:, None] - place
    shifts = [
        (from_place == tap) & (place[:, None] % rows >= tap) for tap in range(1, max(taps, 2))
    ]
    return np.stack(shifts).astype(dtype)


def interpret_kernel(facts: str, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """What a compiled kernel computes, as operations of any device: its metadata's facts, and its operands in order."""
    return _call_kernel(msgspec.json.decode(facts, type=_ConvolutionFacts), operands, True)


@dataclass(frozen=True)
class _ConvolutionFacts:
    """What is fixed when the kernel is compiled.

    Attributes:
        step: groups of a grid step.
        size: channels of a group.
    """

    step: int
    size: int


def _call_kernel(
    facts: "_ConvolutionFacts", operands: Sequence[jax.Array], interpret: Any
) -> Sequence[jax.Array]:
    """operands: layer, rows [T, H] twice, shifts, base kernels [L, 2, J, H], weights [L, 2 J G, H] once for each part.

    The results are the convolved rows and the coefficients after the sublayer, float32 [J, T, H].
    """
    _, h, _, shifts, base, *weights = operands
    T, H = h.shape
    taps = base.shape[2]
    steps = H // facts.size // facts.step
    width = facts.step * facts.size
    parts = [
        pl.BlockSpec(
            (None, facts.step, H), lambda step, layer, part=part: (layer[0], part * steps + step, 0)
        )
        for part in range(2 * taps)
    ]
    call = pl.pallas_call(
        partial(_convolve, facts),
        out_shape=[
            jax.ShapeDtypeStruct((T, H), h.dtype),
            jax.ShapeDtypeStruct((taps, T, H), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[
                pl.BlockSpec((T, H), lambda step, layer: (0, 0)),
                pl.BlockSpec((T, width), lambda step, layer: (0, step)),
                pl.BlockSpec(shifts.shape, lambda step, layer: (0, 0, 0)),
                pl.BlockSpec((None, 2, taps, width), lambda step, layer: (layer[0], 0, 0, step)),
                *parts,
            ],
            out_specs=[
                pl.BlockSpec((T, width), lambda step, layer: (0, step)),
                pl.BlockSpec((taps, T, width), lambda step, layer: (0, 0, step)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * taps * T * H * (H // facts.size + facts.step) + 2 * T * T * H * (taps - 1),
            transcendentals=0,
            bytes_accessed=2 * taps * H * (H // facts.size * h.dtype.itemsize + 4)
            + T * H * (3 * h.dtype.itemsize + 4 * taps),
        ),
        interpret=interpret,
        name=NAME,
        metadata={
            "kernel": NAME,
            "facts": msgspec.json.encode(facts).decode(),
        },  # `interpret_kernel` needs them
    )
    return call(*operands)


def _convolve(
    facts: "_ConvolutionFacts",
    _: Any,
    h: Any,
    own: Any,
    shifts: Any,
    base: Any,
    *weights_and_out: Any,
) -> None:
    """The kernel: one grid step computes the channels `own` of all rows. Rounds where `SublayerConvolution` does."""
    *weights, convolved, after = weights_and_out
    taps = base.shape[1]
    dtype = own.dtype
    shape = (facts.step, facts.step * facts.size)
    first = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * facts.size
    channel = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = ((channel >= first) & (channel < first + facts.size)).astype(dtype)

    def compute_coefficients(side: int, tap: int) -> jax.Array:
        dynamic = _multiply(h[...], weights[side * taps + tap][...], 1).astype(dtype)
        return base[side, tap : tap + 1, :] + _multiply(dynamic, spread, 0)

    total = compute_coefficients(0, 0) * own[...].astype(jnp.float32)
    for tap in range(1, taps):
        total += compute_coefficients(0, tap) * _multiply(shifts[tap - 1], own[...], 0)
    convolved[...] = total.astype(dtype)
    for tap in range(taps):
        after[tap] = compute_coefficients(1, tap)


def _multiply(left: jax.Array, right: jax.Array, contracted: int) -> jax.Array:
    """left [n, in] times right [in, out], or [out, in] with `contracted` 1 → float32 [n, out]."""
    # Explicit: the precision of the context is for products of float32.
    precision = (
        jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    dimensions = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(
        left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
