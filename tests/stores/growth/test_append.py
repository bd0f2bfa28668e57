"""Stores that grow: appended and compacted, or only appended, they are what one ingest of everything makes; what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError
from ooc.stores.fingerprints import fingerprint
from ooc.stores.growth import delta, merge, sorting
from ooc.stores.growth import grow as grow_module
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
F = 3


def fresh(tmp_path: Path) -> Path:
    path = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
    path.mkdir()
    return path


@dataclass
class Case:
    """Edges and nodes that come in several lots, and how they are ingested."""

    edges: list[tuple[int, int, int]]
    cuts: list[int]
    """edges in the store, and in it after each append"""
    nodes: list[int]
    """the same of nodes"""
    temporal: bool
    undirected: bool
    strings: bool
    weighted: bool
    loops: bool
    features: bool
    dtype: str

    def edge_table(self, path: Path, first: int, last: int) -> str:
        part = self.edges[first:last]
        position = np.arange(first, last)
        columns = {
            "src": [self.name(edge[0]) for edge in part],
            "dst": [self.name(edge[1]) for edge in part],
            "t": [edge[2] for edge in part],
            "w": np.sqrt(position + 1),
            "m1": np.where(position == 0, 1, np.sin(position)),
            "m2": np.where(position == 0, 1, np.cos(position)),
        }
        pq.write_table(pa.table(columns), path)
        return str(path)

    def node_table(self, path: Path, rows: list[int], version: int = 0) -> str:
        columns: dict[str, Any] = {
            "id": [self.name(v) for v in rows],
            "y": [v % 3 for v in rows],
            "split": [("train", "val", "test", "")[(v + version) % 4] for v in rows],
            "born": pa.array([None if v % 3 == 0 else v + version for v in rows], pa.int64()),
        }
        columns |= {f"f{j}": [self.value(v, j, version) for v in rows] for j in range(F)}
        pq.write_table(pa.table(columns), path)
        return str(path)

    def value(self, node: int, column: int, version: int) -> float:
        return 1.0 if node == 0 else float(np.sin(100 * version + 10 * node + column))

    def name(self, node: int) -> Any:
        return f"n{node:02d}"[::-1] if self.strings else node

    def settings(self, nodes: str | None) -> dict[str, Any]:
        """What an ingest and an append are told alike."""
        given: dict[str, Any] = {"weight": "w"} if self.weighted else {}
        given |= {"time": "t", "edge_features": ["msg=m*"]} if self.temporal else {}
        if nodes is not None:
            given |= {"nodes": nodes, "label": "y", "split": "split", "x_cols": "f*"} | (
                {"birth": "born"} if self.temporal else {}
            )
        return given

    def ingest(self, out: Path, edges: str, nodes: str | None, count: int) -> None:
        own = {"num_nodes": count} if nodes is None else {}
        drops = {"undirected": self.undirected, "drop_self_loops": not self.loops, "dtype": self.dtype}
        ingest(IngestSpec(out=out, edges=edges, drop_missing=True, **self.settings(nodes), **own, **drops))


@st.composite
def cases(draw: Any) -> Case:
    features = draw(st.booleans())
    nodes = [draw(st.integers(3, 6))]
    lots = draw(st.integers(1, 2))
    edges: list[tuple[int, int, int]] = [(0, 1, 2)]
    cuts = []
    for lot in range(lots + 1):
        if lot:
            nodes.append(nodes[-1] + draw(st.integers(0, 2)))
        end = st.integers(0, nodes[-1] - 1)
        edges += draw(st.lists(st.tuples(end, end, st.integers(0, 5)), min_size=1, max_size=25))
        if not features and lot and nodes[-1] > nodes[-2]:
            edges.append((nodes[-1] - 1, 0, 3))  # without a table, edges say how many nodes there are
        cuts.append(len(edges))
    if draw(st.booleans()):
        edges.sort(key=lambda edge: edge[2])
        edges = [(min(s, nodes[0] - 1), min(d, nodes[0] - 1), t) for s, d, t in edges]
        nodes = [nodes[0]] * len(nodes)
    flags = {name: draw(st.booleans()) for name in ("temporal", "undirected", "weighted", "loops")}
    flags["loops"] |= all(s == d for s, d, _ in edges[: cuts[0]])
    strings = features and draw(st.booleans())
    return Case(
        edges, cuts, nodes, strings=strings, features=features, dtype=draw(st.sampled_from(["float32", "int8"])), **flags
    )


def grow(case: Case, folder: Path) -> tuple[Path, Path]:
    """(a store that grew, one ingested whole)."""
    grown, whole = folder / "grown.ooc", folder / "whole.ooc"
    for lot, (stop, count) in enumerate(zip(case.cuts, case.nodes, strict=True)):
        first = case.cuts[lot - 1] if lot else 0
        edges = case.edge_table(folder / f"e{lot}.parquet", first, stop)
        new = list(range(case.nodes[lot - 1] if lot else 0, count))
        nodes = case.node_table(folder / f"n{lot}.parquet", new) if case.features and (new or not lot) else None
        if lot == 0:
            case.ingest(grown, edges, nodes, count)
        else:
            append(AppendSpec(out=grown, edges=edges, **case.settings(nodes)))
    edges = case.edge_table(folder / "e.parquet", 0, len(case.edges))
    nodes = case.node_table(folder / "n.parquet", list(range(case.nodes[-1]))) if case.features else None
    case.ingest(whole, edges, nodes, case.nodes[-1])
    return grown, whole


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def assert_same_data(one: Path, other: Path) -> None:
    """As a reader has them."""
    with Dataset.open(one) as a, Dataset.open(other) as b:
        assert a.manifest.model_copy(update={"fingerprints": {}}) == b.manifest.model_copy(update={"fingerprints": {}})
        np.testing.assert_array_equal(a.graph.indptr, b.graph.indptr)
        np.testing.assert_array_equal(a.graph.indices, b.graph.indices)
        np.testing.assert_array_equal(a.graph.self_loops, b.graph.self_loops)
        assert a.graph.columns.keys() == b.graph.columns.keys()
        for name in a.graph.columns:
            np.testing.assert_array_equal(a.graph.columns[name], b.graph.columns[name], err_msg=name)
        ids = np.random.default_rng(0).permutation(np.repeat(np.arange(a.num_nodes), 2))
        assert (
            a.external(ids) == b.external(ids)
            if isinstance(a.external(ids), list)
            else (a.external(ids) == b.external(ids)).all()
        )
        assert a.names == b.names
        for name in a.names:
            mine, theirs = (np.empty((len(ids), *ds.rows(name).shape[1:]), ds.rows(name).dtype) for ds in (a, b))
            a.rows(name).read(ids, mine)
            b.rows(name).read(ids, theirs)
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        for name in a.splits:
            np.testing.assert_array_equal(a.split(name), b.split(name))
        if a.manifest.time is not None:
            mine_events, their_events = (ds.events.read(0, len(ds.events)) for ds in (a, b))
            for name in ("src", "dst", "time"):
                np.testing.assert_array_equal(getattr(mine_events, name), getattr(their_events, name), err_msg=name)
            for name, column in their_events.columns.items():
                np.testing.assert_array_equal(mine_events.columns[name], column, err_msg=name)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are many blocks, pieces and records."""
    for module, name, value in (
        (merge, "BLOCK_ROWS", 7),
        (merge, "BLOCK_BYTES", 48),
        (grow_module, "BLOCK_BYTES", 24),
        (delta, "RECORD_ROWS", 5),
        (delta, "TRANSACTION_BYTES", 4000),
        (sorting, "MOST_ROOM", 600),
    ):
        monkeypatch.setattr(module, name, value)


