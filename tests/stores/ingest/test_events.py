"""Ingest with time against a brute-force reference: events, the CSC behind them, their features; errors."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores import events as events_module
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
N = 8


def table(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return str(path)


def fresh(tmp_path: Path) -> Path:
    return tmp_path / f"s{len(list(tmp_path.iterdir()))}.ooc"


def reference(edges: list[tuple[int, int, int]], *, undirected: bool, drop_self_loops: bool, most: int) -> dict[str, Any]:
    """Events and CSC by the definition. most: nodes there are; an edge with another end is left out."""
    kept = [(t, p, s, d) for p, (s, d, t) in enumerate(edges) if max(s, d) < most and not (drop_self_loops and s == d)]
    kept.sort()
    slots = []
    for number, (t, _, s, d) in enumerate(kept):
        slots.append((d, number, s, t))
        if undirected and s != d:
            slots.append((s, number, d, t))
    slots.sort()
    counts = np.bincount([slot[0] for slot in slots], minlength=most)
    return {
        "src": [e[2] for e in kept],
        "dst": [e[3] for e in kept],
        "time": [e[0] for e in kept],
        "input": [e[1] for e in kept],
        "indptr": np.concatenate([[0], np.cumsum(counts)]),
        "indices": [slot[2] for slot in slots],
        "edge_id": [slot[1] for slot in slots],
        "slot_time": [slot[3] for slot in slots],
    }


@FEW
@given(
    edges=st.lists(st.tuples(st.integers(0, N + 1), st.integers(0, N + 1), st.integers(0, 6)), min_size=2, max_size=50),
    ascending=st.booleans(),
    undirected=st.booleans(),
    drop_self_loops=st.booleans(),
    strings=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_events_and_graph_are_the_reference(  # type: ignore[no-untyped-def]
    tmp_path, edges, ascending, undirected, drop_self_loops, strings, weighted, dtype
):
    """With ends that are no nodes, ties, loops; in time order and not."""
    edges = [(0, 1, 3), *edges]
    if ascending:
        edges.sort(key=lambda edge: edge[2])
    out, folder = fresh(tmp_path), fresh(tmp_path).with_suffix(".in")
    ends = [[f"n{v}" if strings else v for v in column] for column in list(zip(*edges, strict=True))[:2]]
    position = np.arange(len(edges))
    held = {
        "src": ends[0],
        "dst": ends[1],
        "t": [edge[2] for edge in edges],
        "w": position / 4,
        "f1": position,
        "f2": -position,
    }
    np.save(folder.parent / f"{folder.name}.npy", np.stack([position, position + 1], axis=1).astype(np.float32))
    for k, part in enumerate(np.array_split(position, 2)):
        table(folder / f"p{k}.parquet", **{name: pa.array(np.asarray(column)[part]) for name, column in held.items()})
    nodes = {"nodes": table(folder / "n/n.parquet", id=[f"n{v}" for v in range(N)])} if strings else {"num_nodes": N}
    ingest(
        IngestSpec(
            out=out, edges=f"{folder}/p*.parquet", time="t", weight="w" if weighted else None, drop_missing=True, dtype=dtype,
            edge_features=["msg=f*", f"other={folder.parent / folder.name}.npy"], undirected=undirected,
            drop_self_loops=drop_self_loops, **nodes,
        )
    )  # fmt: skip
    want = reference(edges, undirected=undirected, drop_self_loops=drop_self_loops, most=N)
    with Dataset.open(out) as ds:
        block = ds.events.read(0, len(ds.events))
        for name in ("src", "dst", "time"):
            np.testing.assert_array_equal(getattr(block, name), want[name], err_msg=name)
        np.testing.assert_array_equal(block.columns["msg"], np.stack([want["input"], np.negative(want["input"])], axis=1))
        np.testing.assert_array_equal(block.columns["other"][:, 1], np.add(want["input"], 1))
        if weighted:
            np.testing.assert_array_equal(block.columns["weight"], np.array(want["input"], np.float32) / 4)
        assert ds.manifest.time is not None
        assert ds.manifest.time.sorted == (want["input"] == list(range(len(edges))))
        graph = ds.graph
        for name in ("indptr", "indices"):
            np.testing.assert_array_equal(getattr(graph, name), want[name], err_msg=name)
        np.testing.assert_array_equal(graph.columns["edge_id"], want["edge_id"])
        np.testing.assert_array_equal(graph.columns["time"], want["slot_time"])
        assert graph.columns["time"].dtype == np.int64
        for t in range(-1, 8):
            assert ds.events.at(t) == np.searchsorted(want["time"], t)
            assert ds.events.at(t, "right") == np.searchsorted(want["time"], t, side="right")
    assert verify(out) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_events_are_read_into_memory_that_is_given(tmp_path: Path, dtype: str) -> None:
    count = 3001
    values = np.arange(count, dtype=np.float32) % 777
    number = np.arange(count)
    edges = table(tmp_path / "e.parquet", src=number % 40, dst=number % 39, time=number, f=values, w=values)
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="time", edge_features=["msg=f"], dtype=dtype, weight="w"))
    given: list[np.ndarray] = []

    def empty(nbytes: int) -> np.ndarray:
        given.append(np.full(nbytes, 0xFF, np.uint8))
        return given[-1]

    with Dataset.open(tmp_path / "s.ooc") as ds:
        for first, last in [(0, count), (17, 2003), (5, 5), (3000, 3001)]:
            given.clear()
            block, plain = ds.events.read(first, last, empty=empty), ds.events.read(first, last)
            assert len(given) == 1
            for name in ("src", "dst", "time"):
                np.testing.assert_array_equal(getattr(block, name), getattr(plain, name))
                assert first == last or np.shares_memory(getattr(block, name), given[0])
            np.testing.assert_array_equal(block.columns["msg"][:, 0], values[first:last])
            np.testing.assert_array_equal(block.columns["weight"], values[first:last])
            assert block.time.tolist() == list(range(first, last))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A store of 4000 events, some of them in bursts, and their times."""
    path, rng = tmp_path_factory.mktemp("uneven"), np.random.default_rng(0)
    time = np.sort(np.concatenate([rng.integers(0, 5000, 2500), rng.integers(900, 1000, 1000), np.full(500, 4000)]))
    edges = table(path / "e.parquet", src=np.zeros(4000, int), dst=np.ones(4000, int), time=time)
    ingest(IngestSpec(out=path / "s.ooc", edges=edges, time="time"))
    return path / "s.ooc", time


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(-500, 5000), steps=st.lists(st.integers(-300, 900), max_size=40), near=st.sampled_from([1, 20, 300]))
def test_times_are_found_wherever_one_looks(
    uneven: tuple[Path, np.ndarray], start: int, steps: list[int], near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, time = uneven
    monkeypatch.setattr(events_module, "_NEAR", near)
    with Dataset.open(store) as ds:
        for t in np.cumsum([start, *steps]).tolist():
            for side in ("left", "right", "right"):
                assert ds.events.at(t, side) == np.searchsorted(time, t, side=side)


def test_times_are_found_behind_many_searches(uneven: tuple[Path, np.ndarray]) -> None:
    store, time = uneven
    with Dataset.open(store) as ds:
        for t in range(0, 5000, 7):
            assert ds.events.at(t) == np.searchsorted(time, t)
        np.testing.assert_array_equal(ds.events.before(time), np.searchsorted(time, time))


def test_whole_times_are_found_by_fractions_and_by_what_no_time_can_be(uneven: tuple[Path, np.ndarray]) -> None:
    store, time = uneven
    between = np.arange(-3, 5000, 7) + 0.5
    with Dataset.open(store) as ds:
        for side in ("left", "right"):
            assert [ds.events.at(t, side) for t in between] == np.searchsorted(time, between).tolist()
            assert (ds.events.at(-(10**30), side), ds.events.at(10**30, side)) == (0, len(time))
        np.testing.assert_array_equal(ds.events.before(between), np.searchsorted(time, between))


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"order": "degree"}, {"parts": 3}])
def test_new_numbers_of_nodes_change_no_event(tmp_path: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    src, dst, time = rng.integers(0, 40, 300), rng.integers(0, 40, 300), rng.integers(0, 50, 300)
    edges = table(tmp_path / "e.parquet", src=src, dst=dst, time=time, f=np.arange(300.0))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="time", edge_features=["msg=f"], num_nodes=40, **options))
    order = np.lexsort([np.arange(300), time])
    with Dataset.open(tmp_path / "s.ooc") as ds:
        block = ds.events.read(0, 300)
        np.testing.assert_array_equal(ds.external(block.src.astype(np.int64)), src[order])
        np.testing.assert_array_equal(ds.external(block.dst.astype(np.int64)), dst[order])
        np.testing.assert_array_equal(block.columns["msg"][:, 0], order)


