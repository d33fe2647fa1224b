"""Tiling of kernels: how much of their work one grid step takes, by shapes, VMEM and cores; and names of references."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

Kernel = TypeVar("Kernel", bound=Callable[..., None])

LANES, SUBLANES = 128, 8  # of a vector register
# Positions of the unit of copies: 16 rows of bfloat16 are whole memory tiles on every generation.
PAGES = (128, 64, 32, 16)
BLOCK = 512  # kv positions
MAX_QUERY_ROWS = 1024  # of a grid step: query heads times positions
STATE_BYTES = 3 * 2**19  # of recurrent states of a grid step; the commit holds four times as much
VMEM_BYTES = 12 * 2**20  # of the 16 MiB that the compiler gives a kernel by default


@dataclass(frozen=True)
class Tiling:
    """How the attention kernel divides its work.

    Attributes:
        heads: kv heads of a grid step.
        queries: positions of this call in a grid step.
        page: kv positions of the unit of copies: a page of the pools, or a part of one.
        pages: of these in a block, the unit of computation.
    """

    heads: int
    queries: int
    page: int
    pages: int

    @property
    def block(self) -> int:
        """kv positions of a block."""
        return self.page * self.pages


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a call of the attention kernel on one device.

    Attributes:
        queries: positions of the call.
        kv_heads: kv heads of the device.
        group: query heads per kv head.
        head_dim: width of a head.
        itemsize: bytes of an element.
        length: kv positions that rows may attend to.
        kv_page: positions of a page of the kv pools.
    """

    queries: int
    kv_heads: int
    group: int
    head_dim: int
    itemsize: int
    length: int
    kv_page: int


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of Gated DeltaNet layers on one device.

    Attributes:
        key_heads: of the device.
        value_heads: of the device, a multiple.
        key_dim: width of a key head.
        value_dim: width of a value head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


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

    return _largest_divisor(sizes.key_heads, fits)


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def choose_tiling(sizes: AttentionSizes, cores: int) -> Tiling | None:
    """The tiling for a device with `cores` TensorCores; None where the kernel does not fit the sizes.

    It does not fit where no part of PAGES divides a page of the pools, or a tile of queries exceeds VMEM.
    """
    page = next((page for page in PAGES if sizes.kv_page % page == 0), None)
    if page is None:
        return None
    pages = max(1, min(BLOCK, round_up(sizes.length, page)) // page)

    def fits(queries: int, heads: int) -> bool:
        rows = heads * sizes.group * queries
        vmem = count_vmem(sizes, Tiling(heads, queries, page, pages))
        divided = sizes.kv_heads // heads >= min(cores, sizes.kv_heads)
        whole = queries == sizes.queries or queries % 8 == 0
        return whole and divided and rows <= MAX_QUERY_ROWS and vmem <= VMEM_BYTES

    # The largest tile of queries first: each of them reads the kv again.
    queries = _largest_divisor(sizes.queries, lambda size: fits(size, 1))
    if queries is None:
        return None
    heads = _largest_divisor(sizes.kv_heads, partial(fits, queries))
    assert heads is not None
    return Tiling(heads, queries, page, pages)


def count_vmem(sizes: AttentionSizes, tiling: Tiling) -> int:
    """Bytes of VMEM: kv buffers, own kv, queries and results (two of each), softmax state, and the scores of a head."""
    rows = round_up(sizes.group * tiling.queries, SUBLANES)
    width = round_up(sizes.head_dim, LANES)
    kv = 2 * 2 * (tiling.block + round_up(sizes.queries, 2 * SUBLANES)) * width * sizes.itemsize
    ends = 2 * 2 * rows * width * sizes.itemsize
    state = 4 * rows * (2 * LANES + width)
    return tiling.heads * (kv + ends + state) + 2 * 4 * rows * tiling.block


def name_references(*names: str) -> Callable[[Kernel], Kernel]:
    """Decorates a kernel that takes its references as `*refs`: JAX finds these names in its signature.

    Programs, and so keys, contain the names of a kernel's references. A last name with a star stands for the rest.
    """

    def decorate(kernel: Kernel) -> Kernel:
        signature = inspect.signature(kernel)
        first = [
            one
            for one in signature.parameters.values()
            if one.kind is not inspect.Parameter.VAR_POSITIONAL
        ]
        kinds = {
            True: inspect.Parameter.VAR_POSITIONAL,
            False: inspect.Parameter.POSITIONAL_OR_KEYWORD,
        }
        named = [
            inspect.Parameter(name.removeprefix("*"), kinds[name.startswith("*")]) for name in names
        ]
        kernel.__signature__ = signature.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
        return kernel

    return decorate


def _largest_divisor(size: int, fits: Callable[[int], bool]) -> int | None:
    return next(
        (
            size // parts
            for parts in range(1, size + 1)
            if size % parts == 0 and fits(size // parts)
        ),
        None,
    )
