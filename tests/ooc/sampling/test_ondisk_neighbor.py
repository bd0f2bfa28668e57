"""Sampling batches together from disk against sampling each of them in memory."""

import threading
import tracemalloc
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.blocks import Subgraph
from ooc.sampling import NeighborSampler, OnDiskFrontier, frontier_bytes, read_together
from ooc.sampling.ondisk_neighbor import FrontierBatches
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids
from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from tests.ooc.sampling.test_neighbor import FANOUTS, KEYS, assert_same, random_graph

compiling = settings(deadline=None)  # the first example may compile a kernel


class CountingRows(ArrayRows):
    """Rows in memory that note every id they are asked for, and fail at one of them."""

    def __init__(self, array: AnyArray, broken: int = -1) -> None:
        super().__init__(array)
        self.calls: list[Ids] = []
        self.broken = broken

    def read(self, ids: Ids, out: AnyArray) -> int:
        self.calls.append(ids.copy())
        if self.broken in ids:
            raise StoreError(f"slot {self.broken} cannot be read")
        super().read(ids, out)
        return len(ids) * self.row_bytes

    def submit(self, ids: Ids, out: AnyArray) -> Future[int]:
        raise NotImplementedError


def off_disk(graph: Graph) -> Graph:
    """The graph with edges that must not be touched: they name no node."""
    return Graph(graph.indptr, np.full_like(graph.indices, -1), graph.columns)


def alone(sampler: NeighborSampler, seeds: Ids, key: int) -> Subgraph | Exception:
    """The batch that the sampler draws in memory, or its error."""
    try:
        return sampler.sample(seeds, key)
    except (InputError, BudgetError, StoreError) as error:
        return error


def assert_all_same(found: FrontierBatches, sampler: NeighborSampler, seeds: list[Ids], keys: list[int]) -> None:
    """Every batch is what the sampler gives, or fails as it does."""
    for batch, each, key in zip(found.batches, seeds, keys, strict=True):
        expected = alone(sampler, each, key)
        if isinstance(expected, Exception):
            assert type(batch) is type(expected)
            assert str(batch) == str(expected)
            continue
        assert isinstance(batch, Subgraph), batch
        assert_same(batch, expected)
        assert (batch.stands_for is None) == (expected.stands_for is None)
        if batch.stands_for is not None:
            assert np.array_equal(batch.stands_for, expected.stands_for)


BATCHES = st.lists(st.tuples(st.lists(st.integers(0, 39), max_size=8), KEYS), max_size=6)


@compiling
@given(
    st.integers(0, 300),
    FANOUTS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([np.int32, np.int64]),
    BATCHES,
    st.integers(1, 60),
    st.lists(st.sampled_from(["edge_id", "weight"]), unique=True),
)
def test_batches_are_those_sampled_alone(
    num_edges: int,
    fanout: list[int],
    replace: bool,
    weighted: bool,
    dtype: type,
    batches: list[tuple[list[int], int]],
    at_once: int,
    read: list[str],
) -> None:
    graph = random_graph(40, num_edges, seed=num_edges)
    weight = "weight" if weighted else None
    seeds, keys = [np.array(nodes, np.int64) for nodes, _ in batches], [key for _, key in batches]
    rows = CountingRows(graph.indices.astype(dtype))
    columns = {name: CountingRows(graph.columns[name]) for name in read}
    together = OnDiskFrontier(NeighborSampler(off_disk(graph), fanout, replace, weight), rows, columns, at_once=at_once)
    found = together.sample(seeds, keys)
    assert_all_same(found, NeighborSampler(graph, fanout, replace, weight), seeds, keys)
    drawn = [batch.slot for batch in found.batches if isinstance(batch, Subgraph)]
    for batch in found.batches:
        assert isinstance(batch, Exception) or list(batch.columns) == read
        for name in read if isinstance(batch, Subgraph) else []:
            assert batch.columns[name].dtype == graph.columns[name].dtype
            assert np.array_equal(batch.columns[name], graph.columns[name][batch.slot])
    ids = sum(len(call) for call in rows.calls)
    assert found.nbytes == ids * (rows.row_bytes + sum(column.row_bytes for column in columns.values()))
    for column in columns.values():
        assert all(map(np.array_equal, column.calls, rows.calls))
    for call in rows.calls:
        assert len(call) <= at_once
        assert (np.diff(call) > 0).all()
    if len(fanout) == 1:
        assert np.array_equal(np.concatenate([np.empty(0, int), *rows.calls]), np.unique(np.concatenate([[], *drawn])))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Graph]:
    """A group with `indices` of several shards, and the graph in memory; node 0 is a hub."""
    group, graph = tmp_path_factory.mktemp("lockstep"), random_graph(30_000, 400_000, seed=5)
    for name, dtype in (("narrow", np.int32), ("wide", np.int64)):
        with Appender(group, name, (), dtype, chunk_bytes=2**16, shard_bytes=2**18) as appender:
            appender.append(graph.indices.astype(dtype))
    with Appender(group, "weight", (), np.float32, chunk_bytes=2**16, shard_bytes=2**18) as appender:
        appender.append(graph.columns["weight"])
    return group, graph


