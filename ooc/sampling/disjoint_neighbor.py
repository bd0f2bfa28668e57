"""Disjoint and temporal neighbor sampling, with the semantics of PyG's NeighborLoader.

Every seed has a tree of its own: a node that two seeds reach is in the batch twice. With times, a seed reaches no edge (or no
neighbor) later than its own time. A tree is what `HeteroNeighborSampler` gives for its seed alone, under a key of the seed, so
it does not depend on the other seeds of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.hetero import EdgeKey, HeteroSubgraph
from ooc.runtime.keyed_random import mix, mix64
from ooc.sampling.edge_split import HeldOut, is_held_out
from ooc.sampling.hetero_neighbor import Fanouts, HeteroBuilder, HeteroNeighborSampler, edge_name
from ooc.sampling.kernels import draw_distinct, num_drawn, sort_slots, stream_of, uniform
from ooc.sampling.labor import Key
from ooc.sampling.left_out import NOTHING, LeftOut, is_left_out
from ooc.sampling.neighbor import EdgeHops, EdgeSampler, NodeHops, damaged_slot
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel

_ANY_TIME, _EDGE_TIME, _NODE_TIME = 0, 1, 2
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Times:
    """What limits a seed's tree: times of edges, or of nodes; types without any are not limited."""

    of_edges: Mapping[EdgeKey, AnyArray] = field(default_factory=dict)
    """[E] by edge type, by slot, ascending in each node's in-edges (as the column `time` is)"""
    of_nodes: Mapping[str, AnyArray] = field(default_factory=dict)
    """[N] by node type: an edge is as late as its source"""
    latest: bool = False
    """whether the latest edges of types with times are taken (PyG's temporal_strategy "last"), not a uniform sample"""

    def of(self, key: EdgeKey) -> tuple[int, AnyArray]:
        """(what limits the edges of a type, the times)."""
        if key in self.of_edges:
            return _EDGE_TIME, self.of_edges[key]
        return (_NODE_TIME, self.of_nodes[key[0]]) if key[0] in self.of_nodes else (_ANY_TIME, _NONE)


@dataclass(frozen=True)
class Trees:
    """The trees of a batch: their keys and times."""

    key: NDArray[np.uint64]
    """uint64[trees]"""
    time: AnyArray | None
    """[trees]; None without times"""
    left_out: Mapping[EdgeKey, LeftOut] = field(default_factory=dict)
    """of each edge type, at the seeds of its target type"""


