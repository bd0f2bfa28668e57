"""Folders in OGB's raw layout with several types (as ogbn-mag's), and with many graphs (as those of ogbg-mol*)."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
COUNTS = {"paper": 12, "author": 5}


def csv(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join("" if value is None else str(value) for value in np.atleast_1d(np.array(row, object))) for row in rows]
    path.with_name(f"{path.name}.csv.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))


@pytest.fixture
def mag(tmp_path: Path) -> dict[str, Any]:
    """A folder as ogbn-mag's, and what is in it."""
    rng, folder = np.random.default_rng(0), tmp_path / "mag"
    raw = folder / "raw"
    held: dict[str, Any] = {
        "folder": folder,
        WRITES: np.stack([rng.integers(0, 5, 20), rng.integers(0, 12, 20)]),
        CITES: rng.integers(0, 12, (2, 30)),
        "x": rng.random((12, 3)).round(3),
        "y": np.arange(12) % 4,
        "year": 2000 + np.arange(12),
        "kind": np.arange(20) % 3,
        "train": [0, 3, 5],
    }
    csv(raw / "num-node-dict", [["paper", "author"], [12, 5]])
    csv(raw / "triplet-type-list", [CITES, WRITES])
    csv(raw / "nodetype-has-feat", [["paper", "author"], [True, False]])
    for key in (WRITES, CITES):
        csv(raw / "relations" / "___".join(key) / "edge", held[key].T)
        csv(raw / "relations" / "___".join(key) / "num-edge-list", [held[key].shape[1]])
    csv(raw / "relations" / "___".join(WRITES) / "edge_reltype", held["kind"])
    csv(raw / "node-feat" / "paper" / "node-feat", held["x"])
    csv(raw / "node-feat" / "paper" / "node_year", held["year"])
    csv(raw / "node-label" / "paper" / "node-label", held["y"])
    csv(folder / "split" / "time" / "nodetype-has-split", [["paper"], [True]])
    for name, rows in (("train", held["train"]), ("valid", [1]), ("test", [2, 4])):
        csv(folder / "split" / "time" / "paper" / name, rows)
    return held


def test_types_of_nodes_and_edges(mag: dict[str, Any], tmp_path: Path) -> None:
    result = ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=mag["folder"], reverse=True))
    assert verify(result.path) == []
    with Dataset.open(result.path) as ds:
        assert {name: ds.nodes(name).num_nodes for name in ds.node_types} == COUNTS
        assert ds.edge_types == [WRITES, CITES, ("paper", "rev_writes", "author"), ("paper", "rev_cites", "paper")]
        for key in (WRITES, CITES):
            source, _, target = key
            bipartite = None if source == target else COUNTS[source]
            want, graph = Graph.from_edges(*mag[key], COUNTS[target], num_sources=bipartite), ds.edges(key).graph
            np.testing.assert_array_equal(graph.indptr, want.indptr)
            np.testing.assert_array_equal(graph.indices, want.indices)
        papers, values = ds.nodes("paper"), np.empty((12, 3), np.float32)
        papers.rows("x").read(np.arange(12), values)
        np.testing.assert_array_equal(values, mag["x"].astype(np.float32))
        assert (papers.names, papers.task, papers.num_classes) == (["node_year", "split", "x", "y"], "multiclass", 4)
        np.testing.assert_array_equal(np.asarray(papers.labels), mag["y"])
        assert {name: papers.split(name).tolist() for name in papers.splits} == {"train": [0, 3, 5], "val": [1], "test": [2, 4]}
        assert (ds.nodes("author").names, ds.edges(WRITES).names, ds.edges(CITES).names) == ([], ["edge_reltype"], [])


@pytest.mark.parametrize(
    ("path", "rows", "message"),
    [
        ("num-node-dict", [["paper", "author"], [12, 5], [3, 4]], "must hold the node types and, in one more line"),
        ("num-node-dict", [["paper", "author"], [12, 0]], "'0' nodes of type 'author': it must be a whole number, at least 1"),
        ("num-node-dict", [["paper"], [12]], r"triplet-type-list\.csv\.gz line 2: there is no node type 'author', only paper"),
        ("triplet-type-list", [["author", "writes"]], "line 1: an edge type is a source type, a name and a target type"),
        ("triplet-type-list", [CITES, CITES], "line 2: the edge type stands there already"),
        ("triplet-type-list", [CITES, ("paper", "likes", "paper")], r"paper___likes___paper has no edge\.csv\.gz"),
        ("relations/paper___cites___paper/edge", [[0, 1], [0, 12]], r"edge\.csv\.gz line 2: .* 12 is out of range 0\.\.11"),
        ("node-label/paper/node-label", np.arange(11), r"node-label\.csv\.gz has 11 rows, but there are 12 nodes"),
    ],
)
def test_damaged_types_are_said(mag: dict[str, Any], tmp_path: Path, path: str, rows: Any, message: str) -> None:
    csv(mag["folder"] / "raw" / path, rows)
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=mag["folder"]))
    assert [each.name for each in tmp_path.iterdir()] == ["mag"]


