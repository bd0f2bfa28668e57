"""What PyG scripts and PyG's own code do with a loader, its batches and its data set."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import CachedLoader, PrefetchLoader, ZipLoader

import ooc
from ooc.graph.aggregation import PreAggregation
from ooc.stores.errors import ConfigError, InputError
from tests.conftest import MakeStore
from tests.ooc.batches import same
from tests.ooc.temporal_stores import Edges

N, E = 60, 240


@pytest.fixture
def ds(make_store: MakeStore) -> Any:
    with ooc.open(make_store(num_nodes=N, num_edges=E)) as opened:
        yield opened


def test_a_path_is_opened_and_a_graph_in_memory_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    path = make_store(num_nodes=N, num_edges=E)
    events = Edges(20, 200).store(tmp_path)
    makes: list[tuple[Any, Any, Any]] = [
        (lambda data: ooc.NeighborLoader(data, [2], seed=0), path, Data()),
        (lambda data: ooc.ClusterLoader(data, num_parts=5, seed=0), str(path), Data()),
        (lambda data: ooc.SaintLoader(data, "node", 9, sample_coverage=1, num_steps=2, seed=0), path, Data()),
        (lambda data: ooc.EventLoader(data, 40, seed=0), events, TemporalData()),
        (lambda data: ooc.SnapshotLoader(data, 40, by="count"), events, TemporalData()),
    ]
    for make, store, data in makes:
        loader = make(store)
        with ooc.open(store) as opened:
            assert same(list(loader), list(make(opened)))
        loader.data.close()
        with pytest.raises(ConfigError, match=r"Data in memory: make a store of it once, ds = ooc\.from_data"):
            make(data)
        with pytest.raises(ConfigError, match="not list"):
            make([store])


def test_batches_have_masks_of_the_splits(ds: Any) -> None:
    for loader in (ooc.NeighborLoader(ds, [2, 2], batch_size=9), ooc.ClusterLoader(ds, num_parts=5)):
        for batch in loader:
            for name in ("train", "val", "test"):
                assert torch.equal(batch[f"{name}_mask"], torch.from_numpy(np.isin(batch.n_id, ds.split(name))))
    batch = next(iter(ooc.NeighborLoader(ds, [2], split_masks=False, features=False)))
    assert not {"train_mask", "x"} & {*batch.keys()}
    assert "y" in batch
    assert "x" not in next(iter(ooc.ClusterLoader(ds, num_parts=5, features=False)))


def test_labels_of_several_classes_a_node_are_float(make_store: MakeStore) -> None:
    y = np.random.default_rng(0).integers(-1, 2, (N, 3)).astype(np.int8)
    with ooc.open(make_store(num_nodes=N, num_edges=E, y=y, task="multilabel", num_classes=3)) as ds:
        for loader in (ooc.NeighborLoader(ds, [2], batch_size=9), ooc.ClusterLoader(ds, num_parts=5)):
            for batch in loader:
                assert torch.equal(batch.y, torch.from_numpy(y[batch.n_id]).float())
        for batch in ooc.ClusterLoader(ds, num_parts=5, input_nodes="train"):
            assert (batch.y[~batch.train_mask] == -1).all()


def test_the_data_set_has_pygs_names(ds: Any) -> None:
    assert ds.num_node_features == ds.num_features == 8
    assert ds.y is ds.labels
    masks = [ds.train_mask, ds.val_mask, ds.test_mask]
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [ds.split(name).tolist() for name in ("train", "val", "test")]
    loader = ooc.NeighborLoader(ds, [3, 2], ds.train_mask, batch_size=7, drop_last=True)
    assert (loader.num_neighbors, loader.batch_size, loader.drop_last) == ([3, 2], 7, True)
    assert len(loader.dataset) == loader.num_seeds == 36
    assert len(loader) == 5


@pytest.mark.parametrize("in_memory", [False, True])
def test_calling_a_loader_makes_the_batch_of_positions(ds: Any, in_memory: bool) -> None:
    with ooc.open(ds.path, in_memory=in_memory) as opened:
        loader = ooc.NeighborLoader(opened, [-1, -1], "val", batch_size=4)
        for expected in loader:
            position = expected.input_id
            assert same(loader(position), expected)
            assert same(loader(position.tolist()), expected)
            assert same(loader(torch.isin(torch.arange(12), position)), expected)
        drawing = ooc.NeighborLoader(opened, [2, 2])
        torch.manual_seed(1)
        one, other = drawing([3, 1]), drawing([3, 1])
        torch.manual_seed(1)
        assert same(drawing([3, 1]), one)
        assert not same(one, other)
        with pytest.raises(InputError, match="position 12 is out of range: there are 12 input nodes"):
            loader([12])
        with pytest.raises(InputError, match="the mask has 13 entries for 12 input nodes"):
            loader([True] * 13)
        with pytest.raises(InputError, match="position -1 is out of range"):
            loader([3, -1])
        with pytest.raises(ConfigError, match=r"index must be a boolean mask or whole numbers .* not float64\[1\]"):
            loader([0.5])
        with pytest.raises(ConfigError, match="no single batches"):
            ooc.NeighborLoader(opened, [2], pre_aggregation=PreAggregation("mean", 8))([0])


def test_pygs_zip_loader_runs_on_loaders(ds: Any) -> None:
    loaders = [ooc.NeighborLoader(ds, [-1], name) for name in ("train", "val")]
    pairs = list(ZipLoader(loaders, batch_size=5))
    assert len(pairs) == 3
    assert [batch.n_id[: batch.batch_size].tolist() for batch in pairs[1]] == [
        ds.split(name)[5:10].tolist() for name in ("train", "val")
    ]


def test_pygs_cached_and_prefetch_loaders_run_on_loaders(ds: Any) -> None:
    def fresh() -> ooc.NeighborLoader:
        return ooc.NeighborLoader(ds, [3, 2], "train", batch_size=10, shuffle=True, seed=3)

    expected, cpu = list(fresh()), torch.device("cpu")
    cached = CachedLoader(fresh(), cpu)
    assert len(cached) == len(expected)
    first, second = list(cached), list(cached)
    assert same(first, expected)
    assert all(one is other for one, other in zip(first, second, strict=True))
    prefetched = PrefetchLoader(fresh(), device=cpu)
    assert len(prefetched) == len(expected)
    assert same(list(prefetched), expected)


def test_sampled_counts_are_those_of_pygs_example(make_store: MakeStore) -> None:
    """The graph of PyG's own test: node 7 has four sources, nodes 2 and 3 share it."""
    src, dst = np.array([2, 3, 4, 5, 7, 7, 10, 11, 12, 13]), np.array([0, 1, 2, 3, 2, 3, 7, 7, 7, 7])
    with ooc.open(make_store(num_nodes=14, src=src, dst=dst)) as ds:
        batch = next(iter(ooc.NeighborLoader(ds, [1, 2, 4], batch_size=2)))
        assert batch.num_sampled_nodes == [2, 2, 3, 4]
        assert batch.num_sampled_edges == [2, 4, 4]


