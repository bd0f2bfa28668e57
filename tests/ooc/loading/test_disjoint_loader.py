"""NeighborLoader with trees of their own and times: PyG's fields, and nothing later than a seed's time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.graph.hetero import EdgeKey
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.stores.build import write_hetero_store, write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.graph import Graph
from tests.ooc.batches import same

N, A, E = 200, 60, 900
WRITES: EdgeKey = ("author", "writes", "paper")
CITES: EdgeKey = ("paper", "cites", "paper")


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "cites": rng.integers(0, N, (2, E)),
        "writes": np.stack([rng.integers(0, A, E), rng.integers(0, N, E)]),
        "year": rng.integers(1990, 2000, N),
        "moment": rng.random(N, np.float32),
        "x": rng.random((N, 5), np.float32),
        "time": rng.integers(0, 50, E),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    own = arrays()
    graph = Graph.from_edges(*own["cites"], N)
    path = tmp_path_factory.mktemp("disjoint") / "plain"
    write_store(
        path, graph, x=own["x"], arrays={"year": own["year"], "moment": own["moment"]}, splits={"train": np.arange(50, 120)}
    )
    with Dataset.open(path) as ds:
        yield ds


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    own = arrays()
    edges = {
        CITES: Graph.from_edges(*own["cites"], N, time=own["time"]),
        WRITES: Graph.from_edges(*own["writes"], N, num_sources=A),
    }
    nodes = {"author": {"num_nodes": A}, "paper": {"x": own["x"], "arrays": {"year": own["year"]}}}
    with Dataset.open(write_hetero_store(tmp_path_factory.mktemp("disjoint") / "typed", nodes, edges)) as ds:
        yield ds


def test_trees_are_the_batches_of_single_seeds(plain: Dataset) -> None:
    batch = next(iter(NeighborLoader(plain, [4, 3], "train", 8, disjoint=True, seed=1)))
    assert batch.batch[:8].tolist() == list(range(8))
    assert batch.n_id[:8].tolist() == list(range(50, 58))
    assert torch.equal(batch.x, torch.from_numpy(arrays()["x"])[batch.n_id])
    source, target = batch.edge_index
    assert torch.equal(batch.batch[source], batch.batch[target])
    cites = torch.from_numpy(arrays()["cites"])
    assert torch.equal(cites[0][batch.e_id], batch.n_id[source])
    assert torch.equal(cites[1][batch.e_id], batch.n_id[target])
    assert len({*zip(batch.batch.tolist(), batch.n_id.tolist(), strict=True)}) == batch.num_nodes > len(batch.n_id.unique())
    assert [block.num_dst for block in batch.blocks] == [sum(batch.num_sampled_nodes[:2]), 8]


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_no_neighbor_is_later_than_its_seed(plain: Dataset, strategy: str, memory: bool) -> None:
    with Dataset.open(plain.path, in_memory=memory) as ds:
        how: Any = {"time_attr": "year", "temporal_strategy": strategy, "seed": 1}
        batches = list(NeighborLoader(ds, [4, 3], "train", 16, **how))
        year = torch.from_numpy(arrays()["year"])
        for batch in batches:
            assert torch.equal(batch.year, year[batch.n_id])
            assert torch.equal(batch.seed_time, batch.year[: batch.batch_size])
            assert (batch.year <= batch.seed_time[batch.batch]).all()
        assert sum(len(batch.e_id) for batch in batches) > 200
        assert same(
            batches, list(NeighborLoader(plain, [4, 3], "train", 16, time_attr="year", temporal_strategy=strategy, seed=1))
        )


def test_times_ingested_as_a_column_are_times_of_nodes(plain: Dataset, tmp_path: Path) -> None:
    own = arrays()
    data = Data(torch.from_numpy(own["x"]), torch.from_numpy(own["cites"]), year=torch.from_numpy(own["year"]))
    typed = HeteroData(paper={"x": data.x, "year": data.year}, paper__cites__paper={"edge_index": data.edge_index})
    seeds, how = np.arange(50, 120), {"time_attr": "year", "temporal_strategy": "last", "seed": 1}
    expected = list(NeighborLoader(plain, [4, 3], seeds, 16, **how))
    for name, each in {"plain": data, "typed": typed}.items():
        with pytest.warns(UserWarning, match="year"):
            ooc.from_data(each, tmp_path / name).close()
    with ooc.open(tmp_path / "plain") as ds:
        assert ds.stored("year").shape == (N, 1)
        for batch, wanted in zip(NeighborLoader(ds, [4, 3], seeds, 16, **how), expected, strict=True):
            assert torch.equal(batch.n_id, wanted.n_id)
            assert torch.equal(batch.year, wanted.year)
            assert torch.equal(batch.seed_time, wanted.seed_time)
    with ooc.open(tmp_path / "typed") as ds:
        for batch, wanted in zip(NeighborLoader(ds, [4, 3], ("paper", seeds), 16, **how), expected, strict=True):
            assert torch.equal(batch["paper"].n_id, wanted.n_id)
            assert torch.equal(batch["paper"].year, wanted.year)


def test_the_last_are_the_latest(plain: Dataset) -> None:
    loader = NeighborLoader(
        plain, [3], np.arange(N), 50, time_attr="year", temporal_strategy="last", input_time=np.full(N, 1997)
    )
    year, (source, target) = arrays()["year"], arrays()["cites"]
    for k, batch in enumerate(loader):
        assert batch.seed_time.tolist() == [1997] * 50
        for i in range(50):
            found = sorted(year[source[batch.e_id[batch.edge_index[1] == i].numpy()]])
            every = sorted(each for each in year[source[target == 50 * k + i]] if each <= 1997)
            assert found == every[-3:]


def test_edges_of_types_with_times_are_limited(typed: Dataset) -> None:
    limit = np.random.default_rng(3).integers(0, 50, N)
    own = arrays()
    loader = NeighborLoader(
        typed, {CITES: [5, 5], WRITES: [2, 2]}, "paper", 20, time_attr="edge_time", input_time=torch.from_numpy(limit)
    )
    reached = 0
    for k, batch in enumerate(loader):
        paper, cites, writes = batch["paper"], batch[CITES], batch[WRITES]
        assert paper.seed_time.tolist() == limit[20 * k : 20 * k + 20].tolist()
        assert np.array_equal(cites.edge_time, own["time"][cites.e_id])
        assert (cites.edge_time <= paper.seed_time[paper.batch[cites.edge_index[1]]]).all()
        assert torch.equal(batch["author"].batch[writes.edge_index[0]], paper.batch[writes.edge_index[1]])
        assert "edge_time" not in writes
        reached += len(cites.e_id) + len(writes.e_id)
    assert reached > 500


def test_nodes_of_types_without_times_are_not_limited(typed: Dataset) -> None:
    batch = next(iter(NeighborLoader(typed, [-1], ("paper", [7, 9]), 2, time_attr="year", input_time=[0, 3000])))
    first, second = (batch["paper"].batch[batch[CITES].edge_index[1]] == tree for tree in (0, 1))
    target = arrays()["cites"][1]
    assert (int(first.sum()), int(second.sum())) == (0, int((target == 9).sum()))
    assert len(batch[WRITES].e_id) == np.isin(arrays()["writes"][1], [7, 9]).sum()


def test_a_state_knows_the_times(plain: Dataset) -> None:
    def make(**more: Any) -> NeighborLoader:
        return NeighborLoader(plain, [2], "train", 16, seed=1, **more)

    state = make(time_attr="year").state_dict()
    with pytest.raises(ConfigError, match="time_attr was 'year' and is 'moment' now"):
        make(time_attr="moment").load_state_dict(state)
    state = make(time_attr="year", input_time=np.arange(70)).state_dict()
    with pytest.raises(ConfigError, match="input_nodes was"):
        make(time_attr="year", input_time=np.arange(70) + 1).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"time_attr": "edge_time"}, "input_time must be given: the input nodes have no 'edge_time' of their own"),
        ({"time_attr": "x"}, "times must be one number a node, but 'x' of 'paper' nodes is float32[200, 5]"),
        (
            {"time_attr": "year", "input_time": [1, 2]},
            "input_time must be one number for each of 200 input nodes, not ",
        ),
        (
            {"time_attr": "born"},
            "'born' is neither an array of nodes nor the time of edges: there are x, year, time (of",
        ),
        ({"input_time": [1]}, "input_time needs time_attr"),
    ],
)
def test_bad_times_are_one_line(typed: Dataset, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match="time") as error:
        NeighborLoader(typed, [1], "paper", **arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
