"""The benchmark of LABOR's batches, on a small graph."""

import pytest

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
