"""A graph's slots: what is read through the engines is what stands in the map."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ooc
from ooc.sampling import temporal_neighbor as slots
from ooc.sampling.negatives import negatives_of
from ooc.sampling.temporal_neighbor import TemporalIndex
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import StoreError
from ooc.stores.graph import Graph
from ooc.temporal.node_memory import MemoryLoader, NodeMemory
from tests.ooc.temporal_stores import Edges

LAWS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
N = 6
EVENTS = st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), st.integers(0, 9)), min_size=1, max_size=80)


@LAWS
@given(
    events=EVENTS,
    asked=st.lists(st.tuples(st.integers(0, N - 1), st.integers(-1, 11)), max_size=9),
    leaf=st.integers(1, 9),
    name=st.sampled_from(["time", "edge_id"]),
)
def test_slots_below_a_bound(events: Any, asked: Any, leaf: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "LEAF", leaf)
    events = sorted(events, key=lambda event: event[2])
    src, dst, time = (np.array([event[k] for event in events], np.int64) for k in range(3))
    graph = Graph.from_edges(src, dst, N, time=time)
    number = {"time": time, "edge_id": np.arange(len(events))}[name]
    rows = {"indices": ArrayRows(graph.indices), **{each: ArrayRows(graph.columns[each]) for each in ("time", "edge_id")}}
    node, bound = np.array([v for v, _ in asked], np.int64), np.array([t for _, t in asked], np.int64)
    for each in (TemporalIndex(graph), TemporalIndex(graph, rows)):
        first, past = each.before(name, node, bound)
        assert first.tolist() == graph.indptr[node].tolist()
        assert past.tolist() == [int(((dst == v) & (number < t)).sum()) for v, t in asked]
        every = np.arange(len(events))[::-1]
        for column in ("indices", "time", "edge_id"):
            column_values = graph.indices if column == "indices" else graph.columns[column]
            assert each.values(column, every).tolist() == column_values[every].tolist()
        assert each.edge_ids(every).dtype == np.int64


def test_a_damaged_topology_is_refused() -> None:
    graph = Graph(np.array([0, 3, 2]), np.array([0, 1], np.int32), {"time": np.array([1, 2])})
    with pytest.raises(StoreError, match="run `ooc verify`"):
        TemporalIndex(graph).before("time", np.array([0]), np.array([1]))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges(count=600).store(tmp_path_factory.mktemp("slots"), undirected=True)


def test_each_caller_has_what_its_own_memory_allows(store: Path) -> None:
    with ooc.open(store) as ds:
        small, large = TemporalIndex.of(ds, 0), TemporalIndex.of(ds, 2**40)
        assert (small.mapped, large.mapped) == (False, True)
        assert TemporalIndex.of(ds, 1) is small
        assert TemporalIndex.of(ds, 2**41) is large


def batches(store: Path, folder: Path, read: bool, patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Everything in the batches of a pass, and what is wanted of the memory."""
    found = []
    patch.setattr("ooc.sampling.temporal_neighbor.TOPOLOGY_SHARE", 2**60 if read else 1)
    with ooc.open(store) as ds:
        loader = MemoryLoader(ds, 50, width=4, num_neighbors=[3, 2], negatives=negatives_of(ds, "historical", 2), seed=0)
        assert loader._sampler._slots.mapped != read
        loader.memory = NodeMemory.create(folder, ds, 4, columns=("msg",), max_bytes=2**20)
        for batch in loader:
            wanted = batch.memory_request
            loader.memory.pull(batch, torch.device("cpu"))
            loader.memory.push(batch, torch.ones(len(batch.n_id), 4))
            parts = {name: getattr(wanted, name) for name in ("own", "other", "time", "known", "write", "at")}
            tensors = {name: value for name, value in batch.to_dict().items() if isinstance(value, torch.Tensor)}
            found.append({**parts, **wanted.columns, **{f"batch {name}": value.numpy() for name, value in tensors.items()}})
        loader.memory.end_pass()
        loader.memory.history.close()
    return found


def test_batches_are_the_same_from_the_map_and_from_the_engines(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (batches(store, tmp_path / f"{read}", read, monkeypatch) for read in (False, True))
    assert len(one) == len(other) >= 12
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert any(len(each["batch edge_id"]) > 100 for each in one)
