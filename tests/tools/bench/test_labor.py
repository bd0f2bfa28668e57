"""The benchmarks of LABOR's batches, on small graphs."""

import numpy as np
import pytest

from ooc.sampling import NeighborSampler
from ooc.sampling.labor import Labor, batch_key
from tools.bench.sampled import labor_pages
from tools.bench.sampled.labor import SAMPLERS, counts, draws, made
from tools.bench.sampled.labor_from_disk import beside


@pytest.mark.slow
def test_batches_have_fewer_nodes_with_every_sampler() -> None:
    graph = made(20_000, community=2000)
    assert 45 < graph.num_edges / 20_000 < 55
    found = counts(graph, [5, 5], seeds=128, batches=2)
    assert list(found) == list(SAMPLERS)
    nodes = [each["nodes"] for each in found.values()]
    assert nodes[0] > nodes[1] > nodes[2]
    assert nodes[1] > nodes[3] > nodes[4]
    assert found["labor"]["nodes_less"] == round(1 - nodes[1] / nodes[0], 3) > 0.1


def test_draws_are_timed() -> None:
    assert min(draws(8, 1000).values()) > 0


def test_ratios_are_to_neighbor_sampling() -> None:
    neighbor = {"bytes_per_batch": 10.0, "seconds_per_batch": 10.0}
    assert beside({"bytes_per_batch": 5.0, "seconds_per_batch": 6.0}, neighbor) == {
        "bytes": 0.5,
        "seconds": 0.6,
        "fall of seconds by that of bytes": 0.8,
    }
    assert beside({"bytes_per_batch": 0.0, "seconds_per_batch": 5.0}, neighbor | {"bytes_per_batch": 0.0}) == {
        "bytes": 1.0,
        "seconds": 0.5,
    }


@pytest.mark.parametrize("kind", ["uniform", "rmat"])
def test_a_graph_in_memory_has_the_edges_of_the_files(kind: str) -> None:
    graph = labor_pages.made(kind, 1000, 9000)
    (chunk,) = labor_pages.edge_chunks(kind, 1000, 9000, 1, 0)
    for column, found in (("dst", np.diff(graph.indptr)), ("src", np.bincount(graph.indices, minlength=1000))):
        assert sorted(found.tolist()) == sorted(np.bincount(chunk[column], minlength=1000).tolist())
    hubs_first = np.diff(np.bincount(graph.indices, minlength=1000)) <= 0
    assert hubs_first.all() == (kind == "rmat")


def test_the_pages_of_a_scan_are_those_of_the_nodes_of_its_batches() -> None:
    graph, labor = labor_pages.made("rmat", 20_000, 200_000), Labor(True, labor_pages.NEVER)
    found = labor_pages.scan(graph, [4, 4], labor, batch_size=50, destinations=1500, row_bytes=512)
    sampler, order = NeighborSampler(graph, [4, 4], labor=labor), np.random.default_rng(0).permutation(20_000)
    node: set[int] = set()
    destinations: list[int] = []
    for step in range(found["batches"] + 1):
        last = node, destinations
        batch = sampler.sample(order[step * 50 : step * 50 + 50], batch_key(0, 0, 0, 4))
        node, destinations = node | {*batch.node.tolist()}, destinations + batch.node[: len(batch.indptr) - 1].tolist()
    assert len({*last[1]}) <= 1500 < len({*destinations})
    assert found["nodes"] == len(last[0])
    assert found["distinct destinations"] == pytest.approx(len({*last[1]}) / len(last[1]), abs=1e-3)
    assert found["MB a batch"] == pytest.approx(4096e-6 * len({v // 8 for v in last[0]}) / found["batches"], abs=0.01)
    plain = labor_pages.scan(graph, [4, 4], None, batch_size=50, destinations=1500, row_bytes=512)
    assert plain["batches"] < found["batches"]
    assert plain["MB a batch"] > found["MB a batch"] > found["MB a batch, seeds alone"] > 0
