"""Uniform and weighted neighbor sampling with the semantics of PyG's NeighborLoader (GraphSAGE, Hamilton et al., 2017).

Every node of a batch is expanded once, in the hop after it is first reached, and all layers share that sample.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import numbered
from ooc.runtime.memory_plan import smaller_than, words_for
from ooc.sampling import kernels
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.labor import Key, Labor
from ooc.sampling.layer_draws import LayerDrawn, LayerDraws
from ooc.sampling.layer_wise import LayerWise
from ooc.sampling.left_out import FilteredDraws, LeftOut
from ooc.sampling.node_table import Table, table_bytes
from ooc.sampling.source_draws import SourceDraws
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.graph import Graph

T = TypeVar("T", bound=np.generic)
_LARGE = 2.0**960
"""a weight that is multiplied by a smaller one, as 2**64 times it is hardly finite"""

scratch = Table()
"""the table of each sampling thread, shared by its samplers"""


class HopBound(NamedTuple):
    """Upper bounds of a batch after a hop, known before anything is allocated for it."""

    sampled: int
    """edges of this hop, including those of weight zero, which weighted sampling skips"""
    degree: int
    """most in-edges of a node expanded in it"""
    num_nodes: int
    num_edges: int
    num_expanded: int


def _grown(array: NDArray[T], size: int, length: int) -> NDArray[T]:
    """Return an array of `length` that starts with `array[:size]`."""
    grown = np.empty(length, array.dtype)
    grown[:size] = array[:size]
    return grown


class NodeHops:
    """The nodes of a batch that are of one type, in hop order: `node[:size]`, and how many are new per hop (`num_nodes`)."""

    def __init__(self, seeds: Ids) -> None:
        self.node = seeds.copy()
        self.num_nodes = [len(seeds)]
        self.size = len(seeds)
        """with those of the hop under way"""

    @property
    def expanding(self) -> tuple[int, int]:
        """The range (start, stop) of the nodes of the last hop, whose in-edges the hop under way samples."""
        stop = sum(self.num_nodes)
        return stop - self.num_nodes[-1], stop

    def grow(self, num_nodes: int) -> None:
        """Grow to this length; numpy backs large new arrays by huge pages."""
        self.node = _grown(self.node, self.size, num_nodes)

    def number(self, table: Table, ids: Ids, first: int, last: int) -> None:
        """Replace `ids[first:last]` by local ids; new nodes are of the hop under way. `table` has those so far."""
        table.reserve(min(self.size + last - first, len(self.node)), self.node, self.size)
        self.size = int(kernels.relabel(table.entries, table.stamp, ids, first, last, self.node, self.size))

    def end_hop(self) -> None:
        self.num_nodes.append(self.size - sum(self.num_nodes))

    def finish(self) -> Ids:
        """The nodes; truncated in place."""
        self.node.resize(self.size, refcheck=False)
        return self.node


class EdgeHops:
    """The edges of a batch that are of one type, hop by hop; `columns` (name -> dtype) are loaded for them by the caller."""

    def __init__(self, weighted: bool, columns: Mapping[str, np.dtype[Any]], by_weight: bool = False) -> None:
        self.indptr = np.zeros(1, np.int64)
        self.source = np.empty(0, np.int64)
        self.slot = np.empty(0, np.int64)
        self.stands_for = np.empty(0, np.float32) if weighted else None
        self.counts_for = np.empty(0, np.float64) if by_weight else None
        self.columns = {name: np.empty(0, dtype) for name, dtype in columns.items()}
        self.num_edges: list[int] = []
        self.left_out: LeftOut | None = None
        """edges to leave out at the seeds"""
        self.filtered: tuple[int, FilteredDraws] | None = None
        """a hop that edges are left out of, and its draws"""
        self.by_layer: list[LayerDrawn] = []
        """of each hop, where all of its nodes share the draws"""

    def grow(self, num_edges: int, num_expanded: int) -> None:
        """Grow the buffers to these lengths."""
        done = sum(self.num_edges)
        self.indptr = _grown(self.indptr, len(self.indptr), num_expanded + 1)
        self.source, self.slot = _grown(self.source, done, num_edges), _grown(self.slot, done, num_edges)
        if self.stands_for is not None:
            self.stands_for = _grown(self.stands_for, done, num_edges)
        if self.counts_for is not None:
            self.counts_for = _grown(self.counts_for, done, num_edges)
        self.columns = {name: _grown(column, done, num_edges) for name, column in self.columns.items()}

    @property
    def drawn(self) -> tuple[int, int]:
        """The range (first, last) of edges sampled by the last `draw` and not yet ended by `end_hop`."""
        return sum(self.num_edges), int(self.indptr[-1])

    def choose(self, kept: Ids, indptr: Ids, stands_for: kernels.Factors | None = None) -> None:
        """Keep these edges of the hop under way: positions int64[e], the indptr of its nodes, and what the edges stand for."""
        first, stop = int(indptr[0]), int(indptr[-1])
        for array in (self.slot, self.source, *self.columns.values()):
            array[first:stop] = array[kept]
        if self.stands_for is not None:
            self.stands_for[first:stop] = self.stands_for[kept] if stands_for is None else stands_for
        self.indptr[len(self.indptr) - len(indptr) :] = indptr

    def end_hop(self) -> None:
        first, last = self.drawn
        self.num_edges.append(last - first)

    def finish(self) -> None:
        """Truncate the arrays in place."""
        for array in (self.source, self.slot, *self.columns.values(), self.stands_for, self.counts_for):
            if array is not None:
                array.resize(sum(self.num_edges), refcheck=False)


class SubgraphBuilder:
    """Builds a subgraph in buffers that grow to the next hop's upper bound.

    A hop has four steps: `NeighborSampler.draw` fills `slot`, the caller sets `source` to `indices[slot]`,
    `NeighborSampler.leave_out` drops the edges to leave out, and `NeighborSampler.number` converts sources to local ids. Only
    the second reads edges; it can serve many batches.
    """

    def __init__(
        self, seeds: Ids, weighted: bool, columns: Mapping[str, np.dtype[Any]], unequal: bool = False, by_weight: bool = False
    ) -> None:
        self.nodes, self.edges, self.unequal = NodeHops(seeds), EdgeHops(weighted, columns, by_weight), unequal

    def grow(self, need: HopBound) -> None:
        """Grow to the bounds of the hop under way."""
        self.nodes.grow(need.num_nodes)
        self.edges.grow(need.num_edges, need.num_expanded)

    def finish(self) -> Subgraph:
        """Return the subgraph; its arrays are truncated in place."""
        edges, node = self.edges, self.nodes.finish()
        edges.finish()
        num_nodes, num_edges = tuple(self.nodes.num_nodes), tuple(edges.num_edges)
        arrays = node, edges.indptr, edges.source, edges.slot, num_nodes, num_edges, edges.stands_for, edges.columns
        in_edges = np.concatenate([each.in_edges for each in edges.by_layer]) if edges.by_layer else None
        scores = [each.score for each in edges.by_layer if each.score is not None]
        score = np.sum(scores, axis=0) if scores else None
        return Subgraph(*arrays, unequal=self.unequal, in_edges=in_edges, score=score, counts_for=edges.counts_for)


class EdgeSampler:
    """Samples in-edges of one type at nodes of its target type, which the arguments of `NeighborSampler` describe.

    A hop's draws need no edges: `draw` reads `indptr` and weights, `gather` then `indices`. `leave_out` drops those that are
    held out, or left out at the seeds. With `labor` or `layer_wise`, whose draws read the sources of all in-edges, none of
    these is drawn.

    type_number: of the edge type, with `labor` of its sources' type, each of which has random numbers of its own. cold: whether
    edges are mapped from the disk and were not read ahead.
    """

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        replace: bool,
        weight: AnyArray | str | None,
        num_sources: int | None = None,
        held_out: HeldOut | None = None,
        labor: Labor | None = None,
        type_number: int = 0,
        cold: bool = False,
        layer_wise: LayerWise | None = None,
    ) -> None:
        if not fanout or any(k != int(k) or k < -1 for k in fanout):
            raise ConfigError(f"fan-out {list(fanout)} is invalid: give one number per hop, 0 or more, or -1 for all")
        self.fanout = tuple(int(k) for k in fanout)
        self.replace = bool(replace)
        # Plain ndarrays over the same memory: numba dispatches np.memmap more slowly.
        self.indptr: Ids = np.asarray(graph.indptr)
        self.indices: AnyArray = np.asarray(graph.indices)
        self.num_nodes, self.num_slots = len(self.indptr) - 1, len(self.indices)
        self.num_sources = self.num_nodes if num_sources is None else num_sources
        self.weight = None if weight is None else _weight_column(graph, weight)
        self.unequal = layer_wise is not None or (labor is not None and labor.iterations != 0)
        self.weighted, self.held_out, self.type_number = weight is not None or self.unequal, held_out, type_number
        self.mean_by_weight = self.unequal and weight is not None
        self.by_source: SourceDraws | LayerDraws | None = None
        self.by_layer = layer_wise is not None
        if labor is not None:
            given = (self.weight, held_out, self.num_sources, type_number, cold)
            self.by_source = SourceDraws(labor, self.indptr, self.indices, *given)
        if layer_wise is not None:
            try:
                self.by_source = LayerDraws.of(layer_wise, self.indptr, self.indices, held_out, self.num_sources, cold)
            except IndexError as error:
                raise damaged_slot(error.args[0]) from None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the draws that a thread keeps for further batches."""
        return 0 if self.by_source is None else self.by_source.kept_bytes(self.fanout)

    def count(self, nodes: NodeHops, edges: EdgeHops, hop: int) -> tuple[int, int, int]:
        """Return (edges, hub, degree): at most so many are sampled in hop `hop`, and the node there with the most in-edges."""
        (start, stop), filtered = nodes.expanding, self._filtered(nodes, edges, hop)
        if filtered is None:
            most = -1 if self.by_layer and self.fanout[hop] else self.fanout[hop]
            sampled, hub, degree = kernels.count_edges(self.indptr, nodes.node, start, stop, most, self.replace)
        else:
            sampled, hub, degree = filtered.bound(self.indptr, nodes.node[start:stop])
        if sampled < 0:
            raise StoreError(f"indptr decreases at node {hub}: the store is damaged; run `ooc verify` on it")
        return sampled, hub, degree

    def most_new(self, sampled: int, hop: int) -> int:
        """New nodes of hop `hop` at most, which samples so many edges."""
        return min(sampled, self.fanout[hop]) if self.by_layer and self.fanout[hop] >= 0 else sampled

    def draw_edges(self, nodes: NodeHops, edges: EdgeHops, hop: int, key: Key, degree: int) -> None:
        """Sample slots at the nodes of hop `hop`, whose most in-edges are `degree`; reads indptr (and weights), no edges but
        with `labor`."""
        if self.by_source is not None:
            where = (nodes.node, nodes.expanding, self.fanout[hop], hop)
            left_out = edges.left_out if hop == 0 else None
            found = self.by_source.draw(*where, key, left_out, edges.slot, edges.indptr, edges.stands_for)
            if isinstance(found, int):
                self.check_drawn(found)
            else:
                edges.by_layer.append(found)
            if self.mean_by_weight:
                self._count_by_weight(edges)
            return
        (start, stop), fanout, stream = nodes.expanding, self.fanout[hop], self._stream(key)
        filtered, draw = self._filtered(nodes, edges, hop), (start, stop, fanout, self.replace, stream)
        node, indptr = nodes.node[start:stop], edges.indptr[start : stop + 1]
        if self.weight is None or edges.stands_for is None or fanout < 0:
            if filtered is None:
                kernels.draw_uniform(self.indptr, nodes.node, *draw, edges.slot, edges.indptr)
            else:
                filtered.draw(self.indptr, node, stream, edges.slot, indptr)
            if edges.stands_for is not None:
                edges.stands_for[edges.indptr[start] :] = 1
            return
        rank = np.empty(kernels.num_drawn(max(degree, 0), fanout, self.replace), np.float64)
        if filtered is None:
            out = (edges.slot, edges.indptr, edges.stands_for)
            bad = kernels.draw_weighted(self.indptr, self.weight, nodes.node, *draw, rank, *out)
        else:
            own = (rank, edges.slot, indptr, edges.stands_for)
            bad = filtered.draw_weighted(self.indptr, self.weight, node, stream, *own)
        self.check_drawn(bad)

    def check_drawn(self, bad: int) -> None:
        """Raise the error for a slot that a kernel found damaged, or whose weight is invalid; -1 for none."""
        if bad >= self.num_slots or (bad >= 0 and (self.weight is None or 0 <= self.weight[bad] < np.inf)):
            raise damaged_slot(bad)
        if bad >= 0:
            assert self.weight is not None
            raise InputError(f"the weight of slot {bad} is {self.weight[bad]}; sampling needs finite weights of at least 0")

    def _count_by_weight(self, edges: EdgeHops) -> None:
        """Set what the edges of the hop under way count for in means: what they stand for, times their weights."""
        assert self.weight is not None
        assert edges.stands_for is not None
        assert edges.counts_for is not None
        drawn = slice(*edges.drawn)
        slot = edges.slot[drawn]
        weight = self.weight[slot]
        valid = (weight >= 0) & (weight < np.inf)
        self.check_drawn(-1 if valid.all() else int(slot[np.argmin(valid)]))
        np.multiply(edges.stands_for[drawn], _scaled(np.asarray(weight, np.float64)), out=edges.counts_for[drawn])

    def _stream(self, key: Key) -> np.uint64:
        """The key of this type's draws, which depend on no other batch."""
        assert isinstance(key, int)
        return np.uint64(numbered(key, self.type_number) & (2**64 - 1))

    def gather(self, edges: EdgeHops) -> None:
        """Set the sources of the sampled edges, as node ids. Raises StoreError if the topology is damaged."""
        damaged = kernels.gather(self.indices, edges.slot, *edges.drawn, self.num_sources, edges.source)
        if damaged >= 0:
            raise damaged_slot(damaged)

    def leave_out(self, nodes: NodeHops, edges: EdgeHops, hop: int, key: Key) -> bool:
        """Drop the edges to leave out of the hop, whose sources are known now. False where a node has too few others among the
        drawn ones: the hop is then drawn again, with all its slots."""
        filtered = self._filtered(nodes, edges, hop)
        if filtered is None:
            return True
        (start, stop), stream = nodes.expanding, self._stream(key)
        node, indptr = nodes.node[start:stop], edges.indptr[start : stop + 1]
        if self.weight is None or edges.stands_for is None or filtered.fanout < 0:
            found = filtered.others(self.indptr, node, stream, edges.slot, edges.source, indptr)
            if found is not None:
                edges.choose(*found)
            return found is not None
        drawn = (edges.slot, edges.source, indptr, edges.stands_for)
        edges.choose(*filtered.others_weighted(self.weight, node, stream, *drawn))
        return True

    def _filtered(self, nodes: NodeHops, edges: EdgeHops, hop: int) -> FilteredDraws | None:
        """The draws of a hop that edges are left out of; None of another."""
        left_out = edges.left_out if hop == 0 else None
        if self.by_source is not None or (left_out is None and self.held_out is None):
            return None
        if edges.filtered is None or edges.filtered[0] != hop:
            (start, stop), fanout = nodes.expanding, self.fanout[hop]
            by_weight, node = self.weighted and fanout >= 0, nodes.node[start:stop]
            draws = FilteredDraws(left_out, self.held_out, self.indptr, node, fanout, self.replace, by_weight)
            edges.filtered = hop, draws
        return edges.filtered[1]


