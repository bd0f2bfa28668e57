"""GraphSAINT's samplers (Zeng et al., 2020): sample a set of nodes and take every edge between them.

Samples are counter-based, so a subgraph is a function of its key. A random walk reads one batch of slots per step, and the
subgraph reads its nodes' runs of slots.
"""

from typing import Literal, NamedTuple

import numpy as np

from ooc.graph.blocks import Subgraph
from ooc.sampling.cluster import PIECE_SLOTS, Edges, InducedSubgraph, Limit, Words, check_bytes, edges_of, members, ones
from ooc.sampling.kernels import stream_of, uniform
from stores.arrays.rows import AnyArray, Ids, Rows
from stores.errors import ConfigError, StoreError
from stores.graph import Graph
from stores.jit import kernel

Kind = Literal["walk", "node", "edge"]
DAMAGED = "a slot holds no valid node id, or indptr decreases: the store is damaged; run `ooc verify` on it"


class Draw(NamedTuple):
    """What to sample for a subgraph, always with replacement.

    "walk": `draws` uniform roots of walks of `length` steps along in-edges. "edge": `draws` edges, as walks of one step.
    "node": `draws` nodes in proportion to in-degree + 1.
    """

    kind: Kind
    draws: int
    length: int = 1

    @property
    def most_nodes(self) -> int:
        """Upper bound on the number of sampled nodes."""
        return self.draws * (1 if self.kind == "node" else 1 + self.length)


def check(draw: Draw) -> Draw:
    """Return `draw` if it is valid. Raises ConfigError otherwise."""
    if draw.kind not in ("walk", "node", "edge"):
        raise ConfigError(f"GraphSAINT sampler {draw.kind!r} is unknown: use walk, node or edge")
    if draw.draws < 1 or draw.length < 1 or (draw.kind == "edge" and draw.length != 1):
        raise ConfigError(
            f"a {draw.kind} sampler with {draw.draws} draws and {draw.length} steps: give at least 1 (edge: 1 step)"
        )
    return draw


def sample_nodes(graph: Graph, draw: Draw, key: int, indices: Rows) -> tuple[Ids, int]:
    """Return the distinct sampled nodes, int64[n] ascending, and the bytes read.

    An edge (u, v) is sampled in proportion to 1 / (in-degree of v); in a symmetric graph, where its reverse counts too, this is
    1/deg(u) + 1/deg(v) as in the paper. Nodes are sampled by in-degree + 1, so that every node can occur (the paper uses
    squared column norms of the adjacency, PyG the degree).
    """
    indptr, stream = np.asarray(graph.indptr), np.uint64(key & (2**64 - 1))
    first = np.empty(draw.draws, np.int64)
    if draw.kind == "node":
        _by_degree(indptr, stream, first)
        return np.unique(first), 0
    _uniformly(len(indptr) - 1, stream, first)
    visited, nbytes = [first], 0
    for step in range(draw.length):
        at, slot = visited[-1], np.empty(draw.draws, np.int64)
        moving = slot[: _step(indptr, at, stream, step, slot)]
        values = np.empty(len(moving), indices.dtype)
        nbytes += indices.read(moving, values)
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < len(indptr) - 1:
            raise StoreError(DAMAGED)
        visited.append(_moved(indptr, at, values))
    return np.unique(np.concatenate(visited)), nbytes


def induce(
    graph: Graph, node: Ids, edges: Edges | None = None, max_bytes: int | None = None, row_bytes: int = 0
) -> InducedSubgraph:
    """Return the subgraph of `node` (int64[n], ascending, distinct) with every edge between them, as `cluster.cut` does.

    Reads all their in-edges, PIECE_SLOTS at a time, with memory for one piece and N/4 bytes.
    """
    work = _Inducing(graph, node, edges or edges_of(graph), (max_bytes, row_bytes))
    for begin in range(0, work.num_in_edges, PIECE_SLOTS):
        work.take(begin, min(begin + PIECE_SLOTS, work.num_in_edges))
    return InducedSubgraph(work.finish(), work.nbytes)


