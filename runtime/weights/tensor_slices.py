"""Which part of which checkpoint tensor lies in a box of a weight argument. Numbers only.

A box is a range (start, stop) per dimension.
"""

import math
from collections.abc import Iterator, Sequence

from dflash_aot.cache.bundle.weight_recipe import Placement

Range = tuple[int, int]
Box = tuple[Range, ...]


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def move_box(box: Box, corner: Sequence[int]) -> Box:
    """The same box where `corner` of before is the origin."""
    return tuple((start - at, stop - at) for (start, stop), at in zip(box, corner, strict=True))


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def split_box(box: Box, most: int) -> Iterator[Box]:
    """In order, along its first dimension that is longer than 1: parts of at most `most` numbers, or one step long."""
    shape = box_shape(box)
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        yield box
        return
    start, stop = box[axis]
    step = max(most // math.prod(shape[axis + 1 :]), 1) if all(shape) else stop - start
    for low in range(start, stop, step):
        yield (*box[:axis], (low, min(low + step, stop)), *box[axis + 1 :])


def intersect(box: Box, placement: Placement) -> Box | None:
    """What of `box` the placement fills, both in the argument; None for nothing."""
    filled = zip(placement.offset, placement.extent, strict=True)
    common = tuple(
        (max(start, at), min(stop, at + size)) for (start, stop), (at, size) in zip(box, filled, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def stored_box(placement: Placement, part: Box) -> Box:
    """`part` of the placement's extent as a box of the tensor as stored.

    The extent is the stored shape with dimensions split (row-major) or added; what is asked of it must be a range
    of each stored dimension.
    """
    dimensions = zip(placement.extent, part, strict=True)
    box = tuple(_merge(_take(dimensions, size), placement) for size in placement.stored)
    assert all(size == 1 for size, _ in dimensions), f"{placement} reshapes over the borders of dimensions"
    return box


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