@pytest.mark.parametrize("replace", [False, True])
def test_weights_are_met_through_their_map(store: tuple[Path, Graph], replace: bool) -> None:
    group, graph = store
    rows, weights = open_zarr_rows(group, "narrow"), open_zarr_rows(group, "weight")
    mapped = Graph(graph.indptr, off_disk(graph).indices, {"weight": weights.map()})
    seeds = [np.arange(i, 30_000, 1_000 + i) for i in range(3)]
    for fanout in ([6, 4], [-1, 2]):
        found = OnDiskFrontier(NeighborSampler(mapped, fanout, replace, "weight"), rows).sample(seeds, [1, 2, 3])
        assert_all_same(found, NeighborSampler(graph, fanout, replace, "weight"), seeds, [1, 2, 3])
    rows.close()
    weights.close()


@pytest.mark.parametrize("engine", ["pread", "mmap"])
@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_a_store_on_disk(store: tuple[Path, Graph], name: str, engine: str) -> None:
    group, graph = store
    seeds = [np.random.default_rng(i).integers(0, 30_000, 1 + 40 * i) for i in range(8)]
    rows = open_zarr_rows(group, name, engine=engine)
    assert isinstance(rows, ShardedRows)
    assert len(rows.segments.paths) > 3
    for fanout in ([7, 5, 3], [-1], [2, -1]):
        for at_once in (3_000, 10**6):
            found = OnDiskFrontier(NeighborSampler(off_disk(graph), fanout), rows, at_once=at_once).sample(
                seeds, list(range(8))
            )
            assert_all_same(found, NeighborSampler(graph, fanout), seeds, list(range(8)))
            assert found.nbytes > 0
    rows.close()


