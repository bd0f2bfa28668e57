"""Disjoint and temporal sampling against trees of single seeds and a plain loop over the edges that are not too late."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.hetero import EdgeKey, HeteroSubgraph
from ooc.runtime.keyed_random import mix, numbered
from ooc.sampling import HeteroNeighborSampler
from ooc.sampling.disjoint_neighbor import DisjointSampler, Times
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph
from tests.ooc.hetero_graphs import ABOUT, CITES, EDGE_TYPES, NUM_NODES, REV_WRITES, WRITES, bipartite, hetero_graphs
from tests.ooc.sampling.test_hetero_neighbor import KEYS, fanouts
from tests.ooc.sampling_reference import Stream, distinct

compiling = settings(deadline=None)  # the first example may compile a kernel
MASK = 2**64 - 1
TIMED = ["edges", "nodes", "some edges"]
SEEDS = st.lists(st.integers(0, NUM_NODES["paper"] - 1), min_size=1, max_size=6)


def tree_key(key: int, seed: int) -> int:
    """The documented key of a seed's tree."""
    return mix((key ^ mix(seed)) & MASK)


def tree_of(found: HeteroSubgraph, tree: int) -> dict[Any, list[Any]]:
    """The nodes and edges of one tree: nodes by type and hop, edges by type as (slot, source, target)."""
    nodes = {}
    for name, node in found.node.items():
        hop = np.repeat(np.arange(len(found.num_nodes[name])), found.num_nodes[name])
        mine = found.tree[name] == tree
        nodes[name] = list(zip(node[mine].tolist(), hop[mine].tolist(), strict=True))
    edges: dict[Any, list[Any]] = {}
    for key, each in found.edges.items():
        source, target = each.edge_index()
        mine = found.tree[key[2]][target] == tree
        assert np.array_equal(found.tree[key[0]][source], found.tree[key[2]][target]), "no edge between trees"
        ends = found.node[key[0]][source[mine]], found.node[key[2]][target[mine]]
        edges[key] = list(zip(each.slot[mine].tolist(), *(end.tolist() for end in ends), strict=True))
    return {**nodes, **edges}


def alone(found: HeteroSubgraph) -> HeteroSubgraph:
    """A subgraph as its only tree."""
    tree = {name: np.zeros(len(node), np.int64) for name, node in found.node.items()}
    return HeteroSubgraph(found.node, found.edges, found.num_nodes, found.num_edges, tree)


@compiling
@given(st.integers(0, 30), fanouts(), SEEDS, st.booleans(), KEYS)
def test_a_tree_is_the_sample_of_its_seed_alone(
    graph_seed: int, fanout: dict[EdgeKey, list[int]], seeds: list[int], replace: bool, key: int
) -> None:
    graphs = hetero_graphs(graph_seed)
    found = DisjointSampler(graphs, NUM_NODES, fanout, replace).sample({"paper": np.array(seeds)}, key)
    assert found.tree["paper"][: len(seeds)].tolist() == list(range(len(seeds)))
    assert found.num_nodes["paper"][0] == len(seeds)
    single = HeteroNeighborSampler(graphs, NUM_NODES, fanout, replace)
    for tree, seed in enumerate(seeds):
        assert tree_of(found, tree) == tree_of(alone(single.sample({"paper": np.array([seed])}, tree_key(key, seed))), 0)
    for name, node in found.node.items():
        assert len({*zip(node.tolist(), found.tree[name].tolist(), strict=True)}) == len(node), "a node is in a tree once"


