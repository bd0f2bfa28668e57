"""Copies rows from a piece of an extent to their destination, the only copy that every engine makes.

Uses `memcpy`, because numba's byte loops over arrays stay below 1 GB/s; adjacent ranges are copied in one call.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ooc.stores.jit import kernel

Ints = NDArray[np.int64]

_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


class Ranges(NamedTuple):
    """Which bytes of the concatenated extents go where; int64 arrays.

    The ranges order[first[j]:first[j + 1]] of extent j are ascending. Range i has size[i] (or size[0]) bytes at source[i] of
    the concatenated extents, in which extent j begins at extent_at[j], and goes to byte destination[i] of the output at the
    address `out`, which outlives the request.
    """

    extent_at: Ints
    source: Ints
    order: Ints
    first: Ints
    destination: Ints
    size: Ints
    out: int


@kernel
def _end(ranges: Ranges, p: int) -> int:
    i = ranges.order[p]
    return ranges.source[i] + (ranges.size[i] if len(ranges.size) > 1 else ranges.size[0])


@kernel
def first_reaching(ranges: Ranges, extent: int, p: int, skipped: int) -> int:
    """First of the extent's ranges from number p on that extends beyond its first `skipped` bytes."""
    p, low = max(p, ranges.first[extent]), ranges.extent_at[extent] + skipped
    while p < ranges.first[extent + 1] and _end(ranges, p) <= low:
        p += 1
    return p


@kernel
def deliver(ranges: Ranges, extent: int, p: int, skipped: int, nbytes: int, piece: int) -> None:
    """Copy the parts of the extent's ranges from number p on that lie in a piece of it, `nbytes` at the address `piece`.

    `skipped` is the number of the extent's bytes before the piece.
    """
    low = ranges.extent_at[extent] + skipped
    high = low + nbytes
    run = run_from = run_to = 0  # bytes adjacent on both sides, not yet copied
    for q in range(p, ranges.first[extent + 1]):
        i = ranges.order[q]
        begin = ranges.source[i]
        if begin >= high:
            break
        start = max(begin, low)
        size = min(_end(ranges, q), high) - start
        target = ranges.destination[i] + start - begin
        if run > 0 and start - low == run_from + run and target == run_to + run:
            run += size
            continue
        if run > 0:
            _memcpy(ranges.out + run_to, piece + run_from, run)
        run, run_from, run_to = size, start - low, target
    if run > 0:
        _memcpy(ranges.out + run_to, piece + run_from, run)
