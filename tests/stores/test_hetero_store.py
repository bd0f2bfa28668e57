"""Heterogeneous stores: what `write_hetero_store` writes, and `Dataset` reads, against the arrays they were given."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from ooc.stores.array_names import EdgeKey
from ooc.stores.build import write_hetero_store, write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.fingerprints import fingerprint
from ooc.stores.graph import Graph
from ooc.stores.growth.compact import compact
from ooc.stores.growth.resplit import resplit
from ooc.stores.info import describe
from ooc.stores.integrity import verify

WRITES, BACK, CITES = ("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper")
COUNTS = {"paper": 30, "author": 12, "venue": 3}
Types = tuple[dict[str, dict[str, Any]], dict[EdgeKey, Graph], dict[EdgeKey, dict[str, np.ndarray]]]


def academic(seed: int = 0) -> Types:
    """Papers with features, labels and splits, authors with ids alone, venues without edges."""
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, 12, 60), rng.integers(0, 30, 60)
    time, weight = rng.integers(0, 9, 60), rng.random(60, np.float32)
    paper = {
        "x": rng.random((30, 4), np.float32),
        "y": rng.integers(0, 3, 30),
        "task": "multiclass",
        "num_classes": 3,
        "splits": {"train": [5, 1], "test": [7]},
    }
    nodes = {"paper": paper, "author": {"external": [f"a{i:02d}" for i in range(12)]}, "venue": {"num_nodes": 3}}
    edges = {
        WRITES: Graph.from_edges(src, dst, 30, num_sources=12, time=time, weight=weight),
        BACK: Graph.from_edges(dst, src, 12, num_sources=30, time=time, weight=weight),
        CITES: Graph.from_edges(*rng.integers(0, 30, (2, 80)), 30),
    }
    return nodes, edges, {WRITES: {"edge_attr": rng.random((60, 2), np.float32)}}


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nodes, edges, arrays = academic()
    return write_hetero_store(tmp_path_factory.mktemp("h") / "s", nodes, edges, edge_arrays=arrays, reverse_of={BACK: WRITES})


@pytest.mark.parametrize("how", [{}, {"in_memory": True}, {"verify_reads": True, "engine": "pread"}])
def test_a_store_of_several_types_gives_back_what_was_written(store: Path, how: dict[str, Any]) -> None:
    nodes, edges, arrays = academic()
    with Dataset.open(store, **how) as ds:
        assert ds.is_hetero
        assert ds.metadata() == (["paper", "author", "venue"], [WRITES, BACK, CITES])
        assert {name: ds.nodes(name).num_nodes for name in ds.node_types} == COUNTS
        assert (ds.num_nodes, ds.num_edges) == (45, 200)
        for key, graph in edges.items():
            found = ds.edges(key).graph
            for one, other in zip(found._arrays(), graph._arrays(), strict=True):
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
            assert (found.sources, found.num_sources, found.num_nodes) == (graph.sources, COUNTS[key[0]], COUNTS[key[2]])
        papers, out = ds.nodes("paper"), np.empty((2, 4), np.float32)
        papers.rows("x").read(np.array([29, 0]), out)
        assert np.array_equal(out, nodes["paper"]["x"][[29, 0]])
        assert papers.labels is not None
        assert np.array_equal(papers.labels, nodes["paper"]["y"])
        assert (papers.task, papers.num_classes, papers.num_features, papers.splits) == ("multiclass", 3, 4, ["train", "test"])
        assert papers.split("train").tolist() == [1, 5]
        assert np.flatnonzero(papers.test_mask).tolist() == [7]
        authors = ds.nodes("author")
        assert (authors.names, authors.task, authors.labels, authors.num_features) == ([], None, None, 0)
        assert authors.external([3, 0]) == ["a03", "a00"]
        assert authors.rows_of(["a11"]).tolist() == [11]
        assert list(ds.nodes("venue").external([2])) == [2]
        features = np.empty((3, 2), np.float32)
        for key in (WRITES, BACK):  # the reverse edges have the ids, and so the features, of their edges
            edge = ds.edges(key)
            edge.features("edge_attr").read(e_id := edge.graph.edge_ids(np.array([4, 0, 59])), features)
            assert np.array_equal(features, arrays[WRITES]["edge_attr"][e_id])
            column = np.empty(1, np.int64)
            edge.rows("time").read(np.array([7]), column)
            assert column[0] == edges[key].columns["time"][7]
        assert (ds.edges(BACK).reverse_of, ds.edges("paper:cites:paper").reverse_of) == (WRITES, None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4)), max_size=30), st.booleans())
def test_a_bipartite_graph_is_its_edges(edges: list[tuple[int, int, int]], weighted: bool) -> None:
    src, dst, time = (np.array([edge[i] for edge in edges], np.int64) for i in range(3))
    columns = {"weight": time.astype(np.float32)} if weighted else {}
    graph = Graph.from_edges(src, dst, 6, num_sources=4, time=time, **columns)
    assert (graph.num_sources, graph.num_nodes, len(graph.self_loops)) == (4, 6, 0)
    for v in range(6):
        slots = np.arange(*graph.slots(v))
        mine = sorted((t, i) for i, (_, d, t) in enumerate(edges) if d == v)
        assert graph.edge_ids(slots).tolist() == [i for _, i in mine]
        assert graph.indices[slots].tolist() == [edges[i][0] for _, i in mine]
        if graph.weight_sum is not None:
            assert graph.weight_sum[v] == sum(t for t, _ in mine)  # also of a source and destination of the same number


def test_bipartite_graphs_check_their_sources() -> None:
    with pytest.raises(InputError, match=r"nodes 0\.\.2, but span 5\.\.5"):
        Graph.from_edges([5], [0], 9, num_sources=3)
    assert Graph.from_edges([5], [0], 1, num_sources=6).in_memory().num_sources == 6
    assert Graph.from_arrays([0, 1], [2**31], num_sources=2**31 + 1).indices.dtype == np.int64


def test_one_type_without_a_name_is_the_homogeneous_store(tmp_path: Path) -> None:
    nodes, edges, _ = academic()
    one = write_hetero_store(tmp_path / "one", {"node": nodes["paper"]}, {("node", "edge", "node"): edges[CITES]})
    other = write_store(tmp_path / "other", edges[CITES], **nodes["paper"])
    files = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()} for root in (one, other)
    ]
    assert files[0] == files[1]
    with Dataset.open(one) as ds:
        assert not ds.is_hetero
        assert ds.metadata() == (["node"], [("node", "edge", "node")])
        assert ds.nodes().labels is ds.labels
        assert ds.edges().graph is ds.graph


def test_the_only_type_may_have_a_name(tmp_path: Path) -> None:
    nodes, edges, _ = academic()
    path = write_hetero_store(tmp_path / "s", {"paper": nodes["paper"]}, {CITES: edges[CITES]})
    with Dataset.open(path) as ds:
        assert (ds.is_hetero, ds.num_features, ds.graph.num_edges) == (True, 4, 80)
        assert ds.split("train").tolist() == ds.nodes("paper").split("train").tolist()


@pytest.mark.parametrize("name", ["graph", "labels", "train_mask", "splits", "num_features", "num_classes", "names", "task"])
def test_attributes_of_one_type_say_which_there_are(store: Path, name: str) -> None:
    with Dataset.open(store) as ds, pytest.raises(InputError, match="several") as caught:
        getattr(ds, name)
    assert ("ds.edges(('author', 'writes', 'paper'))" if name == "graph" else "ds.nodes('paper')") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["rows", "stored", "split", "members", "external", "row", "edge_rows", "edge_features"])
def test_methods_of_one_type_do_too(store: Path, name: str) -> None:
    with Dataset.open(store) as ds, pytest.raises(InputError, match=r"has several (node|edge) types \(.*choose one"):
        getattr(ds, name)("x")


def test_unknown_types_and_arrays_name_those_there_are(store: Path) -> None:
    with Dataset.open(store) as ds:
        with pytest.raises(InputError, match="no node type 'field': there are paper, author, venue"):
            ds.nodes("field")
        for wrong in (("paper", "writes", "author"), "paper:writes:author"):
            with pytest.raises(InputError, match="no edge type paper:writes:author: there are author:writes:paper, "):
                ds.edges(wrong)
        with pytest.raises(InputError, match="no node array 'z' of node type 'paper': there are split, x, y"):
            ds.nodes("paper").rows("z")
        with pytest.raises(InputError, match="no split 'dev' of node type 'paper'"):
            ds.nodes("paper").split("dev")
        with pytest.raises(InputError, match="no edge feature 'msg' of edge type paper:cites:paper: there are none"):
            ds.edges(CITES).features("msg")
        with pytest.raises(InputError, match="no edge column 'time' of edge type paper:cites:paper"):
            ds.edges(CITES).rows("time")


def test_features_of_a_type_are_replaced(store: Path, tmp_path: Path) -> None:
    other = np.random.default_rng(5).random((12, 7), np.float32)
    zarr.create_array(tmp_path / "a.zarr", data=other, chunks=(5, 7))
    with Dataset.open(store, features={"author/x": tmp_path / "a.zarr"}) as ds, Dataset.open(store) as plain:
        out = np.empty((1, 7), np.float32)
        ds.nodes("author").rows("x").read(np.array([11]), out)
        assert np.array_equal(out[0], other[11])
        assert ds.fingerprint != plain.fingerprint
        assert plain.fingerprint == fingerprint(store)
    with pytest.raises(InputError, match="name the node type too, as in paper/x"):
        Dataset.open(store, features={"x": tmp_path / "a.zarr"})


def test_verify_and_info_know_every_type(store: Path, tmp_path: Path) -> None:
    assert verify(store) == []
    found = describe(store)
    assert [each["count"] for each in found["node_types"]] == [30, 12, 3]
    assert found["edge_types"][1]["reverse_of"] == list(WRITES)
    assert found["arrays"]["graph/author__writes__paper/time"]["shape"] == [60]
    nodes, edges, arrays = academic()
    path = write_hetero_store(tmp_path / "s", nodes, edges, edge_arrays=arrays)
    (shard,) = (path / "graph/author__writes__paper/indices/c").iterdir()
    data = bytearray(shard.read_bytes())
    data[9] ^= 255
    shard.write_bytes(data)
    assert [each.array for each in verify(path)] == ["graph/author__writes__paper/indices"]
    with pytest.raises(StoreError, match="author__writes__paper/indices"):
        Dataset.open(path, verify_reads=True)


def test_indices_of_another_type_are_refused(tmp_path: Path) -> None:
    nodes, edges, _ = academic()
    path = write_hetero_store(tmp_path / "s", nodes, edges)
    array = zarr.open_group(path, mode="r+")["graph/author__writes__paper/indices"]
    array[3] = 12  # a paper's row, and no author's  # type: ignore[index]
    shutil.rmtree(path / "checksums/graph/author__writes__paper/indices")
    with pytest.raises(StoreError, match=r"holds 12, which is not within 0\.\.11"):
        Dataset.open(path, in_memory=True)


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ({"paper": {}}, {WRITES: (12, 30)}, "author:writes:paper: there is no node type 'author', only paper"),
        ({"paper": {}, "author": {}, "venue": {}}, {WRITES: (12, 30)}, "node type 'venue': give num_nodes"),
        ({"paper": {"x": np.zeros((31, 2))}, "author": {}}, {WRITES: (12, 30)}, "'x' has 31 rows; .* 30 nodes"),
        (
            {"paper": {}, "author": {}},
            {WRITES: (12, 30), BACK: (31, 12)},
            "paper:rev_writes:author has 31 nodes of 'paper', not 30",
        ),
        ({"paper": {}, "author": {}}, {WRITES: (None, 30)}, "is bipartite .* if its end types differ"),
        ({"paper": {}}, {CITES: (30, 30)}, "is bipartite .* if its end types differ"),
        ({"paper__a": {}}, {}, "node type 'paper__a'"),
        ({"paper": {"z": 1, "num_nodes": 3}}, {}, "node type 'paper': z is unknown"),
    ],
)
def test_types_that_do_not_fit_leave_nothing(tmp_path: Path, nodes: Any, edges: Any, words: str) -> None:
    graphs = {key: Graph.from_edges([0], [1], count, num_sources=sources) for key, (sources, count) in edges.items()}
    with pytest.raises(InputError, match=words):
        write_hetero_store(tmp_path / "s", nodes, graphs)
    assert list(tmp_path.iterdir()) == []


def test_splits_are_of_one_type(store: Path, tmp_path: Path) -> None:
    for node_type, message in (
        (None, "has several node types: give one of paper, author, venue"),
        ("page", "no node type 'page'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resplit(store, (0.5, 0.5, 0.0), node_type=node_type)
    assert not (store / "versions").exists()
    path = Path(shutil.copytree(store, tmp_path / "copy"))
    with Dataset.open(path) as before:
        count = before.nodes("author").num_nodes
        made = resplit(path, (0.5, 0.5, 0.0), node_type="author")
        assert before.nodes("author").splits == []
    with pytest.raises(ConfigError, match=r"has splits of node type 'author' \(train "):
        resplit(path, (1.0, 0.0, 0.0), node_type="author")
    np.save(tmp_path / "all.npy", np.arange(count))
    resplit(path, files={"test": tmp_path / "all.npy"}, node_type="author", replace=True)
    assert sum(made.sizes.values()) == count
    assert verify(path) == []
    with Dataset.open(path) as ds, Dataset.open(store) as old:
        assert ds.nodes("author").split("test").tolist() == list(range(count))
        assert ds.nodes("paper").splits == old.nodes("paper").splits
        for key in ds.edge_types:
            np.testing.assert_array_equal(ds.edges(key).graph.indices, old.edges(key).graph.indices)
    assert compact(path).appends == 0
    assert verify(path) == []


def test_names_of_classes_of_the_only_type(tmp_path: Path) -> None:
    nodes = {"node": {"y": np.array([0, 1, 0]), "task": "binary", "num_classes": 2, "class_names": ["no", "yes"]}}
    path = write_hetero_store(tmp_path / "s", nodes, {("node", "edge", "node"): Graph.from_edges([0], [1], 3)})
    with Dataset.open(path) as ds:
        assert (ds.is_hetero, ds.class_names) == (False, ["no", "yes"])


def test_equal_arrays_give_equal_stores(store: Path, tmp_path: Path) -> None:
    nodes, edges, arrays = academic()
    again = write_hetero_store(tmp_path / "s", nodes, edges, edge_arrays=arrays, reverse_of={BACK: WRITES})
    assert content(again) == content(store)
    assert fingerprint(again) == fingerprint(store)
