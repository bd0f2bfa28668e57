"""Sweeps against rows in memory: the same batches to the bit."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.aggregation import PreAggregation
from ooc.loading import choose_read_strategy as choose_strategy
from ooc.loading.choose_read_strategy import scan_pays
from ooc.loading.sampling import Sampling
from ooc.sampling.labor import Labor
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from ooc.training.loop import train
from tests.conftest import MakeStore, random_edges
from tests.ooc.batches import same
from tests.ooc.loading.shared_pass.scanning import E, F, N, budget, from_memory, in_memory, loader_of, outcome
from tests.ooc.loading.test_feature_gather import TYPES
from tests.ooc.runs import configure, curve


@settings(deadline=None, max_examples=16)
@given(
    kind=st.sampled_from(["mean", "sum", "expanded", "gcn"]),
    fanout=st.sampled_from([[3], [4, 3], [-1], [2, 2, 2]]),
    how=st.sampled_from(["uniform", "replace", "weight_attr", "split_seeds"]),
    batch_size=st.integers(2, 40),
    room=st.integers(20_000, 10**6),
    threads=st.integers(1, 3),
    engine=st.sampled_from(["pread", "mmap", "auto"]),
    encoding=st.sampled_from(TYPES),
    edges_on_disk=st.booleans(),
)
def test_batches_are_those_of_rows_in_memory(
    path: Any, features: Any, kind: Any, fanout: Any, how: str, batch_size: int, room: int, threads: int, engine: Any,
    encoding: str, edges_on_disk: bool,
) -> None:  # fmt: skip
    """Whatever the budget, the threads, the engine, the type of the features and where the edges are."""
    options: dict[str, Any] = {"fanout": fanout, "batch_size": batch_size, "pre_aggregation": PreAggregation(kind, 8)}
    options["input_nodes"] = torch.arange(0, N, 9)
    options["budget"] = budget(room)
    if how == "weight_attr":
        options["weight_attr"] = "weight"
    elif how != "uniform":
        options[how] = True
    if how == "replace" and fanout == [-1]:
        options["fanout"] = [5]
    with pytest.MonkeyPatch.context() as patch, Dataset.open(path, engine=engine, features={"x": features[encoding]}) as ds:
        if edges_on_disk:
            patch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
        loader = loader_of(ds, sample_threads=threads, **options)
        assert (loader.strategy.stages.sample.frontier is not None) == edges_on_disk
        got, message, notes = outcome(loader, epochs=1)
        assert "sum" in loader.times()
        other = from_memory(loader_of(ds, sample_threads=threads, **options))
        want = outcome(other, epochs=1)
        assert "sum" not in other.times()
    assert same((got, message), want[:2])
    assert edges_on_disk or notes == want[2]  # edges on disk are drawn by another stage


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "how", [{"fanout": [-1, -1]}, {"fanout": [3, 3], "sampler": Labor(True, 256), "budget": budget(1_500_000)}]
)
def test_batches_that_share_sums_need_fewer_scans(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    """Where all neighbors are taken, or those of the batch before; the batches are the same, and a sampler that repeats no
    neighbors pays nothing."""
    x = np.random.default_rng(0).standard_normal((N, 256), dtype=np.float32)
    store = write_store(tmp_path / "wide.ooc", Graph.from_edges(*random_edges(N, E), N), x=x)
    options = {"budget": budget(5_000_000), "batch_size": 10, **how}
    with Dataset.open(store) as ds:
        assert not loader_of(ds).strategy.memory.shares_sums
        sharing = loader_of(ds, **options)
        found = outcome(sharing)
        monkeypatch.setattr(Sampling, "repeats_neighbors", False)
        apart = loader_of(ds, **options)
        assert same(found, outcome(apart))
    assert sharing.times()["sum"]["items"] < 0.7 * apart.times()["sum"]["items"]
    assert sharing.bytes_read < 0.7 * apart.bytes_read
    assert same(found, in_memory(store, **options | {"budget": budget(10**8)}))


@pytest.mark.parametrize("source", ["lmdb", "foreign"])
def test_features_that_someone_else_wrote_are_swept_to_the_bit(path: Any, features: Any, source: str) -> None:
    with Dataset.open(path, features={"x": features[source]}) as ds:
        loader = loader_of(ds)
        assert not isinstance(loader.strategy.disk_rows, ShardedRows)
        got = outcome(loader)
        assert 2 < loader.times()["sum"]["items"] < 30
        assert loader.bytes_read > 0
    assert len(got[0]) == 30
    assert same(got, in_memory(path))


def test_windows_make_the_same_sums(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_strategy, "scan_pays", scan_pays)
    loader = loader_of(ds, budget=budget(10**8))
    got = outcome(loader)
    assert "sum" not in loader.times()
    assert loader.rows_read <= N
    assert same(got, in_memory(path))


def test_rows_that_fit_in_half_the_memory_are_not_swept(ds: Dataset) -> None:
    rows = loader_of(ds).strategy.disk_rows
    rooms = [budget(nbytes).resident_rows for nbytes in (N * F * 4, 2 * N * F * 4 - 1, 2 * N * F * 4)]
    assert [scan_pays(rows, room) for room in rooms] == [True, True, False]


@pytest.mark.cases(1)
@pytest.mark.parametrize("taken", [0, 1, 7, 14, 15])
def test_an_epoch_goes_on_where_it_stopped(path: Any, ds: Dataset, taken: int) -> None:
    want = in_memory(path)[0]
    epoch = iter(loader := loader_of(ds))
    got = [next(epoch) for _ in range(taken)]
    state = loader.state_dict()
    epoch.close()
    other = loader_of(ds)
    other.load_state_dict(state)
    rest = [batch for _ in range(2) for batch in other]
    assert same([*got, *rest][: len(want)], want)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model", "settings"), [("sage", {}), ("gin", {"residual": True}), ("gcn", {"input_dropout": 0.0})])
def test_runs_are_the_same_whichever_way_sums_are_made(
    make_store: MakeStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, model: str, settings: Any
) -> None:
    store = make_store(weight=True)
    ways = {"memory": {"in_memory": True}, "swept": {}, "pread": {"engine": "pread"}}
    summaries = {
        name: train(configure(store, tmp_path / name, model=model, epochs=2, dropout=0.3, **way, **settings))
        for name, way in ways.items()
    }
    monkeypatch.setattr(choose_strategy, "scan_pays", scan_pays)
    ways["windows"] = {}
    summaries["windows"] = train(configure(store, tmp_path / "windows", model=model, epochs=2, dropout=0.3, **settings))
    assert {name: "sum" in summary["stages"] for name, summary in summaries.items()} == {
        name: name in ("swept", "pread") for name in ways
    }
    assert len({curve(tmp_path / name) for name in ways}) == 1
    assert len({str(summary["metrics"]) for summary in summaries.values()}) == 1