def timed_graphs(seed: int) -> dict[EdgeKey, Graph]:
    rng, graphs = np.random.default_rng(seed), {}
    for key in EDGE_TYPES:
        count = int(rng.integers(0, 90))
        source, target = rng.integers(0, NUM_NODES[key[0]], count), rng.integers(0, NUM_NODES[key[2]], count)
        target[: count // 3] = 0
        graphs[key] = bipartite(source, target, NUM_NODES[key[2]], time=rng.integers(0, 12, count))
    return graphs


def drawn(
    graph: Graph, number: int, v: int, until: float, fanout: int, replace: bool, key: int, late: np.ndarray | None, last: bool
) -> list[int]:
    """Slots drawn at a node of a tree; late: [E], the time of each edge, None for types without."""
    slots = [s for s in range(*graph.slots(v)) if late is None or late[s] <= until]
    last = last and late is not None  # as in PyG, a type without times has a uniform sample
    if last and 0 <= fanout < len(slots):
        return sorted(sorted(slots, key=lambda s: (late[s], s))[len(slots) - fanout :])  # type: ignore[index]
    stream = Stream(numbered(key, number), v)
    if fanout < 0 or not slots or ((last or not replace) and len(slots) <= fanout):
        return slots
    if replace and not last:
        return sorted(slots[int(stream(j) * len(slots))] for j in range(fanout))
    return [slots[i] for i in distinct(stream, len(slots), fanout)]


def timed_tree(
    graphs: dict[EdgeKey, Graph],
    late: dict[EdgeKey, Any],
    fanout: dict[EdgeKey, list[int]],
    seed: int,
    until: float,
    **how: Any,
) -> dict[EdgeKey, set[tuple[int, int, int]]]:
    """(slot, source, target) of each edge of a seed's tree, by plain recursion over hops."""
    local: dict[str, dict[int, int]] = {name: {} for name in NUM_NODES}
    local["paper"][seed] = 0
    edges: dict[EdgeKey, list[tuple[int, int, int]]] = {each: [] for each in graphs}
    frontier = {name: list(nodes) for name, nodes in local.items()}
    for hop in range(len(fanout[CITES])):
        new: dict[str, list[int]] = {name: [] for name in NUM_NODES}
        for number, (each, graph) in enumerate(graphs.items()):
            for v in frontier[each[2]]:
                for s in drawn(graph, number, v, until, fanout[each][hop], late=late.get(each), **how):
                    u = int(graph.indices[s])
                    if u not in local[each[0]]:
                        local[each[0]][u] = len(local[each[0]])
                        new[each[0]].append(u)
                    edges[each].append((s, u, v))
        frontier = new
    return edges


@compiling
@given(st.integers(0, 30), fanouts(), SEEDS, st.booleans(), st.booleans(), st.sampled_from(TIMED), KEYS, st.data())
def test_trees_hold_nothing_later_than_their_time(
    graph_seed: int, fanout: Any, seeds: list[int], replace: bool, last: bool, kind: str, key: int, data: st.DataObject
) -> None:
    graphs, rng = timed_graphs(graph_seed), np.random.default_rng(graph_seed)
    limits = data.draw(st.lists(st.integers(-1, 13), min_size=len(seeds), max_size=len(seeds)))
    dtype = data.draw(st.sampled_from([np.int64, np.int32, np.float64, np.float32]))
    timed = EDGE_TYPES if kind == "edges" else (CITES,)
    of_edges = {each: graphs[each].columns["time"].astype(dtype) for each in timed} if kind != "nodes" else {}
    of_nodes = {name: rng.integers(0, 12, count).astype(dtype) for name, count in NUM_NODES.items()} if kind == "nodes" else {}
    times = Times(of_edges, of_nodes, last)
    sampler = DisjointSampler(graphs, NUM_NODES, fanout, replace, times=times)
    found = sampler.sample({"paper": np.array(seeds)}, key, {"paper": np.array(limits)})
    late = {each: of_nodes[each[0]][graph.indices] for each, graph in graphs.items()} if kind == "nodes" else of_edges
    for tree, (seed, until) in enumerate(zip(seeds, limits, strict=True)):
        edges = tree_of(found, tree)
        for each in graphs:
            assert all(late[each][s] <= until for s, _, _ in edges[each] if each in late), "nothing later than the seed"
        own = tree_key(key, seed)
        expected = timed_tree(graphs, late, fanout, seed, until, replace=replace, key=own, last=last)
        assert {each: edges[each] for each in graphs} == expected


def test_edges_without_times_are_drawn_uniformly_beside_the_latest() -> None:
    in_edges = np.arange(12), np.zeros(12, np.int64)
    graphs = {CITES: bipartite(*in_edges, 12, time=np.arange(12)), WRITES: bipartite(*in_edges, 12)}
    seed, until, drawn = {"paper": np.array([0])}, {"paper": np.array([20])}, []
    for latest in (False, True):
        times = Times({CITES: graphs[CITES].columns["time"]}, latest=latest)
        sampler = DisjointSampler(graphs, {"paper": 12, "author": 12}, [3], times=times)
        found = [sampler.sample(seed, key, until) for key in range(8)]
        drawn.append([each.edges[WRITES].slot.tolist() for each in found])
        if latest:
            assert all(each.edges[CITES].slot.tolist() == [9, 10, 11] for each in found)
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn[1]))) > 1


