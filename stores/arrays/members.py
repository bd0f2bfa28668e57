"""`Members`: a set of nodes as a bitmap addressed by position, an eighth of a byte per node."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel

_WORDS = 8  # 64-node words per index entry: 9/64 of a byte per node in total


class Members:
    """Ascending node ids that are looked up by position without storing them (rank/select, Jacobson 1989).

    A split of 100 million nodes takes 14 MB for a graph of 100 million nodes, instead of 800 MB as int64 ids.

    >>> odd = Members.of(np.array([False, True, False, True]))
    >>> len(odd), odd[np.array([1, 0])]
    (2, array([3, 1]))
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        """`words` is uint64[w], w a multiple of 8; bit b of word i is node 64 * i + b."""
        self._words = words
        counts = np.zeros(len(words) // _WORDS + 1, np.int64)
        np.cumsum(np.bitwise_count(words).reshape(-1, _WORDS).sum(axis=1, dtype=np.int64), out=counts[1:])
        self._before = counts  # members before each group of words, and in total

    @classmethod
    def of(cls, array: NDArray[np.generic], wanted: int | bool = True, block: int = 2**22) -> "Members":
        """Return the rows of `array` ([N], also a memory map) equal to `wanted`, processed in blocks (a multiple of 512)."""
        words = np.zeros(-(-len(array) // (64 * _WORDS)) * _WORDS, np.uint64)
        packed = words.view(np.uint8)
        for start in range(0, len(array), block):
            bits = np.packbits(array[start : start + block] == wanted, bitorder="little")
            packed[start // 8 : start // 8 + len(bits)] = bits
        return cls(words)

    @staticmethod
    def nbytes_for(num_nodes: int) -> int:
        """Bytes of a set of `num_nodes` possible nodes."""
        return num_nodes * 9 // 64

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the members at `position` (int64[b], any order). Raises IndexError outside 0..len-1."""
        if len(position) and (int(position.min()) < 0 or int(position.max()) >= len(self)):
            raise IndexError(f"position {int(position.max())} is out of range: there are {len(self)} members")
        node = np.empty(len(position), np.int64)
        _select(self._words, self._before, position, node)
        return node

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All members, int64[n], ascending."""
        return self[np.arange(len(self))].astype(np.int64 if dtype is None else dtype, copy=False)

    def contains(self, node: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `node` (int64[n], valid node ids) are members, bool[n].

        >>> Members.of(np.array([False, True])).contains(np.array([0, 1, 1]))
        array([False,  True,  True])
        """
        result = np.empty(len(node), np.bool_)
        _contains(self._words, node, result)
        return result


@kernel
def _contains(words: NDArray[np.uint64], node: NDArray[np.int64], out: NDArray[np.bool_]) -> None:
    """Set out[i] to whether node[i] is a member."""
    for i in range(len(node)):
        out[i] = (words[node[i] >> 6] >> np.uint64(node[i] & 63)) & np.uint64(1)


@kernel
def _select(words: NDArray[np.uint64], before: NDArray[np.int64], position: NDArray[np.int64], node: NDArray[np.int64]) -> None:
    """Set node[i] to set bit number position[i]; before[g] counts the set bits before group g of `_WORDS` words."""
    one = np.uint64(1)
    for i in range(len(position)):
        group = int(np.searchsorted(before, position[i], side="right")) - 1
        left = position[i] - before[group]
        for w in range(group * _WORDS, len(words)):
            word, bits = words[w], 0
            while word != 0 and bits <= left:
                word &= word - one  # drops the lowest set bit
                bits += 1
            if bits <= left:
                left -= bits
                continue
            word = words[w]
            for _ in range(left):
                word &= word - one
            low, at = word & (~word + one), 0
            while low > one:
                low >>= one
                at += 1
            node[i] = 64 * w + at
            break
