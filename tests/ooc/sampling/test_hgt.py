"""HGT's budget sampling against a plain loop with dictionaries, and all edges between a batch's nodes against brute force."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ooc.graph.hetero import EdgeKey, HeteroSubgraph
from ooc.runtime.keyed_random import numbered
from ooc.sampling.hgt import HGTSampler
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph
from tests.ooc.hetero_graphs import CITES, EDGE_TYPES, NUM_NODES, WRITES, bipartite, hetero_graphs
from tests.ooc.sampling_reference import Stream

compiling = settings(deadline=None)  # the first example may compile a kernel
SAMPLES = st.integers(1, 3).flatmap(
    lambda hops: st.fixed_dictionaries({name: st.lists(st.integers(0, 5), min_size=hops, max_size=hops) for name in NUM_NODES})
)


def reference(
    graphs: Mapping[EdgeKey, Graph], num_samples: Mapping[str, Sequence[int]], seeds: Sequence[int], key: int
) -> dict[str, list[list[int]]]:
    """Nodes by type and iteration, with budgets in dictionaries (algorithms 1 and 2 of the paper)."""
    nodes: dict[str, list[list[int]]] = {name: [list(seeds) if name == "paper" else []] for name in NUM_NODES}
    sampled = {name: set(own[0]) for name, own in nodes.items()}
    budgets: dict[str, dict[int, float]] = {name: {} for name in NUM_NODES}
    for hop in range(len(num_samples["paper"])):
        for (source, _, target), graph in graphs.items():
            for v in nodes[target][-1]:
                first, last = graph.slots(v)
                for u in map(int, graph.indices[first:last]):
                    if u not in sampled[source]:
                        budgets[source][u] = budgets[source].get(u, 0.0) + 1.0 / (last - first)
        for number, (name, budget) in enumerate(budgets.items()):
            own = numbered(key, 1 + hop * len(budgets) + number)
            rank = {u: -math.log(1 - Stream(own, u)(0)) / value**2 for u, value in budget.items()}
            drawn = sorted(budget, key=lambda u, rank=rank: (rank[u], u))[: num_samples[name][hop]]
            nodes[name].append(drawn)
            sampled[name] |= set(drawn)
            for u in drawn:
                del budget[u]
    return nodes


def assert_induced(graphs: Mapping[EdgeKey, Graph], found: HeteroSubgraph) -> None:
    """The edges are all of the graph's between the nodes, each once, by destination and slot."""
    for each, edges in found.edges.items():
        graph, (source, _, target) = graphs[each], each
        local = {int(u): i for i, u in enumerate(found.node[source])}
        expected = [
            (s, local[int(graph.indices[s])], i)
            for i, v in enumerate(found.node[target])
            for s in range(*graph.slots(v))
            if int(graph.indices[s]) in local
        ]
        rows, columns = edges.edge_index().tolist()
        assert list(zip(edges.slot.tolist(), rows, columns, strict=True)) == expected
        assert len(edges.indptr) == len(found.node[target]) + 1
        assert found.num_edges[each] == (len(expected),)


@compiling
@given(
    st.integers(0, 30),
    SAMPLES,
    st.lists(st.integers(0, NUM_NODES["paper"] - 1), unique=True, max_size=5),
    st.integers(0, 2**64 - 1),
)
def test_it_gives_what_the_plain_loop_gives(graph_seed: int, num_samples: dict, seeds: list[int], key: int) -> None:
    graphs = hetero_graphs(graph_seed)
    found = HGTSampler(graphs, NUM_NODES, num_samples).sample({"paper": np.array(seeds, np.int64)}, key)
    expected = reference(graphs, num_samples, seeds, key)
    assert {name: node.tolist() for name, node in found.node.items()} == {
        name: [v for hop in hops for v in hop] for name, hops in expected.items()
    }
    assert found.num_nodes == {name: tuple(map(len, hops)) for name, hops in expected.items()}
    assert all(len(np.unique(node)) == len(node) for node in found.node.values())
    assert_induced(graphs, found)


