"""Int8 weights: quantized while they are read, with a float32 scale for each row, symmetric, rounded half to even.

A row is an output channel. Its scale is the largest magnitude over 127, so a row's integers depend on the row alone. A
checkpoint that is quantized like this keeps its own integers and scales.
"""

import numpy as np

from dflash_aot.cache.bundle.weight_recipe import Placement, WeightRecipe
from dflash_aot.runtime.weights.quantized_tensors import QuantizedTensors
from dflash_aot.runtime.weights.safetensors_reader import CheckpointTensors
from dflash_aot.runtime.weights.tensor_slices import (
    TensorSlice,
    find_stored_slice,
    shift_slice,
    slice_shape,
    to_numpy_slices,
)

LARGEST = np.float32(127)
# A smaller scale would be subnormal, which devices may flush to zero: such a row becomes zeros.
SMALLEST_SCALE = np.finfo(np.float32).tiny


def find_scales(magnitudes: np.ndarray) -> np.ndarray:
    """Returns the scales of rows by their largest magnitudes: finite float32 [n] → float32 [n]. Zeros have scale 0."""
    scales = magnitudes / LARGEST
    return np.where(scales < SMALLEST_SCALE, np.float32(0), scales)


def quantize_rows(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the integers nearest to rows over scales, ties to even: float32 [n, m], float32 [n] → int8 [n, m].

    `rows` may be a part of the columns, and is overwritten. A row whose scale is 0 becomes zeros.
    """
    np.divide(rows, np.where(scales > 0, scales, np.float32(np.inf))[:, None], out=rows)
    return np.rint(rows, out=rows).astype(np.int8)


class Int8Weight:
    """The integers of a weight, read slice by slice, and the scales of all rows.

    Attributes:
        scales: float32 [*out]; those of rows that are not read yet are undefined.
    """

    def __init__(self, recipe: WeightRecipe, tensors: CheckpointTensors, scales: np.ndarray):
        """`recipe` is that of the integers, `scales` an array for their scales."""
        self._tensors, self.scales = tensors, scales
        # A scale belongs to a whole row: if devices split the rows, scales are found before any integer.
        self.splits_rows = any(recipe.sharding[-1:])

    def find_scales(self, placement: Placement, piece: TensorSlice) -> None:
        """Sets the scales of a piece of whole rows, in coordinates of the argument. Raises BadCheckpoint."""
        if not self._is_quantized(placement):
            self._set_scales(piece, find_scales(self._read_rows(placement, piece)[1]))

    def read(self, placement: Placement, piece: TensorSlice) -> np.ndarray:
        """Returns the integers of a piece of the argument, and sets the scales of its rows. Raises BadCheckpoint."""
        if self._is_quantized(placement):
            return self._read_quantized(placement, piece)
        rows, magnitudes = self._read_rows(placement, piece)
        if not self.splits_rows:
            self._set_scales(piece, find_scales(magnitudes))
        scales = self.scales[to_numpy_slices(piece[:-1])].reshape(-1)
        return quantize_rows(rows.astype(np.float32), scales).reshape(slice_shape(piece))

    def _is_quantized(self, placement: Placement) -> bool:
        return isinstance(self._tensors, QuantizedTensors) and self._tensors.reads_integers(placement.tensor)

    def _read_quantized(self, placement: Placement, piece: TensorSlice) -> np.ndarray:
        assert isinstance(self._tensors, QuantizedTensors)
        stored = find_stored_slice(placement, shift_slice(piece, placement.offset))
        self._set_scales(piece, self._tensors.read_scales(placement.tensor, placement.stored, stored[0]))
        integers = self._tensors.read_integers(placement.tensor, placement.stored, stored)
        return integers.reshape(slice_shape(piece))

    def _read_rows(self, placement: Placement, piece: TensorSlice) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of a piece as floats [n, m], and their largest magnitudes [n]."""
        stored = find_stored_slice(placement, shift_slice(piece, placement.offset))
        return self._tensors.read_rows(placement.tensor, placement.stored, stored)

    def _set_scales(self, piece: TensorSlice, scales: np.ndarray) -> None:
        rows = piece[:-1]
        self.scales[to_numpy_slices(rows)] = scales.reshape(slice_shape(rows))
