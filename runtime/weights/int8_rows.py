"""Quantization of weights to int8: a float32 scale for each row, symmetric, rounded half to even.

A row is an output channel. Its scale is the largest magnitude over 127, so a row's integers depend on the row alone.
"""

import numpy as np

LARGEST = np.float32(127)
# A smaller scale would be subnormal, which devices may flush to zero: such a row becomes zeros.
SMALLEST_SCALE = np.finfo(np.float32).tiny


def find_scales(rows: np.ndarray) -> np.ndarray:
    """Returns the scale of each row: finite float32 [n, in] → float32 [n]. The scale of a row of zeros is 0."""
    scales = np.abs(rows).max(axis=1) / LARGEST
    return np.where(scales < SMALLEST_SCALE, np.float32(0), scales)


def quantize_rows(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the integers nearest to rows over scales, ties to even: float32 [n, m], float32 [n] → int8 [n, m].

    `rows` may be a part of the columns, and is overwritten. A row whose scale is 0 becomes zeros.
    """
    np.divide(rows, np.where(scales > 0, scales, np.float32(np.inf))[:, None], out=rows)
    return np.rint(rows, out=rows).astype(np.int8)