def test_budgets_bound_the_numbers_of_every_type() -> None:
    graphs = hetero_graphs(4, edges=400)
    found = HGTSampler(graphs, NUM_NODES, {"author": [3, 4], "paper": [2, 2], "topic": [5, 0]}).sample(
        {"paper": np.arange(4)}, 1
    )
    assert found.num_nodes == {"author": (0, 3, 4), "paper": (4, 2, 2), "topic": (0, 0, 0)}, "nothing points from a topic"


def test_large_numbers_give_the_whole_neighborhood() -> None:
    graphs = hetero_graphs(2)
    found = HGTSampler(graphs, NUM_NODES, [100, 100]).sample({"paper": np.array([0, 3])}, 0)
    nodes = {name: set(own) for name, own in zip(NUM_NODES, ((), (0, 3), ()), strict=True)}
    for _ in range(2):
        before = {name: set(own) for name, own in nodes.items()}
        for (source, _, target), graph in graphs.items():
            nodes[source] |= {int(u) for v in before[target] for u in graph.indices[slice(*graph.slots(v))]}
    assert {name: set(node.tolist()) for name, node in found.node.items()} == nodes


def test_nodes_are_drawn_in_proportion_to_squared_budgets() -> None:
    """Node k points at k of ten seeds of one in-edge each... of a hub, so its budget is k shares, and its weight k squared."""
    target = np.concatenate([np.full(k, 0) for k in (1, 2, 3)])
    graph = bipartite(np.repeat([1, 2, 3], (1, 2, 3)), target, 5)
    sampler, counts = HGTSampler({CITES: graph}, {"paper": 5}, [1]), np.zeros(5)
    for key in range(3000):
        counts[sampler.sample({"paper": np.array([0])}, key).node["paper"][1]] += 1
    weight = np.array([1, 4, 9]) / 14
    assert stats.chisquare(counts[1:4], 3000 * weight).pvalue > 1e-4


@pytest.mark.parametrize(
    ("num_samples", "words"),
    [
        ({"paper": [1]}, "no num_samples are given for the node type 'author': give some for each of author, paper, topic, or"),
        (
            {**{name: [1] for name in NUM_NODES}, "venue": [1]},
            "for the node type 'venue', which the graph has not: it has author",
        ),
        ([1, -1], "num_samples of 'author' must be numbers of nodes per iteration, such as [512, 512], not [1, -1]"),
        ([], "must be numbers of nodes per iteration"),
        (["many"], "must be numbers of nodes per iteration"),
        ([float("nan")], "must be numbers of nodes per iteration"),
        ({"author": [1], "paper": [1, 2], "topic": [1]}, "as many iterations for all node types"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(num_samples: object, words: str) -> None:
    with pytest.raises(ConfigError, match="num_samples") as error:
        HGTSampler(hetero_graphs(0), NUM_NODES, num_samples)
    assert words in str(error.value)


def test_seeds_and_memory_that_do_not_fit_are_refused() -> None:
    graphs = hetero_graphs(0, edges=300)
    sampler = HGTSampler(graphs, NUM_NODES, [2])
    with pytest.raises(InputError, match="there are no 'venue' nodes"):
        sampler.sample({"venue": np.array([0])}, 0)
    with pytest.raises(InputError, match="must be distinct, but a 'paper' node is given twice"):
        sampler.sample({"paper": np.array([1, 1])}, 0)
    seeds = {"paper": np.arange(20)}
    with pytest.raises(BudgetError, match="a batch of HGT's sampler needs"):
        HGTSampler(graphs, NUM_NODES, [2], max_bytes=1000).sample(seeds, 0)
    with pytest.raises(BudgetError, match="a batch of HGT's sampler needs"):
        HGTSampler(graphs, NUM_NODES, [2], max_bytes=10**6, row_bytes={"paper": 10**6}).sample(seeds, 0)
    assert WRITES in EDGE_TYPES