def test_input_nodes_by_ones_own_ids(tmp_path: Path) -> None:
    from ooc.stores.ingest import IngestSpec, ingest

    (tmp_path / "e.csv").write_text("src,dst\n" + "".join(f"u_{i},u_{(i * 7 + 1) % 20}\n" for i in range(20)))
    ingest(IngestSpec(out=str(tmp_path / "s.ooc"), edges=str(tmp_path / "e.csv")))
    with ooc.open(tmp_path / "s.ooc") as ds:
        words = ["u_3", "u_11", "u_0"]
        for given in (words, np.array(words)):
            batch = next(iter(ooc.NeighborLoader(ds, [1], given, batch_size=3)))
            assert ds.external(batch.n_id[:3]) == words
        with pytest.raises(InputError, match="u_99"):
            ooc.NeighborLoader(ds, [1], ["u_99"])


def test_members_of_a_split_are_input_nodes_and_indices(ds: Any) -> None:
    members, ids = ds.members("train"), ds.split("train")
    loader = ooc.NeighborLoader(ds, [2], members, batch_size=100)
    assert next(iter(loader)).n_id[: len(ids)].tolist() == ids.tolist()
    assert loader.state_dict()["input_nodes"] == ooc.NeighborLoader(ds, [2], ids).state_dict()["input_nodes"]
    assert ds.y[members].tolist() == ds.y[ids].tolist()


def test_a_loader_that_was_told_its_epoch_is_there_in_its_state_and_its_pickle(ds: Any) -> None:
    loader = ooc.NeighborLoader(ds, [2], "train", batch_size=7, shuffle=True)
    list(loader)
    loader.set_epoch(5)
    assert loader.state_dict()["epoch"] == 5
    assert same(list(pickle.loads(pickle.dumps(loader))), list(loader))


