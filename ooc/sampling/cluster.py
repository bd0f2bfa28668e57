"""Subgraphs induced by contiguous node ranges, read sequentially from the CSC (Cluster-GCN, Chiang et al., 2019).

Parts of the graph are ranges of node ids (`Graph.parts`), so their in-edges are a few runs of slots. A subgraph has the edges
between its nodes, or all their in-edges with the outside sources (the halo, as in GNNAutoScale, Fey et al., 2021).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel
from ooc.stores.sizes import format_bytes

Words = NDArray[np.uint64]
Limit = tuple[int | None, int, int]
"""most bytes of a batch (None: any), and what a node and an edge take beside the subgraph's arrays"""
"""bytes of a subgraph, None for no limit, and feature bytes per node"""

PIECE_SLOTS = 2**20
"""slots read at a time: 4 MiB of int32"""
_DAMAGED = -1


class Edges(NamedTuple):
    """The slot arrays as Rows [E], for edges on disk (`Dataset.edge_rows`)."""

    indices: Rows
    columns: Mapping[str, Rows]
    """columns loaded with the edges (`Subgraph.columns`)"""


class InducedSubgraph(NamedTuple):
    """An induced subgraph and the bytes read for it."""

    subgraph: Subgraph
    nbytes: int
    """bytes read from disk; 0 for a graph in memory or memory-mapped"""


def parts_of(graph: Graph, count: int | None = None) -> Ids:
    """Return the first node of each part and N at the end, int64[P+1]: the store's parts, or else `count` equal ranges.

    Raises ConfigError if `count` is missing, contradicts the store, or exceeds the number of nodes.
    """
    if graph.parts is not None:
        if count is not None and count != len(graph.parts) - 1:
            raise ConfigError(
                f"the store has {len(graph.parts) - 1} parts, not {count}: leave out `num_parts`, or ingest it with as many"
            )
        return graph.parts
    if count is None:
        raise ConfigError("the store has no parts: ingest it with `parts`, or give `num_parts` to use equal ranges of node ids")
    if not 1 <= count <= graph.num_nodes:
        raise ConfigError(f"{graph.num_nodes} nodes cannot be divided into {count} parts: give 1 to {graph.num_nodes}")
    return np.arange(count + 1) * graph.num_nodes // count


def ranges_of(parts: Ids, numbers: Ids) -> Ids:
    """Return the node ranges [first, last) of the given parts (int64[q], distinct), ascending: int64[q, 2]."""
    numbers = np.sort(numbers)
    return np.stack([parts[numbers], parts[numbers + 1]], axis=1)


def cut(
    graph: Graph,
    ranges: Ids,
    halo: bool,
    edges: Edges | None = None,
    max_bytes: int | None = None,
    row_bytes: int = 0,
    edge_bytes: int = 0,
) -> InducedSubgraph:
    """Return the subgraph induced by node ranges (int64[q, 2], [first, last) each, ascending and disjoint).

    Without a halo its nodes are ascending and its edges are those between them: num_nodes (n,), num_edges (e,). With a halo it
    has all their in-edges, and the outside sources follow in ascending order: num_nodes (n, h). `indptr` is int64[n+1] and
    edges are in slot order. They are read from `edges`, PIECE_SLOTS at a time, or from the graph's arrays. Raises BudgetError
    if the subgraph, with `row_bytes` per node and `edge_bytes` per edge beside its arrays, exceeds `max_bytes`, StoreError if
    the topology is damaged.
    """
    own = np.ascontiguousarray(ranges, np.int64)
    assert (own[:, 0] <= own[:, 1]).all(), "a range ends before it starts"
    assert (own[1:, 0] >= own[:-1, 1]).all(), "ranges overlap or are not ascending"
    builder = _Cutting(graph, own, halo, edges or edges_of(graph), (max_bytes, row_bytes, edge_bytes))
    for index in range(len(own)):
        builder.take(index)
    return InducedSubgraph(builder.finish(), builder.nbytes)


def edges_of(graph: Graph) -> Edges:
    return Edges(ArrayRows(np.asarray(graph.indices)), {})


def check_bytes(limit: Limit, edges: Edges, num_nodes: int, num_edges: int, what: str, advice: str) -> None:
    """Raise BudgetError if an induced subgraph with so many nodes and edges exceeds the limit."""
    need, max_bytes = need_of(limit, edges, num_nodes, num_edges), limit[0]
    if max_bytes is not None and need > max_bytes:
        raise BudgetError(f"{what} needs at least {format_bytes(need)} of {format_bytes(max_bytes)}; {advice}")


def need_of(limit: Limit, edges: Edges, num_nodes: int, num_edges: int) -> int:
    """Bytes of an induced subgraph with so many nodes and edges, as a batch."""
    _, row_bytes, edge_bytes = limit
    per_edge = 16 + edge_bytes + sum(rows.dtype.itemsize for rows in edges.columns.values())
    return (16 + row_bytes) * num_nodes + per_edge * num_edges