@FEW
@given(case=cases(), read=st.booleans())
def test_a_store_that_grew_is_one_ingested_whole(quick_path, small_blocks, case, read):  # type: ignore[no-untyped-def]
    """Array by array, byte for byte once it is compacted, and to a reader before: ties, late events, loops, new nodes."""
    grown, whole = grow(case, fresh(quick_path))
    if read:  # what the reader merges is then taken over
        assert_same_data(grown, whole)
    assert verify(grown) == []
    done = compact(grown)
    assert done.appends == len(case.cuts) - 1
    mine, theirs = files(grown / "versions" / "1"), files(whole)
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if mine[name] != theirs[name]] == []
    assert fingerprint(grown) == fingerprint(whole)
    assert verify(grown) == []
    assert_same_data(grown, whole)
    assert sorted(path.name for path in grown.iterdir() if not path.is_symlink()) == ["versions", "zarr.json"]


def table(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A store whose features were the columns f0 and f1."""
    edges = table(tmp_path / "edges.parquet", src=[0, 1, 2], dst=[1, 2, 0])
    nodes = table(tmp_path / "nodes.parquet", id=[0, 1, 2], f0=[1.0, 2.0, 3.0], f1=[10.0, 20.0, 30.0])
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, nodes=nodes, x_cols="f*"))
    return tmp_path / "s.ooc"


@pytest.mark.parametrize("patterns", ["f*", "f1,f0", "f0,f1"])
@pytest.mark.parametrize("compacted", [False, True])
def test_columns_are_taken_by_name_in_whatever_order(named: Path, patterns: str, compacted: bool) -> None:
    new = table(named.parent / "new.parquet", f1=[40.0, 11.0], id=[3, 0], f0=[4.0, 1.5])
    append(AppendSpec(out=named, nodes=new, x_cols=patterns))
    if compacted:
        compact(named)
        last = table(named.parent / "last.parquet", f1=[50.0], f0=[5.0], id=[4])
        append(AppendSpec(out=named, nodes=last, x_cols=patterns))
    found = np.zeros((5 if compacted else 4, 2), np.float32)
    with Dataset.open(named) as ds:
        ds.rows("x").read(np.arange(len(found)), found)
    assert found.tolist() == [[1.5, 11], [2, 20], [3, 30], [4, 40], [5, 50]][: len(found)]


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"g0": [4.0], "f1": [40.0]}, "only given: g0; only in the store: f0"),
        ({"f0": [4.0], "f1": [4.0], "f2": [1.0]}, "only given: f2; only in the store: none"),
    ],
)
def test_other_columns_are_refused_by_name(named: Path, columns: dict[str, list[float]], wrong: str) -> None:
    before = fingerprint(named)
    new = table(named.parent / "new.parquet", id=[3], **columns)
    with pytest.raises(InputError, match=wrong):
        append(AppendSpec(out=named, nodes=new, x_cols=",".join(columns)))
    assert fingerprint(named) == before


def test_columns_of_edge_features_are_taken_by_name(tmp_path: Path) -> None:
    edges = table(tmp_path / "edges.parquet", src=[0, 1], dst=[1, 0], t=[1, 2], m0=[1.0, 2.0], m1=[10.0, 20.0])
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, time="t", edge_features=["msg=m*"]))
    new = table(tmp_path / "new.parquet", m1=[30.0], t=[3], dst=[0], src=[1], m0=[3.0])
    append(AppendSpec(out=tmp_path / "s.ooc", edges=new, time="t", edge_features=["msg=m*"]))
    found = np.zeros((3, 2), np.float32)
    with Dataset.open(tmp_path / "s.ooc") as ds:
        ds.edges().features("msg").read(np.arange(3), found)
    assert found.tolist() == [[1, 10], [2, 20], [3, 30]]
    other = table(tmp_path / "other.parquet", src=[1], dst=[0], t=[4], m0=[1.0], m2=[2.0])
    with pytest.raises(InputError, match=r"columns for msg are not those .*only given: m2; only in the store: m1"):
        append(AppendSpec(out=tmp_path / "s.ooc", edges=other, time="t", edge_features=["msg=m*"]))