def _epoch_elsewhere(pickled: bytes, queue: Any) -> None:
    loader = pickle.loads(pickled)
    queue.put([batch.n_id.tolist() for batch in loader])


def test_pickled_loaders_are_opened_again_and_go_on_where_they_stand(ds: Any, tmp_path: Path) -> None:
    opened = pickle.loads(pickle.dumps(ds))
    assert (opened.path, opened.num_nodes, opened.fingerprint) == (ds.path.absolute(), ds.num_nodes, ds.fingerprint)
    opened.close()
    makes = [
        lambda: ooc.NeighborLoader(ds, [2], "train", batch_size=7, shuffle=True),
        lambda: ooc.ClusterLoader(ds, num_parts=6, shuffle=True),
        lambda: ooc.SaintLoader(ds, "node", 9, num_steps=4, sample_coverage=1, save_dir=tmp_path / "norm"),
    ]
    for make in makes:
        loader = make()
        epoch = iter(loader)
        next(epoch)
        again = pickle.loads(pickle.dumps(loader))
        assert again.state_dict() == loader.state_dict()
        assert same(list(again), list(epoch))
        again.data.close()
    with ooc.open(Edges(20, 200).store(tmp_path)) as events:
        for stream in (ooc.EventLoader(events, 40), ooc.SnapshotLoader(events, 40, by="count")):
            again = pickle.loads(pickle.dumps(stream))
            assert same(list(again), list(stream))
            again.data.close()


@pytest.mark.slow
def test_a_spawned_process_iterates_over_a_loader_it_was_sent(ds: Any) -> None:
    loader = ooc.NeighborLoader(ds, [2], "train", batch_size=7, shuffle=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_epoch_elsewhere, args=(pickle.dumps(loader), queue))
    process.start()
    assert queue.get(timeout=120) == [batch.n_id.tolist() for batch in loader]
    process.join()


def test_training_nodes_that_come_first_in_the_input_are_said(make_store: MakeStore) -> None:
    splits = {"train": np.arange(10), "val": np.arange(10, 20), "test": np.arange(20, N)}
    with ooc.open(make_store(num_nodes=N, num_edges=E, splits=splits)) as ds:
        with pytest.warns(UserWarning, match="all 10 training nodes are in 1 of 6 parts"):
            ooc.ClusterLoader(ds, num_parts=6, input_nodes="train")
        ooc.ClusterLoader(ds, num_parts=6, input_nodes="test")


def test_graphs_without_edges_and_splits_without_nodes_are_graphs_and_splits(make_store: MakeStore) -> None:
    none = np.empty(0, np.int64)
    splits = {"train": np.arange(20), "val": none, "test": none}
    with ooc.open(make_store(num_nodes=20, src=none, dst=none, splits=splits)) as ds:
        for batch in ooc.NeighborLoader(ds, [2, 2], "train", batch_size=7):
            assert batch.edge_index.shape == (2, 0)
            assert torch.equal(batch.n_id, batch.input_id)
        assert sum(len(batch.n_id) for batch in ooc.ClusterLoader(ds, num_parts=3)) == 20
        loader = ooc.NeighborLoader(ds, [2], "val")
        assert (len(loader), list(loader)) == (0, [])


def test_arguments_of_event_and_snapshot_loaders_are_checked(tmp_path: Path) -> None:
    with ooc.open(Edges(20, 200).store(tmp_path)) as ds:
        with pytest.raises(ConfigError, match="EventLoader has no argument 'negative': did you mean 'negatives'"):
            ooc.EventLoader(ds, 40, negative=None)
        with pytest.raises(ConfigError, match="SnapshotLoader has no argument 'strid': did you mean 'stride'"):
            ooc.SnapshotLoader(ds, 40, by="count", strid=2)
        with pytest.warns(UserWarning, match="num_workers changes nothing"):
            ooc.EventLoader(ds, 40, num_workers=2)


def test_pygs_defaults_are_accepted_and_idle_prefetching_is_said(ds: Any) -> None:
    ooc.NeighborLoader(ds, [2], sample_direction="forward")
    with pytest.raises(ConfigError, match="sample_direction='backward'"):
        ooc.NeighborLoader(ds, [2], sample_direction="backward")
    with pytest.warns(UserWarning, match="prefetch_factor changes nothing"):
        ooc.ClusterLoader(ds, num_parts=5, prefetch_factor=4)
