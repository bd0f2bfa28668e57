"""The pages that contain given rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096


def pages_of(row: NDArray[Any], row_bytes: int) -> NDArray[np.int64]:
    """Distinct pages, int64[p] ascending, of rows (int[n], ascending) of `row_bytes`.

    >>> pages_of(np.array([0, 7, 8]), 512)
    array([0, 1])
    """
    if len(row) == 0:
        return np.empty(0, np.int64)
    begin = row.astype(np.int64) * row_bytes
    first, last = begin // PAGE_BYTES, (begin + row_bytes - 1) // PAGE_BYTES
    base = int(first[0])
    touched = np.zeros(int(last[-1]) + 1 - base, bool)
    for k in range(int((last - first).max()) + 1):
        touched[np.minimum(first + k, last) - base] = True
    return np.flatnonzero(touched) + base