class DisjointSampler(HeteroNeighborSampler):
    """Samples the in-neighborhood of each seed as a tree of its own. Stateless: any number of threads may share one.

    Args:
        graphs, num_nodes, fanout, replace, max_bytes, row_bytes: As of `HeteroNeighborSampler`.
        times: What may be reached; None without times.
        held_out: Edges that no tree has, by edge type.

    Raises:
        ConfigError: As `HeteroNeighborSampler`.

    >>> sampler = DisjointSampler(graphs, num_nodes, [10, 5], times=Times(of_nodes={"paper": year}))
    >>> subgraph = sampler.sample({"paper": np.array([4, 7])}, key, time={"paper": np.array([2010, 2015])})
    >>> subgraph.tree["paper"]  # which seed each paper was reached from
    """

    def __init__(
        self,
        graphs: Mapping[EdgeKey, Graph],
        num_nodes: Mapping[str, int],
        fanout: Fanouts,
        replace: bool = False,
        max_bytes: int | None = None,
        row_bytes: Mapping[str, int] | None = None,
        times: Times | None = None,
        held_out: Mapping[EdgeKey, HeldOut] | None = None,
    ) -> None:
        super().__init__(graphs, num_nodes, fanout, replace, None, max_bytes, row_bytes)
        self.times, self._held_out = times or Times(), held_out or {}
        self._time: dict[EdgeKey, tuple[int, AnyArray]] = {}
        for key in self.samplers:
            kind, time = self.times.of(key)
            count = {_EDGE_TIME: graphs[key].num_edges, _NODE_TIME: self.num_nodes[key[0]], _ANY_TIME: 0}[kind]
            if time.shape != (count,) or time.dtype.kind not in "iuf":
                raise ConfigError(
                    f"times of {edge_name(key)} must be one number for each of {count}, not {time.dtype}{list(time.shape)}"
                )
            self._time[key] = kind, np.asarray(time, _wide(time.dtype))

    def sample(
        self,
        seeds: Mapping[str, Ids],
        key: Key,
        time: Mapping[str, AnyArray] | None = None,
        tree: Mapping[str, Ids] | None = None,
        *,
        left_out: Mapping[EdgeKey, LeftOut] | None = None,
    ) -> HeteroSubgraph:
        """Sample the trees of `seeds`.

        Args:
            seeds: int64[b] by node type; types without seeds may be left out.
            key: Of the draws; see `ooc.runtime.keyed_random`.
            time: Of each seed, [b] by node type; None where `times` limit nothing.
            tree: Number of each seed's tree from 0 on, int64[b] by node type, so that seeds of several types may share one;
                None: each seed has its own, type by type.
            left_out: Sources left out at the seeds of an edge type's target type.

        Returns:
            The subgraph, with every node type and edge type of the graph, and the tree of each node.

        Raises:
            InputError: A seed is not a node or has no time, or its type is unknown.
            BudgetError: The batch may exceed `max_bytes`; raised before it is allocated.
            StoreError: The topology is damaged.
        """
        assert isinstance(key, int)
        numbers = tree or _own_trees(seeds)
        builder = self.begin(seeds)
        trees = replace(self._trees(builder, numbers, key, time), left_out=left_out or {})
        for name, nodes in builder.nodes.items():
            if nodes.size:
                nodes.node += np.asarray(numbers[name], np.int64) * self.num_nodes[name]
        self.expand(builder, lambda hop: self._draw_trees(builder, hop, trees), lambda each: self._gather(each, builder))
        found = builder.finish()
        of = {name: node // max(1, self.num_nodes[name]) for name, node in found.node.items()}
        node = {name: node - of[name] * self.num_nodes[name] for name, node in found.node.items()}
        return replace(found, node=node, tree=of)

    def _trees(self, builder: HeteroBuilder, tree: Mapping[str, Ids], key: int, time: Mapping[str, AnyArray] | None) -> Trees:
        """Each tree's key, from its first seed, and its time, the earliest of its seeds."""
        count = max((int(np.max(each)) + 1 for each in tree.values() if len(each)), default=0)
        keys, known = np.zeros(count, np.uint64), np.zeros(count, bool)
        limited = bool(self.times.of_edges or self.times.of_nodes)
        limit: AnyArray | None = None
        for name, nodes in builder.nodes.items():
            if not nodes.size:
                continue
            own = np.asarray(tree[name], np.int64)
            new = ~known[own]
            keys[own[new][::-1]] = tree_keys(np.uint64(key & (2**64 - 1)), nodes.node[new][::-1].copy())
            known[own] = True
            if not limited:
                continue
            if time is None or name not in time or len(time[name]) != nodes.size:
                raise InputError(f"sampling by time needs the time of every seed, one for each of {nodes.size} {name!r} nodes")
            values = np.asarray(time[name])
            if limit is None:
                limit = np.full(count, np.inf if values.dtype.kind == "f" else np.iinfo(np.int64).max, _wide(values.dtype))
            with np.errstate(invalid="ignore"):  # NaN: nothing is early enough
                np.minimum.at(limit, own, values.astype(limit.dtype))
        return Trees(keys, limit)

    def _draw_trees(self, builder: HeteroBuilder, hop: int, trees: Trees) -> None:
        """`draw`, at nodes of trees."""
        counts = {
            name: _count(sampler, builder.nodes[name[2]], builder.edges[name], hop, self.num_nodes[name[2]])
            for name, sampler in self.samplers.items()
        }
        self.grow(builder, hop, counts, len(trees.key))
        for number, (name, sampler) in enumerate(self.samplers.items()):
            nodes, edges = builder.nodes[name[2]], builder.edges[name]
            keys = trees.key if number == 0 else mixed(trees.key, np.uint64(mix(number)))
            self._draw_type(name, sampler, nodes, edges, hop, replace(trees, key=keys), counts[name][2])

    def _draw_type(
        self, name: EdgeKey, sampler: EdgeSampler, nodes: NodeHops, edges: EdgeHops, hop: int, trees: Trees, degree: int
    ) -> None:
        kind, time = self._time[name]
        limit = _limits(trees.time, time.dtype) if kind != _ANY_TIME and trees.time is not None else np.empty(0, time.dtype)
        left_out, held_out = LeftOut(_NONE, _NONE), self._held_out.get(name, NOTHING)
        if hop == 0:
            left_out = trees.left_out.get(name, left_out)
        listed = kind == _NODE_TIME or len(left_out.node) > 0 or held_out.share > 0
        scratch = np.empty(max(degree, 0) if listed else 0, np.int64)
        bad = draw_trees(
            sampler.indptr,
            sampler.indices,
            nodes.node,
            *nodes.expanding,
            self.num_nodes[name[2]],
            sampler.fanout[hop],
            sampler.replace,
            self.times.latest and kind != _ANY_TIME,
            trees.key,
            kind,
            time,
            limit,
            self.num_nodes[name[0]],
            left_out.indptr,
            left_out.node,
            held_out.key,
            held_out.share,
            held_out.words,
            scratch,
            edges.slot,
            edges.indptr,
        )
        if bad >= 0:
            raise damaged_slot(bad)

    def _gather(self, name: EdgeKey, builder: HeteroBuilder) -> None:
        """Set the sources of the edges just drawn, as nodes of their destinations' trees."""
        nodes, edges = builder.nodes[name[2]], builder.edges[name]
        self.samplers[name].gather(edges)
        start, stop = nodes.expanding
        own = nodes.node[start:stop] // max(1, self.num_nodes[name[2]])
        first, last = edges.drawn
        edges.source[first:last] += np.repeat(own, np.diff(edges.indptr[start : stop + 1])) * self.num_nodes[name[0]]


def _own_trees(seeds: Mapping[str, Ids]) -> dict[str, Ids]:
    """A tree for each seed, type by type."""
    ends = np.cumsum([0, *(len(each) for each in seeds.values())])
    return {name: np.arange(begin, begin + len(each)) for begin, (name, each) in zip(ends, seeds.items(), strict=False)}


def _wide(dtype: np.dtype[Any]) -> type:
    return np.float64 if dtype.kind == "f" else np.int64


def _limits(limit: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Times of trees, to compare with times of `dtype`: int64 if those are whole numbers, else float64."""
    if dtype.kind == "f":
        return limit.astype(np.float64)
    if limit.dtype.kind != "f":
        return limit
    return np.nan_to_num(np.floor(limit), nan=-(2.0**63)).clip(-(2.0**63), 2.0**63 - 1024).astype(np.int64)


def _count(sampler: EdgeSampler, nodes: NodeHops, edges: EdgeHops, hop: int, num_nodes: int) -> tuple[int, int, int]:
    """`EdgeSampler.count`, at nodes of trees."""
    start, stop = nodes.expanding
    plain = NodeHops(nodes.node[start:stop] % max(1, num_nodes))
    return sampler.count(plain, edges, hop)


@kernel
def tree_keys(key: np.uint64, seed: Ids) -> NDArray[np.uint64]:
    """The key of each tree, by its seed (int64[n]): uint64[n]."""
    keys = np.empty(len(seed), np.uint64)
    for i in range(len(seed)):
        keys[i] = stream_of(key, seed[i])
    return keys


@kernel
def mixed(key: NDArray[np.uint64], number: np.uint64) -> NDArray[np.uint64]:
    """`numbered` of many keys; number: `mix` of it."""
    keys = np.empty(len(key), np.uint64)
    for i in range(len(key)):
        keys[i] = mix64(key[i] ^ number)
    return keys


@kernel
def eligible(
    indptr: Ids,
    indices: AnyArray,
    v: int,
    kind: int,
    time: AnyArray,
    limit: Any,
    num_sources: int,
    left: Ids,
    held_key: np.uint64,
    share: float,
    words: NDArray[np.uint64],
    candidate: Ids,
) -> tuple[int, int, int]:
    """(first, count, damaged): the in-edges of `v` up to the time `limit` are slots first:first+count; with times of nodes, or
    edges to leave out, they are candidate[:count], and first is -1. left: sources to leave out, ascending. damaged: -1, or a
    slot without a valid node id."""
    first, last = indptr[v], indptr[v + 1]
    if kind == 1:
        low, high = first, last
        while low < high:
            middle = (low + high) // 2
            if time[middle] <= limit:
                low = middle + 1
            else:
                high = middle
        last = low
    if kind != 2 and len(left) == 0 and share == 0:
        return first, last - first, -1
    count = 0
    for s in range(first, last):
        neighbor = int(indices[s])
        if neighbor < 0 or neighbor >= num_sources:
            return -1, 0, s
        wanted = kind != 2 or time[neighbor] <= limit
        wanted = wanted and not is_held_out(held_key, share, words, s, neighbor, v)
        if wanted and not is_left_out(left, 0, len(left), neighbor):
            candidate[count] = s
            count += 1
    return -1, count, -1


@kernel
def latest(indices: AnyArray, time: AnyArray, candidate: Ids, count: int, chosen: int, slot: Ids, at: int) -> None:
    """Put the `chosen` of candidate[:count] whose sources are latest into slot[at:], ascending; of equal times the last."""
    moment = np.empty(count, time.dtype)
    for j in range(count):
        moment[j] = time[indices[candidate[j]]]
    order = np.argsort(moment, kind="mergesort")
    for j in range(chosen):
        slot[at + j] = candidate[order[count - chosen + j]]
    sort_slots(slot, at, at + chosen)


@kernel
def draw_trees(
    indptr: Ids,
    indices: AnyArray,
    node: Ids,
    start: int,
    stop: int,
    num_nodes: int,
    fanout: int,
    replace: bool,
    last: bool,
    key: NDArray[np.uint64],
    kind: int,
    time: AnyArray,
    limit: AnyArray,
    num_sources: int,
    left_indptr: Ids,
    left: Ids,
    held_key: np.uint64,
    share: float,
    words: NDArray[np.uint64],
    candidate: Ids,
    slot: Ids,
    edge_indptr: Ids,
) -> int:
    """`kernels.draw_uniform` at nodes of trees: node[i] is tree * num_nodes + node. Returns -1, or a damaged slot.

    key, limit: [trees]. kind, num_sources, held_key, share, words: see `eligible`. left_indptr, left: the sources left out at
    each of the nodes, as of `LeftOut`; empty for none. candidate: scratch, int64 of at least the most in-edges of a node.
    """
    at = edge_indptr[start]
    for i in range(start, stop):
        tree = node[i] // num_nodes
        v = node[i] - tree * num_nodes
        until = limit[tree] if kind != 0 else limit.dtype.type(0)
        out = left[left_indptr[i - start] : left_indptr[i - start + 1]] if len(left) > 0 else left
        filtering = (num_sources, out, held_key, share, words, candidate)
        first, count, damaged = eligible(indptr, indices, v, kind, time, until, *filtering)
        if damaged >= 0:
            return damaged
        base = max(first, 0)
        drawn = num_drawn(count, fanout, replace and not last)
        by_source = last and kind == 2 and drawn < count
        if by_source:
            latest(indices, time, candidate, count, drawn, slot, at)
        elif last or fanout < 0 or (drawn == count and not replace):
            for j in range(drawn):
                slot[at + j] = base + count - drawn + j
        elif replace:
            stream = stream_of(key[tree], v)
            for j in range(drawn):
                slot[at + j] = base + int(uniform(stream, j) * count)
            sort_slots(slot, at, at + drawn)
        else:
            draw_distinct(stream_of(key[tree], v), base, count, drawn, slot, at)
        if first < 0 and not by_source:
            for j in range(drawn):
                slot[at + j] = candidate[slot[at + j]]
        at += drawn
        edge_indptr[i + 1] = at
    return -1