class _Inducing:
    """Builds a subgraph; `num_in_edges` is the number of in-edges of its nodes, processed as one sequence of positions."""

    def __init__(self, graph: Graph, node: Ids, edges: Edges, limit: Limit) -> None:
        self._indptr, self._node, self._edges, self._limit = np.asarray(graph.indptr), node, edges, limit
        self._check(0)
        self._start = np.zeros(len(node) + 1, np.int64)
        np.cumsum(self._indptr[node + 1] - self._indptr[node], out=self._start[1:])
        self.num_in_edges = int(self._start[-1])
        if (np.diff(self._start) < 0).any():
            raise StoreError(DAMAGED)
        self._seen = np.zeros(-(-graph.num_nodes // 64), np.uint64)
        _mark(node, self._seen)
        self._before = members(self._seen)[1]
        self._out = np.zeros(len(node) + 1, np.int64)
        self._source, self._slot = np.empty(self.num_in_edges, np.int64), np.empty(self.num_in_edges, np.int64)
        self._size = self._row = self.nbytes = 0

    def take(self, begin: int, end: int) -> None:
        """Keep the edges at positions begin..end-1 whose sources were sampled too."""
        slot = np.empty(end - begin, np.int64)
        _slots(self._indptr, self._node, self._start, self._row, begin, slot)
        values = np.empty(len(slot), self._edges.indices.dtype)
        self.nbytes += self._edges.indices.read(slot, values)
        place, out = (self._start, begin, self._row), (self._source, self._slot, self._size, self._out)
        num_nodes = len(self._indptr) - 1
        self._row, self._size = _keep(values, slot, place, num_nodes, self._seen, self._before, *out)
        if self._row < 0:
            raise StoreError(DAMAGED)
        self._check(self._size)

    def finish(self) -> Subgraph:
        self._out[self._row + 1 :] = self._size
        for array in (self._source, self._slot):
            array.resize(self._size, refcheck=False)
        columns = {}
        for name, rows in self._edges.columns.items():
            columns[name] = np.empty(self._size, rows.dtype)
            self.nbytes += rows.read(self._slot, columns[name])
        return Subgraph(self._node, self._out, self._source, self._slot, (len(self._node),), (self._size,), columns=columns)

    def _check(self, num_edges: int) -> None:
        advice = "sample fewer roots, nodes or edges, use shorter walks, or more memory"
        check_bytes(self._limit, self._edges, len(self._node), num_edges, f"a subgraph of {len(self._node)} nodes", advice)


class SaintSampler(NamedTuple):
    """Samples one subgraph per key; for `max_bytes` and `row_bytes` see `induce`."""

    graph: Graph
    how: Draw
    edges: Edges | None = None
    max_bytes: int | None = None
    row_bytes: int = 0

    def draw(self, key: int) -> InducedSubgraph:
        """Return the subgraph of `key`. Raises BudgetError if it does not fit, StoreError if the topology is damaged."""
        edges = self.edges or edges_of(self.graph)
        node, nbytes = sample_nodes(self.graph, self.how, key, edges.indices)
        result = induce(self.graph, node, edges, self.max_bytes, self.row_bytes)
        return result._replace(nbytes=nbytes + result.nbytes)


@kernel
def _uniformly(num_nodes: int, key: np.uint64, out: Ids) -> None:
    for i in range(len(out)):
        out[i] = int(uniform(stream_of(key, i), 0) * num_nodes)


@kernel
def _by_degree(indptr: Ids, key: np.uint64, out: Ids) -> None:
    """Sample nodes in proportion to in-degree + 1: node v has positions indptr[v] + v .. indptr[v + 1] + v of E + N."""
    num_nodes = len(indptr) - 1
    total = indptr[num_nodes] + num_nodes
    for i in range(len(out)):
        place = int(uniform(stream_of(key, i), 0) * total)
        low, high = 0, num_nodes
        while high - low > 1:
            middle = (low + high) // 2
            if indptr[middle] + middle <= place:
                low = middle
            else:
                high = middle
        out[i] = low


@kernel
def _step(indptr: Ids, at: Ids, key: np.uint64, step: int, slot: Ids) -> int:
    """Sample one slot of each node that has in-edges; returns their number."""
    size = 0
    for i in range(len(at)):
        degree = indptr[at[i] + 1] - indptr[at[i]]
        if degree > 0:
            slot[size] = indptr[at[i]] + int(uniform(stream_of(key, i), step + 1) * degree)
            size += 1
    return size


@kernel
def _moved(indptr: Ids, at: Ids, values: AnyArray) -> Ids:
    """New positions of the walks; those at nodes without in-edges stay."""
    out, k = at.copy(), 0
    for i in range(len(at)):
        if indptr[at[i] + 1] > indptr[at[i]]:
            out[i] = values[k]
            k += 1
    return out


@kernel
def _mark(node: Ids, seen: Words) -> None:
    for i in range(len(node)):
        seen[node[i] >> 6] |= np.uint64(1) << np.uint64(node[i] & 63)


@kernel
def _slots(indptr: Ids, node: Ids, start: Ids, row: int, begin: int, slot: Ids) -> None:
    """Slots at positions begin.. of the nodes' concatenated in-edges; `row` is the first node with one there."""
    i = 0
    while i < len(slot):
        while start[row + 1] <= begin + i:
            row += 1
        for place in range(begin + i, min(start[row + 1], begin + len(slot))):
            slot[i] = indptr[node[row]] + place - start[row]
            i += 1


@kernel
def _keep(
    values: AnyArray,
    slot: Ids,
    place: tuple[Ids, int, int],
    num_nodes: int,
    seen: Words,
    before: Ids,
    source: Ids,
    kept: Ids,
    size: int,
    out: Ids,
) -> tuple[int, int]:
    """Keep the edges whose source is in `seen`; returns (next row, edges so far), or (-1, 0) for an invalid source."""
    start, begin, row = place
    for i in range(len(values)):
        while start[row + 1] <= begin + i:
            row += 1
            out[row] = size
        u = int(values[i])
        if u < 0 or u >= num_nodes:
            return -1, 0
        bit = np.uint64(1) << np.uint64(u & 63)
        if seen[u >> 6] & bit != np.uint64(0):
            source[size] = before[u >> 6] + ones(seen[u >> 6] & (bit - np.uint64(1)))
            kept[size] = slot[i]
            size += 1
    return row, size
