"""Neighbor sampling over several edge types against a plain loop, and its laws against brute force."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.hetero import EdgeKey, hetero_block_of, hetero_blocks_of
from ooc.sampling import HeteroNeighborSampler, NeighborSampler
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph
from tests.ooc.hetero_graphs import (
    ABOUT,
    CITES,
    EDGE_TYPES,
    NUM_NODES,
    REV_WRITES,
    WRITES,
    hetero_graphs,
    hetero_reference,
)

compiling = settings(deadline=None)  # the first example may compile a kernel
KEYS = st.integers(0, 2**64 - 1)


@st.composite
def fanouts(draw: st.DrawFn) -> dict[EdgeKey, list[int]]:
    hops = draw(st.integers(1, 3))
    return {key: draw(st.lists(st.integers(-1, 5), min_size=hops, max_size=hops)) for key in EDGE_TYPES}


@st.composite
def seed_nodes(draw: st.DrawFn) -> dict[str, np.ndarray]:
    types = draw(st.lists(st.sampled_from(sorted(NUM_NODES)), unique=True, min_size=1))
    return {name: np.array(draw(st.lists(st.integers(0, NUM_NODES[name] - 1), max_size=6)), np.int64) for name in types}


@compiling
@given(st.integers(0, 30), fanouts(), seed_nodes(), st.booleans(), st.booleans(), KEYS)
def test_it_gives_what_the_plain_loop_gives(
    graph_seed: int, fanout: dict[EdgeKey, list[int]], seeds: dict[str, np.ndarray], replace: bool, weighted: bool, key: int
) -> None:
    graphs = hetero_graphs(graph_seed, weighted=(CITES, REV_WRITES))
    weight = "weight" if weighted else None
    found = HeteroNeighborSampler(graphs, NUM_NODES, fanout, replace, weight).sample(seeds, key)
    expected = hetero_reference(
        graphs, NUM_NODES, fanout, {name: ids.tolist() for name, ids in seeds.items()}, key, replace, weight
    )
    assert {name: ids.tolist() for name, ids in found.node.items()} == expected.node
    assert {name: list(counts) for name, counts in found.num_nodes.items()} == expected.num_nodes
    assert {each: list(counts) for each, counts in found.num_edges.items()} == expected.num_edges
    for each, edges in found.edges.items():
        assert edges.slot.tolist() == expected.slot[each]
        assert edges.edge_index().tolist() == [expected.source[each], expected.target[each]]
        assert (edges.stands_for is not None) == (weighted and each in (CITES, REV_WRITES))


@compiling
@given(st.integers(0, 30), fanouts(), seed_nodes(), KEYS)
def test_laws_of_a_subgraph(graph_seed: int, fanout: dict[EdgeKey, list[int]], seeds: dict[str, np.ndarray], key: int) -> None:
    graphs = hetero_graphs(graph_seed)
    seeds = {name: np.unique(ids) for name, ids in seeds.items()}
    found = HeteroNeighborSampler(graphs, NUM_NODES, fanout).sample(seeds, key)
    assert list(found.node) == list(NUM_NODES)
    assert list(found.edges) == list(EDGE_TYPES)
    for name, node in found.node.items():
        assert len(np.unique(node)) == len(node) == sum(found.num_nodes[name]), "each node once"
        assert np.array_equal(node[: found.num_nodes[name][0]], seeds.get(name, []))
    for each, edges in found.edges.items():
        graph, (source, _, target) = graphs[each], each
        local = edges.edge_index()
        owner = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
        assert np.array_equal(graph.indices[edges.slot], found.node[source][local[0]]), "every edge drawn exists"
        assert np.array_equal(owner[edges.slot], found.node[target][local[1]])
        assert len(np.unique(edges.slot)) == len(edges.slot), "and is drawn once"
        expanded = sum(found.num_nodes[target][:-1])
        assert len(edges.indptr) == expanded + 1
        hop = np.repeat(np.arange(len(fanout[each])), found.num_nodes[target][:-1])
        limit, degree = np.array(fanout[each])[hop], graph.degree(found.node[target][:expanded])
        assert np.array_equal(np.diff(edges.indptr), np.where(limit < 0, degree, np.minimum(degree, limit)))


def reached(graphs: dict[EdgeKey, Graph], seeds: dict[str, np.ndarray], hops: int) -> dict[str, set[int]]:
    """All nodes within so many hops, by type."""
    nodes = {name: set(map(int, seeds.get(name, ()))) for name in NUM_NODES}
    for _ in range(hops):
        before = {name: set(found) for name, found in nodes.items()}
        for (source, _, target), graph in graphs.items():
            for v in before[target]:
                nodes[source] |= set(map(int, graph.indices[slice(*graph.slots(v))]))
    return nodes


@compiling
@given(st.integers(0, 30), st.integers(1, 3), seed_nodes())
def test_all_neighbors_are_the_k_hop_subgraph(graph_seed: int, hops: int, seeds: dict[str, np.ndarray]) -> None:
    graphs = hetero_graphs(graph_seed)
    found = HeteroNeighborSampler(graphs, NUM_NODES, [-1] * hops).sample(seeds, 0)
    for depth in range(hops + 1):
        nodes = reached(graphs, seeds, depth)
        assert {name: set(found.node[name][: sum(found.num_nodes[name][: depth + 1])].tolist()) for name in NUM_NODES} == nodes
    expanded = reached(graphs, seeds, hops - 1)
    for each, edges in found.edges.items():
        every = {s for v in expanded[each[2]] for s in range(*graphs[each].slots(v))}
        assert set(edges.slot.tolist()) == every, "full fan-out: all edges"


def assert_one_type(graph: Graph, fanout: Sequence[int], seeds: np.ndarray, replace: bool, weight: str | None) -> None:
    plain = NeighborSampler(graph, fanout, replace, weight).sample(seeds, 11)
    typed = HeteroNeighborSampler({CITES: graph}, {"paper": graph.num_nodes}, fanout, replace, weight)
    found = typed.sample({"paper": seeds}, 11)
    edges = found.edges[CITES]
    pairs = [(found.node["paper"], plain.node), (edges.slot, plain.slot), (edges.source, plain.source)]
    for mine, its in [*pairs, (edges.indptr, plain.indptr)]:
        assert np.array_equal(mine, its)
    assert (found.num_nodes["paper"], found.num_edges[CITES]) == (plain.num_nodes, plain.num_edges)
    assert found.nbytes == plain.nbytes
    if plain.stands_for is not None:
        assert edges.stands_for is not None
        assert edges.stands_for.tobytes() == plain.stands_for.tobytes()


@pytest.mark.parametrize(("replace", "weight"), [(False, None), (True, None), (False, "weight"), (True, "weight")])
def test_one_type_has_the_bits_of_the_homogeneous_sampler(replace: bool, weight: str | None) -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 300, (2, 4000))
    graph = Graph.from_edges(source, target, 300, weight=rng.exponential(size=4000))
    assert_one_type(graph, [5, -1, 3], rng.integers(0, 300, 20), replace, weight)


def test_edge_types_of_the_same_edges_are_drawn_apart() -> None:
    graph = Graph.from_edges(np.arange(1000) % 100, np.zeros(1000, int), 100)
    graphs = {("v", "one", "v"): graph, ("v", "other", "v"): graph}
    found = HeteroNeighborSampler(graphs, {"v": 100}, [10]).sample({"v": np.array([0])}, 5)
    one, other = (edges.slot.tolist() for edges in found.edges.values())
    assert one != other


def test_a_layers_blocks_are_prefixes_that_hold_what_the_layer_needs() -> None:
    graphs = hetero_graphs(3)
    found = HeteroNeighborSampler(graphs, NUM_NODES, [-1, 2, 3]).sample({"paper": np.array([0, 5]), "topic": np.array([0])}, 7)
    edge_index = {each: torch.from_numpy(edges.edge_index()) for each, edges in found.edges.items()}
    layers = hetero_blocks_of(hetero_block_of(graphs, found, edge_index, {}), found.num_nodes, found.num_edges)
    assert len(layers) == 3
    rows = {name: len(node) for name, node in found.node.items()}
    for layer, block in enumerate(layers):
        assert block.num_dst == {name: sum(counts[: 3 - layer]) for name, counts in found.num_nodes.items()}
        for each, own in block.blocks.items():
            source, _, target = each
            count = sum(found.num_edges[each][: 3 - layer])
            assert torch.equal(own.edge_index, edge_index[each][:, :count])
            assert not count or own.edge_index.data_ptr() == edge_index[each].data_ptr()
            assert (own.num_src, own.num_dst) == (rows[source], block.num_dst[target])
            assert not count or (own.edge_index[0].max() < own.num_src and own.edge_index[1].max() < own.num_dst)
            assert own.indptr.tolist() == found.edges[each].indptr[: own.num_dst + 1].tolist()
            assert own.degree.tolist() == graphs[each].degree(found.node[target][: own.num_dst]).tolist()
        rows = block.num_dst
    assert rows == {"author": 0, "paper": 2, "topic": 1}


def test_types_that_are_not_reached_are_empty_keys() -> None:
    found = HeteroNeighborSampler(hetero_graphs(1), NUM_NODES, [0, 0]).sample({"topic": np.array([1])}, 0)
    assert {name: node.tolist() for name, node in found.node.items()} == {"author": [], "paper": [], "topic": [1]}
    assert found.num_nodes == {"author": (0, 0, 0), "paper": (0, 0, 0), "topic": (1, 0, 0)}
    assert all(found.num_edges[each] == (0, 0) and len(edges.slot) == 0 for each, edges in found.edges.items())
    assert len(found.edges[ABOUT].indptr) == 2
    assert len(found.edges[WRITES].indptr) == 1


@pytest.mark.parametrize(
    ("fanout", "words"),
    [
        ({**{key: [1] for key in EDGE_TYPES}, ("a", "b", "c"): [1]}, "a:b:c, which the graph has not: it has paper"),
        ({CITES: [1]}, "no fan-out is given for the edge type author:writes:paper: give one for each, zeros"),
        ({**{key: [1] for key in EDGE_TYPES}, ABOUT: [1, 2]}, "as many hops for all edge types"),
        ([2, -3], "fan-out [2, -3] is invalid"),
        ([], "fan-out [] is invalid"),
    ],
)
def test_fan_outs_that_do_not_fit_are_refused(fanout: dict[EdgeKey, list[int]] | list[int], words: str) -> None:
    with pytest.raises(ConfigError, match="fan-out") as error:
        HeteroNeighborSampler(hetero_graphs(0), NUM_NODES, fanout)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_arguments_that_do_not_fit_are_refused() -> None:
    graphs = hetero_graphs(0)
    with pytest.raises(ConfigError, match="no edge column 'weight' to sample by in any edge type: paper:cites:paper"):
        HeteroNeighborSampler(graphs, NUM_NODES, [1], weight="weight")
    with pytest.raises(ConfigError, match=r"paper:cites:paper has 23 targets, but there are 9 'paper' nodes"):
        HeteroNeighborSampler(graphs, NUM_NODES | {"paper": 9}, [1])
    with pytest.raises(ConfigError, match="paper:about:topic ends at no node type: there are author, paper"):
        HeteroNeighborSampler(graphs, {"author": 14, "paper": 23}, [1])
    sampler = HeteroNeighborSampler(graphs, NUM_NODES, [1])
    with pytest.raises(InputError, match=r"there are no 'venue' nodes: the graph has author, paper, topic"):
        sampler.sample({"venue": np.array([0])}, 0)
    with pytest.raises(InputError, match=r"seed 6 at position 1 is not a node: the graph has 'topic' nodes 0\.\.5"):
        sampler.sample({"topic": np.array([0, 6])}, 0)


def test_a_batch_over_its_memory_is_refused_before_it_is_made() -> None:
    graphs = hetero_graphs(0, edges=400)
    need = {"paper": np.arange(20)}
    HeteroNeighborSampler(graphs, NUM_NODES, [-1, -1], max_bytes=10**7, row_bytes={"paper": 1000}).sample(need, 0)
    sampler = HeteroNeighborSampler(graphs, NUM_NODES, [-1, -1], max_bytes=10**7, row_bytes={"paper": 10**6})
    with pytest.raises(BudgetError, match=r"hop 1 of fan-out \[-1, -1\] samples .* edges of .*; the largest hub is '.*' node"):
        sampler.sample(need, 0)
