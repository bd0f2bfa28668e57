"""Batches of whole graphs are those of PyG's DataLoader, in a pure order, however they are read."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import ooc
from ooc.loading.graph_loader import GraphLoader
from ooc.loading.graph_order import GraphOrder
from ooc.runtime.memory_plan import plan_graph_memory
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError
from tests.ooc.many_graphs import assert_same_batch, random_graphs, sorted_edges

COUNT = 300
BLOCK = 4096
"""bytes that are mixed: a few runs of graphs"""


@pytest.fixture(scope="module")
def graphs() -> list[Data]:
    return random_graphs(COUNT)


@pytest.fixture(scope="module")
def store(graphs: list[Data], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "many.ooc"
    parts = {"train": graphs[:180], "val": graphs[180:240], "test": graphs[240:]}
    ooc.from_data(parts, path).close()
    return path


@pytest.fixture
def ds(store: Path) -> Iterator[Dataset]:
    with ooc.open(store) as opened:
        yield opened


def loaded(loader: GraphLoader) -> list[Any]:
    return list(loader)


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a.keys())  # noqa: SIM118 - of a Batch


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few graphs, so that small stores have many."""
    monkeypatch.setattr("ooc.loading.graph_loader.RUN_BYTES", 1024)


def test_batches_are_those_of_pygs_loader(ds: Dataset, graphs: list[Data]) -> None:
    theirs = DataLoader([sorted_edges(graph) for graph in graphs], batch_size=32)
    batches = loaded(GraphLoader(ds, batch_size=32))
    assert len(batches) == len(theirs) == len(GraphLoader(ds, batch_size=32))
    for at, batch in enumerate(batches):
        assert_same_batch(batch, graphs[32 * at : 32 * at + 32])
        assert batch.graph_id.tolist() == list(range(32 * at, min(32 * at + 32, COUNT)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch_size", [7, 64, COUNT])
def test_shuffled_batches_hold_each_graph_once(ds: Dataset, graphs: list[Data], short_runs: None, batch_size: int) -> None:
    loader = GraphLoader(ds, batch_size=batch_size, shuffle=True, seed=3, shuffle_block=BLOCK)
    epochs = [loaded(loader), loaded(loader)]
    orders = [torch.cat([batch.graph_id for batch in epoch]) for epoch in epochs]
    for order in orders:
        assert sorted(order.tolist()) == list(range(COUNT))
    assert not torch.equal(*orders)
    for batch in epochs[1][:3]:
        assert_same_batch(batch, [graphs[at] for at in batch.graph_id.tolist()])


@pytest.mark.cases(1)
@pytest.mark.parametrize("engine", ["auto", "pread", "mmap"])
def test_no_engine_and_no_memory_changes_a_batch(store: Path, short_runs: None, engine: str) -> None:
    with ooc.open(store) as ds, ooc.open(store, engine=engine) as other, ooc.open(store, in_memory=True) as held:
        settings: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 1, "shuffle_block": 4 * BLOCK, "edge_ids": True}
        expected = loaded(GraphLoader(ds, **settings))
        assert_same(loaded(GraphLoader(other, **settings)), expected)
        assert_same(loaded(GraphLoader(held, **settings)), expected)
        plan = plan_graph_memory(ds)
        small = replace(plan, in_flight=400_000, max_batch=200_000)
        loader = GraphLoader(ds, budget=small, **settings)
        assert_same(loaded(loader), expected)


def test_less_memory_reads_smaller_units(ds: Dataset, short_runs: None) -> None:
    sizes = []
    for nbytes in (2**17, 2**24):
        budget = replace(plan_graph_memory(ds), in_flight=2 * nbytes, max_batch=nbytes)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader = GraphLoader(ds, batch_size=5, shuffle=True, seed=0, budget=budget)
        assert ["read in more pieces" in str(each.message) for each in said] == ([True] if nbytes == 2**17 else [])
        loaded(loader)
        sizes.append(loader.times()["read"]["items"])
    assert sizes[0] > sizes[1] == 1


def test_a_batch_beyond_the_memory_is_refused(ds: Dataset) -> None:
    budget = replace(plan_graph_memory(ds), in_flight=2**13, max_batch=2**12)
    with pytest.raises(BudgetError, match=r"needs .* of "):
        loaded(GraphLoader(ds, batch_size=100, budget=budget))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_input_graphs_and_the_last_batch(ds: Dataset, graphs: list[Data], shuffle: bool, drop_last: bool) -> None:
    mask = torch.zeros(COUNT, dtype=torch.bool)
    mask[::7] = True
    rows = [17, 3, 299, 3]
    for given_graphs, wanted in (("val", list(range(180, 240))), (mask, mask.nonzero().view(-1).tolist()), (rows, rows)):
        loader = GraphLoader(ds, 8, shuffle, given_graphs, drop_last=drop_last, seed=0)
        batches = loaded(loader)
        count = len(wanted) // 8 if drop_last else -(-len(wanted) // 8)
        assert len(batches) == len(loader) == count
        found = [each for batch in batches for each in batch.graph_id.tolist()]
        expected = wanted[: 8 * count]
        assert found == expected if not shuffle else set(found) <= set(wanted) and len(found) == len(expected)
        for batch in batches[:2]:
            assert_same_batch(batch, [graphs[at] for at in batch.graph_id.tolist()])


def test_a_batch_can_be_taken_apart(ds: Dataset, graphs: list[Data]) -> None:
    batch = next(iter(GraphLoader(ds, 10)))
    for graph, own in zip(graphs, batch.to_data_list(), strict=False):
        plain = sorted_edges(graph)
        assert torch.equal(own.edge_index, plain.edge_index)
        assert torch.equal(own.x, plain.x)
        assert torch.equal(own.edge_attr, plain.edge_attr)
        assert own.y == plain.y
    assert torch.equal(batch[3].z, graphs[3].z)


def test_fields_may_be_followed_and_left_out(ds: Dataset, graphs: list[Data]) -> None:
    plain = [sorted_edges(graph) for graph in graphs[:9]]
    theirs: Any = next(iter(DataLoader(plain, 9, follow_batch=["x", "bond"], exclude_keys=["edge_attr", "u"])))
    batch = next(iter(GraphLoader(ds, 9, follow_batch=["x", "bond"], exclude_keys=["edge_attr", "u"])))
    assert not {"edge_attr", "u"} & set(batch.keys())
    for name in ("x_batch", "x_ptr", "bond_batch", "bond_ptr"):
        assert torch.equal(batch[name], theirs[name]), name
    with pytest.raises(ConfigError, match=r"no 'wrong'; there are .*edge_attr"):
        GraphLoader(ds, 9, follow_batch=["wrong"])
    with pytest.raises(ConfigError, match="no 'wrong' to leave out"):
        GraphLoader(ds, 9, exclude_keys="wrong")
    with pytest.raises(ConfigError, match="exclude_keys must be a list of names, not 3"):
        GraphLoader(ds, 9, exclude_keys=3)
    with pytest.raises(ConfigError, match="dtype must be a type of torch"):
        GraphLoader(ds, 9, dtype="float32")


def test_edge_ids_are_positions_in_the_input(ds: Dataset, graphs: list[Data]) -> None:
    starts = np.cumsum([0, *(graph.num_edges for graph in graphs)])
    whole = torch.cat([graph.edge_attr for graph in graphs])
    for batch in loaded(GraphLoader(ds, 50, shuffle=True, seed=4, edge_ids=True)):
        assert torch.equal(batch.edge_attr, whole[batch.e_id])
        low = torch.from_numpy(starts)[batch.graph_id[batch.batch[batch.edge_index[0]]]]
        assert bool((batch.e_id >= low).all())


@pytest.mark.cases(1)
@pytest.mark.parametrize("after", [0, 1, 7, 12, 14])
def test_a_loader_resumes_where_it_stood(ds: Dataset, short_runs: None, after: int) -> None:
    settings: dict[str, Any] = {"batch_size": 20, "shuffle": True, "seed": 2, "shuffle_block": BLOCK}
    expected = loaded(loader := GraphLoader(ds, **settings)) + loaded(loader)
    first, iterator = GraphLoader(ds, **settings), None
    iterator = iter(first)
    for _ in range(after):
        next(iterator)
    state = first.state_dict()
    iterator.close()
    second = GraphLoader(ds, **settings)
    second.load_state_dict(state)
    assert_same(loaded(second) + (loaded(second) if after < 15 else []), expected[after:])
    with pytest.raises(ConfigError, match="block was"):
        GraphLoader(ds, **{**settings, "shuffle_block": 4 * BLOCK}).load_state_dict(state)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_divide_each_epoch(ds: Dataset, short_runs: None, world: int, drop_last: bool) -> None:
    settings: dict[str, Any] = {"batch_size": 11, "shuffle": True, "seed": 5, "shuffle_block": BLOCK, "drop_last": drop_last}
    loaders = [GraphLoader(ds, rank=rank, world_size=world, **settings) for rank in range(world)]
    batches = [loaded(loader) for loader in loaders]
    assert len({len(each) for each in batches}) == 1 == len({len(loader) for loader in loaders})
    found = [each for rank in batches for batch in rank for each in batch.graph_id.tolist()]
    assert len(found) == len(set(found)) == (COUNT // (11 * world) * 11 * world if drop_last else COUNT)


def test_a_drawn_seed_is_taken_from_a_state(ds: Dataset) -> None:
    loader = GraphLoader(ds, 30, shuffle=True)
    state, other = loader.state_dict(), GraphLoader(ds, 30, shuffle=True)
    other.load_state_dict(state)
    assert_same(loaded(other), loaded(loader))


def test_epochs_may_be_set_and_cut_short(ds: Dataset) -> None:
    loader = GraphLoader(ds, 30, shuffle=True, seed=1)
    loaded(loader)
    second = loaded(loader)
    loader.set_epoch(1)
    loader.stop_before(4)
    assert_same(loaded(loader), second[:4])


def test_other_arguments_are_not_ignored(ds: Dataset, make_store: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        GraphLoader(ds, batchsize=3)
    with pytest.raises(ConfigError, match="batch_size, world_size must be 1 or more"):
        GraphLoader(ds, 0)
    with pytest.raises(InputError, match="input graph 300 at position 1 is out of range"):
        GraphLoader(ds, 2, input_graphs=[0, 300])
    with pytest.raises(InputError, match="no split 'dev': there are train, val, test"):
        GraphLoader(ds, 2, input_graphs="dev")
    with pytest.raises(InputError, match="holds one graph: ingest it with `graph_id`"):
        GraphLoader(make_store(), 2)


def test_a_transform_sees_every_batch(ds: Dataset) -> None:
    batches = loaded(GraphLoader(ds, 100, transform=lambda batch: (batch.num_graphs, batch.x.sum())))
    assert [count for count, _ in batches] == [100, 100, 100]


def test_batches_are_moved(ds: Dataset) -> None:
    batch = next(iter(GraphLoader(ds, 10, device="meta")))
    assert batch.x.device.type == batch.ptr.device.type == "meta"


@settings(deadline=None)
@given(
    count=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    run=st.integers(1, 30),
    block=st.integers(1, 9),
    world=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_an_order_is_a_permutation_in_blocks(
    count: int, batch_size: int, run: int, block: int, world: int, epoch: int, shuffle: bool
) -> None:
    """Each graph comes once over all ranks, each block has whole runs, and an order from any step on is the same."""
    found, orders = [], [GraphOrder(count, batch_size, shuffle, 7, False, rank, world, run, block) for rank in range(world)]
    for order in orders:
        spans = list(order.spans(epoch, 0, order.steps))
        own = [order.positions(epoch, *span) for span in spans]
        joined = np.concatenate(own) if own else np.empty(0, np.int64)
        sizes = [last - first for first, last in map(order.batch, range(order.steps))]
        assert sum(sizes) == len(joined)
        assert max(sizes, default=0) <= batch_size
        middle = order.steps // 2
        later = [order.positions(epoch, *span) for span in order.spans(epoch, middle, order.steps)]
        assert joined[sum(sizes[:middle]) :].tolist() == [each for part in later for each in part.tolist()]
        found.append(joined)
    assert sorted(np.concatenate(found).tolist()) == list(range(count))
    if shuffle and world == 1:
        starts = orders[0]._block_starts(epoch)
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            positions = np.sort(orders[0].positions(epoch, first, last))
            runs = np.unique(positions // run)
            assert len(runs) <= block
            whole = np.concatenate([np.arange(each * run, min(count, (each + 1) * run)) for each in runs])
            assert positions.tolist() == whole.tolist()


@given(
    count=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    run=st.integers(1, 5),
    block=st.integers(1, 4),
    world=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_ranks_that_are_as_one_divide_the_steps_of_one(
    count: int, batch_size: int, run: int, block: int, world: int, shuffle: bool
) -> None:
    def batches(order: GraphOrder) -> list[list[int]]:
        each = (order.spans(2, step, step + 1) for step in range(order.steps))
        return [[int(graph) for span in spans for graph in order.positions(2, *span)] for spans in each]

    one = batches(GraphOrder(count, batch_size * world, shuffle, 7, False, 0, 1, run, block, as_one=True))
    orders = [GraphOrder(count, batch_size, shuffle, 7, False, rank, world, run, block, as_one=True) for rank in range(world)]
    ranks = [batches(order) for order in orders]
    assert [[graph for each in step for graph in each] for step in zip(*ranks, strict=True)] == one
    assert [order.own_steps for order in orders] == [sum(map(bool, own)) for own in ranks]
