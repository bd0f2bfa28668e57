"""The fewest bytes that LABOR can read at any batch dependency: pages that one shared scan needs, if numbers never change.

    python -m tools.bench.sampled.labor_pages --kind rmat --fanout 10,10      # 8 M nodes, 80 M edges: 2 GB of memory
    python -m tools.bench.sampled.labor_pages --kind uniform --fanout 10,10 --destinations 420000

Draws batches of a made graph (`tools.graphs.make_graph`; rmat in order of out-degrees, as by `ooc ingest --order degree`) in
RAM until a scan's memory is full: neighbor sampling has an aggregate for each destination of each batch, LABOR one for each
distinct destination, as all batches draw alike. Prints JSON: of each the batches of a scan, the distinct nodes that they want,
and the MB of their pages, a batch; and the MB of the pages of the scan's seeds alone, which every sampler needs.
"""

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling import NeighborSampler
from ooc.sampling.labor import Labor, batch_key
from ooc.stores.graph import Graph
from ooc.stores.ingest.partition import by_degree, count_ends
from ooc.stores.jit import kernel
from tools.bench.lib.pages import PAGE_BYTES, pages_of
from tools.bench.sampled.steps import seeds_of_run
from tools.graphs.make_graph import edge_chunks

NEVER = 2**31 - 1
"""K of numbers that never change"""


def made(kind: str, nodes: int, edges: int, seed: int = 0) -> Graph:
    """The graph of `make_graph` in RAM, each node's in-edges in their order; of rmat renumbered by out-degree."""
    src, dst, at = np.empty(edges, np.int32), np.empty(edges, np.int32), 0
    for chunk in edge_chunks(kind, nodes, edges, 1, seed):
        stop = at + len(chunk["src"])
        src[at:stop], dst[at:stop], at = chunk["src"], chunk["dst"], stop
    if kind == "rmat":
        degree, new = np.zeros(nodes, np.int32), np.empty(nodes, np.int32)
        count_ends(src, degree)
        new[by_degree(degree)] = np.arange(nodes, dtype=np.int32)
        src, dst = new[src], new[dst]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=nodes))])
    indices = np.empty(edges, np.int32)
    _by_destination(src, dst, indptr[:-1].copy(), indices)
    return Graph(indptr, indices)


@kernel
def _by_destination(
    src: NDArray[np.int32], dst: NDArray[np.int32], place: NDArray[np.int64], indices: NDArray[np.int32]
) -> None:
    for e in range(len(src)):
        indices[place[dst[e]]] = src[e]
        place[dst[e]] += 1


def scan(
    graph: Graph, fanout: list[int], labor: Labor | None, batch_size: int, destinations: int, row_bytes: int
) -> dict[str, Any]:
    """What one scan needs that has aggregates for so many destinations; labor: its numbers never change."""
    sampler = NeighborSampler(graph, fanout, labor=labor)
    order = seeds_of_run(graph.num_nodes, batch_size, graph.num_nodes // batch_size, 0).reshape(-1, batch_size)
    made_for, wanted = np.zeros(graph.num_nodes, np.bool_), np.zeros(graph.num_nodes, np.bool_)
    batches = aggregates = drawn = 0
    for seeds in order:
        how = key(0, Purpose.SAMPLE, 0, batches) if labor is None else batch_key(0, 0, 0, NEVER)
        found = sampler.sample(seeds, how)
        destination = found.node[: len(found.indptr) - 1]
        aggregates += len(destination) if labor is None else len(destination) - int(made_for[destination].sum())
        if aggregates > destinations and batches:
            break
        made_for[destination], wanted[found.node] = True, True
        batches, drawn = batches + 1, drawn + len(destination)
    pages, own = (
        PAGE_BYTES * len(pages_of(rows, row_bytes)) for rows in (np.flatnonzero(wanted), np.sort(order[:batches], None))
    )
    return {
        "batches": batches,
        "nodes": int(wanted.sum()),
        "distinct destinations": round(int(made_for.sum()) / drawn, 3),
        "MB a batch": round(pages / batches / 1e6, 2),
        "MB a batch, seeds alone": round(own / batches / 1e6, 2),
    }


def main() -> None:
    """Parse the command line, draw and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["uniform", "rmat", "skewed"], default="rmat")
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--destinations", type=int, default=480_000, help="that a scan has aggregates for")
    parser.add_argument("--row-bytes", type=int, default=512, help="of a feature row")
    a = parser.parse_args()
    graph, fanout = made(a.kind, a.nodes, a.edges), [int(each) for each in a.fanout.split(",")]
    labor = Labor(layer_dependency=True, batch_dependency=NEVER)
    samplers = {"neighbor": None, "LABOR, numbers that never change": labor}
    given = a.batch_size, a.destinations, a.row_bytes
    print(json.dumps({name: scan(graph, fanout, each, *given) for name, each in samplers.items()}, indent=1))


if __name__ == "__main__":
    main()