def test_whole_numbers_and_fractions_compare_as_numbers() -> None:
    graph = Graph.from_edges([1, 2, 3], [0, 0, 0], 4, time=np.array([2**53, 2**53 + 1, 2**53 + 2]))
    sampler = DisjointSampler({CITES: graph}, {"paper": 4}, [-1], times=Times({CITES: graph.columns["time"]}))
    for until, count in ((2**53 + 1, 2), (2**53 - 1, 0)):
        found = sampler.sample({"paper": np.array([0])}, 0, {"paper": np.array([until])})
        assert len(found.edges[CITES].slot) == count
    graph = Graph.from_edges([1, 2, 3], [0, 0, 0], 4, time=np.array([1, 2, 3]))
    sampler = DisjointSampler({CITES: graph}, {"paper": 4}, [-1], times=Times({CITES: graph.columns["time"]}))
    for moment, count in ((2.5, 2), (np.inf, 3), (-np.inf, 0), (np.nan, 0)):
        found = sampler.sample({"paper": np.array([0])}, 0, {"paper": np.array([moment])})
        assert len(found.edges[CITES].slot) == count, moment


def test_seeds_of_two_types_may_share_a_tree() -> None:
    graphs = timed_graphs(1)
    times = Times({each: graph.columns["time"] for each, graph in graphs.items()})
    sampler = DisjointSampler(graphs, NUM_NODES, [2, 2], times=times)
    seeds = {"paper": np.array([3, 3]), "author": np.array([1, 2])}
    time = {"paper": np.array([9, 4]), "author": np.array([7, 8])}
    found = sampler.sample(seeds, 0, time, {"paper": np.array([0, 1]), "author": np.array([1, 0])})
    assert {name: tree[: len(seeds.get(name, ()))].tolist() for name, tree in found.tree.items()} == {
        "author": [1, 0],
        "paper": [0, 1],
        "topic": [],
    }
    for tree, until in ((0, 8), (1, 4)):  # the earliest of a tree's seeds
        assert all(
            graphs[each].columns["time"][s] <= until for each in graphs for s, _, _ in tree_of(found, tree)[each]
        )  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    graphs = timed_graphs(0)
    with pytest.raises(ConfigError, match=r"times of paper:cites:paper must be one number for each of \d+, not int64\[3\]"):
        DisjointSampler(graphs, NUM_NODES, [1], times=Times({CITES: np.arange(3)}))
    with pytest.raises(ConfigError, match=r"times of author:writes:paper must be one number for each of 14"):
        DisjointSampler(graphs, NUM_NODES, [1], times=Times(of_nodes={"author": np.array(["a"] * 14)}))
    times = Times(of_nodes={"paper": np.arange(23)})
    sampler = DisjointSampler(graphs, NUM_NODES, [1], times=times)
    with pytest.raises(InputError, match="sampling by time needs the time of every seed, one for each of 2 'paper' nodes"):
        sampler.sample({"paper": np.arange(2)}, 0, {"paper": np.arange(3)})
    with pytest.raises(BudgetError, match="the largest hub is"):
        DisjointSampler(graphs, NUM_NODES, [-1, -1], max_bytes=1000).sample({"paper": np.arange(9)}, 0)
    assert {WRITES, REV_WRITES, ABOUT} < set(graphs)
