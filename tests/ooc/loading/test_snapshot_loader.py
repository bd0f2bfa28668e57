"""Snapshots against windows cut from the edges in plain Python; resuming; memory; threads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.events import Reader
from tests.ooc.runs import tight
from tests.ooc.temporal_stores import Edges
from tests.waiting import no_threads

E = 400


@pytest.fixture(scope="module")
def edges() -> Edges:
    return Edges()


@pytest.fixture(scope="module")
def store(edges: Edges, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edges.store(tmp_path_factory.mktemp("temporal"))


def check(snapshot: Any, edges: Edges, first: int, last: int) -> None:
    """The snapshot holds just the events first..last-1, and their nodes once each."""
    ends = snapshot.n_id[snapshot.edge_index].numpy()
    np.testing.assert_array_equal(ends, [edges.src[first:last], edges.dst[first:last]])
    np.testing.assert_array_equal(snapshot.t, edges.time[first:last])
    np.testing.assert_array_equal(snapshot.msg, edges.msg[first:last])
    np.testing.assert_array_equal(snapshot.e_id, np.arange(first, last))
    assert snapshot.edge_attr is snapshot.msg
    assert sorted(snapshot.n_id.tolist()) == sorted(set(ends.ravel().tolist()))
    np.testing.assert_array_equal(snapshot.x, edges.x[snapshot.n_id])
    np.testing.assert_array_equal(snapshot.y, edges.y[snapshot.n_id])
    assert snapshot.num_nodes == len(snapshot.n_id)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("window", "stride"), [("60s", None), ("60s", "10s"), ("10s", "35s"), (100_000, 30_000)])
def test_windows_of_time(store: Path, edges: Edges, window: Any, stride: Any) -> None:
    length = {"60s": 60_000, "10s": 10_000}.get(window, window)
    step = {None: length, "10s": 10_000, "35s": 35_000}.get(stride, stride)
    with ooc.open(store) as ds:
        loader = ooc.SnapshotLoader(ds, window, stride)
        found = list(loader)
        assert len(found) == len(loader)
        for snapshot in found:
            assert snapshot.begin == edges.time[0] + snapshot.window * step
            assert snapshot.end == snapshot.begin + length
            first, last = np.searchsorted(edges.time, [snapshot.begin, snapshot.end])
            check(snapshot, edges, int(first), int(last))
        seen = np.concatenate([snapshot.e_id for snapshot in found])
        if stride is None:
            np.testing.assert_array_equal(seen, np.arange(E))


def test_windows_of_events(store: Path, edges: Edges) -> None:
    with ooc.open(store) as ds:
        for k, snapshot in enumerate(ooc.SnapshotLoader(ds, 64, by="count")):
            check(snapshot, edges, 64 * k, min(64 * k + 64, E))


def test_labels_that_change_are_those_of_the_last_event_as_a_source(edges: Edges, tmp_path: Path) -> None:
    store = edges.store(tmp_path, edge_features=["msg=m*", "state=s"], allow_nan=True)
    with ooc.open(store) as ds:
        for snapshot in ooc.SnapshotLoader(ds, "60s", "20s", labels="state"):
            assert not hasattr(snapshot, "state")
            assert snapshot.edge_attr is snapshot.msg
            wanted = dict.fromkeys(snapshot.n_id.tolist(), -1)
            for event in snapshot.e_id.tolist():
                wanted[int(edges.src[event])] = -1 if np.isnan(edges.state[event]) else int(edges.state[event])
            assert snapshot.y.tolist() == list(wanted.values())
        with pytest.raises(InputError, match=r"an event has label .*: labels must be whole numbers"):
            list(ooc.SnapshotLoader(ds, "60s", labels="msg"))


@given(st.integers(1, 60), st.integers(1, 60), st.booleans())
@settings(max_examples=15, deadline=None)
def test_events_of_overlapping_ranges_are_read_once(store: Path, length: int, stride: int, targets: bool) -> None:
    """targets: behind each range the next one's own events are asked for first, as forecasts do."""
    read = []

    class Counting:
        def __init__(self, events: Any) -> None:
            self.events = events

        def read(self, first: int, last: int, *how: Any) -> Any:
            read.extend(range(first, last))
            return self.events.read(first, last, *how)

    with ooc.open(store) as ds:
        reader = Reader(Counting(ds.events), ["msg"])  # type: ignore[arg-type]
        for first in range(0, E, stride):
            spans = [(first, min(first + length, E))]
            if targets:
                spans.append((max(first + stride, spans[0][1]), max(first + stride, min(first + stride + length, E))))
            for begin, end in [span for span in spans if span[0] <= E and span[1] <= E]:
                block, whole = reader.read(begin, end, keep=first), ds.events.read(begin, end, ["msg"])
                assert block.first == begin
                for name in ("src", "dst", "time"):
                    np.testing.assert_array_equal(getattr(block, name), getattr(whole, name))
                np.testing.assert_array_equal(block.columns["msg"], whole.columns["msg"])
    assert len(read) == len(set(read))
    assert stride > length or set(read) == set(range(E))


