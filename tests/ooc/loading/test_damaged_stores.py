"""A damaged store is noticed while it is used, and never makes a kernel read or write outside of its arrays."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.layerwise.edge_tiles import SlotReader
from ooc.pyg import OocGraphStore
from ooc.sampling.negatives import negatives_of
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import StoreError
from tests.ooc.temporal_stores import Edges
from tests.stores.damage import change, flip, shard

NODES, EDGES, EVENTS = 50, 400, 400
HUGE = 2**31 - 1


@pytest.fixture
def store(make_store: Any) -> Path:
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, NODES, (2, EDGES))
    dst[:20] = src[:20]
    parts = np.array([0, 20, NODES])
    return make_store(num_nodes=NODES, src=src, dst=dst, weight=True, parts=parts)


@pytest.fixture(scope="session")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges(nodes=NODES, count=EVENTS).store(tmp_path_factory.mktemp("temporal"), undirected=True)


@pytest.fixture
def events_store(temporal: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(temporal, tmp_path / "t.ooc"))


def neighbors(ds: Dataset) -> Iterator[Any]:
    yield from ooc.NeighborLoader(ds, num_neighbors=[5, 5], input_nodes="train", batch_size=8, weight_attr="weight")


def parts(ds: Dataset) -> Iterator[Any]:
    yield from ooc.ClusterLoader(ds)


def subgraphs(ds: Dataset) -> Iterator[Any]:
    yield from ooc.SaintLoader(ds, "walk", 20, walk_length=3, sample_coverage=2)


def slots(ds: Dataset) -> Iterator[Any]:
    yield from SlotReader(ds.graph, ds.edge_rows("indices"), ds.edge_rows("weight")).parts()


def whole_graph(ds: Dataset) -> Iterator[Any]:
    yield OocGraphStore(ds).get_edge_index(OocGraphStore(ds).get_all_edge_attrs()[0])


def events(ds: Dataset) -> Iterator[Any]:
    yield from ooc.EventLoader(ds, 50, num_neighbors=[5, 5], negatives=negatives_of(ds, "historical", 1))


def windows(ds: Dataset) -> Iterator[Any]:
    yield from ooc.SnapshotLoader(ds, window=200_000)


NODE_USES = [neighbors, parts, subgraphs, slots, whole_graph]
Use = Callable[[Dataset], Iterator[Any]]


def use(store: Path, how: Use, **options: Any) -> list[Any]:
    with ooc.open(store, **options) as ds:
        return list(how(ds))


@pytest.mark.parametrize("how", NODE_USES)
def test_a_sound_store_is_used_without_complaints(store: Path, how: Use) -> None:
    assert use(store, how, verify_reads=True)


@pytest.mark.parametrize("value", [-1, EDGES + 1, 0, HUGE * 4])
def test_a_changed_number_in_indptr_is_found_on_opening(store: Path, value: int) -> None:
    change(store, "graph/indptr", NODES // 2, value)
    with pytest.raises(StoreError, match=r"graph/indptr is damaged: rows 0 to 50 must ascend within 0\.\.400; run"):
        ooc.open(store)


@pytest.mark.parametrize(
    ("name", "value"), [("graph/self_loops", -5), ("graph/self_loops", HUGE), ("graph/parts", 51), ("graph/parts", -1)]
)
def test_changed_numbers_in_small_arrays_are_found_on_opening(store: Path, name: str, value: int) -> None:
    change(store, name, 1, value)
    with pytest.raises(StoreError, match=f"{name} is damaged"):
        ooc.open(store)


@pytest.mark.parametrize("how", NODE_USES)
@pytest.mark.parametrize("value", [-1, NODES, HUGE, -HUGE])
def test_a_changed_source_is_found_by_whatever_reads_it(store: Path, how: Use, value: int) -> None:
    change(store, "graph/indices", slice(0, None, 3), value)  # samples do not meet every slot
    with pytest.raises(StoreError, match=r"valid node id|graph/indices is damaged: row|topology|damaged"):
        use(store, how)
    for options in ({"verify_reads": True}, {"in_memory": True}):
        with pytest.raises(StoreError, match=f"graph/indices is damaged: row 0 holds {value}, which is not within 0..49; run"):
            ooc.open(store, **options)


def test_labels_and_splits_that_do_not_fit_the_manifest_are_found(store: Path) -> None:
    change(store, "node/node/split", 7, 0 if ooc.open(store).split("val").tolist().count(7) else 1)
    with pytest.raises(StoreError, match=r"split 'train' holds \d+ nodes, but the manifest says 30"):
        use(store, neighbors)
    change(store, "node/node/y", 9, 3)
    with ooc.open(store) as ds, pytest.raises(StoreError, match=r"node/node/y is damaged: row 9 holds 3, .* within -1\.\.2"):
        _ = ds.labels


@pytest.mark.parametrize("how", [events, windows])
@pytest.mark.parametrize("name", ["events/src", "events/dst"])
@pytest.mark.parametrize("value", [-1, NODES, HUGE])
def test_a_changed_end_of_an_event_is_found(events_store: Path, how: Use, name: str, value: int) -> None:
    change(events_store, name, 123, value)
    with pytest.raises(StoreError, match=f"{name} is damaged: row 123 holds {value}, which is not within 0..49"):
        use(events_store, how)


@pytest.mark.parametrize(("name", "value"), [("graph/edge_id", -1), ("graph/edge_id", EVENTS), ("graph/indices", NODES)])
def test_a_changed_number_in_the_past_of_events_is_found(events_store: Path, name: str, value: int) -> None:
    change(events_store, name, slice(0, None, 3), value)
    with pytest.raises(StoreError, match=r"slot \d+ holds no valid (node|edge) id"):
        use(events_store, events)


@pytest.mark.parametrize("name", ["indptr", "indices", "weight", "weight_sum", "self_loops", "loop_weight", "parts"])
def test_a_flipped_byte_of_the_topology_is_found_by_sampling(store: Path, name: str) -> None:
    flip(shard(store, f"graph/{name}"), 8)
    with pytest.raises(StoreError, match=rf"graph/{name} is damaged: (chunk 0 \(rows .*\) does not match|rows .* ascend)"):
        use(store, neighbors)


@pytest.mark.parametrize("name", ["split", "y"])
def test_a_flipped_byte_of_labels_and_splits_is_found(store: Path, name: str) -> None:
    flip(shard(store, f"node/node/{name}"), 5, bit=6)
    with pytest.raises(StoreError, match=f"node/node/{name} is damaged"):
        use(store, neighbors)


@pytest.mark.parametrize("engine", ["uring", "pread", "mmap"])
def test_a_flipped_byte_of_features_is_found_where_reads_are_verified(store: Path, engine: str) -> None:
    flip(shard(store, "node/node/x"), 1000)
    assert use(store, neighbors, engine=engine), "rows are picked from the chunk, which nobody reads whole"
    with pytest.raises(StoreError, match=r"node/node/x is damaged: chunk 0 \(rows 0 to 49\) does not match its checksum; run"):
        use(store, neighbors, engine=engine, verify_reads=True)
    with pytest.raises(StoreError, match="node/node/x is damaged"):
        ooc.open(store, in_memory=True)


@pytest.mark.parametrize("name", ["events/src", "events/dst", "events/time", "edge/edge/msg"])
def test_a_flipped_byte_of_events_is_found_once_all_were_read(events_store: Path, name: str) -> None:
    flip(shard(events_store, name), 100)
    for options in ({}, {"verify_reads": True}):
        with pytest.raises(StoreError, match=f"{name} is damaged: chunk 0"):
            use(events_store, windows, **options)


def test_rows_in_memory_and_on_disk_are_the_same_under_verification(store: Path) -> None:
    with ooc.open(store, verify_reads=True) as ds, ooc.open(store, in_memory=True) as other:
        ids, out = np.array([3, 49, 3, 0]), np.empty((4, 8), np.float32)
        ds.rows("x").read(ids, out)
        held = other.rows("x")
        assert isinstance(held, ArrayRows)
        assert (out == held.array[ids]).all()
