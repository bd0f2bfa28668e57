"""Ingest of several types against a double in memory; what is refused; resuming."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.array_names import EdgeKey
from ooc.stores.build import write_hetero_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.ingest import ingest, spec_of
from ooc.stores.integrity import verify
from tests.forked import python

WRITES, CITES, IN = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")
REV_WRITES, REV_CITES, REV_IN = ("paper", "rev_writes", "author"), ("paper", "rev_cites", "paper"), ("venue", "rev_in", "paper")


def table(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


class World:
    """Papers by number, in a table; authors by name, in a table; venues by number, in their edges alone."""

    def __init__(self, folder: Path, seed: int = 0, papers: int = 40, authors: int = 15, edges: int = 90) -> None:
        rng = np.random.default_rng(seed)
        self.folder, self.papers, self.authors = folder, rng.permutation(papers) * 7 + 100, [f"a{i}" for i in range(authors)]
        self.x, self.y = rng.random((papers, 3)).astype(np.float32), rng.integers(0, 3, papers)
        words = np.array(["train", "val", "test", ""])[rng.integers(0, 4, papers)]
        features = {f"f{i}": self.x[:, i] for i in range(3)}
        self.nodes = {
            "paper": table(folder / "papers.parquet", id=self.papers, y=self.y, part=words, **features),
            "author": table(folder / "authors.parquet", name=self.authors, age=rng.integers(20, 80, authors)),
            "venue": None,
        }
        self.writes = rng.integers(0, authors, edges), rng.integers(0, papers, edges)
        self.time, self.weight = rng.integers(0, 9, edges), rng.random(edges).astype(np.float32)
        self.cites = rng.integers(0, papers, (2, edges))
        self.venue = rng.integers(0, 4, papers) * 10**9
        names = np.array(self.authors)[self.writes[0]]
        by = {"who": names, "what": self.papers[self.writes[1]], "t": self.time, "w": self.weight, "order": np.arange(edges)}
        halves = [{name: column[part] for name, column in by.items()} for part in (slice(0, 50), slice(50, edges))]
        for number, half in enumerate(halves):
            table(folder / f"writes{number}.parquet", **half)
        table(folder / "cites.parquet", src=self.papers[self.cites[0]], dst=self.papers[self.cites[1]])
        table(folder / "in.parquet", src=self.papers, dst=self.venue)
        self.edges = {
            WRITES: str(folder / "writes*.parquet"),
            CITES: str(folder / "cites.parquet"),
            IN: str(folder / "in.parquet"),
        }

    def given(self, out: str = "s.ooc", **others: Any) -> dict[str, Any]:
        return {
            "out": self.folder / out,
            "nodes": self.nodes,
            "edges": self.edges,
            "id": {"author": "name"},
            "label": {"paper": "y"},
            "split": {"paper": "part"},
            "x_cols": {"paper": "f*", "author": "age"},
            "src": {WRITES: "who"},
            "dst": {WRITES: "what"},
            "time": {WRITES: "t"},
            "weight": {WRITES: "w"},
            "edge_features": {WRITES: ["order=order"]},
            **others,
        }

    def graphs(self, reverse: bool) -> dict[EdgeKey, Graph]:
        papers, authors = len(self.papers), len(self.authors)
        venues, venue = np.unique(self.venue, return_inverse=True)
        kinds: dict[str, Any] = {"time": self.time, "weight": self.weight}
        found = {
            WRITES: Graph.from_edges(*self.writes, papers, num_sources=authors, **kinds),
            CITES: Graph.from_edges(*self.cites, papers),
            IN: Graph.from_edges(np.arange(papers), venue, len(venues), num_sources=papers),
        }
        if reverse:
            found[REV_WRITES] = Graph.from_edges(*self.writes[::-1], authors, num_sources=papers, **kinds)
            found[REV_CITES] = Graph.from_edges(*self.cites[::-1], papers)
            found[REV_IN] = Graph.from_edges(venue, np.arange(papers), papers, num_sources=len(venues))
        return found


def same_graphs(ds: Dataset, want: dict[EdgeKey, Graph]) -> None:
    assert ds.edge_types == list(want)
    for key, graph in want.items():
        found = ds.edges(key).graph
        assert found.sources == graph.sources
        assert sorted(found.columns) == sorted(graph.columns)
        for name in ("indptr", "indices", "self_loops", "weight_sum", "loop_weight"):
            one, other = getattr(found, name), getattr(graph, name)
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other, err_msg=f"{key} {name}")
        for name in graph.columns:
            np.testing.assert_array_equal(found.columns[name], graph.columns[name], err_msg=f"{key} {name}")


@pytest.mark.cases(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_types_are_ingested_as_their_double_in_memory(tmp_path: Path, reverse: bool) -> None:
    world = World(tmp_path)
    result = ingest(spec_of(world.given(reverse=reverse)))
    assert result.num_nodes == 40 + 15 + 4
    assert result.num_edges == (90 + 90 + 40) * (1 + reverse)
    assert verify(result.path) == []
    with Dataset.open(result.path) as ds:
        same_graphs(ds, world.graphs(reverse))
        papers, authors, venues = (ds.nodes(name) for name in ("paper", "author", "venue"))
        assert papers.external(np.arange(40)).tolist() == world.papers.tolist()
        assert authors.external(np.arange(15)) == world.authors
        assert venues.external(np.arange(4)).tolist() == np.unique(world.venue).tolist()
        assert papers.rows_of(world.papers[[3, 1]]).tolist() == [3, 1]
        assert (papers.task, papers.num_classes, authors.task, venues.names) == ("multiclass", 3, None, [])
        np.testing.assert_array_equal(papers.labels, world.y)
        out = np.empty((40, 3), np.float32)
        papers.rows("x").read(np.arange(40), out)
        np.testing.assert_array_equal(out, world.x)
        assert authors.rows("x").dtype == np.int64
        assert authors.num_features == 1
        assert sorted(papers.splits) == ["test", "train", "val"]
        for key in [WRITES, REV_WRITES][: 1 + reverse]:
            e_id, order = ds.edges(key).graph.edge_ids(np.arange(90)), np.empty((90, 1), np.int64)
            ds.edges(key).features("order").read(e_id, order)
            assert order[:, 0].tolist() == e_id.tolist()
        assert ds.edges(WRITES).reverse_of is None
        if reverse:
            assert {ds.edges(key).reverse_of for key in (REV_WRITES, REV_CITES, REV_IN)} == {WRITES, CITES, IN}


def test_an_ingest_and_a_write_of_the_same_types_hold_the_same(tmp_path: Path) -> None:
    """A law: files through the database, and arrays in memory, make one store."""
    rng = np.random.default_rng(1)
    src, dst, cites = rng.integers(0, 12, 60), rng.integers(0, 30, 60), rng.integers(0, 30, (2, 50))
    np.save(tmp_path / "w.npy", np.stack([src, dst]))
    np.save(tmp_path / "c.npy", cites)
    np.save(tmp_path / "x.npy", x := rng.random((30, 4)).astype(np.float32))
    edges = {WRITES: str(tmp_path / "w.npy"), CITES: str(tmp_path / "c.npy")}
    given = {"nodes": None, "num_nodes": {"author": 12, "paper": 30}, "features": {"paper": [f"x={tmp_path}/x.npy"]}}
    one = ingest(spec_of({"out": tmp_path / "one", "edges": edges, **given})).path
    graphs = {WRITES: Graph.from_edges(src, dst, 30, num_sources=12), CITES: Graph.from_edges(*cites, 30)}
    other = write_hetero_store(tmp_path / "other", {"author": {}, "paper": {"x": x}}, graphs)
    with Dataset.open(one) as a, Dataset.open(other) as b:
        same_graphs(a, graphs)
        assert a.metadata() == b.metadata()
        assert a.manifest.model_copy(update={"created_by": ""}).as_json() == b.manifest.as_json()
    for name in ("node/paper/x", "graph/author__writes__paper/indptr", "graph/author__writes__paper/indices"):
        for path in (one / name).rglob("*"):
            if path.is_file():
                assert path.read_bytes() == (other / path.relative_to(one)).read_bytes()


@settings(max_examples=15, deadline=None)
@given(
    edges=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=25),
    names=st.booleans(),
    duplicates=st.booleans(),
    reverse=st.booleans(),
)
def test_ids_of_the_edges_are_ranks(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int, int]], names: bool, duplicates: bool, reverse: bool
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    key = ("user", "buys", "item")
    src: list[Any] = [f"u{each[0]}" if names else each[0] * 1000 - 5 for each in edges]
    dst: list[Any] = [each[1] * 10**10 for each in edges]
    path = table(folder / "e.parquet", src=src, dst=dst, w=[float(each[2]) for each in edges])
    given = {"edges": {key: path}, "weight": "w", "drop_duplicates": duplicates, "reverse": reverse}
    result = ingest(spec_of({"out": folder / "s", **given}))
    users, items = sorted(set(src)), sorted(set(dst))
    kept = [i for i, each in enumerate(edges) if not duplicates or each[:2] not in [other[:2] for other in edges[:i]]]
    with Dataset.open(result.path) as ds:
        assert list(ds.nodes("user").external(np.arange(len(users)))) == users
        assert list(ds.nodes("item").external(np.arange(len(items)))) == items
        sides = [(key, src, users, dst, items)] + [(("item", "rev_buys", "user"), dst, items, src, users)] * reverse
        for each, sources, source_ids, targets, target_ids in sides:
            graph = ds.edges(each).graph
            for v, target in enumerate(target_ids):
                mine = [i for i in kept if targets[i] == target]
                slots = np.arange(*graph.slots(v))
                assert graph.edge_ids(slots).tolist() == mine
                assert graph.indices[slots].tolist() == [source_ids.index(sources[i]) for i in mine]
                assert graph.columns["weight"][slots].tolist() == [edges[i][2] for i in mine]


def test_options_as_on_the_command_line_are_those_of_python(tmp_path: Path) -> None:
    world = World(tmp_path)
    texts: dict[str, Any] = {
        "nodes": [f"paper={world.nodes['paper']}", f"author={world.nodes['author']}", "venue"],
        "edges": [f"{':'.join(key)}={path}" for key, path in world.edges.items()],
        "id": ["author=name"],
        "label": ["paper=y"],
        "split": ["paper=part"],
        "x_cols": ["paper=f*", "author=age"],
        "src": ["author:writes:paper=who"],
        "dst": ["author:writes:paper=what"],
        "time": ["author:writes:paper=t"],
        "weight": ["author:writes:paper=w"],
        "edge_features": ["author:writes:paper=order=order"],
    }
    assert spec_of({"out": tmp_path / "s.ooc", **texts}) == spec_of(world.given())


REFUSED = [
    (
        {"edges": {("author", "writes", "papr"): "writes*.parquet"}},
        "author:writes:papr: there is no node type 'papr', only paper",
    ),
    ({"label": {"papr": "y"}}, "`label`: there is no node type 'papr'; there are 'paper', 'author', 'venue'"),
    ({"weight": {("a", "b", "c"): "w"}}, "`weight`: there is no edge type a:b:c"),
    ({"label": "y"}, "`label='y'`: say of which node type, as in paper=y"),
    ({"parts": 4}, "`parts` is for graphs of one type"),
    ({"order": "degree"}, "`order` is for graphs of one type"),
    ({"undirected": True, "edges": {IN: "in.parquet"}}, "`undirected` is for edges between nodes of one type"),
    ({"reverse": True, "edges": {WRITES: "in.parquet", REV_WRITES: "cites.parquet"}}, "adds edge type paper:rev_writes:author"),
    ({"seed": 3}, "`seed` is that of a random split"),
    ({"x_cols": {"venue": "f*"}}, "node type 'venue': `x_cols` names a column of the node table"),
    ({"time_unit": "ms", "time": None}, "`time_unit` says what the times' numbers mean"),
    ({"edges": {"paper:cites": "cites.parquet"}}, "write it SOURCE:NAME:TARGET"),
    ({"edges": {("paper", "a__b", "paper"): "cites.parquet"}}, "edge type 'a__b'.*choose another"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_types_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    nodes = {"paper": str(tmp_path / "p.parquet"), "author": str(tmp_path / "a.parquet"), "venue": None}
    given = {"out": tmp_path / "s", "nodes": nodes, "edges": {WRITES: "w.parquet", IN: "in.parquet"}, "time": "t"}
    with pytest.raises((ConfigError, InputError), match=words) as caught:
        spec_of({**given, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"src": {WRITES: "what"}, "dst": {WRITES: "what"}}, r"writes0.parquet row 0: what '\d+' is not in .*authors.parquet"),
        (
            {"edges": {CITES: "cites.parquet", IN: "in.parquet", ("venue", "has", "paper"): "in.parquet"}},
            "in.parquet.*listed twice",
        ),
        ({"num_nodes": {"venue": 2}}, r"in.parquet row \d+: dst \d+ is out of range 0\.\.1 \(`num_nodes`\)"),
        ({"label": {"paper": "z"}}, "papers.parquet has no column 'z' for labels"),
        ({"features": {"author": ["a=a.npy"]}}, "a.npy has 3 rows, but there are 15 nodes"),
        (
            {"edges": {CITES: "empty.parquet"}, "nodes": {"paper": None}},
            "nothing says which nodes there are of node type 'paper'",
        ),
    ],
)
def test_files_that_do_not_fit_leave_nothing(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    world = World(tmp_path)
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    table(tmp_path / "empty.parquet", src=np.zeros(0, np.int64), dst=np.zeros(0, np.int64))
    if "edges" in change:
        change = change | {"edges": {key: str(tmp_path / name) for key, name in change["edges"].items()}}
    given = world.given(**change)
    if "edges" in change:
        given = {name: given[name] for name in ("out", "nodes", "edges", "id")} | change | {"out": given["out"]}
        given["edges"] = change["edges"]
        given["id"] = {"author": "name"} if "author" in given["nodes"] else {}
    if "features" in change:
        given["features"] = {"author": [f"a={tmp_path}/a.npy"]}
        given["x_cols"] = {"paper": "f*"}
    with pytest.raises(InputError, match=words) as caught:
        ingest(spec_of(given))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s.ooc").exists()
    assert not (tmp_path / "s.ooc.partial").exists()


def test_a_task_is_of_node_types_and_of_edge_types(tmp_path: Path) -> None:
    world = World(tmp_path)
    by_keys = {"paper": "classification", WRITES: "regression"}
    for number, task in enumerate((by_keys, ["paper=classification", "author:writes:paper=regression"])):
        given = world.given(f"{number}.ooc", edge_label={WRITES: "order"}, task=task)
        ingest(spec_of(given))
        with Dataset.open(given["out"]) as ds:
            assert (ds.nodes("paper").task, ds.edges(WRITES).task) == ("multiclass", "regression")
    with pytest.raises(ConfigError, match="the labels of edge type paper:cites:paper are, and there are none"):
        ingest(spec_of(world.given("none.ooc", task={CITES: "regression"})))
    assert not list(tmp_path.glob("none*"))


def test_edges_of_unknown_ids_are_dropped_on_request(tmp_path: Path) -> None:
    papers = table(tmp_path / "p.parquet", id=[10, 20, 30])
    edges = table(tmp_path / "e.parquet", src=["a", "b", "a", "c"], dst=[10, 99, 30, 20])
    given = {"nodes": {"paper": papers, "author": None}, "edges": {WRITES: edges}, "drop_missing": True}
    result = ingest(spec_of({"out": tmp_path / "s", **given}))
    assert result.dropped == {"missing": 1}
    with Dataset.open(result.path) as ds:
        graph = ds.edges(WRITES).graph
        assert (graph.edge_ids(np.arange(3)).tolist(), graph.indices.tolist()) == ([0, 3, 2], [0, 2, 0])
        assert ds.nodes("author").external([0, 1, 2]) == ["a", "b", "c"]


def test_undirected_and_reverse_together_are_pygs_to_undirected(tmp_path: Path) -> None:
    world = World(tmp_path)
    given = {name: value for name, value in world.given().items() if name in ("out", "nodes", "edges", "id", "src", "dst")}
    with Dataset.open(ingest(spec_of({**given, "undirected": True, "reverse": True})).path) as ds:
        assert ds.edge_types == [WRITES, CITES, IN, REV_WRITES, REV_IN]
        loops = int((world.cites[0] == world.cites[1]).sum())
        assert ds.edges(CITES).graph.num_edges == 180 - loops
        assert ds.edges(CITES).undirected


KILLED = """
import json, os, signal, sys
from ooc.stores.ingest import ingest, spec_of

