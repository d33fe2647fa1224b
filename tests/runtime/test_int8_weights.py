"""Int8 quantization of rows: rounding, zeros, and numbers at the ends of float32."""

import ml_dtypes
import numpy as np
import pytest

from dflash_aot.runtime.weights.quantized_tensors import find_scales, quantize_rows
from dflash_aot.runtime.weights.safetensors_reader import find_magnitudes


def quantize(*rows: list[float]) -> tuple[list[list[int]], list[float]]:
    values = np.array(rows, np.float32)
    scales = find_scales(find_magnitudes(values))
    return quantize_rows(values, scales).tolist(), scales.tolist()


def test_largest_magnitude_becomes_127_and_ties_round_to_even():
    integers, scales = quantize([254.0, 1.0, 3.0, -1.0, -5.0], [-63.5, 0.25, 0.75, 1.25, 0.0])
    assert integers == [[127, 0, 2, 0, -2], [-127, 0, 2, 2, 0]]
    assert scales == [2.0, 0.5]


def test_row_whose_scale_would_be_subnormal_becomes_zeros():
    for largest in (0.0, 1e-45, 1e-38, 1.4e-36):
        assert quantize([largest, -largest / 2]) == ([[0, 0]], [0.0])


def test_smallest_and_largest_numbers_stay_in_range():
    largest = float(np.finfo(np.float32).max)
    integers, scales = quantize([1.5e-36, -1.5e-36], [largest, -largest])
    assert integers == [[127, -127], [127, -127]]
    assert np.isfinite(scales).all() and min(scales) > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_largest_magnitude_of_a_row_is_exact(dtype):
    rows = np.array([[-3.5, 2, 0], [-0.0, 0, 1e-7], [1, -np.inf, 2], [np.nan, 1, np.inf], [0, 0, 0]]).astype(dtype)
    found = find_magnitudes(rows)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([3.5, dtype(1e-7), np.inf, np.nan, 0], np.float32))
