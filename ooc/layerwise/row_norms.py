"""Norms of rows: what of them counts where rows are compared."""

import numpy as np

from ooc.stores.arrays.rows import AnyArray


def with_norms_to(rows: AnyArray, power: float) -> AnyArray:
    """Rows of the same directions, whose norms are raised to a power.

    Dot products of such rows are `cos(u, v) * (|u| * |v|)**power`: 1 leaves them what they are, 0 makes them cosines.

    Args:
        rows: float32[n, width].
        power: From 0 to 1.

    Returns:
        float32[n, width]; of rows of zeros zeros.

    >>> with_norms_to(np.array([[3.0, 4.0]], np.float32), 0)
    array([[0.6, 0.8]], dtype=float32)
    """
    if power == 1:
        return rows
    norm = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    return np.asarray(rows / np.where(norm > 0, norm, 1)[:, None] ** (1 - power), np.float32)