class NeighborSampler(EdgeSampler):
    """Samples the in-neighborhood of seeds, hop by hop. Stateless: any number of threads may share one.

    Per node and hop, the seeds' hop first, `fanout` in-edges are sampled; -1 takes all. With `replace`, nodes with in-edges get
    exactly `fanout` of them. By `weight` (float[E] per slot, or the name of such a column) edges are sampled with probability
    proportional to it, and `Subgraph.stands_for` makes sums over samples unbiased. With a finite fan-out, edges of weight 0 are
    never sampled: a sum weighted by edge weights (GCN) loses nothing, an unweighted one (GIN) lacks their terms. `labor` draws
    by random numbers of the sources; `layer_wise` draws `fanout` sources for all nodes of a hop together. `max_bytes` limits a
    batch's arrays, hash table and features, of `row_bytes` per node, and `expanded_bytes` more per node of all hops but the
    last. Edges of `held_out` are never sampled. Raises ConfigError if the fan-out or the weight is invalid.

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
        held_out: HeldOut | None = None,
        labor: Labor | None = None,
        cold: bool = False,
        layer_wise: LayerWise | None = None,
    ) -> None:
        super().__init__(graph, fanout, replace, weight, held_out=held_out, labor=labor, cold=cold, layer_wise=layer_wise)
        self.max_bytes = max_bytes
        self.row_bytes, self.expanded_bytes = row_bytes, expanded_bytes

    def sample(self, seeds: Ids, key: Key, left_out: LeftOut | None = None) -> Subgraph:
        """Sample the neighborhood of `seeds` (int64[b], duplicates allowed); the sample at a node depends on (key, node), and
        at a seed on what is left out there.

        Raises InputError if a seed is not a node, or a weight is negative or not finite; BudgetError if the batch may exceed
        `max_bytes`, before it is allocated; StoreError if the topology is damaged.
        """
        builder = self.begin(seeds, left_out=left_out)
        try:
            scratch.refill(len(seeds), builder.nodes.node, len(seeds))
            for hop in range(len(self.fanout)):
                drawn = False
                while not drawn:
                    self.draw(builder, hop, key, self.need(builder, hop))
                    self.gather(builder.edges)
                    drawn = self.leave_out(builder.nodes, builder.edges, hop, key)
                self.number(builder)
        finally:
            scratch.trim()
        return builder.finish()

    def begin(
        self, seeds: Ids, columns: Mapping[str, np.dtype[Any]] | None = None, left_out: LeftOut | None = None
    ) -> SubgraphBuilder:
        """Start a batch of `seeds`; for `columns` see `EdgeHops`. Raises InputError if a seed is not a node."""
        how = self.weighted, columns or {}, self.unequal, self.mean_by_weight
        builder = SubgraphBuilder(checked_seeds(seeds, self.num_nodes), *how)
        builder.edges.left_out = left_out
        return builder

    def need(self, builder: SubgraphBuilder, hop: int) -> HopBound:
        """Return the upper bounds after hop `hop`. Raises BudgetError if they may exceed `max_bytes`."""
        nodes, counted, beside = builder.nodes, self.count(builder.nodes, builder.edges, hop), 0
        if self.by_source is not None:
            beside = self.by_source.scratch_bytes(nodes.node[slice(*nodes.expanding)], self.fanout[hop])
        return self.checked_bound(hop, counted, nodes.num_nodes, sum(builder.edges.num_edges), beside)

    def checked_bound(
        self, hop: int, counted: tuple[int, int, int], num_nodes: Sequence[int], done: int, beside: int = 0
    ) -> HopBound:
        """The upper bounds after hop `hop`, of which `count` gives (edges, hub, degree). num_nodes: of the hops before; done:
        their edges; beside: bytes for the draws. Raises BudgetError if the batch may exceed `max_bytes`."""
        (sampled, hub, degree), stop, batch_size = counted, sum(num_nodes), num_nodes[0]
        reached = min(stop + self.most_new(sampled, hop), self.num_nodes + batch_size)
        most = HopBound(sampled, degree, reached, done + sampled, stop)
        factors = 4 * self.weighted + 8 * self.mean_by_weight
        need = edge_bytes(most.num_edges, most.num_expanded, factors) + node_bytes(most.num_nodes, self.row_bytes)
        need += self.expanded_bytes * most.num_expanded + self.kept_bytes + beside
        if self.max_bytes is not None and need > self.max_bytes:
            raise BudgetError(
                f"hop {hop + 1} of fan-out {list(self.fanout)} samples {sampled} edges, so the batch may need "
                f"{words_for(need, self.max_bytes)}; the largest hub is node {hub} with "
                f"{degree} in-edges; use {smaller_than(batch_size)}"
            )
        return most

    def draw(self, builder: SubgraphBuilder, hop: int, key: Key, need: HopBound) -> None:
        """Step 1 of a hop: sample slots at the nodes of hop `hop`; reads indptr (and weights), no edges but with `labor`."""
        builder.grow(need)
        self.draw_edges(builder.nodes, builder.edges, hop, key, need.degree)

    def number(self, builder: SubgraphBuilder) -> None:
        """Step 4 of a hop: replace the sources by local ids; new nodes form the next hop. `scratch` has those so far."""
        builder.nodes.number(scratch, builder.edges.source, *builder.edges.drawn)
        builder.nodes.end_hop()
        builder.edges.end_hop()


def checked_seeds(seeds: Ids, num_nodes: int, of: str = "") -> Ids:
    """Return `seeds` as int64[b]. Raises InputError if one is not a node 0..num_nodes-1; of: their type, for the message."""
    seeds = np.asarray(seeds)
    if seeds.ndim != 1 or (seeds.dtype.kind not in "iu" and len(seeds)):
        raise InputError(f"seeds must be a one-dimensional array of integers, not {seeds.dtype}{list(seeds.shape)}")
    wrong = (seeds < 0) | (seeds >= num_nodes)
    if wrong.any():
        at, nodes = int(np.argmax(wrong)), f"{of!r} nodes" if of else "nodes"
        raise InputError(f"seed {seeds[at]} at position {at} is not a node: the graph has {nodes} 0..{num_nodes - 1}")
    return seeds.astype(np.int64)


def node_bytes(num_nodes: int, row_bytes: int) -> int:
    """Bytes of so many nodes of a type with their hash table, twice while it grows to this size, and feature rows."""
    return 8 * num_nodes + table_bytes(num_nodes) + row_bytes * num_nodes


def edge_bytes(num_edges: int, num_expanded: int, factors: int) -> int:
    """Bytes of so many edges of a type, with one old copy of an array while it grows, at so many expanded nodes. factors: of
    these, what an edge stands for and counts for."""
    return (24 + factors) * num_edges + 8 * (num_expanded + 1)


def damaged_slot(slot: int, what: str = "node") -> StoreError:
    """The error for a slot outside the graph or without a valid node id (or edge id)."""
    return StoreError(f"slot {slot} holds no valid {what} id: the store is damaged; run `ooc verify` on it")


def _scaled(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights whose products with what edges stand for are finite: all of a hop divided by a power of two, which changes no
    ratio, where one is near the largest number."""
    largest = weight.max(initial=0)
    return weight if largest < _LARGE else np.ldexp(weight, -64)


def _kernels_know(dtype: np.dtype[Any]) -> bool:
    """Whether numbers are of a type that numba has."""
    return dtype.isnative and (dtype.kind in "iu" or (dtype.kind == "f" and dtype.itemsize in (4, 8)))


def _weight_column(graph: Graph, weight: AnyArray | str) -> AnyArray:
    if isinstance(weight, str):
        if weight not in graph.columns:
            raise ConfigError(f"no edge column {weight!r} to sample by; the graph has {sorted(graph.columns)}")
        weight = graph.columns[weight]
    column = np.asarray(weight)
    if column.shape != graph.indices.shape or not _kernels_know(column.dtype):
        raise ConfigError(
            f"sampling weights must be one float32, float64 or whole number for each of {graph.num_edges} edges, "
            f"not {column.dtype}{list(column.shape)}"
        )
    return column
