"""Tensor slices: which part of which checkpoint tensor fills a slice of a weight argument. Arithmetic only.

A tensor slice is a range (start, stop) for each dimension.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec

from dflash_aot.cache.bundle.weight_recipe import Placement, find_section_shape

Range = tuple[int, int]
TensorSlice = tuple[Range, ...]


def cover_tensor(shape: Sequence[int]) -> TensorSlice:
    """Returns the slice of a whole tensor."""
    return tuple((0, size) for size in shape)


def slice_shape(part: TensorSlice) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in part)


def shift_slice(part: TensorSlice, origin: Sequence[int]) -> TensorSlice:
    """Returns `part` in coordinates that begin at `origin`."""
    return tuple((start - at, stop - at) for (start, stop), at in zip(part, origin, strict=True))


def to_numpy_slices(part: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in part)


def split_slice(part: TensorSlice, most: int) -> Iterator[TensorSlice]:
    """Splits along the first dimension that is longer than 1, in order.

    Each piece has at most `most` elements, or the length 1 in this dimension if that is still more.
    """
    shape = slice_shape(part)
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        yield part
        return
    start, stop = part[axis]
    step = max(most // math.prod(shape[axis + 1 :]), 1) if all(shape) else stop - start
    for low in range(start, stop, step):
        yield (*part[:axis], (low, min(low + step, stop)), *part[axis + 1 :])


def intersect_placement(part: TensorSlice, placement: Placement) -> TensorSlice | None:
    """Returns the part of the argument's slice that the placement fills; None for nothing."""
    filled = zip(placement.offset, placement.extent, strict=True)
    common = tuple(
        (max(start, at), min(stop, at + size)) for (start, stop), (at, size) in zip(part, filled, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def find_stored_slice(placement: Placement, part: TensorSlice) -> TensorSlice:
    """Returns the slice of the stored tensor that holds `part` of the placement's extent.

    The extent is the shape of the stored section with dimensions split (row-major) or added. `part` must correspond to
    a range of each stored dimension; anything else is an error of the caller (AssertionError).
    """
    dimensions = zip(placement.extent, part, strict=True)
    found = tuple(
        _merge_ranges(_take_dimensions(dimensions, size), placement) for size in find_section_shape(placement)
    )
    assert all(size == 1 for size, _ in dimensions), f"{placement} reshapes across stored dimensions"
    if placement.rows is msgspec.UNSET:
        return found
    return (*shift_slice(found[:1], (-placement.rows[0],)), *found[1:])


def _take_dimensions(dimensions: Iterator[tuple[int, Range]], size: int) -> list[tuple[int, Range]]:
    """Takes the next dimensions of the extent, as many as make up a stored dimension of `size`."""
    taken, product = [], 1
    while product < size and (dimension := next(dimensions, None)):
        taken.append(dimension)
        product *= dimension[0]
    assert product == size, f"a stored dimension of {size} is not a product of the extent's dimensions: {taken}"
    return taken


def _merge_ranges(dimensions: Sequence[tuple[int, Range]], placement: Placement) -> Range:
    """Returns the range of a stored dimension, from the ranges of the dimensions that it was split into."""
    start, length = 0, 1
    for size, (low, high) in dimensions:
        assert length == 1 or (low, high) == (0, size), f"{placement}: {dimensions} is not a range when stored"
        start, length = start * size + low, length * (high - low)
    return start, start + length
