"""Subgraphs of contiguous ranges of nodes, cut out of the CSC by reading it front to back (Cluster-GCN, Chiang et al., 2019).

Nodes are numbered so that a part of the graph is one range (`Graph.parts`), so the in-edges of a batch of parts are a few runs
of slots. Either only the edges between the batch's nodes are kept, or all their in-edges, with the sources outside (the halo,
as in GNNAutoScale, Fey et al., 2021) behind the batch's own nodes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from stores.arrays.rows import ArrayRows, Rows
from stores.arrays.segment_rows import read_range
from stores.errors import BudgetError, ConfigError, StoreError
from stores.graph import Graph
from stores.jit import kernel
from stores.sizes import format_bytes

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

PIECE_SLOTS = 2**20
"""Slots read at a time: 4 MiB of int32"""
_DAMAGED = -1


class Edges(NamedTuple):
    """The slot arrays as Rows [E], for edges that stay on disk (`Dataset.edge_rows`)."""

    indices: Rows
    columns: Mapping[str, Rows]
    """further ones whose entries come with the edges (`Subgraph.columns`)"""


class InducedSubgraph(NamedTuple):
    """A subgraph cut out, and what that took."""

    subgraph: Subgraph
    nbytes: int
    """read from the disk, 0 for a graph in memory or mapped"""


def parts_of(graph: Graph, count: int | None = None) -> Ids:
    """int64[P+1]: the first node of each part, and N at the end.

    The store's own parts, or `count` equal ranges of ids where it has none. Raises ConfigError where it has none and `count` is
    None, where `count` contradicts the store, and where there are fewer nodes than parts.

    >>> parts_of(graph_of_10_nodes, 3)
    array([ 0,  3,  6, 10])
    """
    if graph.parts is not None:
        if count is not None and count != len(graph.parts) - 1:
            raise ConfigError(
                f"the store has {len(graph.parts) - 1} parts, not {count}: leave --parts out, or ingest anew with it"
            )
        return graph.parts
    if count is None:
        raise ConfigError("the store has no parts: ingest it with --parts, or give --parts to cut equal ranges of node ids")
    if not 1 <= count <= graph.num_nodes:
        raise ConfigError(f"{graph.num_nodes} nodes cannot make {count} parts: give 1 to {graph.num_nodes}")
    return np.arange(count + 1) * graph.num_nodes // count


def ranges_of(parts: Ids, numbers: Ids) -> Ids:
    """int64[q, 2], ascending: the nodes [first, last) of each of the parts `numbers` (int64[q], distinct).

    >>> ranges_of(np.array([0, 3, 6, 10]), np.array([2, 0]))
    array([[ 0,  3],
           [ 6, 10]])
    """
    numbers = np.sort(numbers)
    return np.stack([parts[numbers], parts[numbers + 1]], axis=1)


def cut(
    graph: Graph,
    ranges: Ids,
    halo: bool,
    edges: Edges | None = None,
    max_bytes: int | None = None,
    row_bytes: int = 0,
) -> InducedSubgraph:
    """The subgraph of the nodes in `ranges` (int64[q, 2], [first, last) each, ascending and disjoint).

    halo=False: its nodes ascending, and the edges between them: num_nodes (n,), num_edges (e,). halo=True: all their in-edges,
    and behind the n nodes the sources outside, ascending: num_nodes (n, h). Either way `indptr` is int64[n+1], and
    edges stand in the order of their slots.
    edges: read them through these, PIECE_SLOTS at a time, instead of the graph's arrays. max_bytes, row_bytes: limit on the
    bytes of the subgraph with `row_bytes` of features a node. Memory beside it: a piece, and N/4 bytes for a halo.
    Raises BudgetError, soon after the limit is passed, StoreError where the topology is damaged.

    >>> found = cut(graph, ranges_of(graph.parts, np.array([0, 3])), halo=True).subgraph
    >>> found.node[found.source]  # int64[e]: the source of every edge
    """
    indptr, own = np.asarray(graph.indptr), np.ascontiguousarray(ranges, np.int64)
    assert (own[:, 0] <= own[:, 1]).all(), "a range ends before it begins"
    assert (own[1:, 0] >= own[:-1, 1]).all(), "ranges overlap or descend"
    work = _Cutting(graph, indptr, own, halo, edges, max_bytes, row_bytes)
    for index in range(len(own)):
        work.take(index)
    return InducedSubgraph(work.finish(), work.nbytes)


class _Cutting:
    """A subgraph in the making. Its edges' buffers have room for every in-edge; pages never written to take no memory."""

    def __init__(
        self, graph: Graph, indptr: Ids, own: Ids, halo: bool, edges: Edges | None, max_bytes: int | None, row_bytes: int
    ) -> None:
        self._indptr, self._own, self._halo = indptr, own, halo
        self._edges = edges or Edges(ArrayRows(np.asarray(graph.indices)), {})
        self._limit = max_bytes, row_bytes
        self._first, self._end = own[:, 0].copy(), own[:, 1].copy()
        self._base = np.zeros(len(own) + 1, np.int64)  # local id of each range's first node
        np.cumsum(own[:, 1] - own[:, 0], out=self._base[1:])
        self._num_nodes = int(self._base[-1])
        self._check(self._num_nodes, 0)
        most = int((indptr[own[:, 1]] - indptr[own[:, 0]]).sum())
        if most < 0 or most > len(graph.indices):
            raise StoreError("indptr falls: the store is damaged; run `ooc verify` on it")
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
            had = self._size
            where = (self._first, self._end, self._base, index)
            node, self._size = _take(
                self._indptr, values, begin, node, last, where, self._halo, self._seen, self._source, self._slot, had, self._out
            )
            if node == _DAMAGED:
                raise StoreError(f"slot {self._size} or its neighbors hold no node's id, or indptr falls: run `ooc verify`")
            kept = self._slot[had : self._size] - begin
            for name, rows in self._edges.columns.items():
                self._columns[name][had : self._size] = self._read(rows, begin, end)[kept]
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

    def _read(self, rows: Rows, begin: int, end: int) -> NDArray[Any]:
        values, nbytes = read_range(rows, begin, end)
        self.nbytes += nbytes
        return values

    def _check(self, num_nodes: int, num_edges: int) -> None:
        most, row_bytes = self._limit
        per_edge = 16 + sum(rows.dtype.itemsize for rows in self._edges.columns.values())
        need = (16 + row_bytes) * num_nodes + per_edge * num_edges
        if most is not None and need > most:
            raise BudgetError(
                f"a batch of {len(self._own)} parts with {num_nodes} nodes needs {format_bytes(need)} or more of "
                f"{format_bytes(most)}; take fewer parts a batch, a store with more parts, or more memory"
            )


@kernel
def _take(
    indptr: Ids,
    values: NDArray[Any],
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
    """Keep the edges in slots begin:begin+len(values), `values` being their sources, whose destinations begin at `node`.

    where: (first, last, local id of the first) of every range, and the one at hand, of which `last` is the end. A source
    outside is kept with a halo, as -1 - id, and marked in `seen`. Returns the node at which to go on and the edges so far, or
    (_DAMAGED, a slot).
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
    """Bits of a word that are set."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel
def members(seen: Words) -> tuple[Ids, Ids]:
    """(int64[h] the numbers marked in `seen`, ascending; int64[words] how many stand before each word)."""
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
    """Local ids for the sources outside: their ranks among those seen, behind the inner ones."""
    for e in range(len(source)):
        if source[e] < 0:
            u = -1 - source[e]
            below = seen[u >> 6] & ((np.uint64(1) << np.uint64(u & 63)) - np.uint64(1))
            source[e] = num_inner + before[u >> 6] + ones(below)
