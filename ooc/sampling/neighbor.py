"""Uniform and weighted neighbor sampling with the semantics of PyG's NeighborLoader (GraphSAGE, Hamilton et al., 2017).

Every node of a batch is expanded once, in the hop after it is first reached; all layers of a model share that one draw.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.memory_plan import words_for
from ooc.sampling import kernels
from stores.errors import BudgetError, ConfigError, InputError, StoreError
from stores.graph import Graph

Ids = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)

_TABLE_KEPT = 32 * 2**20
"""bytes: the largest hash table a thread keeps for its next batch"""
_TABLE_LEAST = 2**10
_STAMPS = 1 << (63 - kernels.LOCAL_BITS)


class HopCount(NamedTuple):
    """What expanding one hop draws: `edges` in all; `hub` is the expanded node with the most in-edges (-1: none)."""

    edges: int
    hub: int
    degree: int


class HopBound(NamedTuple):
    """What a batch holds at most once a hop is expanded, known before anything is allocated for it."""

    edges: HopCount
    num_nodes: int
    num_edges: int
    num_expanded: int


def count_hop(indptr: Ids, node: Ids, start: int, stop: int, fanout: int, replace: bool) -> HopCount:
    """Count the edges that expanding `node[start:stop]` draws, before anything is allocated.

    indptr: int64[N+1]; node: int64[n], ids below N. Exact, but that it counts edges of weight zero too, which a weighted
    draw leaves out. Raises StoreError where indptr is not ascending there.

    >>> count_hop(np.array([0, 3, 4]), np.array([0, 1]), 0, 2, fanout=2, replace=False)
    HopCount(edges=3, hub=0, degree=3)
    """
    edges, hub, degree = kernels.count_edges(indptr, node, start, stop, fanout, replace)
    if edges < 0:
        raise StoreError(f"indptr falls at node {hub}: the store is damaged; run `ooc verify` on it")
    return HopCount(int(edges), int(hub), int(degree))


def table_capacity(num_nodes: int) -> int:
    """Entries of a hash table for `num_nodes` nodes: a power of two, filled to three quarters at most."""
    return max(_TABLE_LEAST, 1 << (num_nodes * 4 // 3).bit_length())


def bytes_bound(num_nodes: int, num_edges: int, num_expanded: int, row_bytes: int, weighted: bool = False) -> int:
    """Bytes a batch of at most so many nodes and edges needs at its peak: its arrays, hash table and feature rows.

    Growing holds an array of edges (one at a time) and a table of half the size once more. weighted: draws are by weight,
    and `stands_for` is one more array of edges.
    """
    arrays = 8 * num_nodes + (24 + 4 * weighted) * num_edges + 8 * (num_expanded + 1)
    return arrays + 24 * table_capacity(num_nodes) + row_bytes * num_nodes


class Table:
    """The hash table node id -> local id of the batch at hand; `kernels.relabel` says how it is laid out."""

    def __init__(self) -> None:
        self.entries = np.zeros((_TABLE_LEAST, 2), np.int64)
        self.stamp = 0

    def clear(self) -> None:
        """Forget all nodes: a new stamp makes every entry empty."""
        self.stamp += 1
        if self.stamp == _STAMPS:
            self.entries[:] = 0
            self.stamp = 1

    def reserve(self, num_nodes: int, node: Ids, size: int) -> None:
        """Make room for `num_nodes` nodes, of which `node[:size]` are there already."""
        capacity = table_capacity(num_nodes)
        if capacity > len(self.entries):
            self.entries = np.zeros((capacity, 2), np.int64)
            kernels.insert(self.entries, self.stamp, node, size)

    def refill(self, num_nodes: int, node: Ids, size: int) -> None:
        """Hold `node[:size]` and no others, with room for `num_nodes`."""
        self.clear()
        self.reserve(num_nodes, node, 0)
        kernels.insert(self.entries, self.stamp, node, size)

    def trim(self) -> None:
        """Give back a table too large to keep."""
        if self.entries.nbytes > _TABLE_KEPT:
            self.entries = np.zeros((_TABLE_LEAST, 2), np.int64)


class ThreadTables(threading.local):
    """One table per thread that samples, shared by its samplers."""

    def __init__(self) -> None:
        self.table = Table()


scratch = ThreadTables()


def _grown(array: NDArray[T], size: int, length: int) -> NDArray[T]:
    """A new array of `length` that begins with `array[:size]`."""
    grown = np.empty(length, array.dtype)
    grown[:size] = array[:size]
    return grown


class SubgraphBuilder:
    """A subgraph in the making: buffers that grow hop by hop to what the next hop needs at most.

    A hop is three steps of `NeighborSampler`: `draw` fills `slot`, someone puts `indices[slot]` into `source`, and `number`
    makes local ids of them. Only the second reads the graph's edges, so it can be done for many batches at once.

    weighted: whether to tell what each edge stands for; columns: name and dtype of what is to be read for the edges, which is
    someone else's to fill in.
    """

    def __init__(self, seeds: Ids, weighted: bool, columns: Mapping[str, np.dtype[Any]]) -> None:
        self.node = seeds.copy()
        self.indptr = np.zeros(1, np.int64)
        self.source = np.empty(0, np.int64)
        self.slot = np.empty(0, np.int64)
        self.stands_for = np.empty(0, np.float32) if weighted else None
        self.columns = {name: np.empty(0, dtype) for name, dtype in columns.items()}
        self.num_nodes = [len(seeds)]
        self.num_edges: list[int] = []

    def grow(self, num_nodes: int, num_edges: int, num_expanded: int) -> None:
        """Make the buffers this long, keeping what they hold; numpy backs large new arrays by huge pages."""
        self.node = _grown(self.node, sum(self.num_nodes), num_nodes)
        self.indptr = _grown(self.indptr, len(self.indptr), num_expanded + 1)
        self.source = _grown(self.source, sum(self.num_edges), num_edges)
        self.slot = _grown(self.slot, sum(self.num_edges), num_edges)
        if self.stands_for is not None:
            self.stands_for = _grown(self.stands_for, sum(self.num_edges), num_edges)
        self.columns = {name: _grown(column, sum(self.num_edges), num_edges) for name, column in self.columns.items()}

    @property
    def drawn(self) -> tuple[int, int]:
        """(first, last) edge that the last `draw` drew and `number` has not seen yet."""
        return sum(self.num_edges), int(self.indptr[sum(self.num_nodes)])

    def finish(self) -> Subgraph:
        """The subgraph, its arrays cut to their length in place."""
        self.node.resize(sum(self.num_nodes), refcheck=False)
        self.source.resize(sum(self.num_edges), refcheck=False)
        self.slot.resize(sum(self.num_edges), refcheck=False)
        for array in (*([] if self.stands_for is None else [self.stands_for]), *self.columns.values()):
            array.resize(sum(self.num_edges), refcheck=False)
        num_nodes, num_edges = tuple(self.num_nodes), tuple(self.num_edges)
        return Subgraph(self.node, self.indptr, self.source, self.slot, num_nodes, num_edges, self.stands_for, self.columns)


class NeighborSampler:
    """Samples the in-neighborhood of seeds, hop by hop. Stateless: any number of threads may share one.

    fanout: in-edges drawn at a node, per hop, the seeds' first; -1 takes all.
    replace: draw with replacement (a node that has in-edges then gets exactly `fanout` of them).
    weight: float[E] per slot or the name of such a graph column; edges are drawn with probability proportional to it.
        Each edge then comes with how many of the graph's edges it stands for (`Subgraph.stands_for`), which makes sums
        over samples unbiased, like `degree / drawn` does for uniform draws. Where a fan-out is finite, edges of weight 0
        are never drawn, so a node may get fewer, even where the fan-out covers its degree: a sum in which each edge
        counts by its weight (GCN) loses nothing, an unweighted one (GIN) lacks their terms, which no factor can restore.
    max_bytes, row_bytes, expanded_bytes: limit on the bytes of a batch (its arrays, its hash table, `row_bytes` of features a
        node and `expanded_bytes` for one of all hops but the last).

    Raises ConfigError for a fan-out or a weight that does not fit.

    >>> sampler = NeighborSampler(graph, [15, 10, 5])
    >>> subgraph = sampler.sample(np.array([4, 7]), key(seed, Purpose.SAMPLE, epoch, step))
    >>> subgraph.node[subgraph.source[subgraph.indptr[0] : subgraph.indptr[1]]]  # drawn in-neighbors of node 4
    """

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        replace: bool = False,
        weight: NDArray[Any] | str | None = None,
        max_bytes: int | None = None,
        row_bytes: int = 0,
        expanded_bytes: int = 0,
    ) -> None:
        if not fanout or any(k != int(k) or k < -1 for k in fanout):
            raise ConfigError(f"fan-out {list(fanout)}: give one number a hop, each 0 or more, or -1 for all neighbors")
        self.fanout = tuple(int(k) for k in fanout)
        self.replace = bool(replace)
        self.max_bytes = max_bytes
        self.row_bytes, self.expanded_bytes = row_bytes, expanded_bytes
        # Plain ndarrays over the same memory: numba dispatches np.memmap more slowly.
        self.indptr: Ids = np.asarray(graph.indptr)
        self._indices: NDArray[Any] = np.asarray(graph.indices)
        self.weight = None if weight is None else _weight_column(graph, weight)

    def sample(self, seeds: Ids, key: int) -> Subgraph:
        """The sampled neighborhood of `seeds` (int64[b], duplicates allowed); the draw at a node depends on (key, node).

        Raises InputError for a seed that is no node or a weight below zero, BudgetError where the batch may exceed
        `max_bytes` (before it is allocated), StoreError where the topology is damaged.
        """
        draft = self.begin(seeds)
        table = scratch.table
        try:
            table.refill(len(seeds), draft.node, len(seeds))
            for hop in range(len(self.fanout)):
                self.draw(draft, hop, key, self.need(draft, hop))
                first, last = draft.drawn
                damaged = kernels.gather(self._indices, draft.slot, first, last, self.num_nodes, draft.source)
                if damaged >= 0:
                    raise damaged_slot(damaged)
                self.number(draft, table)
        finally:
            table.trim()
        return draft.finish()

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph."""
        return len(self.indptr) - 1

    @property
    def num_slots(self) -> int:
        """Edges of the graph."""
        return len(self._indices)

    @property
    def weighted(self) -> bool:
        """Whether draws are by weight."""
        return self.weight is not None

    def begin(self, seeds: Ids, columns: Mapping[str, np.dtype[Any]] | None = None) -> SubgraphBuilder:
        """A batch of `seeds` before its first hop; columns: see `SubgraphBuilder`. Raises InputError for a seed that is no
        node."""
        return SubgraphBuilder(self._check(seeds), self.weighted, columns or {})

    def need(self, draft: SubgraphBuilder, hop: int) -> HopBound:
        """What expanding hop `hop` takes at most. Raises BudgetError where that may exceed `max_bytes`."""
        stop, done, batch_size = sum(draft.num_nodes), sum(draft.num_edges), draft.num_nodes[0]
        start = stop - draft.num_nodes[-1]
        count = count_hop(self.indptr, draft.node, start, stop, self.fanout[hop], self.replace)
        most_nodes = min(stop + count.edges, self.num_nodes + batch_size)
        need = HopBound(count, most_nodes, done + count.edges, stop)
        self._check_bytes(hop, need, batch_size)
        return need

    def draw(self, draft: SubgraphBuilder, hop: int, key: int, need: HopBound) -> None:
        """Step 1 of a hop: draw slots at the nodes of hop `hop`; reads indptr (and weights), no edges."""
        stop = sum(draft.num_nodes)
        draft.grow(need.num_nodes, need.num_edges, need.num_expanded)
        self._draw(draft, stop - draft.num_nodes[-1], stop, hop, np.uint64(key & (2**64 - 1)), need.edges)

    def number(self, draft: SubgraphBuilder, table: Table) -> None:
        """Step 3 of a hop: local ids for `draft.source`; sources not met before become hop `hop + 1`.

        table: holds the nodes so far.
        """
        stop, (first, last) = sum(draft.num_nodes), draft.drawn
        table.reserve(min(stop + last - first, len(draft.node)), draft.node, stop)
        size = kernels.relabel(table.entries, table.stamp, draft.source, first, last, draft.node, stop)
        draft.num_nodes.append(int(size) - stop)
        draft.num_edges.append(last - first)

    def _draw(self, draft: SubgraphBuilder, start: int, stop: int, hop: int, key: np.uint64, count: HopCount) -> None:
        """Fill `draft.slot` and `draft.indptr` for the nodes start:stop."""
        fanout, replace = self.fanout[hop], self.replace
        draw = (start, stop, fanout, replace, key)
        if self.weight is None or draft.stands_for is None or fanout < 0:
            kernels.draw_uniform(self.indptr, draft.node, *draw, draft.slot, draft.indptr)
            if draft.stands_for is not None:
                draft.stands_for[draft.indptr[start] :] = 1
            return
        rank = np.empty(kernels.num_drawn(max(count.degree, 0), fanout, replace), np.float64)
        out = (draft.slot, draft.indptr, draft.stands_for)
        bad = kernels.draw_weighted(self.indptr, self.weight, draft.node, *draw, rank, *out)
        if bad >= self.num_slots:
            raise damaged_slot(bad)
        if bad >= 0:
            raise InputError(
                f"the weight of slot {bad} is {self.weight[bad]}; sampling by weight needs finite weights of 0 or more"
            )

    def _check(self, seeds: Ids) -> Ids:
        """Seeds as int64[b], all of them nodes."""
        seeds = np.asarray(seeds)
        if seeds.ndim != 1 or (seeds.dtype.kind not in "iu" and len(seeds)):
            raise InputError(f"seeds must be whole numbers in one dimension, not {seeds.dtype}{list(seeds.shape)}")
        num_nodes = len(self.indptr) - 1
        wrong = (seeds < 0) | (seeds >= num_nodes)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"seed {seeds[at]} at position {at} is no node: the graph has nodes 0..{num_nodes - 1}")
        return seeds.astype(np.int64)

    def _check_bytes(self, hop: int, most: HopBound, batch_size: int) -> None:
        """Raise BudgetError where a batch of at most so many nodes and edges may exceed `max_bytes`."""
        if self.max_bytes is None:
            return
        count = most.edges
        need = bytes_bound(most.num_nodes, most.num_edges, most.num_expanded, self.row_bytes, self.weighted)
        need += self.expanded_bytes * most.num_expanded
        if need > self.max_bytes:
            raise BudgetError(
                f"hop {hop + 1} of fan-out {list(self.fanout)} draws {count.edges} edges, so the batch may need "
                f"{words_for(need, self.max_bytes)}; the largest hub is node {count.hub} with "
                f"{count.degree} in-edges; take a batch size below {batch_size}, a smaller fan-out or more --memory"
            )


def damaged_slot(slot: int) -> StoreError:
    """The error for a slot that the graph lacks or that holds no node's id."""
    return StoreError(f"slot {slot} names no node: the store is damaged; run `ooc verify` on it")


def _weight_column(graph: Graph, weight: NDArray[Any] | str) -> NDArray[Any]:
    """The weights as a plain array float[E]."""
    if isinstance(weight, str):
        if weight not in graph.columns:
            raise ConfigError(f"no edge column {weight!r} to sample by; the graph has {sorted(graph.columns)}")
        weight = graph.columns[weight]
    column = np.asarray(weight)
    if column.shape != graph.indices.shape or column.dtype.kind not in "fiu":
        raise ConfigError(
            f"weights to sample by must be one number for each of {graph.num_edges} edges, "
            f"not {column.dtype}{list(column.shape)}"
        )
    return column