given, at, seen = json.loads(sys.argv[1]), int(sys.argv[2]), 0
def die(*_):
    global seen
    seen += 1
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)
print(len(ingest(spec_of(given), die).resumed), seen)
"""


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [0.4, 0.75, 0.99])
def test_an_interrupted_ingest_of_types_resumes_to_the_same_bytes(tmp_path: Path, share: float) -> None:
    world, calls = World(tmp_path), []
    ingest(spec_of(world.given("want.ooc", reverse=True)), lambda *each: calls.append(each))
    left = int(share * len(calls))

    def interrupt(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(spec_of(world.given("got.ooc", reverse=True)), interrupt)
    assert not (tmp_path / "got.ooc").exists()
    again = ingest(spec_of(world.given("got.ooc", reverse=True)))
    assert again.resumed[0] == "gather paper"
    assert content(tmp_path / "got.ooc") == content(tmp_path / "want.ooc")


@pytest.mark.slow
def test_a_killed_ingest_of_types_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    world = World(tmp_path)
    texts = {":".join(key): path for key, path in world.edges.items()}
    given = world.given(out="got.ooc", edges=texts, reverse=True)
    given = {name: _by_text(value) for name, value in given.items()}
    python("-c", KILLED, json.dumps({**given, "out": str(tmp_path / "want.ooc")}), "0")
    want, resumed, at = content(tmp_path / "want.ooc"), [], 3
    while True:
        killed = python("-c", KILLED, json.dumps(given), str(at))
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (tmp_path / "got.ooc").exists()
        again = python("-c", KILLED, json.dumps(given), "0")
        assert again.returncode == 0, again.stderr
        resumed.append(int(again.stdout.split()[0]))
        assert content(tmp_path / "got.ooc") == want
        shutil.rmtree(tmp_path / "got.ooc")
        at += 15
    assert max(resumed) >= 6
    assert resumed == sorted(resumed)


def _by_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {":".join(key) if isinstance(key, tuple) else key: each for key, each in value.items()}
    return str(value) if isinstance(value, Path) else value
