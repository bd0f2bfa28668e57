"""Random splits: an exact share of the nodes each, drawn in bounded memory.

Every node has a random number, keyed by seed and node; those with the smallest numbers are the training nodes, the next ones
the validation nodes. The numbers that separate them are found by counting (one pass) and sorting few of them (another).
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import SPLIT_CODES

Masks = Callable[[], Iterator[NDArray[np.bool_]]]
"""which nodes are drawn from: bool[n] of consecutive nodes, any number of times"""
_BINS = 16
"""leading bits by which numbers are counted"""


def random_bits(seed: int, shares: tuple[float, float, float], eligible: Masks) -> Iterator[NDArray[np.uint8]]:
    """Yield uint8 blocks of all nodes in order, with the bit `1 << code` of their split.

    Args:
        seed: Another seed gives other splits; the result depends on nothing else but the nodes that are eligible.
        shares: Of train, val and test; each split has its share of the eligible nodes, to the nearest whole number.
        eligible: Which nodes to draw from.

    >>> next(random_bits(0, (0.5, 0.25, 0.25), lambda: iter([np.ones(4, bool)]))).tolist()  # two, one and one nodes
    """
    counts = np.zeros(1 << _BINS, np.int64)
    for drawn in _numbers(seed, eligible):
        counts += np.bincount(_bin(drawn), minlength=len(counts))
    wanted = np.rint(np.cumsum(shares) * counts.sum()).astype(np.int64)
    ends = np.cumsum(counts)
    bins = np.searchsorted(ends, wanted)  # of the first number that is not of the split
    near = [drawn[np.isin(_bin(drawn), bins)] for drawn in _numbers(seed, eligible)]
    sorted_near = np.sort(np.concatenate(near)) if near else np.empty(0, np.uint64)
    limits = [
        _limit(sorted_near, int(b), int(count - (ends[b - 1] if b else 0))) for b, count in zip(bins, wanted, strict=True)
    ]
    first = 0
    for mask in eligible():
        number = _number(seed, first, len(mask))
        bits = np.zeros(len(mask), np.uint8)
        before = np.zeros(len(mask), bool)
        for code, limit in zip(SPLIT_CODES.values(), limits, strict=True):
            inside = mask if limit is None else mask & (number < limit)
            bits[inside & ~before] = 1 << code
            before = inside
        first += len(mask)
        yield bits


def _limit(near: NDArray[np.uint64], number_bin: int, rank: int) -> np.uint64 | None:
    """The number of that rank within a bin, or else where the next bin begins: the first that is not of the split; None if all
    numbers are less."""
    own = near[_bin(near) == number_bin]
    if rank < len(own):
        return np.uint64(own[rank])
    return None if number_bin + 1 >= 1 << _BINS else np.uint64((number_bin + 1) << (64 - _BINS))


def _bin(number: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (number >> np.uint64(64 - _BINS)).astype(np.int64)


def _numbers(seed: int, eligible: Masks) -> Iterator[NDArray[np.uint64]]:
    first = 0
    for mask in eligible():
        yield _number(seed, first, len(mask))[mask]
        first += len(mask)


def _number(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Numbers of consecutive nodes: SplitMix64 (Steele, Lea and Flood, 2014), so no two are equal."""
    start = (seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64
    x = np.uint64(start) + (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