class _Cutting:
    """Builds a subgraph. Edge buffers have space for every in-edge; untouched pages take no memory."""

    def __init__(self, graph: Graph, own: Ids, halo: bool, edges: Edges, limit: Limit) -> None:
        self._indptr = indptr = np.asarray(graph.indptr)
        self._own, self._halo, self._edges, self._limit = own, halo, edges, limit
        self._first, self._end = own[:, 0].copy(), own[:, 1].copy()
        self._base = np.zeros(len(own) + 1, np.int64)  # local id of each range's first node
        np.cumsum(own[:, 1] - own[:, 0], out=self._base[1:])
        self._num_nodes = int(self._base[-1])
        self._check(self._num_nodes, 0)
        most = int((indptr[own[:, 1]] - indptr[own[:, 0]]).sum())
        if most < 0 or most > len(graph.indices):
            raise StoreError("indptr decreases: the store is damaged; run `ooc verify` on it")
        self._out = np.zeros(self._num_nodes + 1, np.int64)
        self._source, self._slot = np.empty(most, np.int64), np.empty(most, np.int64)
        self._columns = {name: np.empty(most, rows.dtype) for name, rows in self._edges.columns.items()}
        self._seen = np.zeros(-(-graph.num_nodes // 64) if halo else 0, np.uint64)
        self._size = self.nbytes = 0

    def take(self, index: int) -> None:
        """Add the in-edges of range number `index`."""
        node, last = self._own[index].tolist()
        stop = int(self._indptr[last])
        for begin in range(int(self._indptr[node]), stop, PIECE_SLOTS):
            end = min(begin + PIECE_SLOTS, stop)
            values = self._read(self._edges.indices, begin, end)
            start = self._size
            where = (self._first, self._end, self._base, index)
            out = self._seen, self._source, self._slot, start, self._out
            node, self._size = _take(self._indptr, values, begin, node, last, where, self._halo, *out)
            if node == _DAMAGED:
                raise StoreError(
                    f"slot {self._size} or one near it holds no valid node id, or indptr decreases: "
                    "the store is damaged; run `ooc verify` on it"
                )
            selected = self._slot[start : self._size] - begin
            for name, rows in self._edges.columns.items():
                self._columns[name][start : self._size] = self._read(rows, begin, end)[selected]
            self._check(self._num_nodes, self._size)
        self._out[self._base[index] + node - self._own[index, 0] + 1 : self._base[index + 1] + 1] = self._size

    def finish(self) -> Subgraph:
        inner = np.concatenate([np.arange(*pair) for pair in self._own.tolist()] or [np.empty(0, np.int64)])
        num_nodes: tuple[int, ...] = (len(inner),)
        if self._halo:
            outside, before = members(self._seen)
            self._check(len(inner) + len(outside), self._size)
            _number(self._source[: self._size], self._seen, before, len(inner))
            inner, num_nodes = np.concatenate([inner, outside]), (len(inner), len(outside))
        for array in (self._source, self._slot, *self._columns.values()):
            array.resize(self._size, refcheck=False)
        return Subgraph(inner, self._out, self._source, self._slot, num_nodes, (self._size,), columns=self._columns)

    def _read(self, rows: Rows, begin: int, end: int) -> AnyArray:
        values, nbytes = read_range(rows, begin, end)
        self.nbytes += nbytes
        return values

    def _check(self, num_nodes: int, num_edges: int) -> None:
        what = f"a batch of {len(self._own)} parts with {num_nodes} nodes"
        advice = "use fewer parts per batch, a store with more parts, or more memory"
        check_bytes(self._limit, self._edges, num_nodes, num_edges, what, advice)


@kernel
def _take(
    indptr: Ids,
    values: AnyArray,
    begin: int,
    node: int,
    last: int,
    where: tuple[Ids, Ids, Ids, int],
    halo: bool,
    seen: Words,
    source: Ids,
    slot: Ids,
    size: int,
    out: Ids,
) -> tuple[int, int]:
    """Append the edges in slots begin:begin+len(values), with sources `values` and destinations from `node` on.

    `where` is (first, last, local id of the first) of every range and the current range, which ends at `last`. Outside sources
    are stored as -1 - id and marked in `seen`. Returns the next node and the edges so far, or (_DAMAGED, slot).
    """
    first, end, base, index = where
    num_nodes, stop = len(indptr) - 1, begin + len(values)
    while node < last:
        if indptr[node + 1] < indptr[node]:
            return _DAMAGED, begin
        for s in range(max(indptr[node], begin), min(indptr[node + 1], stop)):
            u = np.int64(values[s - begin])
            if u < 0 or u >= num_nodes:
                return _DAMAGED, s
            k = index
            if u < first[k] or u >= end[k]:
                k = int(np.searchsorted(first, u, side="right")) - 1
            if k >= 0 and u < end[k]:
                source[size] = base[k] + u - first[k]
            elif halo:
                source[size] = -1 - u
                seen[u >> 6] |= np.uint64(1) << np.uint64(u & 63)
            else:
                continue
            slot[size] = s
            size += 1
        if indptr[node + 1] > stop:
            break
        out[base[index] + node - first[index] + 1] = size
        node += 1
    return node, size


@kernel
def ones(word: np.uint64) -> int:
    """Population count of a 64-bit word."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel
def members(seen: Words) -> tuple[Ids, Ids]:
    """Return the marked numbers ascending, int64[h], and how many precede each word, int64[words]."""
    before = np.empty(len(seen), np.int64)
    count = 0
    for w in range(len(seen)):
        before[w] = count
        count += ones(seen[w])
    found = np.empty(count, np.int64)
    at = 0
    for w in range(len(seen)):
        word = seen[w]
        while word != np.uint64(0):
            low = word & (~word + np.uint64(1))
            found[at] = w * 64 + ones(low - np.uint64(1))
            at += 1
            word ^= low
    return found, before


@kernel
def _number(source: Ids, seen: Words, before: Ids, num_inner: int) -> None:
    """Replace outside sources by local ids: their rank among those seen, after the inner nodes."""
    for e in range(len(source)):
        if source[e] < 0:
            u = -1 - source[e]
            below = seen[u >> 6] & ((np.uint64(1) << np.uint64(u & 63)) - np.uint64(1))
            source[e] = num_inner + before[u >> 6] + ones(below)
