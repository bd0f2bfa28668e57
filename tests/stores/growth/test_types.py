"""Stores of several types that grow: appended and compacted, or only appended, they are what one ingest of everything makes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.cli.main import main
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.fingerprints import fingerprint
from ooc.stores.growth.compact import compact
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from tests.stores.growth.test_append import FEW, files, fresh, small_blocks
from tests.stores.growth.test_killed import kill_everywhere, leftovers

__all__ = ["small_blocks"]
VISITS, KNOWS, REVERSE = ("user", "visits", "item"), ("user", "knows", "user"), ("item", "rev_visits", "user")
USERS, ITEMS = [6, 6, 9], [5, 8, 8]
"""nodes in the store, and in it after each append"""


def user(number: int) -> str:
    return f"u{number:02d}"[::-1]


def tables(folder: Path, lot: str, users: range, items: range, edges: dict[tuple[str, str, str], Any]) -> dict[str, Any]:
    """What `ooc.ingest` or `ooc.append` is given of a lot."""
    folder = folder / lot
    folder.mkdir(exist_ok=True)
    own: dict[str, Any] = {"user": {"id": [user(v) for v in users], "y": [v % 3 for v in users]}}
    own["user"] |= {f"f{j}": [float(np.sin(10 * v + j)) for v in users] for j in range(3)}
    own["item"] = {"id": [7 * v - 20 for v in items], "split": [("train", "val", "test")[v % 3] for v in items]}
    of_nodes = {"user": own["user"], "item": own["item"]}
    for name, columns in of_nodes.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    pairs = np.array(edges[VISITS]).reshape(-1, 3)
    visits = {"src": [user(v) for v in pairs[:, 0]], "dst": (7 * pairs[:, 1] - 20).tolist()}
    visits["part"] = [("train", "val", "test", "")[number % 4] for number in pairs[:, 2]]
    pairs = np.array(edges[KNOWS]).reshape(-1, 3)
    knows: dict[str, Any] = {"src": [user(v) for v in pairs[:, 0]], "dst": [user(v) for v in pairs[:, 1]]}
    knows["w"] = np.sqrt(1.0 + pairs[:, 2])
    given: dict[str, Any] = {"nodes": {}, "edges": {}, "id": "id"}
    for key, columns in ((VISITS, visits), (KNOWS, knows)):
        if len(columns["src"]):
            pq.write_table(pa.table(columns), folder / f"{key[1]}.parquet")
            given["edges"][key] = folder / f"{key[1]}.parquet"
    given["nodes"] = {name: folder / f"{name}.parquet" for name, columns in of_nodes.items() if len(columns["id"])}
    if "user" in given["nodes"]:
        given |= {"x_cols": {"user": "f*"}, "label": {"user": "y"}}
    if "item" in given["nodes"]:
        given["split"] = {"item": "split"}
    given |= {"edge_split": {VISITS: "part"}} if VISITS in given["edges"] else {}
    given |= {"weight": {KNOWS: "w"}} if KNOWS in given["edges"] else {}
    return {name: value for name, value in given.items() if value != {}}


def lots(draw: Any) -> list[dict[tuple[str, str, str], Any]]:
    """Edges of each lot, among the nodes that there are by then; the first has some of each type, of every split."""
    found = []
    for number, (users, items) in enumerate(zip(USERS, ITEMS, strict=True)):
        most = st.integers(0, 50)
        visits = st.lists(st.tuples(st.integers(0, users - 1), st.integers(0, items - 1), most), max_size=25)
        knows = st.lists(st.tuples(st.integers(0, users - 1), st.integers(0, users - 1), most), max_size=25)
        own = {VISITS: draw(visits), KNOWS: draw(knows)}
        if number == 0:
            own = {VISITS: [(0, 0, 0), (1, 1, 1), (2, 1, 2), *own[VISITS]], KNOWS: [(0, 1, 0), *own[KNOWS]]}
        found.append(own)
    return found


def assert_same_data(one: Path, other: Path) -> None:
    """As a reader has them."""
    with Dataset.open(one) as a, Dataset.open(other) as b:
        assert a.manifest.model_copy(update={"fingerprints": {}}) == b.manifest.model_copy(update={"fingerprints": {}})
        for key in (VISITS, KNOWS, REVERSE):
            mine, theirs = a.edges(key), b.edges(key)
            np.testing.assert_array_equal(mine.graph.indptr, theirs.graph.indptr)
            np.testing.assert_array_equal(mine.graph.indices, theirs.graph.indices)
            for name in theirs.graph.columns:
                np.testing.assert_array_equal(mine.graph.columns[name], theirs.graph.columns[name], err_msg=name)
            for name in theirs.splits:
                every = np.arange(len(theirs.members(name)))
                np.testing.assert_array_equal(mine.members(name)[every], theirs.members(name)[every])
        for node_type in ("user", "item"):
            nodes, wanted = a.nodes(node_type), b.nodes(node_type)
            rows = np.arange(wanted.num_nodes)
            assert list(nodes.external(rows)) == list(wanted.external(rows))
            assert nodes.rows_of(nodes.external(rows)).tolist() == rows.tolist()
            for name in wanted.names:
                own, true = (np.empty((len(rows), *wanted.rows(name).shape[1:]), wanted.rows(name).dtype) for _ in range(2))
                nodes.rows(name).read(rows, own)
                wanted.rows(name).read(rows, true)
                np.testing.assert_array_equal(own, true, err_msg=name)
            for name in wanted.splits:
                np.testing.assert_array_equal(nodes.split(name), wanted.split(name))


@pytest.mark.slow
@settings(FEW, max_examples=4)
@given(data=st.data(), read=st.booleans())
def test_a_store_of_several_types_that_grew_is_one_ingested_whole(quick_path, small_blocks, data, read):  # type: ignore[no-untyped-def]
    """Array by array, byte for byte once it is compacted, and to a reader before: new nodes of either type, edges of either."""
    folder, parts = fresh(quick_path), lots(data.draw)
    grown, whole, begin = folder / "grown.ooc", folder / "whole.ooc", (0, 0)
    appends = 0
    for lot, (edges, end) in enumerate(zip(parts, zip(USERS, ITEMS, strict=True), strict=True)):
        own = tables(folder, str(lot), range(begin[0], end[0]), range(begin[1], end[1]), edges)
        begin = end
        if lot == 0:
            ooc.ingest(grown, reverse=True, **own)
        elif "nodes" in own or "edges" in own:
            ooc.append(grown, **own)
            appends += 1
    every = {key: [edge for edges in parts for edge in edges[key]] for key in (VISITS, KNOWS)}
    ooc.ingest(whole, reverse=True, **tables(folder, "all", range(USERS[-1]), range(ITEMS[-1]), every))
    if read:  # what the reader merges is then taken over
        assert_same_data(grown, whole)
    assert verify(grown) == []
    assert compact(grown).appends == appends
    mine, theirs = files(grown / "versions" / "1"), files(whole)
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if mine[name] != theirs[name]] == []
    assert fingerprint(grown) == fingerprint(whole)
    assert verify(grown) == []
    assert_same_data(grown, whole)


def first_lot(tmp_path: Path) -> Path:
    edges = {VISITS: [(0, 0, 0), (1, 1, 1), (2, 1, 2)], KNOWS: [(0, 1, 0), (2, 3, 4)]}
    path = tmp_path / "shop.ooc"
    ooc.ingest(path, reverse=True, **tables(tmp_path, "first", range(6), range(5), edges))
    return path


def test_edges_bring_new_nodes_of_types_without_features(tmp_path: Path) -> None:
    path = first_lot(tmp_path)
    new = {"src": [user(0), user(3)], "dst": [1000, 2000], "part": ["train", "test"]}
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    done = ooc.append(path, edges={VISITS: tmp_path / "new.parquet"}, edge_split={VISITS: "part"}).appended
    assert (done.edges, done.nodes, done.parts["item"]["nodes"]) == (2, 2, 2)
    with ooc.open(path) as ds:
        assert (ds.nodes("item").num_nodes, ds.nodes("user").num_nodes) == (7, 6)
        assert ds.nodes("item").external([5, 6]).tolist() == [1000, 2000]
        assert ds.edges(VISITS).splits == {"train": 2, "val": 1, "test": 2} or set(ds.edges(VISITS).splits) >= {"train", "test"}
        assert ds.edges(REVERSE).num_edges == ds.edges(VISITS).num_edges == 5
    pq.write_table(pa.table({**new, "src": [user(0), "nobody"]}), tmp_path / "new.parquet")
    with pytest.raises(InputError, match="src 'nobody' is not in"):
        ooc.append(path, edges={VISITS: tmp_path / "new.parquet"}, edge_split={VISITS: "part"})
    with ooc.open(path) as ds:
        assert ds.edges(VISITS).num_edges == 5


def test_the_command_line_takes_types_and_says_what_was_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = first_lot(tmp_path)
    pq.write_table(pa.table({"id": [500, 501], "split": ["train", "test"]}), tmp_path / "items.parquet")
    pq.write_table(pa.table({"src": [user(0)] * 2, "dst": [500, 501], "part": ["val", ""]}), tmp_path / "new.parquet")
    nodes = ["--nodes", f"item={tmp_path}/items.parquet", "--split", "item=split"]
    edges = ["--edges", f"user:visits:item={tmp_path}/new.parquet", "--edge-split", "user:visits:item=part"]
    main(["append", str(path), *nodes, *edges])
    assert "2 edges, 2 new nodes, 2 rows of item/split appended" in capsys.readouterr().out
    main(["info", str(path)])
    assert "2 edges, 2 new nodes" in capsys.readouterr().out
    main(["compact", str(path)])
    with ooc.open(path) as ds:
        assert ds.nodes("item").num_nodes == 7
        assert len(ds.edges(VISITS).members("val")) == 2


@pytest.mark.slow
def test_a_store_of_types_knows_which_nodes_were_touched_since(tmp_path: Path) -> None:
    path = first_lot(tmp_path)
    with Dataset.open(path) as ds:
        was = ds.fingerprint
    new = {"src": [user(2)], "dst": [7 * 3 - 20], "part": ["train"]}
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    ooc.append(path, edges={VISITS: tmp_path / "new.parquet"}, edge_split={VISITS: "part"})
    pq.write_table(pa.table({"id": [user(9)], "f0": [0.1], "f1": [0.2], "f2": [0.3]}), tmp_path / "user.parquet")
    for _ in range(2):
        with Dataset.open(path) as ds:
            found = ds.grown_since(was)
            assert found is not None
            assert found.tolist() == [2, 6 + 3]  # behind one another: its edges go both ways
        compact(path)
    ooc.append(path, nodes={"user": tmp_path / "user.parquet"}, x_cols={"user": "f*"})
    with Dataset.open(path) as ds:
        found = ds.grown_since(was)
        assert found is not None
        assert found.tolist() == [2, 6, 7 + 3]


@pytest.mark.slow
def test_an_append_of_several_types_and_its_compaction_are_killed_anywhere(quick_path: Path) -> None:
    """All or nothing, of nodes and edges of both types; the same call goes on."""
    path, edges = first_lot(quick_path), {VISITS: [(6, 5, 0), (7, 1, 1)], KNOWS: [(6, 7, 3)]}
    own = tables(quick_path, "more", range(6, 8), range(5, 7), edges)

    def grown() -> None:
        assert verify(path) == []
        with ooc.open(path) as ds:
            assert (ds.nodes("user").num_nodes, ds.nodes("item").num_nodes) == (8, 7)
            assert (ds.edges(VISITS).num_edges, ds.edges(REVERSE).num_edges, ds.edges(KNOWS).num_edges) == (5, 5, 3)

    def after_append(path: Path) -> None:
        assert verify(path) == []
        if not describe(path)["appends"]:
            ooc.append(path, **own)
        grown()

    def after_compaction(path: Path) -> None:
        grown()
        compact(path)
        grown()
        assert describe(path)["appends"] == 0
        assert leftovers(path) == []

    kill_everywhere(path, lambda: ooc.append(path, **own), after_append)
    shutil.rmtree(path)
    shutil.copytree(path.with_suffix(".kept"), path)
    shutil.rmtree(path.with_suffix(".kept"))
    ooc.append(path, **own)
    kill_everywhere(path, lambda: compact(path), after_compaction)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"edges": "new.parquet"}, "is heterogeneous: give `edges` and `nodes` by type"),
        ({"edges": {("user", "buys", "item"): "new.parquet"}}, "nothing can be appended to edge type user:buys:item"),
        ({"nodes": {"shop": "new.parquet"}}, "has no node type 'shop'"),
        ({"edges": {VISITS: "new.parquet"}}, "edges of .* of edge type user:visits:item have a split"),
        ({"edges": {REVERSE: "new.parquet"}}, "nothing can be appended to edge type item:rev_visits:user"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    path = first_lot(tmp_path)
    pq.write_table(pa.table({"src": [user(0)], "dst": [1], "id": [1]}), tmp_path / "new.parquet")
    own: dict[str, Any] = {
        name: {key: tmp_path / file for key, file in value.items()} for name, value in given.items() if value != "new.parquet"
    }
    own |= {name: str(tmp_path / value) for name, value in given.items() if value == "new.parquet"}
    before = fingerprint(path)
    with pytest.raises(ConfigError, match=says):
        ooc.append(path, **own)
    assert fingerprint(path) == before
