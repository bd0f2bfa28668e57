"""A loader over edges that stay on disk gives the batches of one whose edges are in memory, to the bit."""

import dataclasses
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.runtime.memory_plan import divide
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.waiting import no_threads

N, E, F = 300, 3000, 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    src, dst = random_edges(N, E)
    weight = np.random.default_rng(1).random(E, np.float32)
    x = np.random.default_rng(0).standard_normal((N, F), dtype=np.float32)
    return write_store(tmp_path_factory.mktemp("topology") / "t.ooc", Graph.from_edges(src, dst, N, weight=weight), x=x)


@pytest.fixture
def _edges_do_not_fit(monkeypatch):
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)


def without_edges(ds: Dataset, weight: bool) -> None:
    """Whoever meets an edge in the map finds nonsense there, but for the weights that are sampled by."""
    graph = ds.graph
    kept = {"weight": graph.columns["weight"]} if weight else {}
    columns = {name: np.full_like(column, -(2**40)) for name, column in graph.columns.items()} | kept
    ds.edges().graph = dataclasses.replace(graph, indices=np.full_like(graph.indices, -1), columns=columns)


def budget(max_batch: int):
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch)


@pytest.mark.usefixtures("_edges_do_not_fit")
@settings(deadline=None, max_examples=15)
@given(
    batch_size=st.integers(3, 80),
    max_batch=st.sampled_from([60_000, 120_000, 10**7]),
    fanout=st.sampled_from([[3, 2], [-1], [4, 4]]),
    weighted=st.booleans(),
    split=st.booleans(),
    edge_ids=st.booleans(),
)
def test_batches_are_those_of_edges_in_memory(path, batch_size, max_batch, fanout, weighted, split, edge_ids):
    options = {"batch_size": batch_size, "shuffle": not split, "split_seeds": split, "budget": budget(max_batch), "seed": 0}
    options["edge_ids"] = edge_ids
    if weighted and fanout != [-1]:
        options["weight_attr"] = "weight"

    def outcome(**how):
        with Dataset.open(path, **how) as ds:
            if "in_memory" not in how:
                without_edges(ds, "weight_attr" in options)
            loader = NeighborLoader(ds, fanout, **options)
            assert (loader.strategy.stages.sample.frontier is None) == ("in_memory" in how)
            got = []
            try:
                for _ in range(2):
                    got.extend(loader)
            except BudgetError as error:
                return got, str(error)
            return got, ""

    on_disk, in_memory = outcome(), outcome(in_memory=True)
    assert same(on_disk, in_memory)
    gc.collect()
    assert no_threads()


@pytest.mark.usefixtures("_edges_do_not_fit")
def test_bytes_that_sampling_reads_are_counted(path):
    with Dataset.open(path) as ds:
        loader = NeighborLoader(ds, [2], batch_size=50)
        list(loader)
        assert loader.strategy.stages.counts.topology_nbytes >= 4096
        assert loader.bytes_read == loader.strategy.stages.counts.nbytes + loader.strategy.stages.counts.topology_nbytes
        assert ds.edge_rows("indices") is ds.edge_rows("indices")


@pytest.mark.usefixtures("_edges_do_not_fit")
def test_an_unreadable_edge_fails_at_its_batch(path):
    with Dataset.open(path) as ds:
        whole = list(NeighborLoader(ds, [2], batch_size=10))
        rows = ds.edge_rows("indices")

        class Broken:
            shape, dtype, row_bytes = rows.shape, rows.dtype, rows.row_bytes
            bad = int(ds.graph.indptr[57])

            def read(self, ids, out, at=None):
                if self.bad in ids:
                    raise StoreError("unreadable")
                return rows.read(ids, out, at)

        loader = NeighborLoader(ds, [-1], batch_size=10)
        loader.strategy.stages.sample.frontier.indices = Broken()
        got = []
        with pytest.raises(StoreError, match="unreadable"):
            got.extend(loader)
        assert len(got) == 5  # node 57 is a seed of batch 5
        assert len(whole) == 30


def test_edges_that_fit_are_read_in_beforehand(path):
    with Dataset.open(path, memory="4GB") as ds:
        assert NeighborLoader(ds, [2]).strategy.stages.sample.frontier is None
