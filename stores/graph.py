"""`Graph`: the topology as compressed sparse columns (CSC), in memory maps or in RAM.

The in-edges of node v are slots `indptr[v]:indptr[v+1]`; a slot number addresses source node, weight, time and edge id. Offsets
are int64, so graphs of more than 2**31 edges need nothing special.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.io.segments import forget, warm

Ints = NDArray[np.int64]
MAP_SLOTS = 2**14
"""slots of a part: a page fault also maps the cached pages around it (the kernel's fault-around, 64 KiB, as many int32)"""


def index_dtype(num_nodes: int) -> np.dtype[Any]:
    """Return the dtype of `indices`: int32 if every node id fits, else int64.

    >>> index_dtype(2**31 - 1), index_dtype(2**31)
    (dtype('int32'), dtype('int64'))
    """
    return np.dtype(np.int32 if num_nodes < 2**31 else np.int64)


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph by destination. The arrays may be read-only memory maps; they are never written to.

    >>> graph = Graph.from_edges([1, 2, 0], [0, 0, 2], num_nodes=3)
    >>> graph.slots(0), graph.degree(np.array([0, 1, 2]))
    ((0, 2), array([2, 0, 1]))
    """

    indptr: Ints
    """int64[N+1]: the in-edges of node v are slots indptr[v]:indptr[v+1]"""
    indices: NDArray[Any]
    """int32|int64[E]: source node of each slot"""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """one entry per slot: `edge_id` int64[E] (position in the input), `weight` float32[E], ..."""
    self_loops: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[k], sorted: the destination of every self-loop"""
    weight_sum: NDArray[np.float32] | None = None
    """float32[N]: sum of each node's in-weights without self-loops; None for an unweighted graph"""
    loop_weight: NDArray[np.float32] | None = None
    """float32[k]: weight of each edge of `self_loops`, in slot order per node; None for an unweighted graph"""
    parts: Ints | None = None
    """int64[P+1], ascending from 0 to N: part p is nodes parts[p]..parts[p+1]-1, with most edges inside; None without parts"""
    sources: int | None = None
    """number of sources of a bipartite graph, which are nodes of another type; None if sources and destinations are the same
    nodes"""

    @classmethod
    def from_arrays(
        cls,
        indptr: Any,
        indices: Any,
        columns: Mapping[str, Any] | None = None,
        parts: Any = None,
        num_sources: int | None = None,
    ) -> "Graph":
        """Build a graph in memory from CSC arrays; self-loops and weight sums are derived (`columns["weight"]`).

        `indptr` is [N+1], `indices` [E], `columns` name -> [E], `parts` [P+1] or None; `num_sources` is given for a bipartite
        graph. Raises InputError if shapes or ids do not fit.
        """
        indptr = np.ascontiguousarray(indptr, dtype=np.int64)
        indices = np.ascontiguousarray(indices)
        arrays = {name: np.ascontiguousarray(column) for name, column in (columns or {}).items()}
        num_nodes = len(indptr) - 1
        _check(indptr, indices, arrays, num_nodes if num_sources is None else num_sources)
        indices = indices.astype(index_dtype(num_nodes if num_sources is None else num_sources), copy=False)
        target = np.repeat(np.arange(num_nodes), np.diff(indptr))
        loop = (target == indices) & (num_sources is None)
        total = loop_weight = None
        if "weight" in arrays:
            arrays["weight"] = arrays["weight"].astype(np.float32, copy=False)
            total = np.bincount(target[~loop], arrays["weight"][~loop], minlength=num_nodes).astype(np.float32)
            loop_weight = arrays["weight"][loop]
        if parts is not None:
            parts = check_parts(np.ascontiguousarray(parts, np.int64), num_nodes)
        return cls(indptr, indices, arrays, target[loop], total, loop_weight, parts, num_sources)

    @classmethod
    def from_edges(
        cls, src: Any, dst: Any, num_nodes: int, *, num_sources: int | None = None, parts: Any = None, **columns: Any
    ) -> "Graph":
        """Build a graph in memory from edges in input order; adds the column `edge_id`.

        Args:
            src: Sources, int[E].
            dst: Destinations, int[E].
            num_nodes: Number of nodes, of a bipartite graph that of destinations.
            num_sources: Number of sources of a bipartite graph; None if sources and destinations are the same nodes.
            parts: [P+1] or None.
            **columns: An entry for each edge, [E]: `weight`, `time`, ...

        Returns:
            The graph. Slots are in canonical order (destination, time, edge id).

        Raises:
            InputError: If sizes or nodes do not fit.

        >>> graph = Graph.from_edges([0, 5], [1, 1], num_nodes=2, num_sources=6)
        >>> graph.num_sources, graph.indices
        (6, array([0, 5], dtype=int32))
        """
        src, dst = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        if len(src) != len(dst) or (len(dst) and not 0 <= dst.min() <= dst.max() < num_nodes):
            raise InputError(f"edges need as many sources as destinations, all in 0..{num_nodes - 1}")
        order = np.lexsort((np.asarray(columns["time"]), dst)) if "time" in columns else np.argsort(dst, kind="stable")
        indptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(dst, minlength=num_nodes), out=indptr[1:])
        sorted_columns = {name: np.asarray(column)[order] for name, column in columns.items()}
        return cls.from_arrays(indptr, src[order], {"edge_id": order, **sorted_columns}, parts, num_sources)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, of a bipartite graph that of destinations."""
        return len(self.indptr) - 1

    @property
    def num_sources(self) -> int:
        """Number of nodes that `indices` are of: of the source type in a bipartite graph, else `num_nodes`."""
        return self.num_nodes if self.sources is None else self.sources

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def topology_bytes(self) -> int:
        """Bytes of all arrays of the graph, mapped or in RAM."""
        return sum(array.nbytes for array in self._arrays())

    def sampled_bytes(self, weight: str | None = None) -> int:
        """Bytes that sampling reads besides `indptr`: `indices`, and the weight column."""
        return self.indices.nbytes + (0 if weight is None else self.columns[weight].nbytes)

    def mapped_bytes(self, columns: Collection[str] | None = None) -> int:
        """Most bytes of `indices` and these columns (None: all) that can be mapped, in parts of `MAP_SLOTS` slots."""
        return max(1, -(-len(self.indices) // MAP_SLOTS)) * self.part_bytes(self.columns if columns is None else columns)

    def part_bytes(self, columns: Collection[str]) -> int:
        """Bytes of `MAP_SLOTS` slots of `indices` and these columns."""
        return MAP_SLOTS * sum(array.itemsize for array in (self.indices, *(self.columns[name] for name in columns)))

    def warm(self, weight: str | None = None) -> int:
        """Read what sampling needs into the page cache sequentially; returns the bytes read (0 from RAM)."""
        return sum(warm(array) for array in (self.indptr, self.indices, *([] if weight is None else [self.columns[weight]])))

    def forget(self) -> None:
        """Unmap the pages of all slot arrays from this process; they stay in the page cache."""
        for array in (self.indices, *self.columns.values()):
            forget(array)

    def slots(self, v: int) -> tuple[int, int]:
        """Return (first, last) such that the in-edges of node `v` are slots first..last-1. Raises IndexError."""
        if not 0 <= v < self.num_nodes:
            raise IndexError(f"node {v} is out of range: there are {self.num_nodes} nodes")
        return int(self.indptr[v]), int(self.indptr[v + 1])

    def degree(self, ids: Ints) -> Ints:
        """Return the in-degrees of `ids` (int64[n]), including self-loops, int64[n]."""
        return np.asarray(self.indptr[ids + 1] - self.indptr[ids])

    def loops(self, ids: Ints) -> Ints:
        """Return the numbers of self-loops of `ids` (int64[n]), int64[n]."""
        counts = np.zeros(len(ids), np.int64)
        if len(self.self_loops):
            first = np.searchsorted(self.self_loops, ids)
            have = np.flatnonzero(self.self_loops[np.minimum(first, len(self.self_loops) - 1)] == ids)  # few nodes do
            counts[have] = np.searchsorted(self.self_loops, ids[have], side="right") - first[have]
        return counts

    def last_loop_weight(self, ids: Ints) -> NDArray[np.float32] | None:
        """Return the weight of the last self-loop of each of `ids` (int64[n]), 1 without one: float32[n].

        None for an unweighted graph and for one without self-loops.
        """
        if self.loop_weight is None or not len(self.self_loops):
            return None
        last = np.searchsorted(self.self_loops, ids, side="right") - 1
        has = self.self_loops[last] == ids  # for last = -1 this is the largest node with a loop, above the id
        return np.where(has, self.loop_weight[last], np.float32(1))

    def edge_ids(self, slots: Ints) -> Ints:
        """Return the input position of each of `slots` (int64[n]), int64[n]; the slots if none is stored."""
        column = self.columns.get("edge_id")
        return slots if column is None else np.asarray(column[slots], dtype=np.int64)

    def in_memory(self) -> "Graph":
        """Return the graph with every array copied into RAM."""
        return replace(
            self,
            indptr=np.array(self.indptr),
            indices=np.array(self.indices),
            columns={name: np.array(column) for name, column in self.columns.items()},
            self_loops=np.array(self.self_loops),
            weight_sum=None if self.weight_sum is None else np.array(self.weight_sum),
            loop_weight=None if self.loop_weight is None else np.array(self.loop_weight),
            parts=None if self.parts is None else np.array(self.parts),
        )

    def _arrays(self) -> list[NDArray[Any]]:
        derived = [array for array in (self.weight_sum, self.loop_weight, self.parts) if array is not None]
        return [self.indptr, self.indices, self.self_loops, *self.columns.values(), *derived]


def check_parts(parts: Ints, num_nodes: int) -> Ints:
    """Return `parts` if it divides the nodes 0..num_nodes-1 into non-empty parts. Raises InputError otherwise."""
    if parts.ndim != 1 or len(parts) < 2 or parts[0] != 0 or parts[-1] != num_nodes or (np.diff(parts) < 1).any():
        raise InputError(f"parts must increase from 0 to the number of nodes, {num_nodes}, with at least one node in each part")
    return parts


def _check(indptr: Ints, indices: NDArray[Any], columns: Mapping[str, NDArray[Any]], num_sources: int) -> None:
    if indptr.ndim != 1 or not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        raise InputError(f"indptr must ascend from 0 to the number of edges, {len(indices)}")
    if len(indices) and (indices.ndim != 1 or indices.dtype.kind not in "iu"):
        raise InputError(f"indices must be one-dimensional integers, not {indices.dtype}{list(indices.shape)}")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < num_sources:
        raise InputError(f"indices must be nodes 0..{num_sources - 1}, but span {indices.min()}..{indices.max()}")
    for name, column in columns.items():
        if column.shape != indices.shape:
            raise InputError(f"column {name!r} has shape {column.shape}; it needs one entry for each of {len(indices)} edges")