def test_settings_of_one_type_are_refused(mag: dict[str, Any], tmp_path: Path) -> None:
    for settings, message in (({"parts": 2}, "`parts` is for graphs of one type"), ({"split_index": 1}, "several|split_index")):
        with pytest.raises((ConfigError, InputError), match=message):
            ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=mag["folder"], **settings))


@pytest.fixture
def molecules(tmp_path: Path) -> Path:
    """A folder as ogbg-molbace's: three graphs, the second without edges."""
    folder = tmp_path / "mol"
    csv(folder / "raw" / "num-node-list", [3, 1, 2])
    csv(folder / "raw" / "num-edge-list", [2, 0, 1])
    csv(folder / "raw" / "edge", [[0, 1], [2, 1], [1, 0]])
    csv(folder / "raw" / "node-feat", [[at, at % 2] for at in range(6)])
    csv(folder / "raw" / "edge-feat", [[5], [6], [7]])
    csv(folder / "raw" / "graph-label", [[1, 0], [0, None], [1, 1]])
    csv(folder / "split" / "scaffold" / "train", [0, 2])
    csv(folder / "split" / "scaffold" / "valid", [1])
    return folder


def test_many_graphs(molecules: Path, tmp_path: Path) -> None:
    result = ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=molecules))
    assert (result.num_graphs, result.num_nodes, result.num_edges, result.notes) == (3, 6, 3, ())
    assert verify(result.path) == []
    with Dataset.open(result.path) as ds:
        assert (ds.graphs.ptr.tolist(), ds.graphs.edge_ptr.tolist()) == ([0, 3, 4, 6], [0, 2, 2, 3])
        assert ds.graph.indices.tolist() == [0, 2, 5]
        assert (ds.graphs.task, ds.graphs.num_classes) == ("multilabel", 2)
        assert ds.graphs.labels is not None
        assert ds.graphs.labels.tolist() == [[1, 0], [0, -1], [1, 1]]
        assert {name: ds.graphs.split(name).tolist() for name in ds.graphs.splits} == {"train": [0, 2], "val": [1]}
        assert (ds.names, ds.edges().names, ds.splits) == (["x"], ["edge_attr"], [])
    csv(molecules / "raw" / "graph-label", [1.5, 2.5, None])
    with Dataset.open(ingest(IngestSpec(out=tmp_path / "t.ooc", ogb=molecules)).path) as ds:
        assert ds.graphs.labels is not None
        np.testing.assert_array_equal(np.asarray(ds.graphs.labels), np.array([1.5, 2.5, np.nan], np.float32))


def test_splits_of_another_form_are_not_dropped_silently(molecules: Path, tmp_path: Path) -> None:
    shutil.rmtree(molecules / "split" / "scaffold")
    (molecules / "split" / "time").mkdir()
    (molecules / "split" / "time" / "train.pt").touch()
    (note,) = ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=molecules)).notes
    assert note.endswith("split/time/train.pt: left out, as splits are read from csv.gz files of rows")


@pytest.mark.parametrize(
    ("path", "rows", "message"),
    [
        ("num-node-list", [3, 0, 3], r"num-node-list\.csv\.gz line 2: graph 1 has 0 nodes: at least 1"),
        ("num-edge-list", [2, 0, 2], "3 graphs and 4 edges, .* 3 graphs and edge.csv.gz 3 edges: they must agree"),
        ("num-edge-list", [2, "x", 1], r"num-edge-list\.csv\.gz line 2: not a whole number"),
        ("edge", [[0, 1], [3, 1], [1, 0]], r"edge\.csv\.gz line 2: an end is none of graph 0's nodes, 0\.\.2"),
        ("edge", [[0, 1], [0, 1], [1, "x"]], r"edge\.csv\.gz line 3: an end is none of graph 2's nodes, 0\.\.1"),
        ("graph-label", [1, 0], r"graph-label\.csv\.gz has 2 rows, but there are 3 graphs"),
    ],
)
def test_damaged_graphs_are_said(molecules: Path, tmp_path: Path, path: str, rows: Any, message: str) -> None:
    csv(molecules / "raw" / path, rows)
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=molecules))
    assert [each.name for each in tmp_path.iterdir()] == ["mol"]
