"""LABOR over edges on disk, many batches together, against sampling each of them in memory."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.blocks import Subgraph
from ooc.sampling import NeighborSampler, OnDiskFrontier
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.in_edge_pass import cut_pieces
from ooc.sampling.labor import Labor, batch_key
from ooc.sampling.left_out import LeftOut
from ooc.stores.arrays.rows import Ids
from ooc.stores.arrays.segment_rows import RangePlan
from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from tests.ooc.sampling.test_neighbor import FANOUTS, assert_same, random_graph
from tests.ooc.sampling.test_ondisk_neighbor import CountingRows, off_disk

compiling = settings(deadline=None)  # the first example may compile a kernel
N = 40


def assert_equal(found: Subgraph | Exception, expected: Subgraph) -> None:
    assert isinstance(found, Subgraph), found
    assert_same(found, expected)
    assert (found.stands_for is None) == (expected.stands_for is None)
    if expected.stands_for is not None:
        assert found.stands_for is not None
        assert np.array_equal(found.stands_for, expected.stands_for)


def no_weights(graph: Graph) -> Graph:
    """The graph without edges, whose weights must not be touched either."""
    columns = {name: np.full_like(column, -1) for name, column in graph.columns.items()}
    return Graph(graph.indptr, off_disk(graph).indices, columns)


@compiling
@given(
    st.integers(0, 2500),
    FANOUTS,
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 300),
    st.data(),
)
def test_batches_are_those_sampled_alone(
    num_edges: int,
    fanout: list[int],
    weighted: bool,
    layers: bool,
    period: int,
    held: bool,
    columns: bool,
    at_once: int,
    data: st.DataObject,
) -> None:
    """Window after window by one sampler, which keeps draws, with links left out at the seeds of some batches."""
    graph, labor = random_graph(N, num_edges, seed=num_edges), Labor(layer_dependency=layers, batch_dependency=period)
    weight = "weight" if weighted else None
    how: dict[str, Any] = {"weight": weight, "labor": labor, "held_out": HeldOut(np.uint64(3), 0.3) if held else None}
    rows, read = CountingRows(graph.indices), {"edge_id": CountingRows(graph.columns["edge_id"])} if columns else {}
    weights = CountingRows(graph.columns["weight"]) if weighted else None
    sampler = NeighborSampler(no_weights(graph), fanout, **how)
    together, step = OnDiskFrontier(sampler, rows, read, at_once=at_once, weight=weights), 0
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(0, 6))
        seeds = [np.array(data.draw(st.lists(st.integers(0, N - 1), max_size=8)), np.int64) for _ in range(size)]
        keys: list[Any] = [batch_key(5, 0, step + k, period) if period > 1 else 7 * step + k for k in range(size)]
        step += size
        left_out = [leaving(data, each) if data.draw(st.integers(0, 3)) == 0 else None for each in seeds]
        found = together.sample(seeds, keys, left_out)
        for batch, nodes, key, out in zip(found.batches, seeds, keys, left_out, strict=True):
            assert_equal(batch, NeighborSampler(graph, fanout, **how).sample(nodes, key, out))
            for name in read:
                assert np.array_equal(batch.columns[name], graph.columns[name][batch.slot])  # type: ignore[union-attr]


def leaving(data: st.DataObject, seeds: Ids) -> LeftOut | None:
    if not len(seeds):
        return None
    seed = np.array(data.draw(st.lists(st.integers(0, len(seeds) - 1), max_size=6)), np.int64)
    return LeftOut.of(seed, np.array([data.draw(st.integers(0, N - 1)) for _ in seed], np.int64), len(seeds))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Graph]:
    """A group with `indices` and `weight` of several shards, and the graph in memory; node 0 is a hub."""
    group, graph = tmp_path_factory.mktemp("in-edges"), random_graph(30_000, 400_000, seed=5)
    columns = {"indices": graph.indices, "wide": graph.indices.astype(np.int64), "weight": graph.columns["weight"]}
    for name, column in columns.items():
        with Appender(group, name, (), column.dtype, chunk_bytes=2**16, shard_bytes=2**18) as appender:
            appender.append(column)
    return group, graph


@pytest.mark.cases(2)
@pytest.mark.parametrize("engine", ["auto", "pread", "mmap"])
@pytest.mark.parametrize(("name", "weighted"), [("indices", False), ("wide", False), ("indices", True), ("wide", True)])
def test_a_store_on_disk(store: tuple[Path, Graph], name: str, weighted: bool, engine: str) -> None:
    group, graph = store
    rows, weights = open_zarr_rows(group, name, engine), open_zarr_rows(group, "weight", engine) if weighted else None
    how: dict[str, Any] = {"weight": "weight" if weighted else None, "labor": Labor(True, 64)}
    seeds = [np.arange(i, 30_000, 1_000 + i) for i in range(4)]
    keys = [batch_key(1, 0, step, 64) for step in (14, 15, 16, 17)]
    for at_once in (300, 2**20):
        frontier = OnDiskFrontier(NeighborSampler(no_weights(graph), [6, 4], **how), rows, at_once=at_once, weight=weights)
        found = frontier.sample(seeds, keys)  # type: ignore[arg-type]
        alone = NeighborSampler(graph, [6, 4], **how)
        for batch, nodes, key in zip(found.batches, seeds, keys, strict=True):
            assert_equal(batch, alone.sample(nodes, key))
        assert found.nbytes > 0
    for each in (rows, weights):
        if each is not None:
            each.close()


def test_a_hub_is_read_once_for_all_batches_and_not_again_for_those_that_draw_alike() -> None:
    graph = random_graph(4, 4000, seed=1)
    rows, labor, seeds = CountingRows(graph.indices), Labor(batch_dependency=64), [np.array([0, 1])] * 3
    frontier = OnDiskFrontier(NeighborSampler(off_disk(graph), [5], labor=labor), NotInMemory(rows))
    degree = int(graph.indptr[2])
    key = [batch_key(0, 0, step, 64) for step in range(40)]
    assert frontier.sample(seeds, key[14:17]).nbytes == 4 * degree  # two of one key and one of another
    assert frontier.sample(seeds[:2], key[17:19]).nbytes == 0
    assert frontier.sample(seeds[:1], key[32:33]).nbytes == 4 * degree
    assert frontier.sample(seeds[:1], [batch_key(1, 0, 0, 64)]).nbytes == 4 * degree


class NotInMemory:
    """Rows that look like those of another format, of which no view is taken."""

    def __init__(self, rows: CountingRows) -> None:
        self.shape, self.dtype, self.row_bytes, self.read = rows.shape, rows.dtype, rows.row_bytes, rows.read


def test_damage_and_invalid_weights_fail_the_batches_that_meet_them() -> None:
    graph = random_graph(20, 300, seed=0)
    seeds, keys = [np.array([v]) for v in range(6)], [9] * 6
    slot = int(graph.indptr[3])
    graph.columns["weight"][slot] = np.nan
    weights = CountingRows(graph.columns["weight"])
    sampler = NeighborSampler(off_disk(graph), [3], weight="weight", labor=Labor())
    with pytest.raises(ConfigError, match="weights that it draws by"):
        OnDiskFrontier(sampler, CountingRows(graph.indices))
    found = OnDiskFrontier(sampler, CountingRows(graph.indices), weight=weights).sample(seeds, keys).batches
    assert [type(batch) for batch in found] == [Subgraph] * 3 + [InputError] + [Subgraph] * 2
    assert f"weight of slot {slot} " in str(found[3])
    wrong = graph.indices.copy()
    wrong[graph.indptr[4] : graph.indptr[5]] = 2**20
    unweighted = NeighborSampler(off_disk(graph), [3], labor=Labor())
    found = OnDiskFrontier(unweighted, CountingRows(wrong)).sample(seeds, keys).batches
    assert [type(batch) for batch in found] == [Subgraph] * 4 + [StoreError] + [Subgraph]
    broken = NotInMemory(CountingRows(graph.indices, broken=slot))
    found = OnDiskFrontier(unweighted, broken).sample(seeds, keys).batches
    assert [type(batch) for batch in found] == [Subgraph] * 3 + [StoreError] + [Subgraph] * 2


@compiling
@given(st.integers(1, 2000), st.integers(1, 400), st.integers(1, 20), st.integers(0, 99))
def test_pieces_are_bounded_in_bytes_and_in_what_is_drawn(
    store: tuple[Path, Graph], count: int, pages: int, fanout: int, seed: int
) -> None:
    group, graph = store
    node = np.unique(np.random.default_rng(seed).integers(0, 30_000, count))
    rows = open_zarr_rows(group, "indices")
    assert isinstance(rows, ShardedRows)
    cut, most, drawn = np.empty(len(node) + 1, np.int64), 4096 * pages, 500
    limits = (rows.row_bytes, rows.engine.alignment, rows.cost.gap_bytes, most, fanout, drawn)
    pieces = cut_pieces(graph.indptr, node, *limits, cut)
    assert cut[0] == 0
    assert cut[pieces] == len(node)
    for k in range(pieces):
        own = node[cut[k] : cut[k + 1]]
        nbytes = RangePlan.of(rows, graph.indptr[own], graph.indptr[own + 1]).nbytes
        assert len(own) == 1 or (nbytes <= most and np.minimum(np.diff(graph.indptr)[own], fanout).sum() <= drawn)
    rows.close()


def test_it_takes_no_more_memory_than_it_counts(store: tuple[Path, Graph]) -> None:
    """Also where few batches fit: a call samples as many as fit, and one at least."""
    group, graph = store
    rows = open_zarr_rows(group, "indices")
    seeds, keys = [np.arange(i, 30_000, 31) for i in range(16)], list(range(16))
    for most in (2_000_000, 6_000_000, 20_000_000):
        frontier = OnDiskFrontier(NeighborSampler(off_disk(graph), [8, 4], labor=Labor()), rows, None, most, 2**12)
        frontier.sample(seeds[:1], keys[:1])
        tracemalloc.start()
        found = frontier.sample(seeds, keys)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= most or len(found.batches) == 1
        assert len(found.batches) > 1 or most < 6_000_000
    rows.close()
