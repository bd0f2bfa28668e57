"""Edge features of batches: those of the edges by `e_id`, to the bit whatever the memory and wherever the rows are."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import ooc
from ooc.graph.aggregation import PreAggregation
from ooc.loading import superbatch
from ooc.loading.collate import with_edge_ids
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.loading.load_stage import BatchArray
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.read_strategy import InMemory
from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
from ooc.loading.superbatch import Superbatches
from ooc.loading.superbatch_plan import SuperbatchPlanner, shares_of
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import divide
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.waiting import no_threads

N, E, F = 300, 1500, 16
RNG = np.random.default_rng(3)
ARRAYS = {
    "edge_attr": RNG.standard_normal((E, 5), dtype=np.float32),
    "kind": RNG.integers(0, 9, E),
    "wide": RNG.standard_normal((E, 6), dtype=np.float32),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Edges in random order, some of them loops and some twice."""
    x = RNG.standard_normal((N, F), dtype=np.float32)
    data = Data(x=torch.from_numpy(x), edge_index=torch.from_numpy(np.stack(random_edges(N, E))), y=torch.arange(N) % 3)
    data.train_mask = torch.arange(N) % 2 == 0
    for name, array in ARRAYS.items():
        data[name] = torch.from_numpy(array)
    folder = tmp_path_factory.mktemp("edges")
    with pytest.warns(UserWarning, match="kind, wide"):
        ooc.from_data(data, folder / "test.ooc").close()
    return folder / "test.ooc"


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    assert no_threads()


def budget(max_batch: int, memory: int = 10**9) -> Any:
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch, memory=memory)


MAKES: dict[str, Callable[..., Any]] = {
    "neighbor": lambda ds, **more: NeighborLoader(ds, [3, 2], batch_size=40, shuffle=True, seed=1, **more),
    "cluster": lambda ds, **more: ClusterLoader(ds, 2, num_parts=7, num_layers=2, shuffle=True, seed=1, **more),
    "link": lambda ds, **more: LinkNeighborLoader(ds, [3, 2], batch_size=90, neg_sampling="binary", seed=1, **more),
    "saint": lambda ds, **more: SaintLoader(ds, "walk", 30, sample_coverage=2, num_steps=4, seed=1, num_layers=2, **more),
}


def check(batch: Any, name: str = "edge_attr") -> None:
    wanted = torch.from_numpy(ARRAYS[name])[batch.e_id]
    found = batch[name].reshape(wanted.shape)
    assert torch.equal(found.to(wanted.dtype), wanted)
    for block in batch.blocks:
        assert torch.equal(block.edge_attr, batch.edge_attr[: block.edge_index.size(1)])
        assert block.edge_attr.data_ptr() == batch.edge_attr.data_ptr()


@pytest.mark.parametrize("loader", MAKES)
@pytest.mark.parametrize("where", ["disk", "edges on disk", "memory", "x in memory"])
def test_batches_have_the_features_of_their_edges(path: Path, loader: str, where: str) -> None:
    memory = 1 if where == "edges on disk" else 10**9
    with Dataset.open(path, in_memory=where == "memory") as ds:
        options: dict[str, Any] = {"budget": budget(10**7, memory), "edge_features": ["edge_attr", "wide"]}
        made = MAKES[loader](ds, **options)
        assert isinstance(made.strategy, InMemory if where == "memory" else Superbatches)
        if where == "x in memory":
            array = np.empty((N, F), np.float32)
            ds.rows("x").read(np.arange(N), array)
            made.strategy = made.strategy.over(ArrayRows(array))
        batches = list(made)
        assert len(batches) > 2
        for batch in batches:
            check(batch)
            check(batch, "wide")
            assert batch.edge_attr.dtype == torch.float32
        assert (made.topology_bytes_read > 0) == (where != "memory")
        if loader == "neighbor":
            check(made(torch.arange(7)))