TIMES = {
    "whole numbers": ([5, 3, 3], [3, 3, 5], "int64", "s"),
    "whole doubles": ([5.0, 3.0, 3.0], [3, 3, 5], "int64", "s"),
    "fractions": ([0.5, 0.25, 3.0], [0.25, 0.5, 3.0], "float64", "s"),
    "timestamps": (
        pa.array([datetime(1970, 1, 1, 0, 0, s) for s in (5, 3, 3)], pa.timestamp("ms")), [3e6, 3e6, 5e6], "int64", "us"
    ),
    "zoned": (
        pa.array([datetime(1970, 1, 1, 0, 0, s, tzinfo=UTC) for s in (5, 3, 3)], pa.timestamp("ns", "Europe/Rome")),
        [3e6, 3e6, 5e6], "int64", "us",
    ),
    "dates": (
        pa.array([datetime(1970, 1, d) for d in (5, 3, 3)], pa.date32()), [2 * 864e8, 2 * 864e8, 4 * 864e8], "int64", "us",
    ),
    "number words": (["5", "3", "3.5"], [3.0, 3.5, 5.0], "float64", "s"),
    "iso words": (["1970-01-01T00:00:05", "1970-01-01 00:00:03", "1970-01-01T00:00:03Z"], [3e6, 3e6, 5e6], "int64", "us"),
}  # fmt: skip


