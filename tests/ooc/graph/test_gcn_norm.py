"""GCN's normalisation: by its definition in float64, one rule in every place that sums."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from ooc.graph.aggregation import PreAggregation, RowDecoder, gathered
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.edge_tiles import SlotReader, Tiles, count_entries, out_edges
from ooc.models.builders import full_blocks
from ooc.models.convs import propagated
from ooc.runtime.range_io import MemoryRows
from ooc.sampling import NeighborSampler
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.graph import Graph
from tests.ooc.graphs import hub_graph

N, F = 120, 7
ODD = {
    "ordinary": (),
    "negative": (-1.0, -0.25, -8.0),
    "zero": (0.0,),
    "infinite": (np.inf, -np.inf),
    "not a number": (np.nan,),
}


def graph_of(odd: tuple[float, ...]) -> Graph:
    """With a hub, nodes without in-edges, duplicates and self-loops; a few weights are `odd`."""
    src, dst = hub_graph(N, loops=True).numpy()
    rng = np.random.default_rng(1)
    weight = rng.integers(1, 16, len(src)).astype(np.float32) / 8
    for number, value in enumerate(odd):
        weight[rng.choice(len(weight), 40 if value <= 0 else 5, replace=False)] = value
        weight[np.flatnonzero(src == dst)[number]] = value
    return Graph.from_edges(src, dst, N, weight=weight)


def by_definition(graph: Graph, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64[N, N], [N]: GCN's factor of every edge, summed, and of each node's own row."""
    weight = graph.columns["weight"].astype(np.float64)
    degree, loop = np.zeros(N), np.ones(N)
    for v in range(N):
        for slot in range(*graph.slots(v)):
            if graph.indices[slot] == v:
                loop[v] = weight[slot]
            else:
                degree[v] += weight[slot]
    degree += loop
    counts = np.isfinite(degree) & (degree > 0)
    factor = np.where(counts, np.abs(np.where(counts, degree, 1)) ** -0.5, 0)
    matrix = np.zeros((N, N))
    for v in range(N):
        for slot in range(*graph.slots(v)):
            source = graph.indices[slot]
            if source != v and counts[source] and counts[v]:
                matrix[v, source] += factor[source] * factor[v] * weight[slot]
    return matrix, np.where(counts, np.where(counts, loop, 0) * factor**2, 0)


def tiles_of(graph: Graph) -> tuple[Tiles, Tiles]:
    """The edges by piece of sources, and turned round."""
    slots, made = SlotReader(graph, ArrayRows(graph.indices), ArrayRows(graph.columns["weight"])), []
    for reverse in (False, True):
        grid = count_entries(slots, 32, 16, reverse=reverse)
        tiles = Tiles(grid, *(MemoryRows.create((grid.size,), kind) for kind in ("int64", "float32")))
        tiles.fill(out_edges(made[0]) if reverse else slots.parts(), lambda done: None)
        made.append(tiles)
    return made[0], made[1]


def summed(tiles: Tiles, graph: Graph, x: np.ndarray) -> np.ndarray:
    out = np.full((N, F), np.nan, x.dtype)
    with closing(SumKernel(tiles, graph, "gcn", 2, x.dtype)) as kernel:
        kernel.add(ArrayRows(x), RowDecoder.of(Encoding.plain(np.dtype(np.float32))), 0, N, out)
        kernel.scale(0, out)
    return out


@pytest.mark.parametrize("odd", ODD)
def test_one_rule_wherever_gcn_sums(odd: str) -> None:
    graph = graph_of(ODD[odd])
    x = np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)
    matrix, own = by_definition(graph, x)
    assert odd == "ordinary" or odd == "zero" or not own.all()
    close: dict[str, Any] = {"rtol": 3e-5, "atol": 3e-5}

    forward, backward = tiles_of(graph)
    for rows in (x, x.astype(np.float64)):
        np.testing.assert_allclose(summed(forward, graph, rows), matrix @ rows, **close)
        np.testing.assert_allclose(summed(backward, graph, rows), matrix.T @ rows, **close)

    target = np.repeat(np.arange(N), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    block = full_blocks(edge_index, N, 1, torch.from_numpy(np.array(graph.columns["weight"])))[0]
    given = torch.from_numpy(x).requires_grad_()
    out = propagated(given, block, rescale=True)
    np.testing.assert_allclose(out.detach().numpy(), matrix @ x + own[:, None] * x, **close)
    out.sum().backward()
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), (matrix.T.sum(1) + own)[:, None].repeat(F, 1), **close)

    found = NeighborSampler(graph, [-1]).sample(np.arange(N), 3)
    neighbor, self_row = np.full((2, N, F), np.nan, np.float32)
    factors = PreAggregation("gcn", 8).factors(graph, found)
    gathered(x, RowDecoder.of(Encoding.plain(x.dtype)), found.node, found, factors, neighbor, self_row)
    np.testing.assert_allclose(neighbor, matrix @ x, **close)
