"""Which part of which checkpoint tensor lies in a region of a weight argument. Numbers only.

A region is a range (start, stop) per dimension.
"""

import math
from collections.abc import Iterator, Sequence

from dflash_aot.cache.bundle.weight_recipe import Placement

Range = tuple[int, int]
TensorSlice = tuple[Range, ...]


def cover_tensor(shape: Sequence[int]) -> TensorSlice:
    return tuple((0, size) for size in shape)


def slice_shape(region: TensorSlice) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def shift_slice(region: TensorSlice, corner: Sequence[int]) -> TensorSlice:
    """The same region where `corner` of before is the origin."""
    return tuple((start - at, stop - at) for (start, stop), at in zip(region, corner, strict=True))


def to_numpy_slices(region: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


def split_slice(region: TensorSlice, most: int) -> Iterator[TensorSlice]:
    """In order, along its first dimension that is longer than 1: parts of at most `most` numbers, or one step long."""
    shape = slice_shape(region)
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        yield region
        return
    start, stop = region[axis]
    step = max(most // math.prod(shape[axis + 1 :]), 1) if all(shape) else stop - start
    for low in range(start, stop, step):
        yield (*region[:axis], (low, min(low + step, stop)), *region[axis + 1 :])


def intersect_placement(region: TensorSlice, placement: Placement) -> TensorSlice | None:
    """What of `region` the placement fills, both in the argument; None for nothing."""
    filled = zip(placement.offset, placement.extent, strict=True)
    common = tuple(
        (max(start, at), min(stop, at + size)) for (start, stop), (at, size) in zip(region, filled, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def find_stored_slice(placement: Placement, part: TensorSlice) -> TensorSlice:
    """`part` of the placement's extent as a region of the tensor as stored.

    The extent is the stored shape with dimensions split (row-major) or added; what is asked of it must be a range
    of each stored dimension.
    """
    dimensions = zip(placement.extent, part, strict=True)
    region = tuple(_merge(_take(dimensions, size), placement) for size in placement.stored)
    assert all(size == 1 for size, _ in dimensions), f"{placement} reshapes over the borders of dimensions"
    return region


def _take(dimensions: Iterator[tuple[int, Range]], size: int) -> list[tuple[int, Range]]:
    """The next dimensions of the extent, as many as make up a stored one of `size`."""
    taken, product = [], 1
    while product < size and (dimension := next(dimensions, None)):
        taken.append(dimension)
        product *= dimension[0]
    assert product == size, f"a stored dimension of {size} is no product of the extent's: {taken}"
    return taken


def _merge(dimensions: Sequence[tuple[int, Range]], placement: Placement) -> Range:
    """Ranges of the dimensions that a stored one was split into, as its own range."""
    start, length = 0, 1
    for size, (low, high) in dimensions:
        assert length == 1 or (low, high) == (0, size), f"{placement}: {dimensions} is no range of a stored dimension"
        start, length = start * size + low, length * (high - low)
    return start, start + length
