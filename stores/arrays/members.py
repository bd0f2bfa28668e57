"""`Members`: a set of nodes as a bitmap, addressed by position: an eighth of a byte a node, however many are in it."""

import numpy as np
from numpy.typing import NDArray

from stores.jit import kernel

_WORDS = 8  # of 64 nodes each, between two entries of the index: 9/64 of a byte a node in all


class Members:
    """Node ids in ascending order, of which any few are looked up without holding all (rank/select, Jacobson 1989).

    A split of 100 million nodes would be 800 MB as int64 ids; here it is 14 MB for 100 million nodes of the graph.

    >>> odd = Members.of(np.array([False, True, False, True]))
    >>> len(odd), odd[np.array([1, 0])]
    (2, array([3, 1]))
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        """words: uint64[w], bit b of word i is node 64 * i + b; w a multiple of 8."""
        self._words = words
        counts = np.zeros(len(words) // _WORDS + 1, np.int64)
        np.cumsum(np.bitwise_count(words).reshape(-1, _WORDS).sum(axis=1, dtype=np.int64), out=counts[1:])
        self._before = counts  # members before each group of words, and all of them

    @classmethod
    def of(cls, array: NDArray[np.generic], wanted: int | bool = True, block: int = 2**22) -> "Members":
        """The rows of `array` ([N], a memory map too) that equal `wanted`, looked at `block` rows at a time.

        block: a multiple of 512.
        """
        words = np.zeros(-(-len(array) // (64 * _WORDS)) * _WORDS, np.uint64)
        held = words.view(np.uint8)
        for start in range(0, len(array), block):
            bits = np.packbits(array[start : start + block] == wanted, bitorder="little")
            held[start // 8 : start // 8 + len(bits)] = bits
        return cls(words)

    @staticmethod
    def nbytes_for(num_nodes: int) -> int:
        """Bytes of memory a set of `num_nodes` possible nodes takes."""
        return num_nodes * 9 // 64

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[b]: the members at `position` (int64[b], any order). Raises IndexError outside 0..len-1."""
        if len(position) and (int(position.min()) < 0 or int(position.max()) >= len(self)):
            raise IndexError(f"position {int(position.max())} is out of range: there are {len(self)} members")
        node = np.empty(len(position), np.int64)
        _select(self._words, self._before, position, node)
        return node

    def contains(self, node: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[n]: which of `node` (int64[n], ids of the graph's nodes) are members.

        >>> Members.of(np.array([False, True])).contains(np.array([0, 1, 1]))
        array([False,  True,  True])
        """
        bit = (node & 63).astype(np.uint64)
        found: NDArray[np.bool_] = ((self._words[node >> 6] >> bit) & np.uint64(1)).astype(np.bool_)
        return found


@kernel
def _select(words: NDArray[np.uint64], before: NDArray[np.int64], position: NDArray[np.int64], node: NDArray[np.int64]) -> None:
    """node[i]: the set bit number position[i]; before[g]: the set bits of the words before group g of `_WORDS`."""
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
