"""Every sampled edge in both directions: PyG's `subgraph_type="bidirectional"`."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ooc.graph.hetero import EdgeKey, EdgeSample, HeteroSubgraph
from ooc.runtime.memory_plan import words_for
from ooc.sampling.links import slots_of
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph

Pairs = tuple[Ids, Ids, Ids]
"""local sources, local destinations and slots of edges, int64[e] each"""


def bidirectional(
    graphs: Mapping[EdgeKey, Graph],
    reverses: Mapping[EdgeKey, EdgeKey],
    found: HeteroSubgraph,
    max_bytes: int | None = None,
) -> HeteroSubgraph:
    """Return the subgraph with the reverse of every edge, without duplicates.

    The reverse of an edge whose type is its own reverse has the edge's slot, so its id, weight and features, as in PyG. Others
    have the slot that they have in the graph of their own type, and are left out where that graph has no such edge. The edges
    of each type are by destination, over all nodes of the target type; their number is one number.

    Args:
        graphs: The topology of each edge type.
        reverses: The edge type that has an edge type's edges in the other direction; types without one stay as they are.
        found: The sampled subgraph.
        max_bytes: What it may take.

    Raises:
        BudgetError: It takes more.
    """
    sampled = {key: (edges.source, _targets(edges), edges.slot) for key, edges in found.edges.items()}
    need, edges = sum(node.nbytes for node in found.node.values()), {}
    for key, graph in graphs.items():
        count = len(sampled[key][0]) + len(sampled[reverses[key]][0] if key in reverses else ())
        need += 8 * (2 * count + len(found.node[key[2]]) + 1)
        if max_bytes is not None and need > max_bytes:
            raise BudgetError(
                f"the edges of {':'.join(key)} in both directions need {words_for(need, max_bytes)}; "
                "take a smaller batch size, fewer samples or more memory"
            )
        edges[key] = _over_all_nodes(found.edges[key], len(found.node[key[2]]))
        if key in reverses:
            back = _reversed(graph, found, key, sampled[reverses[key]], reverses[key] == key)
            edges[key] = _distinct(sampled[key], back, len(found.node[key[0]]), len(found.node[key[2]]))
    return replace(found, edges=edges, num_edges={key: (len(each.slot),) for key, each in edges.items()})


def _targets(edges: EdgeSample) -> Ids:
    """int64[e]: the local destination of each edge."""
    return np.repeat(np.arange(len(edges.indptr) - 1), np.diff(edges.indptr))


def _reversed(graph: Graph, found: HeteroSubgraph, key: EdgeKey, edges: Pairs, own: bool) -> Pairs:
    """The reverses of edges, as edges of the type `key`. own: whether these are edges of that type too."""
    target, source, slot = edges
    if own:
        return source, target, slot
    rows = found.node[key[0]][source], found.node[key[2]][target]
    slot = slots_of(np.asarray(graph.indptr), np.asarray(graph.indices), *rows)
    there = slot >= 0
    return source[there], target[there], slot[there]


def _over_all_nodes(edges: EdgeSample, targets: int) -> EdgeSample:
    """The edges, with an entry for nodes that were not expanded too."""
    missing = targets + 1 - len(edges.indptr)
    return EdgeSample(np.pad(edges.indptr, (0, missing), mode="edge"), edges.source, edges.slot, columns=edges.columns)


def _distinct(edges: Pairs, others: Pairs, sources: int, targets: int) -> EdgeSample:
    """The first edge between every two nodes, by destination and source."""
    source, target, slot = (np.concatenate(pair) for pair in zip(edges, others, strict=True))
    first = np.unique(target * max(1, sources) + source, return_index=True)[1]
    indptr = np.zeros(targets + 1, np.int64)
    np.cumsum(np.bincount(target[first], minlength=targets), out=indptr[1:])
    return EdgeSample(indptr, source[first], slot[first])
