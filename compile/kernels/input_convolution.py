"""The convolution before a sublayer of a DFlash2 draft as a Pallas TPU kernel, from the coefficients' product on.

A grid step computes the coefficients of some groups of channels and convolves those channels, while the weights of the
next groups are copied to VMEM. As XLA's operations the product waits for its first weights, then for its last, and the
coefficients are written and read twice.

L layers · T rows of all blocks · H hidden · G groups of channels · J taps
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from dflash_aot.compile.kernels.kernel import (
    DEFAULT_VMEM,
    Kernel,
    Launch,
    Operand,
    keep_in_hbm,
    multiply,
)
from dflash_aot.compile.kernels.kernel_device import (
    LANES,
    RESERVED_VMEM,
    SUBLANES,
    InputConvolution,
)

GROUP_UNIT = 16  # groups of a grid step: rows of whole memory tiles, of any dtype
TILE_BYTES = 2**20  # of the weights of a grid step
VMEM_BYTES = DEFAULT_VMEM - RESERVED_VMEM
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
    kernel = ConvolveInput(step, convolution.group)
    shifts = make_shifts(B, rows, taps, h.dtype)
    sizes = jax.ShapeDtypeStruct((B * rows, H), h.dtype)
    weights = [convolution.projection] * 2 * taps
    if (
        kernel.count_vmem(convolution.layer, sizes, sizes, shifts, convolution.base, *weights)
        > VMEM_BYTES
    ):
        return None
    weight, base = map(keep_in_hbm, (convolution.projection, convolution.base))
    flat = h.reshape(B * rows, H)
    operands = (
        convolution.layer.reshape(1),
        flat,
        flat,
        jnp.asarray(shifts),
        base,
        *[weight] * 2 * taps,
    )
    convolved, after = kernel.call(operands, interpret)
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


def make_shifts(blocks: int, rows: int, taps: int, dtype: Any) -> np.ndarray:
    """Matrices [taps - 1 or 1, T, T] of zeros and ones that move the rows of each block by 1, 2, … to later places."""
    place = np.arange(blocks * rows)
    from_place = place[:, None] - place
    shifts = [
        (from_place == tap) & (place[:, None] % rows >= tap) for tap in range(1, max(taps, 2))
    ]
    return np.stack(shifts).astype(dtype)


@dataclass(frozen=True)
class ConvolveInput(Kernel):
    """The kernel.

    Attributes:
        step: groups of a grid step.
        size: channels of a group.
    """

    name = "convolve_input"

    step: int
    size: int

    @property
    def width(self) -> int:
        """Channels of a grid step."""
        return self.step * self.size

    def plan(self, *operands: Operand) -> Launch:
        """operands: layer, rows [T, H] twice, shifts, base kernels [L, 2, J, H], weights [L, 2 J G, H] for each part.

        The results are the convolved rows and the coefficients after the sublayer, float32 [J, T, H].
        """
        _, h, _, shifts, base, *weights = operands
        T, H = h.shape
        taps = base.shape[2]
        steps = H // self.width
        parts = [
            pl.BlockSpec(
                (None, self.step, H),
                lambda step, layer, part=part: (layer[0], part * steps + step, 0),
            )
            for part in range(len(weights))
        ]
        own = pl.BlockSpec((T, self.width), lambda step, layer: (0, step))
        return Launch(
            body=partial(_convolve, self),
            results=[
                jax.ShapeDtypeStruct((T, H), h.dtype),
                jax.ShapeDtypeStruct((taps, T, H), jnp.float32),
            ],
            grid=(steps,),
            axes=("parallel",),
            scalars=1,
            inputs=[
                pl.BlockSpec((T, H), lambda step, layer: (0, 0)),
                own,
                pl.BlockSpec(shifts.shape, lambda step, layer: (0, 0, 0)),
                pl.BlockSpec(
                    (None, 2, taps, self.width), lambda step, layer: (layer[0], 0, 0, step)
                ),
                *parts,
            ],
            outputs=[own, pl.BlockSpec((taps, T, self.width), lambda step, layer: (0, 0, step))],
            value_bytes=4 * 4 * T * self.width,
            cost=pl.CostEstimate(
                flops=4 * taps * T * H * (H // self.size + self.step) + 2 * T * T * H * (taps - 1),
                transcendentals=0,
                bytes_accessed=2 * taps * H * (H // self.size * h.dtype.itemsize + 4)
                + T * H * (3 * h.dtype.itemsize + 4 * taps),
            ),
        )


def _convolve(
    kernel: ConvolveInput,
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
    shape = (kernel.step, kernel.width)
    first = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * kernel.size
    channel = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = ((channel >= first) & (channel < first + kernel.size)).astype(dtype)

    def compute_coefficients(side: int, tap: int) -> jax.Array:
        dynamic = multiply(h[...], weights[side * taps + tap][...], (1, 1)).astype(dtype)
        return base[side, tap : tap + 1, :] + multiply(dynamic, spread)

    total = compute_coefficients(0, 0) * own[...].astype(jnp.float32)
    for tap in range(1, taps):
        total += compute_coefficients(0, tap) * multiply(shifts[tap - 1], own[...])
    convolved[...] = total.astype(dtype)
    for tap in range(taps):
        after[tap] = compute_coefficients(1, tap)
