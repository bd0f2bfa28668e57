"""Rows of numbers as int8 with a scale a row, which stands behind them: a stored row is whole by itself, wherever it goes.

A number is the nearest multiple of the row's scale, its largest magnitude / 127 (symmetric quantization, Jacob et al., 2018),
so it is off by 1/254 of that at most. Rounding is to the nearest and not at random: a row is rounded once and pulled many
times, and equal rows are equal bytes. A row of zero bytes, which was never written, is zeros.
"""

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray
from ooc.stores.jit import kernel

SCALE_BYTES = 4
"""of a stored row, behind its numbers"""


@kernel
def _encode(rows: NDArray[np.float32], out: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
    """Fill `out` ([n, w]) and `scale` (float32[n]); a scale is infinite or not a number where a number is."""
    for i in range(len(rows)):
        row, most, all_finite = rows[i], np.float32(0), True
        for j in range(len(row)):
            most = max(most, abs(row[j]))
            all_finite &= np.isfinite(row[j])
        step = np.float32(most / np.float32(127)) if all_finite else np.float32(np.nan)
        scale[i] = step
        for j in range(len(row)):
            out[i, j] = np.int8(np.rint(row[j] / step)) if all_finite and step > 0 else np.int8(0)


@kernel
def _decode(stored: NDArray[np.int8], scale: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(len(stored)):
        for j in range(out.shape[1]):
            out[i, j] = np.float32(stored[i, j]) * scale[i]


def as_int8(rows: AnyArray) -> NDArray[np.int8] | None:
    """Return rows [n, width] as stored, int8[n, width + 4]; None where a number is not finite.

    >>> numbers_of(as_int8(np.array([[0.5, -1.0, 0.0]])))
    array([[ 0.503937, -1.      ,  0.      ]], dtype=float32)
    """
    values = np.ascontiguousarray(rows, np.float32)
    count, width = values.shape
    stored, scale = np.empty((count, width + SCALE_BYTES), np.int8), np.empty(count, np.float32)
    _encode(values, stored[:, :width], scale)
    if not np.isfinite(scale).all():
        return None
    stored[:, width:] = scale.view(np.int8).reshape(count, SCALE_BYTES)
    return stored


def numbers_of(stored: AnyArray) -> AnyArray:
    """Return rows as they are computed with: float32[n, width] of what `as_int8` made, others unchanged."""
    if stored.dtype != np.int8:
        return stored
    count, width = len(stored), stored.shape[1] - SCALE_BYTES
    scale = np.ascontiguousarray(stored[:, width:]).view(np.float32).reshape(count)
    out = np.empty((count, width), np.float32)
    _decode(stored, scale, out)
    return out


def stored_bytes(width: int, dtype: str) -> int:
    """Bytes of a stored row of so many numbers, of a history of this dtype.

    >>> stored_bytes(256, "int8"), stored_bytes(256, "float16")
    (260, 512)
    """
    return width * np.dtype(dtype).itemsize + SCALE_BYTES * (dtype == "int8")
