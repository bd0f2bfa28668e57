"""The benchmark of a graph shaped as ogbn-mag: its graph, its clocks, and PyG's hops out of edges."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.stores.dataset import Dataset
from tools.bench.sampled import hetero
from tools.graphs.mag import EDGES, NODES, make_mag, reverse_of

SCALE = 0.001


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mag") / "mag.ooc"
    make_mag(path, SCALE)
    return path


@pytest.fixture(scope="module")
def ds(store: Path) -> Iterator[Dataset]:
    with Dataset.open(store) as opened:
        yield opened


def test_the_graph_has_the_shape_of_ogbn_mag(ds: Dataset) -> None:
    assert {name: ds.nodes(name).num_nodes for name in ds.node_types} == {
        name: max(10, int(count * SCALE)) for name, count in NODES.items()
    }
    assert set(ds.edge_types) == {each for key in EDGES for each in (key, reverse_of(key))}
    for key, ends in EDGES.items():
        graph, back = ds.edges(key).graph, ds.edges(reverse_of(key)).graph
        assert graph.num_edges == back.num_edges == int(ends.edges * SCALE)
        degree = np.bincount(graph.indices, minlength=graph.num_sources)
        np.testing.assert_array_equal(degree, np.diff(back.indptr))
    widths = {name: ds.nodes(name).num_features for name in ds.node_types}
    assert widths == {"author": 128, "field_of_study": 0, "institution": 0, "paper": 128}
    cited = np.sort(np.diff(ds.edges(("paper", "cites", "paper")).graph.indptr))[::-1]
    assert cited[: len(cited) // 10].sum() > 0.3 * cited.sum(), "a tenth of the papers has most of the citations"


def test_hops_out_of_edges_are_those_of_the_sampler(ds: Dataset) -> None:
    class Adjacency:
        def __init__(self, edge_index: torch.Tensor) -> None:
            self.edge_index = edge_index

        def coo(self) -> tuple[Any, Any, None]:
            return self.edge_index[1], self.edge_index[0], None

    batch = next(iter(NeighborLoader(ds, [4, 3], ("paper", "train"), batch_size=10, seed=0)))
    found = HeteroData()
    for name in batch.node_types:
        found[name].num_nodes = batch[name].num_nodes
    for key in batch.edge_types:
        found[key].adj_t = Adjacency(batch[key].edge_index)
    edges, nodes, per_hop = hetero.by_hop(found, 10, 2)
    assert nodes == {name: batch[name].num_sampled_nodes for name in batch.node_types}
    assert per_hop == {key: batch[key].num_sampled_edges for key in batch.edge_types}
    assert all(torch.equal(edges[key], batch[key].edge_index) for key in edges)


def test_seconds_leave_out_the_warm_up() -> None:
    found = hetero.timed([0.0, 5.0, 6.0, 7.0, 10.0], warm_up=1)
    assert found == {"seconds_per_batch": 5 / 3, "median_seconds": 1.0, "with_first_fill": 2.5}


def test_losses_are_compared_to_the_bit() -> None:
    runs = {arm: [{"losses": [0.5, 0.25]}] for arm in (hetero.OOC_RAM, hetero.OOC_DISK)}
    assert hetero.same_losses(runs) is True
    assert hetero.same_losses(runs | {hetero.OOC_DISK: [{"losses": [0.5, 0.26]}]}) is False
    assert hetero.same_losses({hetero.OOC_RAM: runs[hetero.OOC_RAM]}) is None


@pytest.mark.slow
def test_a_run_in_ram_has_a_loss_and_a_time_a_batch(store: Path, tmp_path: Path) -> None:
    settings = {"fanout": "4,3", "batch_size": 64, "hidden": 16, "lr": 0.01, "batches": 4, "warm_up": 1, "seed": 0}
    a = Namespace(arm=hetero.OOC_RAM, work=tmp_path, store=store, limit="", **settings)
    found = hetero.by_ooc(a)
    assert len(found["losses"]) == 4
    assert 0 < found["median_seconds"] < found["seconds_per_batch"] * 4
