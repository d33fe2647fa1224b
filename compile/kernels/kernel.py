"""The protocol of the Pallas TPU kernels: facts, call and interpretation. Also their products, and names of references.

A kernel is a frozen dataclass: its fields are the facts that are fixed when it is compiled. `Kernel.call` writes name
and facts into the metadata of the compiled call. From these the same kernel is interpreted on any device.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.compile.kernels.kernel_device import LANES, SUBLANES, round_up

Body = TypeVar("Body", bound=Callable[..., None])
Arrays = jax.Array | Sequence[jax.Array]
Operand = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # what a launch depends on: shape and dtype

DTYPES = {1: jnp.int8, 2: jnp.bfloat16, 4: jnp.float32}  # of operands, by bytes of a number
DEFAULT_VMEM = 16 * 2**20  # bytes that the compiler gives a kernel, where nothing else is said


@dataclass(frozen=True)
class Launch:
    """How a kernel runs on given operands.

    Attributes:
        body: one grid step, a function of references.
        results: shapes and dtypes.
        grid: its sizes; one that is an array is the first operand.
        axes: of each of them "parallel", if a device's cores may share it, or "arbitrary".
        scalars: how many operands are prefetched to scalar memory; the first ones.
        inputs: which part of each other operand a grid step takes.
        outputs: which part of each result a grid step writes.
        cost: what the compiler's estimates assume.
        scratch: memory of a grid step.
        aliases: operands that results overwrite, by number.
        vmem_bytes: that the kernel may use; None: DEFAULT_VMEM.
        value_bytes: of values of a grid step that registers do not hold, such as products.
    """

    body: Callable[..., None]
    results: Any
    grid: tuple[Any, ...]
    axes: tuple[Literal["parallel", "arbitrary"], ...]
    scalars: int
    inputs: Sequence[pl.BlockSpec]
    outputs: Any
    cost: pl.CostEstimate
    scratch: Sequence[Any] = ()
    aliases: Mapping[int, int] = field(default_factory=dict)
    vmem_bytes: int | None = None
    value_bytes: int = 0


class Kernel:
    """A kernel with its facts.

    Attributes:
        name: of the compiled call. It is part of every key of a program with the kernel, as are the facts' names.
    """

    name: ClassVar[str]

    @abstractmethod
    def plan(self, *operands: Operand) -> Launch:
        """The launch on these operands."""

    def count_vmem(self, *operands: Operand) -> int:
        """Bytes of VMEM of a grid step: two buffers of each part of an operand or result, scratch memory, values."""
        launch = self.plan(*operands)
        results = _list(launch.results)
        arrays = (*operands[len(operands) - len(launch.inputs) :], *results)
        parts = zip((*launch.inputs, *_list(launch.outputs)), arrays, strict=True)
        buffers = sum(count_tile_bytes(part.block_shape or (), one.dtype) for part, one in parts)
        scratch = sum(
            count_tile_bytes(one.shape, one.dtype)
            for one in launch.scratch
            if one.memory_space == pltpu.VMEM
        )
        return 2 * buffers + scratch + launch.value_bytes

    def call(self, operands: Sequence[jax.Array], interpret: Any = False) -> Any:
        """The results of the kernel. `interpret` is that of `KernelDevice`."""
        launch = self.plan(*operands)
        in_grid = sum(isinstance(size, jax.Array) for size in launch.grid)
        call = pl.pallas_call(
            launch.body,
            out_shape=launch.results,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=launch.scalars,
                grid=launch.grid,
                in_specs=launch.inputs,
                out_specs=launch.outputs,
                scratch_shapes=launch.scratch,
            ),
            input_output_aliases=dict(launch.aliases),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=launch.axes, vmem_limit_bytes=launch.vmem_bytes
            ),
            cost_estimate=launch.cost,
            interpret=interpret,
            name=self.name,
            metadata={"kernel": self.name, "facts": msgspec.json.encode(self).decode()},
        )
        return call(*operands[in_grid:])

    @classmethod
    def interpret(cls, facts: str, operands: Sequence[jax.Array]) -> Arrays:
        """What a compiled call computes, as operations of any device: by its metadata's facts, and its operands."""
        return msgspec.json.decode(facts, type=cls).call(operands, interpret=True)


def describe_operands(*groups: tuple[Any, Sequence[tuple[int, ...]]]) -> list[Operand]:
    """Operands by dtype and shapes, for `Kernel.count_vmem`."""
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype, shapes in groups for shape in shapes]


def _list(one_or_more: Any) -> list[Any]:
    return [*one_or_more] if isinstance(one_or_more, list | tuple) else [one_or_more]


def count_tile_bytes(shape: Sequence[int | None], dtype: Any) -> int:
    """Bytes of an array in VMEM, of whole memory tiles: rows of LANES numbers, as many as fill SUBLANES registers.

    Axes that are None are not there. An array without axes takes no memory.
    """
    *outer, rows, lanes = [1, 1, *(size for size in shape if size is not None)]
    if len(shape) == 0:
        return 0
    item = jnp.dtype(dtype).itemsize
    return math.prod(outer) * round_up(rows, SUBLANES * 4 // item) * round_up(lanes, LANES) * item


def multiply(left: jax.Array, right: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two matrices over one axis of each, float32."""
    # Explicit: the precision of the context is for products of float32.
    precision = (
        jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    axes = ((contracted[0],), (contracted[1],))
    return jax.lax.dot_general(
        left, right, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def keep_in_hbm(array: jax.Array) -> jax.Array:
    """The array, in main memory: XLA would copy all layers of it to VMEM for each call, where they fit."""
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def find_largest_divisor(size: int, fits: Callable[[int], bool]) -> int | None:
    """The largest divisor that fits."""
    divisors = (size // parts for parts in range(1, size + 1) if size % parts == 0)
    return next((one for one in divisors if fits(one)), None)


def name_references(*names: str) -> Callable[[Body], Body]:
    """Decorates the body of a kernel that takes its references as `*refs`: JAX finds these names in its signature.

    Programs, and so keys, contain the names of a kernel's references. A last name with a star stands for the rest.
    """

    def decorate(body: Body) -> Body:
        signature = inspect.signature(body)
        *first, _ = signature.parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        named = [inspect.Parameter(one.removeprefix("*"), kinds[one[0] == "*"]) for one in names]
        body.__signature__ = signature.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
        return body

    return decorate
