"""Which numbers of a matrix are dropped, as kernels: a 32-bit hash of an element's position (lowbias32, Wellons, 2018) under a
key; see `ooc.models.dropout`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.stores.jit import kernel

LEVELS = 1 << 32
"""probabilities are rounded to multiples of 1 / LEVELS; the scale uses the rounded value"""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW, _LOW64, _S32 = LEVELS - 1, np.uint64(LEVELS - 1), np.uint64(32)
_STEP, _MIX_1, _MIX_2 = np.uint32(0x9E3779B9), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S15, _S16 = np.uint32(15), np.uint32(16)


@kernel
def number(at: np.uint32, one: np.uint32, other: np.uint32) -> np.uint32:
    """The 32-bit hash of a position under the key (one, other). numba widens sums: each step is cast, to stay 32 bits."""
    h = np.uint32(at * _STEP + one)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> _S16)) * _MIX_1)
    h = np.uint32(np.uint32(np.uint32(h ^ np.uint32(h >> _S15)) ^ other) * _MIX_2)
    return np.uint32(h ^ np.uint32(h >> _S16))


@kernel
def run_of(key: np.uint64, begin: int, end: int) -> tuple[int, np.uint32, np.uint32, np.uint32]:
    """Where the run of positions from `begin` on with the same high 32 bits ends, at most at `end`; its first position's 32 low
    bits, and its key for `number`, of which the high bits are part."""
    low = begin & _LOW
    own = mix64(key ^ np.uint64(begin >> 32) * _GOLDEN)
    return min(end, begin + LEVELS - low), np.uint32(low), np.uint32(own & _LOW64), np.uint32(own >> _S32)


@kernel
def drop(key: np.uint64, begin: int, dropped: int, scale: np.float32, x: NDArray[Any], out: NDArray[Any]) -> None:
    """Zero each element with probability dropped / LEVELS, else scale it; x[i] takes number begin + i of the key's stream."""
    done, least = 0, np.uint32(dropped)
    while done < len(x):
        stop, first, one, other = run_of(key, begin + done, begin + len(x))
        given, result = x[done : stop - begin], out[done : stop - begin]
        for i in range(len(given)):
            kept = number(np.uint32(first + np.uint32(i)), one, other) >= least
            result[i] = given[i] * scale if kept else x.dtype.type(0)
        done = stop - begin


@kernel
def drop_positive(
    key: np.uint64, begin: int, dropped: int, scale: np.float32, x: NDArray[np.float32], cut: NDArray[np.bool_]
) -> None:
    """ReLU and `drop` in place, in one pass; sets `cut` where an element is neither positive (or NaN) and kept."""
    done, least = 0, np.uint32(dropped)
    while done < len(x):
        stop, first, one, other = run_of(key, begin + done, begin + len(x))
        own, gone = x[done : stop - begin], cut[done : stop - begin]
        for i in range(len(own)):
            zero = (number(np.uint32(first + np.uint32(i)), one, other) < least) | (own[i] <= 0)
            gone[i] = zero
            own[i] = np.float32(0) if zero else own[i] * scale
        done = stop - begin


@kernel
def drop_rows(
    key: np.uint64, dropped: int, scale: np.float32, row: NDArray[np.int64], x: NDArray[Any], out: NDArray[Any]
) -> None:
    """Apply `drop` to rows row[i] (int64[n]) of a matrix; x and out ([n, f]) hold those rows."""
    width, least, run, one, other = x.shape[1], np.uint32(dropped), -1, np.uint32(0), np.uint32(0)
    for i in range(len(row)):
        begin = row[i] * width
        low = begin & _LOW
        if low + width > LEVELS:
            drop(key, begin, dropped, scale, x[i], out[i])
            continue
        if begin >> 32 != run:
            run = begin >> 32
            _, _, one, other = run_of(key, begin, begin + 1)
        first = np.uint32(low)
        for j in range(width):  # without slices of rows, whose references are counted
            kept = number(np.uint32(first + np.uint32(j)), one, other) >= least
            out[i, j] = x[i, j] * scale if kept else x.dtype.type(0)


@kernel
def drop_positive_rows(
    key: np.uint64, dropped: int, scale: np.float32, row: NDArray[np.int64], x: NDArray[np.float32], cut: NDArray[np.bool_]
) -> None:
    """Apply `drop_positive` to rows row[i] (int64[n]) of a matrix; x and cut ([n, f]) hold those rows."""
    width, least, run, one, other = x.shape[1], np.uint32(dropped), -1, np.uint32(0), np.uint32(0)
    for i in range(len(row)):
        begin = row[i] * width
        low = begin & _LOW
        if low + width > LEVELS:
            drop_positive(key, begin, dropped, scale, x[i], cut[i])
            continue
        if begin >> 32 != run:
            run = begin >> 32
            _, _, one, other = run_of(key, begin, begin + 1)
        first = np.uint32(low)
        for j in range(width):
            zero = (number(np.uint32(first + np.uint32(j)), one, other) < least) | (x[i, j] <= 0)
            cut[i, j] = zero
            x[i, j] = np.float32(0) if zero else x[i, j] * scale


def scale_of(dropped: int) -> np.float32:
    """What elements that are kept are multiplied by, where dropped / LEVELS of them are not."""
    return np.float32(LEVELS / (LEVELS - dropped))