@pytest.mark.parametrize("loader", MAKES)
def test_edge_attr_comes_by_itself_and_others_when_they_are_asked_for(path: Path, loader: str) -> None:
    with Dataset.open(path) as ds:
        batch = next(iter(MAKES[loader](ds)))
        check(batch)
        assert "kind" not in batch
        bare = next(iter(MAKES[loader](ds, edge_features=())))
        assert "edge_attr" not in bare
        assert bare.blocks[0].edge_attr is None
        kind = next(iter(MAKES[loader](ds, edge_features="kind", edge_ids=False)))
        assert "e_id" not in kind
        assert torch.equal(kind.kind.reshape(-1), torch.from_numpy(ARRAYS["kind"])[batch.e_id].to(kind.kind.dtype))
        assert torch.equal(kind.blocks[0].edge_attr, kind.kind)
        half = next(iter(MAKES[loader](ds, dtype=torch.float16)))
        assert half.x.dtype == half.edge_attr.dtype == torch.float16


@settings(deadline=None, max_examples=25)
@given(
    batch_size=st.integers(3, 60),
    max_batch=st.integers(20_000, 400_000),
    threads=st.integers(1, 3),
    ramp=st.tuples(st.integers(1, 20_000), st.integers(1, 5)),
    split=st.booleans(),
    edges_stay=st.booleans(),
    edge_ids=st.booleans(),
)
def test_batches_are_those_of_rows_in_memory_whatever_the_budget(
    path: Path,
    batch_size: int,
    max_batch: int,
    threads: int,
    ramp: tuple[int, int],
    split: bool,
    edges_stay: bool,
    edge_ids: bool,
) -> None:
    def outcome(ds: Dataset) -> tuple[list[Any], str]:
        got: list[Any] = []
        loader = NeighborLoader(
            ds, [3, 2], batch_size=batch_size, shuffle=not split, split_seeds=split, sample_threads=threads, seed=0,
            budget=budget(max_batch, 1 if edges_stay else 10**9), edge_features=["edge_attr", "kind"], edge_ids=edge_ids,
        )  # fmt: skip
        try:
            for _ in range(2):  # what the first epoch leaves in memory serves the second
                got.extend(loader)
        except BudgetError as error:
            return got, str(error)
        return got, ""

    with pytest.MonkeyPatch.context() as patch:
        first_bytes, growth = ramp
        patch.setattr(superbatch, "SuperbatchPlanner", partial(SuperbatchPlanner, first_bytes=first_bytes, growth=growth))
        with Dataset.open(path) as ds, Dataset.open(path, in_memory=True) as resident:
            assert same(outcome(ds), outcome(resident))


def test_edge_rows_are_read_together_and_those_that_fit_once(path: Path) -> None:
    with Dataset.open(path) as ds:
        loader = NeighborLoader(ds, [-1, -1], batch_size=20, seed=0, budget=budget(10**8))
        read = []
        for _ in range(3):
            assert len(list(loader)) == 15
            read.append(loader.topology_bytes_read)
        assert loader.times()["read"]["items"] == 3, "superbatches"
        assert read[0] == read[2] < 1.2 * ARRAYS["edge_attr"].nbytes
        assert loader.rows_read == N, "those of nodes"
        small = budget(40_000)
        tight = NeighborLoader(ds, [3, 2], batch_size=4, shuffle=True, seed=0, budget=dataclasses.replace(small, in_flight=1))
        count = len(list(tight))
        assert 2 < tight.times()["read"]["items"] < count


