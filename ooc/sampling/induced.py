"""All edges between the nodes of a batch, of every edge type: PyG's `subgraph_type="induced"`, and what HGT's sampler gives."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ooc.graph.hetero import EdgeKey, EdgeSample, HeteroSubgraph
from ooc.runtime.memory_plan import words_for
from ooc.sampling.kernels import LOCAL_BITS, home
from ooc.sampling.neighbor import damaged_slot
from ooc.sampling.node_table import Table
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel
from ooc.stores.prefetch import AHEAD, prefetch

_LOCAL_MASK = (1 << LOCAL_BITS) - 1
_NONE = np.empty(0, np.int64)


def induced(graphs: Mapping[EdgeKey, Graph], found: HeteroSubgraph, max_bytes: int | None = None) -> HeteroSubgraph:
    """Return the subgraph with all edges between its nodes in place of those that were sampled.

    The edges of each type are by destination, over all nodes of the target type, then by slot; their number is one number, as
    they have no hops. Raises BudgetError if they take more than `max_bytes`, StoreError if the topology is damaged.
    """
    edges: dict[EdgeKey, EdgeSample] = {}
    tables: dict[str, Table] = {}
    need = sum(node.nbytes for node in found.node.values())
    for key, graph in graphs.items():
        source, _, target = key
        if source not in tables:
            tables[source] = Table()
            tables[source].refill(len(found.node[source]), found.node[source], len(found.node[source]))
        count = _induce(graph, found.node[target], tables[source], _NONE, _NONE, _NONE)
        need += 8 * (2 * count + len(found.node[target]) + 1)
        if max_bytes is not None and need > max_bytes:
            raise BudgetError(
                f"the {count} edges of {':'.join(key)} between the nodes of a batch need {words_for(need, max_bytes)}; "
                "take a smaller batch size, fewer samples or more memory"
            )
        indptr = np.zeros(len(found.node[target]) + 1, np.int64)
        own, slot = np.empty(count, np.int64), np.empty(count, np.int64)
        _induce(graph, found.node[target], tables[source], own, slot, indptr)
        edges[key] = EdgeSample(indptr, own, slot)
    return replace(found, edges=edges, num_edges={key: (len(each.slot),) for key, each in edges.items()})


def _induce(graph: Graph, target: Ids, table: Table, source: Ids, slot: Ids, indptr: Ids) -> int:
    """`induce` over a graph: the number of edges."""
    arrays = np.asarray(graph.indptr), np.asarray(graph.indices)
    found = int(induce(*arrays, target, table.entries, table.stamp, source, slot, indptr))
    if found < 0:
        raise damaged_slot(-1 - found)
    return found


@kernel
def induce(
    indptr: Ids, indices: AnyArray, target: Ids, table: Ids, stamp: int, source: Ids, slot: Ids, edge_indptr: Ids
) -> int:
    """Find the in-edges of `target` whose sources are in the table (see `kernels.relabel`); returns their number.

    Fills source (local ids), slot and edge_indptr[1:], unless edge_indptr is empty: then it only counts. Returns -1 - s for a
    slot s outside the graph.
    """
    mask, count = table.shape[0] - 1, 0
    for i in range(len(target)):
        first, last = indptr[target[i]], indptr[target[i] + 1]
        if first < 0 or last > len(indices):
            return -1 - first
        for s in range(first, last):
            if s + AHEAD < last:
                prefetch(table, 2 * home(int(indices[s + AHEAD]), mask))
            u = int(indices[s])
            at = home(u, mask)
            while table[at, 1] >> LOCAL_BITS == stamp and table[at, 0] != u:
                at = (at + 1) & mask
            if table[at, 1] >> LOCAL_BITS == stamp:
                if len(edge_indptr):
                    source[count] = table[at, 1] & _LOCAL_MASK
                    slot[count] = s
                count += 1
        if len(edge_indptr):
            edge_indptr[i + 1] = count
    return count
