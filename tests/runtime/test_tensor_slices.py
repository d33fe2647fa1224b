"""Tensor slices: slices of arguments as slices of stored tensors, against NumPy on numbered elements."""

import itertools
import math

import numpy as np
import pytest
from msgspec import UNSET

from dflash_aot.cache.weight_recipe import Placement
from dflash_aot.runtime.weights.safetensors_reader import (
    cover_tensor,
    find_stored_slice,
    intersect_placement,
    shift_slice,
    slice_shape,
    split_slice,
    to_numpy_slices,
)

# kv heads, queries per kv head, head, hidden, MLP, expert, experts, layers
G, R, D, H, W, M, E, L = 4, 2, 3, 6, 8, 4, 3, 2
# Kinds of weight arguments: shape, the dimension that devices split, (stored, offset, extent, rows) of each tensor.
KINDS = {
    "q": ((G, R, D, H), 0, [((G * R * D, H), (0, 0, 0, 0), (G, R, D, H))]),
    "kv": ((G, 2, D, H), 0, [((G * D, H), (0, at, 0, 0), (G, 1, D, H)) for at in range(2)]),
    "kv_bias": ((G, 2, D), 0, [((G * D,), (0, at, 0), (G, 1, D)) for at in range(2)]),
    "o": ((H, G, R, D), 1, [((H, G * R * D), (0, 0, 0, 0), (H, G, R, D))]),
    "gate_up": ((2, W, H), 1, [((W, H), (at, 0, 0), (1, W, H)) for at in range(2)]),
    "down": ((H, W), 1, [((H, W), (0, 0), (H, W))]),
    "experts": ((2 * E, M, H), 1, [((M, H), (at, 0, 0), (1, M, H)) for at in range(2 * E)]),
    "embedding": ((W, H), 0, [((W, H), (0, 0), (W, H))]),
    "stacked q": ((L, G, R, D, H), 1, [((G * R * D, H), (at, 0, 0, 0, 0), (1, G, R, D, H)) for at in range(L)]),
    "stacked o": ((L, H, G, R, D), 2, [((H, G * R * D), (at, 0, 0, 0, 0), (1, H, G, R, D)) for at in range(L)]),
    "sections": (
        (G, R + 2 * D, H),
        0,
        [
            ((G * (R + 2 * D), H), (0, 0, 0), (G, D, H), (0, G * D)),
            ((G * (R + 2 * D), H), (0, D, 0), (G, D, H), (G * D, 2 * G * D)),
            ((G * (R + 2 * D), H), (0, 2 * D, 0), (G, R, H), (2 * G * D, G * (R + 2 * D))),
        ],
    ),
    "stacked norm": ((L, H), None, [((H,), (at, 0), (1, H)) for at in range(L)]),
}


def placements(kind: str) -> list[Placement]:
    return [Placement(f"tensor {at}", *one) for at, one in enumerate(KINDS[kind][2])]


def assemble(shape: tuple[int, ...], kind: str, wanted) -> np.ndarray:
    """Returns a slice of an argument, from stored tensors whose elements are all different."""
    array = np.full(slice_shape(wanted), -1)
    for placement in placements(kind):
        number = int(placement.tensor.removeprefix("tensor ")) if placement.rows is UNSET else 0
        stored = np.arange(math.prod(placement.stored)).reshape(placement.stored) + 1000 * number
        if common := intersect_placement(wanted, placement):
            for piece in split_slice(common, 5):
                part = shift_slice(piece, placement.offset)
                values = stored[to_numpy_slices(find_stored_slice(placement, part))].reshape(slice_shape(part))
                array[to_numpy_slices(shift_slice(piece, [start for start, _ in wanted]))] = values
    return array


def assemble_reference(kind: str) -> np.ndarray:
    """Returns the whole argument, tensor by tensor."""
    array = np.full(KINDS[kind][0], -1)
    for placement in placements(kind):
        number = int(placement.tensor.removeprefix("tensor ")) if placement.rows is UNSET else 0
        stored = np.arange(math.prod(placement.stored)).reshape(placement.stored) + 1000 * number
        array[to_numpy_slices(shift_slice(cover_tensor(placement.extent), [-at for at in placement.offset]))] = (
            stored if placement.rows is UNSET else stored[slice(*placement.rows)]
        ).reshape(placement.extent)
    return array


@pytest.mark.parametrize("kind", KINDS)
def test_device_slice_equals_that_of_the_whole_argument(kind, devices=2):
    shape, split, _ = KINDS[kind]
    whole = assemble_reference(kind)
    assert whole.min() == 0  # filled completely
    for device in range(devices):
        device_slice = list(cover_tensor(shape))
        if split is not None:
            share = shape[split] // devices
            device_slice[split] = (device * share, (device + 1) * share)
        wanted = tuple(device_slice)
        np.testing.assert_array_equal(assemble(shape, kind, wanted), whole[to_numpy_slices(wanted)])


def test_stored_slice_is_correct_or_raises():
    """For all slices of a small extent: a returned slice is correct, the others are not a range when stored."""
    placement = Placement("t", (2 * 3, 2), (0, 0, 0, 0), (2, 3, 1, 2))
    numbers = np.arange(12).reshape(6, 2)
    ranges = [list(itertools.combinations(range(size + 1), 2)) for size in placement.extent]
    correct = refused = 0
    for part in itertools.product(*ranges):
        wanted = numbers.reshape(placement.extent)[to_numpy_slices(part)]
        try:
            found = numbers[to_numpy_slices(find_stored_slice(placement, part))]
        except AssertionError:
            rows = np.unique(wanted // 2)
            assert len(rows) <= rows[-1] - rows[0]  # with a gap
            refused += 1
        else:
            np.testing.assert_array_equal(found.reshape(slice_shape(part)), wanted)
            correct += 1
    assert correct and refused
