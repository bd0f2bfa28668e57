"""What readers of a growing store see, what is refused, and what a crash or a second append meets."""

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.stores.array_names import DELTA
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError, OocError, StoreError
from ooc.stores.growth import compact as compact_module
from ooc.stores.growth import delta, grow, lineage
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.growth.versions import alone
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify

N, E = 6, 20


def table(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def edges(path: Path, first: int = 0, count: int = E, nodes: int = N, **more: Any) -> str:
    rng = np.random.default_rng(first)
    src, dst = rng.integers(0, nodes, (2, count))
    own = {"src": src, "dst": dst, "t": np.arange(first, first + count), "m": np.arange(first, first + count) / 8}
    return table(path, **{**own, **more})


def nodes(path: Path, ids: Any, shift: float = 0, **more: Any) -> str:
    rows = np.arange(len(ids))
    own = {"id": ids, "y": rows % 3, "split": ["train"] * len(ids), "f1": rows + shift, "f2": -rows - shift}
    return table(path, **{**own, **more})


def store(folder: Path, *, time: bool = True, text: bool = False, **settings: Any) -> Path:
    """A store of N nodes with features, labels and splits; text: ids "n0", "n1", ..."""
    ends = {}
    if text:
        rng = np.random.default_rng(0)
        ends = {name: [f"n{v}" for v in rng.integers(0, N, E)] for name in ("src", "dst")}
    given: dict[str, Any] = {"edges": edges(folder / "e.parquet", **ends), "label": "y", "split": "split", "x_cols": "f*"}
    given["nodes"] = nodes(folder / "n.parquet", [f"n{v}" if text else v for v in range(N)])
    given |= {"time": "t", "edge_features": ["msg=m"]} if time else {}
    return ingest(IngestSpec(out=folder / "s.ooc", **{**given, **settings})).path


def more(path: Path, **settings: Any) -> AppendSpec:
    """Ten further events of a store of `store`."""
    given = {"edges": edges(path.parent / "more.parquet", 100, 10), "time": "t", "edge_features": ["msg=m"]}
    return AppendSpec(out=path, **{**given, **settings})


def rows_of(ds: Dataset, name: str) -> np.ndarray:
    out = np.empty(ds.rows(name).shape, ds.rows(name).dtype)
    ds.rows(name).read(np.arange(len(out)), out)
    return out


def test_what_is_open_stays_as_it_was_through_appends_and_compactions(tmp_path: Path) -> None:
    """Arrays opened late too; the old version goes when nobody has it."""
    path = store(tmp_path)
    with Dataset.open(path) as old:
        append(more(path))
        with Dataset.open(path) as view:
            compact(path)
            with Dataset.open(path) as new:
                assert [ds.num_edges for ds in (old, view, new)] == [E, E + 10, E + 10]
                assert [len(ds.events) for ds in (old, view, new)] == [E, E + 10, E + 10]
                assert [len(ds.edge_rows("indices").read_range(0, 5)[0]) for ds in (old, view, new)] == [5, 5, 5]  # type: ignore[attr-defined]
                assert [len(ds.split("train")) for ds in (old, view, new)] == [N, N, N]
                assert old.labels is not None
                assert len({old.fingerprint, view.fingerprint, new.fingerprint}) == 3
                with old.follow() as newer:
                    assert newer.num_edges == E + 10
                assert new.follow() is new
    assert (path / "graph").exists()
    append(more(path))
    compact(path)
    assert sorted(each.name for each in path.iterdir() if not each.is_symlink()) == ["versions", "zarr.json"]
    assert {each.resolve().parent for each in path.iterdir() if each.is_symlink()} == {path / "versions" / "2"}
    assert sorted(each.name for each in (path / "versions").iterdir()) == ["2", "state", "zarr.json"]


def test_known_nodes_get_new_rows_the_last_ones_hold(tmp_path: Path) -> None:
    path = store(tmp_path, dtype="float16")
    with Dataset.open(path) as ds:
        before = rows_of(ds, "x")
    for k in (1, 2):
        given = nodes(tmp_path / "u.parquet", [4, k], 10 * k, y=[2, -1], split=["test", ""])
        append(AppendSpec(out=path, nodes=given, x_cols="f*", label="y", split="split"))
    want = before.copy()
    want[[4, 1, 2]] = [[20, -20], [11, -11], [21, -21]]
    for look in range(2):
        with Dataset.open(path) as ds:
            np.testing.assert_array_equal(rows_of(ds, "x"), want)
            assert ds.labels is not None
            np.testing.assert_array_equal(ds.labels, [0, -1, -1, 0, 2, 2])
            assert ds.split("train").tolist() == [0, 3, 5]
            assert ds.split("test").tolist() == [4]
            assert ds.manifest.node_type().splits == {"train": 3, "test": 1}
            assert len(ds.events) == E
        if not look:
            assert compact(path).appends == 2
    assert verify(path) == []
    assert compact(path).appends == 0


def test_unknown_ids_are_new_nodes_where_nodes_have_no_features(tmp_path: Path) -> None:
    given = table(tmp_path / "a.parquet", src=["b", "a"], dst=["a", "c"])
    path = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=given)).path
    for new in (["z", "x"], ["y", "x"]):
        append(AppendSpec(out=path, edges=table(tmp_path / "b.parquet", src=new, dst=["a", "a"])))
    for _ in range(2):
        with Dataset.open(path) as ds:
            assert ds.external(np.arange(6)) == ["a", "b", "c", "x", "z", "y"]
            assert [ds.row(each) for each in "abcxzy"] == list(range(6))
            assert ds.external(ds.graph.indices[: ds.graph.indptr[1]].astype(np.int64)) == ["b", "z", "x", "y", "x"]
            with pytest.raises(InputError, match="no node has the id 'w'"):
                ds.row("w")
        compact(path)
    assert verify(path) == []