def test_rows_in_memory_keep_to_their_shares(path: Path) -> None:
    """Of what is left beside batches: a superbatch's rows of nodes and edges, with what keeps order among them."""
    with Dataset.open(path) as ds:
        loader = NeighborLoader(ds, [3, 2], batch_size=4, shuffle=True, seed=0, edge_features=["edge_attr", "wide"])
        drawn = list(loader.strategy.stages.sample.batches(iter([Cursor(0, step) for step in range(len(loader))])))
        planner = dataclasses.replace(loader.strategy.planner(200_000), first_bytes=2**40)
        sketches = list(planner.sketches(iter(drawn)))
        assert 1 < len(sketches) < len(drawn)
        assert sum(planner.shares) == pytest.approx(1)
        for sketch in sketches:
            rows = [len(used.ids) * each.rows.row_bytes for used, each in zip(sketch.arrays, planner.arrays, strict=True)]
            assert sum(rows) < 200_000
            for used, of_edges in zip(sketch.arrays, planner.of_edges, strict=True):
                assert len(used.ids) <= used.limit
                assert len(used.ids) <= (E if of_edges else N)
        unpacked = [
            batch.unpack(planner.columns, [used.ids for used in sketch.arrays])
            for sketch in sketches
            for batch in sketch.batches
        ]
        for one, other in zip(unpacked, drawn, strict=True):
            assert np.array_equal(one.subgraph.node, other.subgraph.node)
            assert np.array_equal(one.subgraph.columns["edge_id"], ds.graph.edge_ids(other.subgraph.slot))


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 10**4), st.integers(1, 4096), st.booleans()), min_size=1, max_size=4),
    density=st.floats(1, 100),
    pool=st.integers(1, 10**9),
)
def test_shares_are_all_of_the_memory_and_no_more_than_an_array_needs(
    rows: list[tuple[int, int, bool]], density: float, pool: int
) -> None:
    arrays = [BatchArray(_Sized(*each[:2]), None, each[2]) for each in rows]  # type: ignore[arg-type]
    shares = shares_of(arrays, density, pool)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0
    whole = [4 * each.rows.shape[0] * (each.rows.row_bytes + 112) / pool for each in arrays]
    if sum(whole) > 1:
        assert all(share <= need * (1 + 1e-9) for share, need in zip(shares, whole, strict=True))
    if len(arrays) == 1:
        assert shares == (1.0,)


class _Sized:
    def __init__(self, count: int, row_bytes: int) -> None:
        self.shape, self.row_bytes = (count,), row_bytes


def test_a_batch_counts_the_bytes_of_its_edge_features(path: Path) -> None:
    with Dataset.open(path) as ds:
        plain, wide = (NeighborLoader(ds, [3], edge_features=names) for names in ((), ("edge_attr", "wide")))
        one, other = (loader.strategy.stages.collate.collator.nbytes(10, 30, 0) for loader in (plain, wide))
        assert other - one == 30 * 4 * (5 + 6)
        assert wide.strategy.stages.collate.collator.nbytes(0, 1, 0) == 16 + 8 + 44
        with pytest.raises(BudgetError, match="a batch of 300 seeds needs"):
            list(NeighborLoader(ds, [-1], batch_size=N, budget=budget(one_batch(ds) - 1)))


def one_batch(ds: Dataset) -> int:
    """Bytes of the batch of all nodes with all their edges."""
    loader = NeighborLoader(ds, [-1], batch_size=N)
    return loader.strategy.memory.nbytes(loader.strategy.stages.sample.sample(Cursor(0, 0)))


def test_what_does_not_fit_is_refused(path: Path) -> None:
    with Dataset.open(path) as ds:
        with pytest.raises(InputError, match="no edge feature 'msg': there are edge_attr, kind, wide"):
            NeighborLoader(ds, [2], edge_features="msg")
        with pytest.raises(ConfigError, match="asked for twice"):
            ClusterLoader(ds, num_parts=3, edge_features=["kind", "kind"])
        with pytest.raises(ConfigError, match="'x' has the name of another field"):
            NeighborLoader(ds, [2], edge_features=["x"])
        summed = PreAggregation("mean", F)
        with pytest.raises(ConfigError, match="pre_aggregation"):
            NeighborLoader(ds, [2], edge_features="edge_attr", pre_aggregation=summed)
        assert "edge_attr" not in next(iter(NeighborLoader(ds, [2, 2], pre_aggregation=summed)))
        drawn = NeighborLoader(ds, [2]).strategy.stages.sample.sample(Cursor(0, 0))
        with pytest.raises(StoreError, match="damaged"):
            with_edge_ids(ds.graph, drawn, 1)


def test_features_of_links_count_for_the_memory_of_their_batch(path: Path) -> None:
    with Dataset.open(path) as ds:
        drawn = {}
        for wanted in (False, True):
            loader = LinkNeighborLoader(ds, [0], batch_size=64, edge_label_attr=wanted)
            drawn[wanted] = loader.strategy.stages.sample.sample(Cursor(0, 0))
        attr = next(iter(loader)).edge_label_attr
        assert drawn[True].link_bytes - drawn[False].link_bytes == attr.nbytes == 64 * 5 * 4
