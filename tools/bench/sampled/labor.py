"""LABOR beside neighbor sampling on a made graph: nodes and edges of a batch, and what drawing costs.

    python -m tools.bench.sampled.labor                          # 1 M nodes of 50 in-edges, about 1 GB of memory
    python -m tools.bench.sampled.labor --nodes 100000 --seeds 256

The graph is shaped as ogbn-products: in-degrees are log-normal with a mean of 50, and most sources are of a node's community.
Prints JSON: for each sampler the distinct nodes and the edges of a batch, the difference in nodes to neighbor sampling, and the
seconds of a batch by one thread in RAM; and for in-degrees of 10 and 50 the nanoseconds of a draw, an in-edge.
"""

import argparse
import json
import time
from typing import Any

import numpy as np

from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling import NeighborSampler
from ooc.sampling.labor import Labor
from ooc.stores.graph import Graph

SAMPLERS: dict[str, Labor | None] = {
    "neighbor": None,
    "labor": Labor(),
    "labor, layer dependency": Labor(layer_dependency=True),
    "labor, importance 1": Labor(importance=1),
    "labor, importance *": Labor(importance="*"),
}
_AT_ONCE = 2**22


def made(num_nodes: int, degree: float = 50, community: int = 20_000, within: float = 0.9, seed: int = 0) -> Graph:
    """A graph whose nodes have about `degree` in-edges, and `within` of these from their own `community` of nodes."""
    rng = np.random.default_rng(seed)
    degrees = np.minimum(rng.lognormal(np.log(degree) - 0.5, 1.0, num_nodes), num_nodes // 10).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    target, indices = np.repeat(np.arange(num_nodes, dtype=np.int32), degrees), np.empty(indptr[-1], np.int32)
    for start in range(0, len(indices), _AT_ONCE):
        own = target[start : start + _AT_ONCE]
        drawn, first = rng.random(len(own)), own // community * community
        inside = np.minimum(first + (drawn * community).astype(np.int64), num_nodes - 1)
        indices[start : start + _AT_ONCE] = np.where(
            rng.random(len(own)) < within, inside, (drawn * num_nodes).astype(np.int64)
        )
    return Graph(indptr, indices)


def counts(graph: Graph, fanout: list[int], seeds: int, batches: int) -> dict[str, dict[str, Any]]:
    """Of each sampler what a batch has, on average."""
    order, found = np.random.default_rng(1).permutation(graph.num_nodes), dict[str, dict[str, Any]]()
    for name, labor in SAMPLERS.items():
        sampler = NeighborSampler(graph, fanout, labor=labor)
        sampler.sample(order[:1], 0)  # compiles
        nodes, edges, begun = [], [], time.perf_counter()
        for step in range(batches):
            batch = sampler.sample(order[step * seeds : (step + 1) * seeds], key(0, Purpose.SAMPLE, 0, step))
            nodes.append(len(batch.node))
            edges.append(len(batch.source))
        seconds = (time.perf_counter() - begun) / batches
        found[name] = {"nodes": int(np.mean(nodes)), "edges": int(np.mean(edges)), "seconds": round(seconds, 3)}
        found[name]["nodes_less"] = round(1 - found[name]["nodes"] / found["neighbor"]["nodes"], 3)
    return found


def draws(degree: int, num_nodes: int, fanout: int = 5) -> dict[str, float]:
    """Nanoseconds of drawing at a node of so many in-edges, for each of these, in RAM and by one thread: the least of five."""
    indices = np.random.default_rng(0).integers(0, num_nodes, num_nodes * degree, np.int32)
    graph, found = Graph(np.arange(num_nodes + 1) * degree, indices), {}
    seeds = np.random.default_rng(1).permutation(num_nodes)[: num_nodes // 10]
    for name in ("neighbor", "labor"):
        sampler, taken = NeighborSampler(graph, [fanout], labor=SAMPLERS[name]), []
        for turn in range(6):
            builder = sampler.begin(seeds)
            need = sampler.need(builder, 0)
            builder.edges.grow(need.num_edges, need.num_expanded)
            begun = time.perf_counter()
            sampler.draw_edges(builder.nodes, builder.edges, 0, turn, degree)
            taken.append(time.perf_counter() - begun)
        found[name] = round(min(taken[1:]) / len(seeds) / degree * 1e9, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 10, 10])
    parser.add_argument("--seeds", type=int, default=1024, help="of a batch")
    parser.add_argument("--batches", type=int, default=3)
    a = parser.parse_args()
    found = counts(made(a.nodes), a.fanout, a.seeds, a.batches)
    print(json.dumps({"batch": found, "draw_ns": {str(degree): draws(degree, a.nodes) for degree in (10, 50)}}, indent=1))


if __name__ == "__main__":
    main()
