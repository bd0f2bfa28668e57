"""Neighbor sampling over several edge types, with the semantics of PyG's NeighborLoader on a HeteroData.

The topology is one `Graph` (CSC) per edge type. In each hop, edge type by edge type, in-edges are drawn at the nodes of the
target type that the hop before reached, and new sources are numbered in their own type.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ooc.graph.hetero import EdgeKey, EdgeSample, HeteroSubgraph
from ooc.runtime.memory_plan import smaller_than, words_for
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.labor import Key, Labor
from ooc.sampling.left_out import LeftOut
from ooc.sampling.neighbor import (
    EdgeHops,
    EdgeSampler,
    NodeHops,
    checked_seeds,
    edge_bytes,
    node_bytes,
)
from ooc.sampling.node_table import TABLE_KEPT, Table
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph

Fanouts = Sequence[int] | Mapping[EdgeKey, Sequence[int]]


def edge_name(key: EdgeKey) -> str:
    """An edge type in messages and on the command line: "author:writes:paper"."""
    return ":".join(key)


def fanouts_of(fanout: Fanouts, edge_types: Sequence[EdgeKey]) -> dict[EdgeKey, list[int]]:
    """The fan-out of every edge type: one list for all, or a list for each. Raises ConfigError where they do not fit."""
    if not isinstance(fanout, Mapping):
        return {key: list(fanout) for key in edge_types}
    return check_fanouts(fanout, edge_types)


def check_fanouts(fanout: Mapping[EdgeKey, Sequence[int]], edge_types: Sequence[EdgeKey]) -> dict[EdgeKey, list[int]]:
    """The fan-outs in the order of the edge types. Raises ConfigError unless each has one, of as many hops."""
    there = ", ".join(map(edge_name, edge_types))
    unknown = [key for key in fanout if key not in edge_types]
    if unknown:
        name = edge_name(unknown[0]) if isinstance(unknown[0], tuple) else unknown[0]
        raise ConfigError(f"a fan-out is given for the edge type {name}, which the graph has not: it has {there}")
    missing = [key for key in edge_types if key not in fanout]
    if missing:
        raise ConfigError(
            f"no fan-out is given for the edge type {edge_name(missing[0])}: give one for each, zeros to leave a type out"
        )
    for one, other in pairwise(edge_types):
        if len(fanout[one]) != len(fanout[other]):
            raise ConfigError(
                f"fan-outs must have as many hops for all edge types: {edge_name(one)} has {len(fanout[one])}, "
                f"{edge_name(other)} has {len(fanout[other])}"
            )
    return {key: list(fanout[key]) for key in edge_types}


class HeteroBuilder:
    """Builds a subgraph of several types, hop by hop."""

    def __init__(self, seeds: Mapping[str, Ids], weighted: Mapping[EdgeKey, bool]) -> None:
        self.nodes = {name: NodeHops(each) for name, each in seeds.items()}
        self.edges = {key: EdgeHops(each, {}) for key, each in weighted.items()}

    def end_hop(self) -> None:
        for nodes in self.nodes.values():
            nodes.end_hop()
        for edges in self.edges.values():
            edges.end_hop()

    def finish(self) -> HeteroSubgraph:
        """Return the subgraph; its arrays are truncated in place."""
        for edges in self.edges.values():
            edges.finish()
        return HeteroSubgraph(
            {name: nodes.finish() for name, nodes in self.nodes.items()},
            {key: EdgeSample(e.indptr, e.source, e.slot, e.stands_for, e.columns) for key, e in self.edges.items()},
            {name: tuple(nodes.num_nodes) for name, nodes in self.nodes.items()},
            {key: tuple(edges.num_edges) for key, edges in self.edges.items()},
        )


class HeteroNeighborSampler:
    """Samples the in-neighborhood of seeds over several edge types. Stateless: any number of threads may share one.

    Per hop, each node that the hop before reached gets `fanout` in-edges of every edge type that ends at its type. The draw at
    a node depends on (key, the edge type's number, the node), so with one node type and one edge type the arrays are those of
    `NeighborSampler`.

    Args:
        graphs: The topology of each edge type: `indptr` over the nodes of the target type, `indices` of the source type.
        num_nodes: Nodes of each node type; batches have the types in this order.
        fanout: In-edges per hop, for all edge types or for each; -1 takes all, 0 none.
        replace: Whether the draws of a node may repeat.
        weight: Column of the graphs to sample in proportion to; edge types without it are sampled uniformly.
        max_bytes: Limit of a batch's arrays, hash tables and features; None: no limit.
        row_bytes: Bytes of a node's features and labels, by node type.
        held_out: Edges that are never sampled, by edge type.
        labor: Draws by random numbers of the sources, which all edge types from a node type share.
        cold: Whether edges are mapped from the disk and were not read ahead.

    Raises:
        ConfigError: A fan-out or the weight is invalid, or an edge type is unknown.

    >>> sampler = HeteroNeighborSampler(graphs, {"author": 4, "paper": 9}, {("author", "writes", "paper"): [10, 5]})
    >>> subgraph = sampler.sample({"paper": np.array([4, 7])}, key)
    >>> subgraph.node["author"][subgraph.edges["author", "writes", "paper"].source]
    """

    def __init__(
        self,
        graphs: Mapping[EdgeKey, Graph],
        num_nodes: Mapping[str, int],
        fanout: Fanouts,
        replace: bool = False,
        weight: str | None = None,
        max_bytes: int | None = None,
        row_bytes: Mapping[str, int] | None = None,
        held_out: Mapping[EdgeKey, HeldOut] | None = None,
        labor: Labor | None = None,
        cold: bool = False,
    ) -> None:
        self.fanout = fanouts_of(fanout, list(graphs))
        if weight is not None and all(weight not in graph.columns for graph in graphs.values()):
            raise ConfigError(f"no edge column {weight!r} to sample by in any edge type: {', '.join(map(edge_name, graphs))}")
        self.num_nodes = dict(num_nodes)
        self.samplers: dict[EdgeKey, EdgeSampler] = {}
        types = list(self.num_nodes)
        for number, (key, graph) in enumerate(graphs.items()):
            if not {key[0], key[2]} <= self.num_nodes.keys():
                raise ConfigError(f"the edge type {edge_name(key)} ends at no node type: there are {', '.join(self.num_nodes)}")
            own = weight if weight in graph.columns else None
            held = (held_out or {}).get(key)
            how = self.num_nodes[key[0]], held, labor, number if labor is None else types.index(key[0]), cold
            self.samplers[key] = EdgeSampler(graph, self.fanout[key], replace, own, *how)
            if graph.num_nodes != self.num_nodes[key[2]]:
                raise ConfigError(
                    f"the edge type {edge_name(key)} has {graph.num_nodes} targets, but there are "
                    f"{self.num_nodes[key[2]]} {key[2]!r} nodes"
                )
        self.hops = max((len(each) for each in self.fanout.values()), default=0)
        self.max_bytes = max_bytes
        self.row_bytes = {name: (row_bytes or {}).get(name, 0) for name in self.num_nodes}
        self._tables = {name: Table() for name in self.num_nodes}

    def sample(
        self, seeds: Mapping[str, Ids], key: Key, *, left_out: Mapping[EdgeKey, LeftOut] | None = None
    ) -> HeteroSubgraph:
        """Sample the neighborhood of `seeds`.

        Args:
            seeds: int64[b] by node type, duplicates allowed; types without seeds may be left out.
            key: Of the draws; see `ooc.runtime.keyed_random`.
            left_out: Sources left out of the draws of an edge type, at the seeds of its target type.

        Returns:
            The subgraph, with every node type and edge type of the graph.

        Raises:
            InputError: A seed is not a node, its type is unknown, or a weight is negative or not finite.
            BudgetError: The batch may exceed `max_bytes`; raised before it is allocated.
            StoreError: The topology is damaged.
        """
        builder = self.begin(seeds)
        for each, own in (left_out or {}).items():
            builder.edges[each].left_out = own
        self.expand(
            builder,
            lambda hop: self.draw(builder, hop, key),
            lambda each: self.samplers[each].gather(builder.edges[each]),
            lambda hop: self.leave_out(builder, hop, key),
        )
        return builder.finish()

    def expand(
        self,
        builder: HeteroBuilder,
        draw: Callable[[int], None],
        gather: Callable[[EdgeKey], None],
        leave_out: Callable[[int], bool] = lambda hop: True,
    ) -> None:
        """Sample all hops. draw: fills the slots of a hop; gather: sets the sources of an edge type's; leave_out: drops edges
        of a hop, False where it has to be drawn again."""
        try:
            for name, nodes in builder.nodes.items():
                self._tables[name].refill(nodes.size, nodes.node, nodes.size)
            for hop in range(self.hops):
                drawn = False
                while not drawn:
                    draw(hop)
                    for each in self.samplers:
                        gather(each)
                    drawn = leave_out(hop)
                self.number(builder)
        finally:
            for table in self._tables.values():
                table.trim(TABLE_KEPT // len(self._tables))

    def begin(self, seeds: Mapping[str, Ids]) -> HeteroBuilder:
        """Start a batch of `seeds`. Raises InputError if one is not a node."""
        unknown = [name for name in seeds if name not in self.num_nodes]
        if unknown:
            raise InputError(f"there are no {unknown[0]!r} nodes: the graph has {', '.join(self.num_nodes)}")
        none = np.empty(0, np.int64)
        checked = {name: checked_seeds(seeds.get(name, none), count, name) for name, count in self.num_nodes.items()}
        return HeteroBuilder(checked, {key: sampler.weighted for key, sampler in self.samplers.items()})

    def draw(self, builder: HeteroBuilder, hop: int, key: Key) -> None:
        """Step 1 of a hop: sample slots of every edge type; reads indptr (and weights), no edges.

        Raises BudgetError, before anything is allocated, if the batch may exceed `max_bytes` after this hop.
        """
        counts = {
            each: sampler.count(builder.nodes[each[2]], builder.edges[each], hop) for each, sampler in self.samplers.items()
        }
        self.grow(builder, hop, counts)
        for each, sampler in self.samplers.items():
            nodes, edges, (_, _, degree) = builder.nodes[each[2]], builder.edges[each], counts[each]
            sampler.draw_edges(nodes, edges, hop, key, degree)

    def leave_out(self, builder: HeteroBuilder, hop: int, key: Key) -> bool:
        """Drop the edges to leave out of a hop, of every edge type; see `EdgeSampler.leave_out`."""
        done = [
            sampler.leave_out(builder.nodes[each[2]], builder.edges[each], hop, key) for each, sampler in self.samplers.items()
        ]
        return all(done)

    def grow(
        self, builder: HeteroBuilder, hop: int, counts: Mapping[EdgeKey, tuple[int, int, int]], trees: int | None = None
    ) -> None:
        """Grow the buffers to the upper bounds after hop `hop`; raises as `draw` does.

        counts: of each edge type, as `EdgeSampler.count` gives them. trees: in how many a node may be; None: in the batch once.
        """
        most = {name: nodes.size for name, nodes in builder.nodes.items()}
        for (source, _, _), (sampled, _, _) in counts.items():
            most[source] += sampled
        for name, nodes in builder.nodes.items():
            most[name] = min(most[name], self.num_nodes[name] * (1 if trees is None else trees) + nodes.num_nodes[0])
        self._check(builder, hop, most, counts)
        for name, nodes in builder.nodes.items():
            nodes.grow(most[name])
        for each, (sampled, _, _) in counts.items():
            edges = builder.edges[each]
            edges.grow(sum(edges.num_edges) + sampled, sum(builder.nodes[each[2]].num_nodes))

    def number(self, builder: HeteroBuilder) -> None:
        """Step 3 of a hop: replace the sources by local ids; new nodes form the next hop."""
        for (source, _, _), edges in builder.edges.items():
            builder.nodes[source].number(self._tables[source], edges.source, *edges.drawn)
        builder.end_hop()

    def _check(
        self, builder: HeteroBuilder, hop: int, most: Mapping[str, int], counts: Mapping[EdgeKey, tuple[int, int, int]]
    ) -> None:
        """Raise BudgetError if the batch may exceed `max_bytes` with so many nodes, and edges of this hop."""
        need = sum(node_bytes(count, self.row_bytes[name]) for name, count in most.items())
        for each, (sampled, _, _) in counts.items():
            edges, expanded = builder.edges[each], sum(builder.nodes[each[2]].num_nodes)
            need += edge_bytes(sum(edges.num_edges) + sampled, expanded, 4 * self.samplers[each].weighted)
            need += self.samplers[each].kept_bytes
        if self.max_bytes is not None and need > self.max_bytes:
            largest = max(counts, key=lambda each: counts[each][0])
            sampled, hub, degree = counts[largest]
            batch_size = sum(nodes.num_nodes[0] for nodes in builder.nodes.values())
            raise BudgetError(
                f"hop {hop + 1} of fan-out {self.fanout[largest]} samples {sampled} edges of {edge_name(largest)}, so the "
                f"batch may need {words_for(need, self.max_bytes)}; the largest hub is {largest[2]!r} node {hub} with {degree} "
                f"in-edges; use {smaller_than(batch_size)}"
            )
