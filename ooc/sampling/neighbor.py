"""Uniform and weighted neighbor sampling with the semantics of PyG's NeighborLoader (GraphSAGE, Hamilton et al., 2017).

Every node of a batch is expanded once, in the hop after it is first reached, and all layers share that sample.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.memory_plan import words_for
from ooc.sampling import kernels
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.graph import Graph

T = TypeVar("T", bound=np.generic)

_TABLE_KEPT = 32 * 2**20
"""bytes of the largest hash table a thread keeps for its next batch"""
_TABLE_LEAST = 2**10
_STAMPS = 1 << (63 - kernels.LOCAL_BITS)


class HopBound(NamedTuple):
    """Upper bounds of a batch after a hop, known before anything is allocated for it."""

    sampled: int
    """edges of this hop, including those of weight zero, which weighted sampling skips"""
    degree: int
    """most in-edges of a node expanded in it"""
    num_nodes: int
    num_edges: int
    num_expanded: int


def table_capacity(num_nodes: int) -> int:
    """Entries of a hash table for `num_nodes` nodes: a power of two, at most three quarters full."""
    return max(_TABLE_LEAST, 1 << (num_nodes * 4 // 3).bit_length())


class Table(threading.local):
    """A hash table from node id to local id, one for each thread that uses it; see `kernels.relabel` for its layout."""

    def __init__(self) -> None:
        self.entries = np.zeros((_TABLE_LEAST, 2), np.int64)
        self.stamp = 0

    def reserve(self, num_nodes: int, node: Ids, size: int) -> None:
        """Grow to `num_nodes` nodes; `node[:size]` are in the table."""
        capacity = table_capacity(num_nodes)
        if capacity > len(self.entries):
            self.entries = np.zeros((capacity, 2), np.int64)
            kernels.insert(self.entries, self.stamp, node, size)

    def refill(self, num_nodes: int, node: Ids, size: int) -> None:
        """Replace the contents by `node[:size]`, with capacity for `num_nodes`; a new stamp invalidates every entry."""
        self.stamp += 1
        if self.stamp == _STAMPS:
            self.entries[:] = 0
            self.stamp = 1
        self.reserve(num_nodes, node, 0)
        kernels.insert(self.entries, self.stamp, node, size)

    def trim(self) -> None:
        """Free a table that is too large to keep."""
        if self.entries.nbytes > _TABLE_KEPT:
            self.entries = np.zeros((_TABLE_LEAST, 2), np.int64)


scratch = Table()
"""the table of each sampling thread, shared by its samplers"""


def _grown(array: NDArray[T], size: int, length: int) -> NDArray[T]:
    """Return an array of `length` that starts with `array[:size]`."""
    grown = np.empty(length, array.dtype)
    grown[:size] = array[:size]
    return grown


class SubgraphBuilder:
    """Builds a subgraph in buffers that grow to the next hop's upper bound.

    A hop has three steps: `NeighborSampler.draw` fills `slot`, the caller sets `source` to `indices[slot]`, and
    `NeighborSampler.number` converts them to local ids. Only the second reads edges; it can serve many batches. The caller also
    fills `columns` (name -> dtype), which are loaded for the edges.
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
        """Grow the buffers to these lengths; numpy backs large new arrays by huge pages."""
        done = sum(self.num_edges)
        self.node = _grown(self.node, sum(self.num_nodes), num_nodes)
        self.indptr = _grown(self.indptr, len(self.indptr), num_expanded + 1)
        self.source, self.slot = _grown(self.source, done, num_edges), _grown(self.slot, done, num_edges)
        if self.stands_for is not None:
            self.stands_for = _grown(self.stands_for, done, num_edges)
        self.columns = {name: _grown(column, done, num_edges) for name, column in self.columns.items()}

    @property
    def drawn(self) -> tuple[int, int]:
        """The range (first, last) of edges sampled by the last `draw` and not yet processed by `number`."""
        return sum(self.num_edges), int(self.indptr[sum(self.num_nodes)])

    def finish(self) -> Subgraph:
        """Return the subgraph; its arrays are truncated in place."""
        self.node.resize(sum(self.num_nodes), refcheck=False)
        arrays: list[AnyArray] = [self.source, self.slot, *self.columns.values()]
        for array in arrays if self.stands_for is None else [*arrays, self.stands_for]:
            array.resize(sum(self.num_edges), refcheck=False)
        num_nodes, num_edges = tuple(self.num_nodes), tuple(self.num_edges)
        return Subgraph(self.node, self.indptr, self.source, self.slot, num_nodes, num_edges, self.stands_for, self.columns)


