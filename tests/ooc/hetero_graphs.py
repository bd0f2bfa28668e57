"""Small graphs of several types and a brute-force sampler for them: PyG's loop in plain Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ooc.graph.hetero import EdgeKey
from ooc.runtime.keyed_random import numbered
from ooc.stores.graph import Graph
from tests.ooc.sampling_reference import draw

NUM_NODES = {"author": 14, "paper": 23, "topic": 6}
CITES: EdgeKey = ("paper", "cites", "paper")
WRITES: EdgeKey = ("author", "writes", "paper")
REV_WRITES: EdgeKey = ("paper", "rev_writes", "author")
ABOUT: EdgeKey = ("paper", "about", "topic")
EDGE_TYPES = (CITES, WRITES, REV_WRITES, ABOUT)
"""Topics are only reached as seeds: no edge starts at one"""


def bipartite(
    source: np.ndarray, target: np.ndarray, num_targets: int, weight: np.ndarray | None = None, time: np.ndarray | None = None
) -> Graph:
    """The CSC of edges (source[i], target[i]), slots in the order of time, then of input, within a target."""
    order = np.argsort(target, kind="stable") if time is None else np.lexsort((time, target))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=num_targets))])
    columns = {"edge_id": order} | ({} if weight is None else {"weight": weight[order].astype(np.float32)})
    columns |= {} if time is None else {"time": time[order]}
    return Graph(indptr, source[order].astype(np.int32), columns)


def hetero_graphs(
    seed: int, edges: int = 60, weighted: Sequence[EdgeKey] = (), num_nodes: Mapping[str, int] = NUM_NODES
) -> dict[EdgeKey, Graph]:
    """Random edges of each type, with duplicates, isolated nodes, a hub, and an edge type that may be empty."""
    rng, graphs = np.random.default_rng(seed), {}
    for key in EDGE_TYPES:
        count = int(rng.integers(0, edges)) if edges else 0
        source, target = rng.integers(0, num_nodes[key[0]], count), rng.integers(0, max(1, num_nodes[key[2]] - 2), count)
        target[: count // 4] = 0
        weight = rng.exponential(size=count) * (rng.random(count) < 0.8) if key in weighted else None
        graphs[key] = bipartite(source, target, num_nodes[key[2]], weight)
    return graphs


@dataclass
class Reference:
    """What the plain loop gives: nodes by type, edges by type as lists in the order they were drawn."""

    node: dict[str, list[int]]
    source: dict[EdgeKey, list[int]] = field(default_factory=dict)
    target: dict[EdgeKey, list[int]] = field(default_factory=dict)
    slot: dict[EdgeKey, list[int]] = field(default_factory=dict)
    num_nodes: dict[str, list[int]] = field(default_factory=dict)
    num_edges: dict[EdgeKey, list[int]] = field(default_factory=dict)


def hetero_reference(
    graphs: Mapping[EdgeKey, Graph],
    num_nodes: Mapping[str, int],
    fanout: Mapping[EdgeKey, Sequence[int]],
    seeds: Mapping[str, Sequence[int]],
    key: int,
    replace: bool = False,
    weight: str | None = None,
) -> Reference:
    """The subgraph `HeteroNeighborSampler` must give."""
    found = Reference({name: list(seeds.get(name, ())) for name in num_nodes})
    local: dict[str, dict[int, int]] = {name: {} for name in num_nodes}
    for name, nodes in found.node.items():
        found.num_nodes[name] = [len(nodes)]
        for i, seed in enumerate(nodes):
            local[name].setdefault(seed, i)
    for each in graphs:
        found.source[each], found.target[each], found.slot[each], found.num_edges[each] = [], [], [], []
    for hop in range(len(next(iter(fanout.values())))):
        stop = {name: len(nodes) for name, nodes in found.node.items()}
        for number, (each, graph) in enumerate(graphs.items()):
            source, _, target = each
            before, column = len(found.slot[each]), graph.columns.get(weight) if weight else None
            for i in range(stop[target] - found.num_nodes[target][-1], stop[target]):
                own = numbered(key, number)
                for s in draw(graph, found.node[target][i], fanout[each][hop], replace, column, own):
                    u = int(graph.indices[s])
                    if u not in local[source]:
                        local[source][u] = len(found.node[source])
                        found.node[source].append(u)
                    found.source[each].append(local[source][u])
                    found.target[each].append(i)
                    found.slot[each].append(s)
            found.num_edges[each].append(len(found.slot[each]) - before)
        for name, nodes in found.node.items():
            found.num_nodes[name].append(len(nodes) - stop[name])
    return found