@pytest.mark.parametrize("what", TIMES)
def test_times_of_every_kind(tmp_path: Path, what: str) -> None:
    given_, want, dtype, unit = TIMES[what]
    edges = table(tmp_path / "e.parquet", src=[0, 1, 2], dst=[1, 2, 0], when=given_)
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="when"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert (str(ds.events.dtype), ds.events.unit) == (dtype, unit)
        np.testing.assert_array_equal(ds.events.read(0, 3).time, want)
        assert ds.events.span == (want[0], want[-1])


def test_times_in_text_files(tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text("1 2 1082040961\n3 4 1082155839\n5 2 1082414391\n")
    spec: dict[str, Any] = {"edges": str(tmp_path / "e.txt"), "time": "column2", "time_unit": "ms"}
    ingest(IngestSpec(out=tmp_path / "s.ooc", **spec))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        np.testing.assert_array_equal(ds.events.read(0, 3).time, [1082040961, 1082155839, 1082414391])
        assert ds.events.unit == "ms"


BAD = {
    "word": ([1, 2], ["3", "soon"], r"e\.parquet row 1: t is 'soon', not a"),
    "empty": ([1, 2], [3, None], r"e\.parquet row 1: t is empty"),
    "nan": ([1, 2], [0.5, float("nan")], r"e\.parquet row 1: t is 'nan', not a finite number"),
    "list": ([1, 2], [[1], [2]], "column 't' holds list"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_time_is_named(tmp_path: Path, what: str) -> None:
    ends, times, message = BAD[what]
    edges = table(tmp_path / "e.parquet", src=ends, dst=ends, t=times)
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="t"))
    assert not (tmp_path / "s.ooc").exists()
    assert not (tmp_path / "s.ooc.partial").exists()


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"birth": "b", "nodes": "n.parquet"}, "give `time` too"),
        ({"time_unit": "ms"}, "give `time` too"),
        ({"time": "t", "drop_duplicates": True}, "does not go with `time`"),
        ({"time": "t", "edge_features": ["f"]}, "write it NAME=COLUMNS"),
        ({"time": "t", "edge_features": ["m=a", "m=b"]}, "is taken"),
        ({"time": "t", "edge_features": ["time=a"]}, "is taken"),
        ({"time": "t", "edge_features": ["weight=a"]}, "is taken"),
    ],
)
def test_settings_that_contradict(tmp_path: Path, settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IngestSpec(out=tmp_path / "s.ooc", edges="e.parquet", **settings_)


def test_features_that_do_not_fit(tmp_path: Path) -> None:
    edges = table(tmp_path / "e.parquet", src=[0, 1], dst=[1, 0], t=[1, 2])
    np.save(tmp_path / "short.npy", np.zeros((1, 3), np.float32))
    for pattern, message in (
        ("g*", "no column like 'g\\*' for `edge_features` msg"),
        (f"{tmp_path}/short.npy", "one row a edge"),
    ):
        with pytest.raises(InputError, match=message):
            ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="t", edge_features=[f"msg={pattern}"]))


