"""Edges held out of the messages; and a random split of edges that is stored nowhere: the part of an edge is a function of the
seed and of its two ends."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.hetero import EdgeKey
from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling.kernels import stream_of, uniform
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import ConfigError
from ooc.stores.jit import kernel

PARTS = ("train", "val", "test")


_NO_WORDS = np.empty(0, np.uint64)


class HeldOut(NamedTuple):
    """Edges that carry no messages: those of which `pair_number(key, source, destination)` is below `share`; or, with `words`,
    those whose slots are bits of these, of which there are about a `share`."""

    key: np.uint64
    share: float
    words: NDArray[np.uint64] = _NO_WORDS
    """bit b of word i is slot 64 * i + b; empty for `key`"""


@dataclass(frozen=True)
class EdgeSplit:
    """Edges divided at random into training, validation and test.

    An edge, its reverse and other edges between the same two nodes are in the same part. Nothing is stored.

    Args:
        val, test: Shares of the edges, 0 or more, together below 1.
        seed: Which split.

    Raises:
        ConfigError: The shares are no such numbers, or the seed is no whole number.

    >>> split = EdgeSplit(val=0.1, test=0.2, seed=0)
    >>> loader = LinkNeighborLoader(ds, [10, 10], "train", edge_split=split, neg_sampling="binary", batch_size=1024)
    """

    val: float = 0.1
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = isinstance(self.val, Real) and isinstance(self.test, Real)
        if not (numbers and self.val >= 0 and self.test >= 0 and self.val + self.test < 1):
            raise ConfigError(f"val and test must be 0 or more and together below 1, not {self.val!r} and {self.test!r}")
        if not isinstance(self.seed, Integral):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}")

    @property
    def held_out(self) -> HeldOut:
        """The edges of validation and test."""
        return HeldOut(np.uint64(key(self.seed, Purpose.SPLIT)), self.val + self.test)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts."""
        return PARTS

    def held_out_of(self, edge_types: Iterable[EdgeKey]) -> Mapping[EdgeKey, HeldOut]:
        """Those edges by edge type: an edge type and its reverses."""
        return dict.fromkeys(edge_types, self.held_out)

    def parts(self, src: Ids, dst: Ids) -> NDArray[np.int8]:
        """The part of each edge (int64[k] ends), as its position in ("train", "val", "test"): int8[k]."""
        part = np.empty(len(src), np.int8)
        _parts(self.held_out.key, src, dst, self.val, self.val + self.test, part)
        return part

    def members(self, name: str, edges: Iterator[tuple[Ids, Ids]], count: int) -> Members:
        """The slots of the part `name`, of `count` in all: an eighth of a byte each.

        edges: The ends of all slots in order, piece by piece, in multiples of 8 but for the last.
        """
        words, at, number = np.zeros(-(-count // 512) * 8, np.uint64), 0, PARTS.index(name)
        for src, dst in edges:
            bits = np.packbits(self.parts(src, dst) == number, bitorder="little")
            words.view(np.uint8)[at : at + len(bits)] = bits
            at += len(bits)
        return Members(words)


@kernel
def pair_number(key: np.uint64, a: int, b: int) -> float:
    """A number in [0, 1) of two nodes in either order."""
    return uniform(stream_of(stream_of(key, min(a, b)), max(a, b)), 0)


@kernel
def is_held_out(key: np.uint64, share: float, words: NDArray[np.uint64], slot: int, source: int, node: int) -> bool:
    """Whether the edge of a slot is held out; see `HeldOut`."""
    if share == 0:
        return False
    if len(words) > 0:
        return (words[slot >> 6] >> np.uint64(slot & 63)) & np.uint64(1) != 0
    return pair_number(key, source, node) < share


@kernel
def _parts(key: np.uint64, src: Ids, dst: Ids, val: float, held_out: float, part: NDArray[np.int8]) -> None:
    for i in range(len(src)):
        number = pair_number(key, src[i], dst[i])
        part[i] = 1 if number < val else (2 if number < held_out else 0)