def test_columns_and_fields_that_are_not_wanted(store: Path) -> None:
    with ooc.open(store) as ds:
        snapshot = next(iter(ooc.SnapshotLoader(ds, "60s", columns=[], features=False, labels=False)))
        assert set(snapshot.keys()) == {"edge_index", "num_nodes", "t", "n_id", "e_id", "window", "begin", "end"}
        with pytest.raises(InputError, match="no column 'nothing': there are msg"):
            ooc.SnapshotLoader(ds, "60s", columns=["nothing"])


def test_a_column_does_not_take_a_fields_place(edges: Edges, tmp_path: Path) -> None:
    with ooc.open(edges.store(tmp_path, edge_features=["x=m0", "y=s"], allow_nan=True)) as ds:
        with pytest.raises(ConfigError, match="column 'x' would take the place of another field"):
            ooc.SnapshotLoader(ds, E, by="count")
        snapshot = next(iter(ooc.SnapshotLoader(ds, E, by="count", columns=[], labels="y")))
        np.testing.assert_array_equal(snapshot.x, edges.x[snapshot.n_id])


def test_windows_without_events(store: Path) -> None:
    with ooc.open(store) as ds:
        every = list(ooc.SnapshotLoader(ds, "1s", empty=True))
        assert [snapshot.window for snapshot in every] == list(range(len(every)))
        none = [snapshot for snapshot in every if not len(snapshot.t)]
        assert none
        assert none[0].x.shape == (0, 5)
        assert none[0].edge_index.shape == (2, 0)
        some = [snapshot.window for snapshot in ooc.SnapshotLoader(ds, "1s")]
        assert some == [snapshot.window for snapshot in every if len(snapshot.t)]


def test_goes_on_where_it_stood(store: Path) -> None:
    def make() -> Any:
        return ooc.SnapshotLoader(ds, "60s", "20s", transform=lambda data: data)

    with ooc.open(store) as ds:
        whole = list(make())
        loader, taken = make(), []
        for snapshot in loader:
            taken.append(snapshot)
            if len(taken) == 7:
                break
        other = make()
        other.load_state_dict(loader.state_dict())
        taken += list(other)
        assert len(taken) == len(whole)
        for a, b in zip(taken, whole, strict=True):
            assert torch.equal(a.e_id, b.e_id)
            assert torch.equal(a.x, b.x)
        assert len(list(other)) == len(whole), "the next pass is a whole one"
        with pytest.raises(ConfigError, match="cannot resume: windows were"):
            ooc.SnapshotLoader(ds, "61s").load_state_dict(loader.state_dict())
        with pytest.raises(ConfigError, match="another store"):
            make().load_state_dict({**loader.state_dict(), "store": "f" * 64})


def test_a_window_that_does_not_fit_is_refused(store: Path) -> None:
    with ooc.open(store, memory=tight()) as ds:
        loader = ooc.SnapshotLoader(ds, E, by="count")
        assert len(list(loader)) == 1
        loader._max_bytes = 1000
        with pytest.raises(BudgetError, match="window 0 has 400 events and may need"):
            list(loader)


def test_no_thread_stays(store: Path) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("mine")

    with ooc.open(store) as ds:
        steps: list[Callable[[], Any]] = [
            lambda: list(ooc.SnapshotLoader(ds, "60s")),
            lambda: next(iter(ooc.SnapshotLoader(ds, "60s"))),
        ]
        for step in steps:
            step()
        with pytest.raises(RuntimeError, match="mine"):
            list(ooc.SnapshotLoader(ds, "60s", transform=fail))
        one = iter(ooc.SnapshotLoader(ds, "60s"))
        next(one)
        one.close()
        with pytest.raises(StopIteration):
            next(one)
    assert no_threads()