def test_several_features_of_a_new_ingest_resume_nothing(tmp_path: Path) -> None:
    edges = table(tmp_path / "e.parquet", src=[0, 1, 2], dst=[1, 2, 0], t=[3, 1, 2], a=[0.0, 1.0, 2.0], b=[3.0, 4.0, 5.0])
    made = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="t", edge_features=["one=a", "two=b"]))
    assert made.resumed == ()
    with Dataset.open(tmp_path / "s.ooc") as data:
        held = data.events.read(0, 3).columns
    assert held["one"].ravel().tolist() == [1, 2, 0]
    assert held["two"].ravel().tolist() == [4, 5, 3]


def test_births_stand_in_the_time_of_the_edges(tmp_path: Path) -> None:
    day = datetime(2024, 1, 1)
    edges = table(tmp_path / "e.parquet", src=["a", "b"], dst=["b", "c"], t=[day, day + timedelta(1)])
    nodes = table(tmp_path / "n.parquet", id=["c", "b", "a"], born=pa.array([day, None, day + timedelta(2)]))
    spec: dict[str, Any] = {"edges": edges, "nodes": nodes, "time": "t", "birth": "born"}
    ingest(IngestSpec(out=tmp_path / "s.ooc", **spec))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        found = np.empty(3, np.int64)
        ds.rows("birth").read(np.arange(3), found)
        start = ds.events.span[0]
        np.testing.assert_array_equal(found, [start, np.iinfo(np.int64).min, start + 2 * 86_400_000_000])
    other = table(tmp_path / "m.parquet", id=["c", "b", "a"], born=[1, 2, 3])
    with pytest.raises(InputError, match="column 'born' holds ints, the edges' times are timestamps"):
        ingest(IngestSpec(out=tmp_path / "t.ooc", **{**spec, "nodes": other}))


def test_a_store_without_times_says_so(tmp_path: Path) -> None:
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=table(tmp_path / "e.parquet", src=[0], dst=[1])))
    with Dataset.open(tmp_path / "s.ooc") as ds, pytest.raises(InputError, match="ingest it with `time`"):
        len(ds.events)


def test_a_lost_array_of_events_is_found(tmp_path: Path) -> None:
    edges = table(tmp_path / "e.parquet", src=[0, 1], dst=[1, 0], t=[1, 2], f=[1.0, 2.0])
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="t", edge_features=["msg=f"]))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        with pytest.raises(InputError, match="no column 'x': there are msg"):
            ds.events.read(0, 2, ["x"])
        with pytest.raises(IndexError):
            ds.events.read(1, 3)
    (tmp_path / "s.ooc/edge/edge/msg/zarr.json").unlink()
    assert [each.array for each in verify(tmp_path / "s.ooc")] == ["edge/edge/msg"]
    with Dataset.open(tmp_path / "s.ooc") as ds, pytest.raises(StoreError, match="msg"):
        len(ds.events)


def test_text_timestamps_keep_their_offset_and_are_utc_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")  # of the machine, which changes nothing
    texts = ["1970-01-01T02:00:05+02:00", "1970-01-01T00:00:03Z", "1970-01-01 00:00:01", "1969-12-31 19:00:02-05"]
    lines = [f"{i},{i + 1},{text}" for i, text in enumerate(texts)]
    (tmp_path / "e.csv").write_text("\n".join(["src,dst,t", *lines, ""]))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv"), time="t"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        np.testing.assert_array_equal(np.asarray(ds.graph.columns["time"]), [5e6, 3e6, 1e6, 2e6])
