"""LightGCN's propagation over a whole graph (He et al., 2020): the mean of a table's rows and what they become in each layer.

It has no parameters and is linear, so its columns do not depend on each other: a graph whose rows do not fit the memory is
propagated some columns at a time, each in one pass over the edges a layer, with the same bits. Over edges that go both ways it
is symmetric, so its backward pass is the propagation of the gradient.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.graph.bag_sum import bag_sum
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.io.atomic import disk_errors
from ooc.stores.jit import kernel

Pieces = Callable[[], Iterator[tuple[Ids, Ids]]]
"""() -> the two ends of links, int64[k] each, piece by piece, the same ones each time"""
_ENTRIES_AT_ONCE = 2**22
"""neighbors whose rows are added up at a time"""
_CACHED_BYTES = 2**20
"""of the sums of nodes that are worked on at a time"""


class SymmetricAdjacency:
    """The neighbors of every node along links in both directions, and their weights 1 / sqrt(degree * degree of the neighbor).

    Args:
        indptr: Where each node's neighbors begin, int64[N + 1].
        neighbor: int32 or int64[2 * links]; may be a memory map.

    >>> adjacency = SymmetricAdjacency.of(lambda: iter([(users, num_users + items)]), num_users + num_items)
    >>> propagate(adjacency, table, layers=3).shape
    torch.Size([70839, 64])
    """

    def __init__(self, indptr: Ids, neighbor: AnyArray) -> None:
        self.indptr, self.neighbor, self.num_nodes = indptr, neighbor, len(indptr) - 1
        degree = np.diff(indptr)
        weight = np.zeros(self.num_nodes, np.float32)
        np.divide(1, np.sqrt(degree, dtype=np.float32), where=degree > 0, out=weight)
        self.weight = torch.from_numpy(weight).unsqueeze(1)
        """float32[N, 1]: 1 / sqrt(degree), 0 of nodes without neighbors"""

    @classmethod
    def of(cls, pieces: Pieces, num_nodes: int, room: int = 2**30, path: Path | None = None) -> Self:
        """Put links in order of their ends, in as many passes over them as `room` asks for.

        Args:
            pieces: The links.
            num_nodes: Ids are below.
            room: Bytes for the neighbors that are put in order at a time.
            path: A file for all of them where they take more; None: they are in memory.

        Raises:
            StoreError: The disk is full.
        """
        indptr = np.zeros(num_nodes + 1, np.int64)
        for ends in pieces():
            for end in ends:
                np.add.at(indptr, end + 1, 1)
        np.cumsum(indptr, out=indptr)
        dtype = np.dtype(np.int32 if num_nodes <= 2**31 else np.int64)
        if path is None or int(indptr[-1]) * dtype.itemsize <= room:
            out = np.empty(int(indptr[-1]), dtype)
            _fill(pieces, indptr, 0, num_nodes, out)
            return cls(indptr, out)
        with disk_errors(path), path.open("wb") as file:
            for first, stop in _ranges(indptr, max(1, room // dtype.itemsize)):
                out = np.empty(int(indptr[stop] - indptr[first]), dtype)
                _fill(pieces, indptr, first, stop, out)
                file.write(out.data)
        return cls.open(indptr, path)

    @classmethod
    def open(cls, indptr: Ids, path: Path) -> Self:
        """The neighbors that `of` has written to `path`."""
        return cls(indptr, np.memmap(path, np.int32 if len(indptr) - 1 <= 2**31 else np.int64, "r"))

    def scaled(self, rows: Tensor) -> Tensor:
        """Return the rows times their nodes' 1 / sqrt(degree), which are what neighbors add up. float32[N, c], as it gets."""
        return rows * self.weight

    def add_layer(self, scaled: Tensor, total: Tensor, following: Tensor) -> None:
        """Add each node's weighted sum of its neighbors' rows to `total`, and write it, scaled, to `following`.

        Each number is one sum in the order of the neighbors, so columns may be given some at a time. A range of nodes is done
        with while its sums are in the processor's cache: an array of all sums would cost a third of the time (measured).

        Args:
            scaled: The neighbors' rows, as `scaled` returns them, float32[N, c].
            total: Is added to, float32[N, c].
            following: Is written, float32[N, c]: the next layer's `scaled`.
        """
        most = max(1, _CACHED_BYTES // (4 * max(1, scaled.shape[1])))
        for first, stop in _ranges(self.indptr, _ENTRIES_AT_ONCE, most):
            begin, end = int(self.indptr[first]), int(self.indptr[stop])
            piece = self.neighbor[begin:end]
            neighbor = torch.from_numpy(np.array(piece) if isinstance(piece, np.memmap) else piece)
            place = torch.from_numpy((self.indptr[first : stop + 1] - begin).astype(self.neighbor.dtype, copy=False))
            sums, weight = bag_sum(neighbor, scaled, place, None), self.weight[first:stop]
            total[first:stop] += sums.mul_(weight)
            torch.mul(sums, weight, out=following[first:stop])


def propagate(adjacency: SymmetricAdjacency, rows: Tensor, layers: int) -> Tensor:
    """The mean of the rows and of those of each layer: float32[N, c] gives float32[N, c]; not recorded for autograd.

    >>> propagate(adjacency, torch.eye(70839), layers=2)  # the matrix of propagation
    """
    with torch.no_grad():
        total, scaled = rows.clone(), adjacency.scaled(rows)
        following = torch.empty_like(scaled)
        for _ in range(layers):
            adjacency.add_layer(scaled, total, following)
            scaled, following = following, scaled
        return total.div_(layers + 1)


class Propagate(torch.autograd.Function):
    """`propagate` with its gradient, which is the propagation of the gradient.

    >>> Propagate.apply(table, adjacency, 3)[users]
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, adjacency: SymmetricAdjacency, layers: int) -> Tensor:
        ctx.adjacency, ctx.layers = adjacency, layers
        return propagate(adjacency, rows, layers)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        return propagate(ctx.adjacency, gradient[0].contiguous(), ctx.layers), None, None


def _ranges(indptr: Ids, most: int, nodes: int = 2**62) -> Iterator[tuple[int, int]]:
    """Ranges of at most so many nodes, which have at most `most` neighbors together, or of one node."""
    first, count = 0, len(indptr) - 1
    while first < count:
        stop = max(first + 1, int(np.searchsorted(indptr, indptr[first] + most, side="right")) - 1)
        stop = min(stop, first + nodes)
        yield first, stop
        first = stop


def _fill(pieces: Pieces, indptr: Ids, first: int, stop: int, out: AnyArray) -> None:
    """The neighbors of nodes first..stop-1."""
    at = indptr[first:stop] - indptr[first]
    for one, other in pieces():
        _place(other, one, first, stop, at, out)
        _place(one, other, first, stop, at, out)


@kernel
def _place(node: Ids, neighbor: Ids, first: int, stop: int, at: Ids, out: NDArray[Any]) -> None:
    """Put each neighbor of nodes first..stop-1 where that node has come to."""
    for i in range(len(node)):
        own = node[i] - first
        if 0 <= own < stop - first:
            out[at[own]] = neighbor[i]
            at[own] += 1