class NeighborSampler:
    """Samples the in-neighborhood of seeds, hop by hop. Stateless: any number of threads may share one.

    Per node and hop, the seeds' hop first, `fanout` in-edges are sampled; -1 takes all. With `replace`, nodes with in-edges get
    exactly `fanout` of them. By `weight` (float[E] per slot, or the name of such a column) edges are sampled with probability
    proportional to it, and `Subgraph.stands_for` makes sums over samples unbiased. With a finite fan-out, edges of weight 0 are
    never sampled: a sum weighted by edge weights (GCN) loses nothing, an unweighted one (GIN) lacks their terms. `max_bytes`
    limits a batch's arrays, hash table and features, of `row_bytes` per node, and `expanded_bytes` more per node of all hops
    but the last. Raises ConfigError if the fan-out or the weight is invalid.

    >>> sampler = NeighborSampler(graph, [15, 10, 5])
    >>> subgraph = sampler.sample(np.array([4, 7]), key(seed, Purpose.SAMPLE, epoch, step))
    >>> subgraph.node[subgraph.source[subgraph.indptr[0] : subgraph.indptr[1]]]  # drawn in-neighbors of node 4
    """

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        replace: bool = False,
        weight: AnyArray | str | None = None,
        max_bytes: int | None = None,
        row_bytes: int = 0,
        expanded_bytes: int = 0,
    ) -> None:
        if not fanout or any(k != int(k) or k < -1 for k in fanout):
            raise ConfigError(f"fan-out {list(fanout)} is invalid: give one number per hop, 0 or more, or -1 for all")
        self.fanout = tuple(int(k) for k in fanout)
        self.replace = bool(replace)
        self.max_bytes = max_bytes
        self.row_bytes, self.expanded_bytes = row_bytes, expanded_bytes
        # Plain ndarrays over the same memory: numba dispatches np.memmap more slowly.
        self.indptr: Ids = np.asarray(graph.indptr)
        self._indices: AnyArray = np.asarray(graph.indices)
        self.num_nodes, self.num_slots = len(self.indptr) - 1, len(self._indices)
        self.weight = None if weight is None else _weight_column(graph, weight)
        self.weighted = weight is not None

    def sample(self, seeds: Ids, key: int) -> Subgraph:
        """Sample the neighborhood of `seeds` (int64[b], duplicates allowed); the sample at a node depends on (key, node).

        Raises InputError if a seed is not a node, or a weight is negative or not finite; BudgetError if the batch may exceed
        `max_bytes`, before it is allocated; StoreError if the topology is damaged.
        """
        builder = self.begin(seeds)
        try:
            scratch.refill(len(seeds), builder.node, len(seeds))
            for hop in range(len(self.fanout)):
                self.draw(builder, hop, key, self.need(builder, hop))
                first, last = builder.drawn
                damaged = kernels.gather(self._indices, builder.slot, first, last, self.num_nodes, builder.source)
                if damaged >= 0:
                    raise damaged_slot(damaged)
                self.number(builder)
        finally:
            scratch.trim()
        return builder.finish()

    def begin(self, seeds: Ids, columns: Mapping[str, np.dtype[Any]] | None = None) -> SubgraphBuilder:
        """Start a batch of `seeds`; for `columns` see `SubgraphBuilder`. Raises InputError if a seed is not a node."""
        return SubgraphBuilder(self._check(seeds), self.weighted, columns or {})

    def need(self, builder: SubgraphBuilder, hop: int) -> HopBound:
        """Return the upper bounds after hop `hop`. Raises BudgetError if they may exceed `max_bytes`."""
        stop, done, batch_size = sum(builder.num_nodes), sum(builder.num_edges), builder.num_nodes[0]
        start = stop - builder.num_nodes[-1]
        sampled, hub, degree = kernels.count_edges(self.indptr, builder.node, start, stop, self.fanout[hop], self.replace)
        if sampled < 0:
            raise StoreError(f"indptr decreases at node {hub}: the store is damaged; run `ooc verify` on it")
        most = HopBound(sampled, degree, min(stop + sampled, self.num_nodes + batch_size), done + sampled, stop)
        # With the feature rows, and while growing one old copy of an edge array and a table of half the size.
        need = 8 * most.num_nodes + (24 + 4 * self.weighted) * most.num_edges + 8 * (most.num_expanded + 1)
        need += 24 * table_capacity(most.num_nodes) + self.row_bytes * most.num_nodes + self.expanded_bytes * most.num_expanded
        if self.max_bytes is not None and need > self.max_bytes:
            raise BudgetError(
                f"hop {hop + 1} of fan-out {list(self.fanout)} samples {sampled} edges, so the batch may need "
                f"{words_for(need, self.max_bytes)}; the largest hub is node {hub} with "
                f"{degree} in-edges; use a batch size below {batch_size}, a smaller fan-out or more memory"
            )
        return most

    def draw(self, builder: SubgraphBuilder, hop: int, key: int, need: HopBound) -> None:
        """Step 1 of a hop: sample slots at the nodes of hop `hop`; reads indptr (and weights), no edges."""
        stop, fanout = sum(builder.num_nodes), self.fanout[hop]
        start = stop - builder.num_nodes[-1]
        builder.grow(need.num_nodes, need.num_edges, need.num_expanded)
        draw = (start, stop, fanout, self.replace, np.uint64(key & (2**64 - 1)))
        if self.weight is None or builder.stands_for is None or fanout < 0:
            kernels.draw_uniform(self.indptr, builder.node, *draw, builder.slot, builder.indptr)
            if builder.stands_for is not None:
                builder.stands_for[builder.indptr[start] :] = 1
            return
        rank = np.empty(kernels.num_drawn(max(need.degree, 0), fanout, self.replace), np.float64)
        out = (builder.slot, builder.indptr, builder.stands_for)
        bad = kernels.draw_weighted(self.indptr, self.weight, builder.node, *draw, rank, *out)
        if bad >= self.num_slots:
            raise damaged_slot(bad)
        if bad >= 0:
            raise InputError(f"the weight of slot {bad} is {self.weight[bad]}; sampling needs finite weights of at least 0")

    def number(self, builder: SubgraphBuilder) -> None:
        """Step 3 of a hop: replace `builder.source` by local ids; new nodes form the next hop. `scratch` has those so far."""
        stop, (first, last) = sum(builder.num_nodes), builder.drawn
        scratch.reserve(min(stop + last - first, len(builder.node)), builder.node, stop)
        size = kernels.relabel(scratch.entries, scratch.stamp, builder.source, first, last, builder.node, stop)
        builder.num_nodes.append(int(size) - stop)
        builder.num_edges.append(last - first)

    def _check(self, seeds: Ids) -> Ids:
        seeds = np.asarray(seeds)
        if seeds.ndim != 1 or (seeds.dtype.kind not in "iu" and len(seeds)):
            raise InputError(f"seeds must be a one-dimensional array of integers, not {seeds.dtype}{list(seeds.shape)}")
        wrong = (seeds < 0) | (seeds >= self.num_nodes)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"seed {seeds[at]} at position {at} is not a node: the graph has nodes 0..{self.num_nodes - 1}")
        return seeds.astype(np.int64)


def damaged_slot(slot: int, what: str = "node") -> StoreError:
    """The error for a slot outside the graph or without a valid node id (or edge id)."""
    return StoreError(f"slot {slot} holds no valid {what} id: the store is damaged; run `ooc verify` on it")


def _weight_column(graph: Graph, weight: AnyArray | str) -> AnyArray:
    if isinstance(weight, str):
        if weight not in graph.columns:
            raise ConfigError(f"no edge column {weight!r} to sample by; the graph has {sorted(graph.columns)}")
        weight = graph.columns[weight]
    column = np.asarray(weight)
    if column.shape != graph.indices.shape or column.dtype.kind not in "fiu":
        raise ConfigError(
            f"sampling weights must be one number for each of {graph.num_edges} edges, not {column.dtype}{list(column.shape)}"
        )
    return column
