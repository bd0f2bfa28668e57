"""PURE: random nodes of some buckets of a table, which links share as negatives."""

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.stores.jit import kernel

Ints = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def drawn_nodes(key: int, count: int, buckets: Ints, num_buckets: int, nodes: range) -> Ints:
    """Return nodes drawn uniformly, with repetition, among those of some buckets; node v is of bucket v % num_buckets.

    Args:
        key: Of the draw.
        count: How many.
        buckets: int64[c], each once.
        num_buckets: Of all nodes.
        nodes: Those that may be drawn; if the buckets have none of them, there is nothing to draw.

    Returns:
        int64[count], or empty.

    >>> drawn_nodes(7, 3, np.array([0, 2]), 4, range(8))
    array([6, 2, 4])
    """
    first = nodes.start + (buckets - nodes.start) % num_buckets
    sizes = np.maximum(0, -(-(nodes.stop - first) // num_buckets))
    ends = np.cumsum(sizes)
    out = np.empty(count if len(ends) and ends[-1] else 0, np.int64)
    _draw(np.uint64(key), first, ends, num_buckets, out)
    return out


@kernel
def _draw(key: np.uint64, first: Ints, ends: Ints, num_buckets: int, out: Ints) -> None:
    total = ends[-1]
    for i in range(len(out)):
        number = np.int64((mix64(key + np.uint64(i) * _GOLDEN) >> np.uint64(1)) % np.uint64(total))
        k = 0
        while ends[k] <= number:
            k += 1
        out[i] = first[k] + num_buckets * (number - (ends[k - 1] if k else 0))