def test_threads_may_share_one(store: tuple[Path, Graph]) -> None:
    group, graph = store
    rows = open_zarr_rows(group, "narrow")
    together = OnDiskFrontier(NeighborSampler(off_disk(graph), [6, 4]), rows)
    seeds = [np.arange(i, 30_000, 1_000 + i) for i in range(4)]
    found: dict[int, FrontierBatches] = {}

    def work(thread: int) -> None:
        found[thread] = together.sample(seeds, [thread + i for i in range(4)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows.close()
    for i in range(4):
        assert_all_same(found[i], NeighborSampler(graph, [6, 4]), seeds, [i + k for k in range(4)])


def test_a_batch_that_fails_spoils_no_other() -> None:
    graph = random_graph(400, 3_000, seed=6)  # the hub, node 0, has a third of the edges
    seeds = [np.array([5, 17]), np.array([400]), np.array([0]), np.array([], np.int64), np.array([0.5]), np.array([9])]
    keys = list(range(6))
    sampler = NeighborSampler(graph, [-1, 2], max_bytes=60_000)
    found = OnDiskFrontier(sampler, ArrayRows(graph.indices)).sample(seeds, keys)
    assert [type(batch) for batch in found.batches] == [
        Subgraph,
        InputError,
        BudgetError,
        Subgraph,
        InputError,
        Subgraph,
    ]
    assert_all_same(found, sampler, seeds, keys)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_damage_is_its_batchs_alone(dtype: type) -> None:
    indices = np.array([1, 9, 0, -1, 2], dtype)  # slot 1 and 3 name no node
    seeds = [np.array([node]) for node in (0, 1, 2, 3)]
    graph = Graph(np.array([0, 1, 2, 3, 5]), indices)
    found = OnDiskFrontier(NeighborSampler(graph, [-1]), ArrayRows(indices)).sample(seeds, [0] * 4)
    assert [type(batch) for batch in found.batches] == [Subgraph, StoreError, Subgraph, StoreError]
    assert_all_same(found, NeighborSampler(graph, [-1]), seeds, [0] * 4)
    for indptr, message in (
        ([0, 1, 9, 9, 9], "slot 5 holds no valid node id"),
        ([0, 5, 3, 4, 5], "indptr decreases at node 1"),
    ):
        damaged = Graph(np.array(indptr), np.zeros(5, dtype))
        found = OnDiskFrontier(NeighborSampler(damaged, [-1]), ArrayRows(damaged.indices)).sample(seeds, [0] * 4)
        with pytest.raises(StoreError, match=message):
            raise found.batches[1]  # type: ignore[misc]
        assert isinstance(found.batches[2], Subgraph)
    weighted = NeighborSampler(
        Graph(np.array([0, 1, 2**40, 2**40, 2**40]), indices, {"weight": np.ones(5)}), [1], False, "weight"
    )
    found = OnDiskFrontier(weighted, ArrayRows(indices)).sample(seeds, [0] * 4)
    assert [type(batch) for batch in found.batches] == [Subgraph, StoreError, StoreError, StoreError]
    assert_all_same(found, weighted, seeds, [0] * 4)


def test_a_page_that_cannot_be_read_fails_those_who_want_it() -> None:
    graph = Graph.from_edges(np.arange(1, 100), np.arange(99), num_nodes=100)
    seeds = [np.array([3, 4]), np.array([50, 4]), np.array([60])]
    rows = CountingRows(graph.indices, broken=50)
    found = OnDiskFrontier(NeighborSampler(graph, [1]), rows).sample(seeds, [0, 1, 2])
    assert str(found.batches[1]) == "slot 50 cannot be read"
    for k in (0, 2):
        batch = found.batches[k]
        assert isinstance(batch, Subgraph)
        assert_same(batch, NeighborSampler(graph, [1]).sample(seeds[k], k))
    assert found.nbytes == 3 * rows.row_bytes


@compiling
@given(st.integers(0, 400_000), st.integers(1, 12), st.booleans())
def test_what_does_not_fit_is_left_for_the_next_call(limit: int, count: int, weighted: bool) -> None:
    graph = random_graph(400, 3_000, seed=6)
    sampler = NeighborSampler(graph, [4, 3], weight="weight" if weighted else None)
    together = OnDiskFrontier(sampler, ArrayRows(graph.indices), max_bytes=limit, at_once=500)
    seeds, keys = [np.arange(k, k + 20) for k in range(count)], list(range(count))
    batches: list[Subgraph | Exception] = []
    while len(batches) < count:
        found = together.sample(seeds[len(batches) :], keys[len(batches) :])
        assert len(found.batches) > 0
        batches += found.batches
    assert_all_same(FrontierBatches(batches, 0), sampler, seeds, keys)


def peak_of(together: OnDiskFrontier, seeds: list[Ids]) -> tuple[int, FrontierBatches]:
    """(bytes that Python and numpy held at most for it, the result)."""
    together.sample(seeds[:1], [0])
    tracemalloc.start()
    found = together.sample(seeds, list(range(len(seeds))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, found


@pytest.mark.parametrize("at_once", [2_000, 10**6])
@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize("read", [(), ("weight", "edge_id")])
def test_memory_is_within_what_is_foreseen(
    store: tuple[Path, Graph], read: tuple[str, ...], weight: str | None, at_once: int
) -> None:
    group, graph = store
    columns = {name: ArrayRows(graph.columns[name]) for name in read}
    rows = open_zarr_rows(group, "narrow")
    sampler = NeighborSampler(graph, [6, 5], weight=weight)
    seeds = [np.arange(1 + k, 29_000, 29) for k in range(16)]
    limit = 16_000_000
    peak, found = peak_of(OnDiskFrontier(sampler, rows, columns, limit, at_once), seeds)
    rows.close()
    assert 1 < len(found.batches) < 16
    assert peak <= limit < 4 * peak


def test_the_estimate_grows_with_each_of_its_parts() -> None:
    graph = random_graph(400, 3_000, seed=6)
    sampler = NeighborSampler(graph, [4])
    need = sampler.need(sampler.begin(np.arange(100)), 0)
    one = frontier_bytes([need], 4)
    assert one < frontier_bytes([need], 8) < frontier_bytes([need] * 2, 8) < frontier_bytes([need] * 2, 8, weighted=True)
    assert frontier_bytes([need], 4, at_once=1) < one
    assert one < frontier_bytes([need], 4, columns=[4]) < frontier_bytes([need], 4, columns=[4, 8])
    assert frontier_bytes([], 4) == 0


def test_reading_together_serves_every_request() -> None:
    rows = CountingRows(np.arange(1000) * 7)
    requests = [np.array([5, 999, 5]), np.empty(0, np.int64), np.array([0, 5, 3])]
    other = CountingRows(np.arange(1000, dtype=np.float32) / 2)
    found = read_together([rows, other], requests, at_once=3)
    sevens, halves = zip(*found.values, strict=True)
    assert [values.tolist() for values in sevens] == [[35, 6993, 35], [], [0, 35, 21]]
    assert [values.tolist() for values in halves] == [[2.5, 499.5, 2.5], [], [0, 2.5, 1.5]]
    assert [call.tolist() for call in rows.calls] == [call.tolist() for call in other.calls] == [[0, 3, 5], [999]]
    assert found.nbytes == 4 * (8 + 4)
    assert read_together([rows], []).values == []
    assert read_together([], requests).values == [[], [], []]


def test_rows_of_another_graph_are_refused() -> None:
    sampler = NeighborSampler(random_graph(10, 30, seed=1), [2])
    for rows in (ArrayRows(np.zeros(29, np.int32)), ArrayRows(np.zeros(30)), ArrayRows(np.zeros((30, 1), np.int32))):
        with pytest.raises(ConfigError, match="30 source nodes"):
            OnDiskFrontier(sampler, rows)
    with pytest.raises(ConfigError, match=r"column 'time' has shape \[31\]: it needs one for each of 30"):
        OnDiskFrontier(sampler, ArrayRows(np.zeros(30, np.int32)), {"time": ArrayRows(np.zeros(31))})
    with pytest.raises(ConfigError, match="and 0"):
        OnDiskFrontier(sampler, ArrayRows(np.zeros(30, np.int32)), at_once=0)