def test_new_nodes_come_without_edges_too(tmp_path: Path) -> None:
    path = store(tmp_path)
    append(AppendSpec(out=path, nodes=nodes(tmp_path / "new.parquet", [7, 6], 3), x_cols="f*"))
    append(more(path, edges=table(tmp_path / "b.parquet", src=[7], dst=[6], t=[70], m=[0.0])))
    for _ in range(2):
        with Dataset.open(path) as ds:
            assert (ds.num_nodes, ds.num_edges) == (N + 2, E + 1)
            assert ds.graph.degree(np.array([N, N + 1])).tolist() == [1, 0]
            assert rows_of(ds, "x")[N:].tolist() == [[4, -4], [3, -3]]
            assert ds.labels is not None
            assert ds.labels[N:].tolist() == [-1, -1]
            assert ds.split("train").tolist() == list(range(N))
        compact(path)
    assert verify(path) == []


def test_a_table_without_rows_adds_no_nodes(tmp_path: Path) -> None:
    path = store(tmp_path)
    append(AppendSpec(out=path, nodes=nodes(tmp_path / "none.parquet", np.empty(0, np.int64)), x_cols="f*"))
    for _ in range(2):
        with Dataset.open(path) as ds:
            assert (ds.num_nodes, ds.num_edges) == (N, E)
        compact(path)
    assert verify(path) == []


def test_info_and_verify_tell_what_waits(tmp_path: Path) -> None:
    path = store(tmp_path)
    append(more(path))
    found = describe(path)
    assert (found["num_edges"], found["appends"], found["appended"]["edges"]) == (E, 1, 10)
    data = path / DELTA / "data.mdb"
    held = bytearray(data.read_bytes())
    at = held.index((100 / 8).hex().encode()) if (100 / 8).hex().encode() in held else held.index(np.arange(100, 110).tobytes())
    held[at] ^= 1
    data.write_bytes(held)
    assert [damage.array for damage in verify(path)] == [DELTA]
    with pytest.raises(StoreError, match=r"record .* is damaged"):
        Dataset.open(path)


