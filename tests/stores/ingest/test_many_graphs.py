"""Stores of many graphs from tables: their order, nodes, edges, labels and splits, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, OocError
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.resplit import resplit
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify

NODES = [
    ("a1", "m2", 1.0, 1),
    ("a2", "m2", 2.0, 1),
    ("b1", "m1", 3.0, 0),
    ("b2", "m1", 4.0, 0),
    ("b3", "m1", 5.0, 0),
    ("c1", "m3", 6.0, 1),
]
EDGES = [("b1", "b2"), ("a2", "a1"), ("b3", "b1"), ("b2", "b1"), ("a1", "a2")]
GRAPHS = [("m1", 0, "train"), ("m2", 1, "test"), ("m3", 1, "train")]


def write(path: Path, header: str, rows: Any) -> str:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    nodes = write(tmp_path / "nodes.csv", "id,mol,f,toxic", NODES)
    edges = write(tmp_path / "edges.csv", "src,dst,w", [(*edge, at) for at, edge in enumerate(EDGES)])
    return {"nodes": nodes, "edges": edges, "graph_id": "mol", "x_cols": "f", "edge_features": ["edge_attr=w"]}


def graphs_of(ds: Dataset) -> dict[Any, tuple[list[Any], list[tuple[Any, Any, float]]]]:
    """Graph id -> (the features of its nodes, its edges by the nodes' ids with their feature), of what the store says."""
    graphs, found = ds.graphs, {}
    x = np.empty((ds.num_nodes, 1), np.float32)
    ds.rows("x").read(np.arange(ds.num_nodes), x)
    names = np.array(ds.external(np.arange(ds.num_nodes)))
    attr = np.empty(ds.edge_features("edge_attr").shape, np.float32)
    ds.edge_features("edge_attr").read(np.arange(len(attr)), attr)
    for row, graph in enumerate(np.asarray(graphs.external(np.arange(len(graphs)))).tolist()):
        first, last = graphs.ptr[row : row + 2]
        slots = range(*graphs.edge_ptr[row : row + 2])
        target = np.searchsorted(ds.graph.indptr, list(slots), side="right") - 1
        edges = [
            (names[ds.graph.indices[slot]], names[at], float(attr.reshape(-1)[ds.graph.columns["edge_id"][slot]]))
            for slot, at in zip(slots, target, strict=True)
        ]
        found[graph] = x[first:last, 0].tolist(), edges
    return found


def expected() -> dict[Any, tuple[list[Any], list[tuple[Any, Any, float]]]]:
    graph_of = {node: graph for node, graph, *_ in NODES}
    order = [node for node, *_ in NODES]
    found = {}
    for graph, *_ in GRAPHS:
        edges = [(src, dst, float(at)) for at, (src, dst) in enumerate(EDGES) if graph_of[dst] == graph]
        edges.sort(key=lambda edge: order.index(edge[1]))
        found[graph] = [f for _, own, f, _ in NODES if own == graph], edges
    return found


def test_graphs_come_in_the_order_of_their_nodes(tables: dict[str, Any], tmp_path: Path) -> None:
    result = ingest(IngestSpec(out=tmp_path / "s.ooc", **tables, graph_label="toxic"))
    assert (result.num_graphs, result.notes) == (3, ())
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert ds.num_graphs == len(ds.graphs) == 3
        assert ds.graphs.external([0, 1, 2]) == ["m2", "m1", "m3"]
        assert ds.graphs.rows_of(["m3", "m2"]).tolist() == [2, 0]
        assert graphs_of(ds) == expected()
        assert (ds.graphs.task, ds.graphs.num_classes, ds.graphs.labels.tolist()) == ("binary", 2, [1, 0, 1])  # type: ignore[union-attr]
    assert verify(tmp_path / "s.ooc") == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_table_of_graphs_gives_their_order_labels_and_splits(
    tables: dict[str, Any], tmp_path: Path, seed: int | None
) -> None:
    """Also where nodes and edges stand in any order: each graph's nodes are put together."""
    listed = write(tmp_path / "graphs.csv", "mol,y,part", GRAPHS)
    if seed is not None:
        shuffle = np.random.default_rng(seed).permutation
        nodes = [NODES[at] for at in shuffle(len(NODES))]
        tables["nodes"] = write(tmp_path / "shuffled.csv", "id,mol,f,toxic", nodes)
    ingest(IngestSpec(out=tmp_path / "s.ooc", **tables, graphs=listed, graph_label="y", graph_split="part"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert ds.graphs.external([0, 1, 2]) == ["m1", "m2", "m3"]
        assert ds.graphs.labels is not None
        assert ds.graphs.labels.tolist() == [0, 1, 1]
        assert {name: ds.graphs.split(name).tolist() for name in ds.graphs.splits} == {"train": [0, 2], "test": [1]}
        found = graphs_of(ds)
        assert {graph: sorted(x) for graph, (x, _) in found.items()} == {graph: x for graph, (x, _) in expected().items()}
        assert {graph: sorted(edges) for graph, (_, edges) in found.items()} == {
            graph: sorted(edges) for graph, (_, edges) in expected().items()
        }
    assert verify(tmp_path / "s.ooc") == []


def test_numbers_that_are_rows_need_no_ids(tmp_path: Path) -> None:
    nodes = write(tmp_path / "nodes.csv", "id,graph,split", [(0, 0, "train"), (1, 0, "train"), (2, 1, "val")])
    edges = write(tmp_path / "edges.csv", "src,dst", [(0, 1)])
    ingest(IngestSpec(out=tmp_path / "s.ooc", nodes=nodes, edges=edges, graph_id="graph", graph_split="split"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert ds.manifest.graphs is not None
        assert ds.manifest.graphs.id_kind is None
        assert not (tmp_path / "s.ooc" / "graph_ids.lmdb").exists()
        assert ds.graphs.split("val").tolist() == [1]
        assert ds.graphs.edge_ptr.tolist() == [0, 1, 1]


def test_random_splits_and_standard_scores_are_of_graphs(tables: dict[str, Any], tmp_path: Path) -> None:
    spec = IngestSpec(out=tmp_path / "s.ooc", **tables, random_split="0.34,0.33,0.33", normalize="standard")
    ingest(spec)
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert {name: len(ds.graphs.split(name)) for name in ds.graphs.splits} == {"train": 1, "val": 1, "test": 1}
        assert ds.splits == []
        (train,) = ds.graphs.split("train")
        x = np.empty((ds.num_nodes, 1), np.float32)
        ds.rows("x").read(np.arange(ds.num_nodes), x)
        assert abs(float(x[ds.graphs.ptr[train] : ds.graphs.ptr[train + 1]].mean())) < 1e-6


REFUSED = [
    ("nodes", [*NODES, ("d1", "", 0, 0)], r"nodes\.csv line 8: mol is empty; give every node the id of its graph"),
    ("graphs", [*GRAPHS, ("m4", 0, "")], r"graphs\.csv line 5: graph 'm4' has no nodes; leave it out"),
    ("graphs", GRAPHS[1:], r"nodes\.csv line 4: mol 'm1' is not in .*graphs\.csv; list every graph there"),
    ("graphs", [*GRAPHS, GRAPHS[0]], r"graphs\.csv line 5: mol 'm1' stands there already; every graph is listed once"),
    ("graphs", [*GRAPHS, ("", 0, "")], r"graphs\.csv line 5: mol is empty; give every graph an id"),
    ("edges", [*EDGES, ("a1", "b1")], r"edges\.csv line 7: the edge from 'a1' to 'b1' joins two graphs"),
]


@pytest.mark.parametrize(("what", "rows", "message"), REFUSED)
def test_what_is_wrong_is_said(tables: dict[str, Any], tmp_path: Path, what: str, rows: Any, message: str) -> None:
    headers = {"nodes": "id,mol,f,toxic", "graphs": "mol,y,part", "edges": "src,dst"}
    tables["graphs"] = write(tmp_path / "graphs.csv", headers["graphs"], GRAPHS)
    tables[what] = write(tmp_path / f"{what}.csv", headers[what], rows)
    if what == "edges":
        del tables["edge_features"]
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", **tables))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".csv"]


def test_whole_numbers_of_graphs_are_targets_if_the_task_says_so(tables: dict[str, Any], tmp_path: Path) -> None:
    result = ingest(
        IngestSpec(out=tmp_path / "s.ooc", graph_label="toxic", task="regression", random_split="0.4,0.3,0.3", **tables)
    )
    assert result.resumed == ()  # steps whose result is asked for again are not those of an earlier run
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert (ds.task, ds.graphs.task, ds.graphs.num_classes) == (None, "regression", 1)


def test_a_graph_has_one_label(tables: dict[str, Any], tmp_path: Path) -> None:
    tables["nodes"] = write(tmp_path / "n.csv", "id,mol,f,toxic", [*NODES[:4], ("b3", "m1", 5.0, 1), NODES[5]])
    with pytest.raises(InputError, match=r"n\.csv line 6: toxic is not what the first node of its graph has"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", **tables, graph_label="toxic"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": 2}, "`parts` does not go with many graphs"),
        ({"time": "t"}, "`time` does not go with many graphs"),
        ({"order": "degree"}, "`order` does not go with many graphs"),
        ({"graph_split": "s", "random_split": "1,0,0"}, "say the same thing twice"),
        ({"graph_id": None, "graph_label": "y"}, "give `graph_id` too"),
        ({"nodes": None, "x_cols": None}, "`graph_id` names a column of the node table: give `nodes` too"),
    ],
)
def test_settings_that_do_not_go_with_graphs(settings: dict[str, Any], message: str) -> None:
    given = {"out": "s.ooc", "edges": "e.csv", "nodes": "n.csv", "graph_id": "g"} | settings
    with pytest.raises(ConfigError, match=message):
        IngestSpec(**given)


def test_growth_of_many_graphs(tables: dict[str, Any], tmp_path: Path) -> None:
    """Splits may be given anew; what would add to one graph is refused in a line."""
    path = tmp_path / "s.ooc"
    ingest(IngestSpec(out=path, **tables, graph_label="toxic"))
    with pytest.raises(ConfigError, match="it holds 3 graphs, and an append adds to one; ingest everything anew"):
        append(AppendSpec(out=path, edges=tables["edges"]))
    np.save(tmp_path / "train.npy", np.array([2, 0]))
    assert resplit(path, files={"train": tmp_path / "train.npy"}).sizes == {"train": 2}
    assert compact(path).appends == 0
    with Dataset.open(path) as ds:
        assert ds.graphs.split("train").tolist() == [0, 2]
        assert ds.graphs.external([1]) == ["m1"]
        assert graphs_of(ds) == expected()
    assert verify(path) == []
    found = describe(path)
    assert found["graphs"]["count"] == 3
    assert {"graphs/ptr", "graphs/edge_ptr", "graphs/y", "graphs/split"} <= found["arrays"].keys()


def test_damage_to_graphs_is_found(tables: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "s.ooc"
    ingest(IngestSpec(out=path, **tables, graph_label="toxic"))
    (path / "graph_ids.lmdb" / "data.mdb").write_bytes(b"0" * 100)
    shard = next(each for each in (path / "graphs" / "ptr").rglob("*") if each.is_file() and each.name != "zarr.json")
    data = bytearray(shard.read_bytes())
    data[8] ^= 1
    shard.write_bytes(bytes(data))
    assert {damage.array for damage in verify(path)} == {"graph_ids.lmdb", "graphs/ptr"}
    with Dataset.open(path) as ds, pytest.raises(OocError):
        len(ds.graphs)