REFUSED: dict[str, tuple[dict[str, Any], type[OocError], str]] = {
    "no time": ({"time": None}, ConfigError, "have a time: name the column"),
    "a weight": ({"weight": "m"}, ConfigError, "have no weight: leave `weight` out"),
    "no edge features": ({"edge_features": []}, ConfigError, "have the features msg; given: none"),
    "unit": ({"time_unit": "ms"}, InputError, "times are in ms, those of .* in s"),
    "nothing": ({"edges": None, "time": None, "edge_features": []}, ConfigError, "nothing to append"),
    "settled": ({"undirected": True}, ConfigError, "`undirected` is settled when a store is ingested"),
    "memory": ({"memory": "500MB"}, BudgetError, "needs at least 856 MB"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_are_refused(tmp_path: Path, name: str) -> None:
    path = store(tmp_path)
    settings, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        append(more(path, **settings))
    assert describe(path)["appends"] == 0


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown id": ({"src": np.full(10, 77)}, {}, r"row 0: src 77 is out of range 0..5"),
    "fractions": ({"t": np.arange(10) + 0.5}, {}, "has fractions, the times of .* are whole numbers"),
    "NaN": ({"m": np.full(10, np.nan)}, {}, "row 0 column m is NaN"),
    "width": ({"m2": np.zeros(10)}, {"edge_features": ["msg=m*"]}, "only given: m2; only in the store: none"),
    "empty": ({"dst": pa.array([1] * 9 + [None])}, {}, "row 9: dst is empty"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", BAD)
def test_edges_are_checked_as_an_ingest_checks_them(tmp_path: Path, name: str) -> None:
    path = store(tmp_path)
    columns, settings, words = BAD[name]
    given = edges(tmp_path / "bad.parquet", 100, 10, **columns)
    with pytest.raises(InputError, match=words):
        append(more(path, edges=given, **settings))
    assert describe(path)["appends"] == 0


BAD_NODES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any], str]] = {
    "a gap": ([6, 8], {}, {"x_cols": "f*"}, "row 1: id 8 is out of range: 2 new nodes are 6 to 7"),
    "twice": ([6, 6], {}, {"x_cols": "f*"}, "id 6 stands there already"),
    "no features": (
        [2, 6, 7],
        {},
        {"label": "y"},
        "2 new nodes have no row of x, the first in .*new.parquet row 1: give",
    ),
    "a class": ([6, 7], {"y": [1, 3]}, {"x_cols": "f*", "label": "y"}, "label 3.* is none of 0..2"),
    "a split": ([6, 7], {"split": ["train", "spare"]}, {"x_cols": "f*", "split": "split"}, "row 1: split is 'spare'"),
    "words": ([6, 7], {"f1": ["1", "one"]}, {"x_cols": "f*"}, "f1.* holds string"),
    "births": ([6, 7], {}, {"x_cols": "f*", "birth": "y"}, "have no births"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", BAD_NODES)
def test_nodes_are_checked_as_an_ingest_checks_them(tmp_path: Path, name: str) -> None:
    path = store(tmp_path)
    ids, columns, settings, words = BAD_NODES[name]
    with pytest.raises((InputError, ConfigError), match=words):
        append(more(path, nodes=nodes(tmp_path / "new.parquet", ids, **columns), **settings))
    assert describe(path)["appends"] == 0


def test_an_id_that_nobody_listed_is_refused_or_left_out(tmp_path: Path) -> None:
    path = store(tmp_path, text=True)
    given = table(tmp_path / "m.parquet", src=["n1", "q"], dst=["n2", "n1"], t=[50, 51], m=[1.0, 2.0])
    with pytest.raises(InputError, match=r"row 1: src 'q' is not in .*s.ooc; fix it or pass `drop_missing=True`"):
        append(more(path, edges=given))
    found = append(more(path, edges=given, drop_missing=True)).appended
    assert (found.edges, found.missing) == (1, 1)
    with Dataset.open(path) as ds:
        assert len(ds.events) == E + 1
        assert ds.manifest.input is not None
        assert ds.manifest.input.edges == E + 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parts": 2}, "by 2 parts of the graph"),
        ({"order": "degree"}, "by degree"),
        ({"time": None, "edge_features": [], "drop_duplicates": True}, "holds each edge once"),
        ({"time": None, "edge_features": [], "weight": "m", "edge_ids": False}, "has no ids of edges"),
    ],
)
def test_a_store_that_cannot_grow_and_stay_what_it_is_says_so(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    path = store(tmp_path, **settings)
    with pytest.raises(ConfigError, match=f"nothing can be appended to .*{words}.*ingest everything anew"):
        append(more(path))


def test_rows_that_other_rows_decided_about_are_refused(tmp_path: Path) -> None:
    path = store(tmp_path, normalize="row")
    new = nodes(tmp_path / "new.parquet", [6])
    with pytest.raises(ConfigError, match=r"were normalised \(row\)"):
        append(more(path, nodes=new, x_cols="f*"))
    (tmp_path / "b").mkdir()
    path = store(tmp_path / "b", dtype="int8")
    with pytest.raises(InputError, match=r"row 0 column f1 is 50.0, beyond the scale of the store's int8 rows \(5 at most\)"):
        append(AppendSpec(out=path, nodes=nodes(tmp_path / "new.parquet", [6], 50), x_cols="f*"))


def test_a_second_append_says_that_another_is_under_way(tmp_path: Path) -> None:
    path = store(tmp_path)
    with alone(path, "growth", wait=False):
        for attempt in (lambda: append(more(path)), lambda: compact(path)):
            with pytest.raises(StoreError, match=r"another append .* is under way: wait for it"):
                attempt()
    append(more(path))
    assert describe(path)["appends"] == 1


def test_readers_of_a_store_that_cannot_be_written_are_told_to_compact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path)
    append(more(path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StoreError, match="run `ooc compact"):
        Dataset.open(path)
    monkeypatch.undo()
    Dataset.open(path).close()
    monkeypatch.setattr("os.access", lambda *_: False)  # somebody merged it
    Dataset.open(path).close()


def test_what_is_published_and_not_cleared_away_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the new version and the removal of the appends that it holds."""
    path = store(tmp_path)
    append(more(path))

    def crash(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compact_module, "remove", crash)
    with pytest.raises(KeyboardInterrupt):
        compact(path)
    monkeypatch.undo()
    assert (path / DELTA).exists()
    with Dataset.open(path) as ds:
        assert ds.num_edges == E + 10
    append(more(path))
    with Dataset.open(path) as ds:
        assert ds.num_edges == E + 20
    assert compact(path).appends == 1
    assert verify(path) == []


def test_the_same_edges_again_are_taken_and_told_of(tmp_path: Path) -> None:
    """With other nodes or none."""
    path = store(tmp_path, text=True)
    ends = {name: [f"n{v}" for v in range(5)] * 2 for name in ("src", "dst")}
    given = edges(tmp_path / "m.parquet", 100, 10, **ends)
    first = append(more(path, edges=given, nodes=nodes(tmp_path / "new.parquet", ["q"]), x_cols="f*"))
    assert first.notes == []
    assert append(more(path, edges=edges(tmp_path / "o.parquet", 110, 10, **ends))).notes == []
    assert "the very same edges" in append(more(path, edges=given)).notes[0]
    assert append(AppendSpec(out=path, nodes=nodes(tmp_path / "new.parquet", ["q"]), x_cols="f*")).notes == []
    with Dataset.open(path) as ds:
        assert len(ds.events) == E + 30


def test_an_append_that_fails_at_its_end_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path)
    append(more(path))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(delta.Appending, "finish", fail)
    with pytest.raises(StoreError, match="No space left"):
        append(more(path))
    monkeypatch.undo()
    assert describe(path)["appends"] == 1
    with Dataset.open(path) as ds:
        assert ds.num_edges == E + 10


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["failed", "killed"])
def test_an_append_of_many_transactions_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """However it is cut off, behind any of its records; what it left is gone with the next one."""
    path = store(tmp_path)
    append(more(path))
    monkeypatch.setattr(delta, "RECORD_ROWS", 3)
    monkeypatch.setattr(delta, "TRANSACTION_BYTES", 1000)
    put, waiting = delta.Appending.put, list[int]()

    def failing(self: delta.Appending, kind: str, record: Any, prefix: str = "") -> None:
        if len(waiting) == 3:
            raise KeyboardInterrupt
        put(self, kind, record, prefix)
        waiting.append(self._waiting)

    with monkeypatch.context() as patch:
        patch.setattr(delta.Appending, "put", failing)
        if cut == "killed":
            patch.setattr(delta.Appending, "give_up", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            append(more(path))
    assert max(waiting) < 1000
    assert len(entries(path)) == (3 if cut == "failed" else 6)  # the base, a record, its line; records that were committed
    assert describe(path)["appends"] == 1
    assert verify(path) == []
    with Dataset.open(path) as ds:
        assert ds.num_edges == E + 10
    append(more(path))
    assert len(entries(path)) == 3 + 4 + 1
    with Dataset.open(path) as ds:
        assert ds.num_edges == E + 20
    assert compact(path).appends == 2


def entries(path: Path) -> list[bytes]:
    """Keys of what was appended."""
    with lmdb.open(str(path / DELTA), readonly=True) as env, env.begin() as transaction:
        return [key for key, _ in transaction.cursor()]


def test_a_first_append_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = store(tmp_path)
    with pytest.raises(InputError):
        append(more(path, edges=edges(tmp_path / "bad.parquet", 100, 10, src=np.full(10, 77))))
    assert not (path / DELTA).exists()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("undirected", [False, True])
def test_a_store_knows_what_it_was_and_which_nodes_were_touched_since(tmp_path: Path, undirected: bool) -> None:
    """Through appends and compactions alike."""
    path = store(tmp_path, undirected=undirected)
    seen = []

    def look() -> None:
        with Dataset.open(path) as ds:
            seen.append(ds.fingerprint)

    look()
    append(more(path, edges=table(tmp_path / "a.parquet", src=[1, 2], dst=[3, 3], t=[60, 61], m=[0.0, 0.0])))
    look()
    compact(path)
    look()
    append(AppendSpec(out=path, nodes=nodes(tmp_path / "b.parquet", [5]), x_cols="f*"))
    look()
    append(more(path, edges=table(tmp_path / "c.parquet", src=[0], dst=[4], t=[62], m=[0.0])))
    look()
    first, second, third = {3} | ({1, 2} if undirected else set()), {5}, {4} | ({0} if undirected else set())
    for _ in range(2):
        with Dataset.open(path) as ds:
            for was, touched in zip(seen, [first | second | third] + 2 * [second | third] + [third, set()], strict=True):
                found = ds.grown_since(was)
                assert found is not None
                assert found.tolist() == sorted(touched)
            assert ds.grown_since("of another store") is None
        compact(path)
    (tmp_path / "b").mkdir()
    with Dataset.open(store(tmp_path / "b", time=False)) as other:
        assert other.grown_since(seen[0]) is None
    assert len(set(seen)) == 5


def test_appends_that_a_compaction_takes_away_while_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that found them, and then did not, reads the new version."""
    path = store(tmp_path)
    append(more(path))
    opened = delta._for_reading

    def too_late(folder: Path) -> Any:
        monkeypatch.setattr(delta, "_for_reading", opened)
        compact(path)
        return opened(folder)

    monkeypatch.setattr(delta, "_for_reading", too_late)
    with Dataset.open(path) as data:
        assert len(data.events) == E + 10


@pytest.mark.slow
def test_the_first_reader_merges_in_a_share_of_its_own_memory_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in what the append was given, nor silently where it is asked."""
    path, rooms, told = store(tmp_path, text=True), [], dict[str, tuple[int, int | None]]()
    made = grow.Growing.__init__

    def watched(self: Any, *arguments: Any, **settings: Any) -> None:
        rooms.append(settings["room"])
        made(self, *arguments, **settings)

    monkeypatch.setattr(grow.Growing, "__init__", watched)
    for memory, room in (("1GB", 125_000_000), ("200MB", 25_000_000), (None, 2**28)):
        new = [f"q{len(rooms)}", f"p{len(rooms)}"]
        given = edges(tmp_path / "m.parquet", 100, 10, src=[new[0]] * 5 + ["n1"] * 5, dst=[new[1]] * 10)
        append(more(path, edges=given, nodes=nodes(tmp_path / "new.parquet", new), x_cols="f*", memory="3GB"))
        told.clear()
        Dataset.open(
            path, memory=memory, progress=lambda step, done, total, unit="rows": told.update({step: (done, total)})
        ).close()
        assert rooms.pop() == room
        assert rooms == []
        rooms = []
        assert {"sort what was appended", "merge the graph", "merge events/time", "ids"} <= told.keys()
        assert all(done == total for done, total in told.values()), told


@pytest.mark.slow
def test_what_the_appends_touched_takes_four_bytes_a_node_however_many_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path)
    seen, sizes = [], set()
    monkeypatch.setattr(lineage, "MOST_APPENDS", 3)
    for k in range(5):
        with Dataset.open(path) as ds:
            seen.append(ds.fingerprint)
        append(more(path, edges=table(tmp_path / "a.parquet", src=[1], dst=[k], t=[60 + k], m=[0.0])))
        compact(path)
        state = path / "versions" / "state"
        assert {each.name for each in state.iterdir() if each.suffix not in (".lock", "")} == {
            "lineage.json",
            "touched.npy",
            "zarr.json",
        }
        sizes.add((state / "touched.npy").stat().st_size)
    assert sizes == {128 + 4 * N}
    with Dataset.open(path) as ds:
        found = [ds.grown_since(was) for was in seen]
    assert found[:2] == [None, None]  # too many appends ago
    assert [each.tolist() for each in found[2:] if each is not None] == [[2, 3, 4], [3, 4], [4]]


def test_a_feature_may_be_called_what_a_record_calls_its_columns(tmp_path: Path) -> None:
    path = store(tmp_path, edge_features=["place=m"])
    append(more(path, edge_features=["place=m"]))
    for _ in range(2):
        with Dataset.open(path) as ds:
            assert ds.events.read(E, E + 10).columns["place"][:, 0].tolist() == [(100 + k) / 8 for k in range(10)]
        compact(path)
