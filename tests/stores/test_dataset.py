"""Dataset on a store on disk against the arrays it was written from."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from ooc.stores.arrays.lmdb_rows import write_lmdb_rows
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.arrays.whole import load
from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import compact_labels, write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, OocError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import random_edges


@pytest.fixture
def arrays() -> dict:
    rng = np.random.default_rng(1)
    src, dst = random_edges(50, 300, seed=1)
    weight = rng.random(300, np.float32)
    return {"src": src, "dst": dst, "weight": weight, "x": rng.random((50, 8), np.float32), "y": rng.integers(-1, 3, 50)}


@pytest.mark.parametrize("settings", [{}, {"engine": "uring"}, {"engine": "pread"}, {"engine": "mmap"}, {"in_memory": True}])
def test_a_store_gives_back_what_was_written(make_store, arrays, settings) -> None:
    double = Graph.from_edges(arrays["src"], arrays["dst"], 50, weight=arrays["weight"])
    with Dataset.open(make_store(**arrays), **settings) as ds:
        for one, other in zip(ds.graph._arrays(), double._arrays(), strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        assert sorted(ds.graph.columns) == ["edge_id", "weight"]
        ids = np.array([3, 49, 0, 3])
        out = np.empty((4, 8), np.float32)
        ds.rows("x").read(ids, out)
        assert np.array_equal(out, arrays["x"][ids])
        assert ds.labels is not None
        assert np.array_equal(ds.labels, arrays["y"])
        assert (ds.num_nodes, ds.num_edges, ds.num_features, ds.num_classes, ds.task) == (50, 300, 8, 3, "multiclass")
        assert ds.names == ["split", "x", "y"]


def test_in_memory_holds_no_map(make_store) -> None:
    with Dataset.open(make_store(weight=True), in_memory=True) as ds:
        assert all(isinstance(ds.rows(name), ArrayRows) for name in ds.names)
        assert all(array.flags.owndata for array in ds.graph._arrays())
    with Dataset.open(make_store("other.ooc")) as ds:
        assert not any(array.flags.writeable for array in (ds.graph.indptr, ds.graph.indices, ds.labels))


def test_loading_runs_over_all_shards_and_skips_the_padding(tmp_path) -> None:
    x = np.arange(10_000 * 3, dtype=np.int16).reshape(10_000, 3)
    with Appender(tmp_path, "x", (3,), np.int16, chunk_bytes=2**14, shard_bytes=2**15) as appender:
        appender.append(x)
    rows = open_zarr_rows(tmp_path, "x")
    assert isinstance(rows, ShardedRows)
    assert len(rows.segments.paths) > 1
    assert rows.segments.total > x.nbytes
    assert np.array_equal(load(rows), x)
    rows.segments.paths[0].write_bytes(b"short")
    with pytest.raises(StoreError, match="truncated"):
        load(rows)
    rows.close()


def test_plain_zarr_reads_every_array(make_store, arrays) -> None:
    path = make_store(**arrays)
    group = zarr.open_group(path, mode="r")
    graph = Graph.from_edges(arrays["src"], arrays["dst"], 50, weight=arrays["weight"])
    for name, array in {"indptr": graph.indptr, "indices": graph.indices, **graph.columns}.items():
        assert np.array_equal(group[f"graph/{name}"][:], array), name
    assert np.array_equal(group["node/node/x"][:], arrays["x"])
    assert np.array_equal(group["node/node/y"][:], arrays["y"])
    assert set(np.unique(group["node/node/split"][:])) == {0, 1, 2}
    assert {"graph", "node", "checksums"} == set(group.group_keys())


def test_splits_apart_and_overlapping(make_store) -> None:
    apart = {"train": [5, 1], "val": [2], "test": [49]}
    overlapping = {"train": [5, 1], "val": [5], "holdout": [49]}
    for number, splits in enumerate((apart, overlapping)):
        with Dataset.open(make_store(f"{number}.ooc", splits=splits)) as ds:
            assert set(ds.splits) == set(splits)
            for name, ids in splits.items():
                assert ds.split(name).tolist() == sorted(ids)
                assert ds.split(name).dtype == np.int64
            with pytest.raises(InputError, match="no split 'dev': there are train, val"):
                ds.split("dev")
            assert ("split" in ds.names) == (splits is apart)


@pytest.mark.parametrize(
    ("task", "y", "stored"),
    [
        ("binary", [1, 0, -1], [1, 0, -1]),
        ("multiclass", [199.0, np.nan, 0], [199, -1, 0]),
        ("multilabel", [[1, 0], [np.nan, 1], [0, 0]], [[1, 0], [-1, 1], [0, 0]]),
    ],
)
def test_labels_of_every_task(tmp_path, task, y, stored) -> None:
    graph = Graph.from_edges([0, 1], [1, 2], 3)
    with Dataset.open(write_store(tmp_path / "s", graph, y=np.array(y), task=task, num_classes=200)) as ds:
        assert ds.labels is not None
        assert ds.labels.tolist() == stored
        assert ds.labels.dtype == (np.int16 if task == "multiclass" else np.int8)
        assert ds.num_features == 0


@pytest.mark.parametrize(("task", "y"), [("multiclass", [0, 3]), ("binary", [0, 2]), ("multilabel", [[0, 1], [0, 0.5]])])
def test_labels_out_of_range_are_named_by_row(task, y) -> None:
    with pytest.raises(InputError, match=r"the label of row 1 is .* 0\.\.[12]"):
        compact_labels(np.array(y), task, 3)


def test_ids_of_the_user(make_store) -> None:
    external = [f"paper {i}" for i in range(50)]
    with Dataset.open(make_store(external=external)) as ds:
        assert ds.external(np.array([7, 0, 7])) == ["paper 7", "paper 0", "paper 7"]
        assert ds.row("paper 31") == 31
    with Dataset.open(make_store("plain.ooc")) as ds:
        assert list(ds.external(np.array([7, 0]))) == [7, 0]
        assert ds.row("31") == ds.row(31) == 31
        for bad in ("paper", 50, -1):
            with pytest.raises(InputError, match="no node has"):
                ds.row(bad)


def test_a_store_built_again_at_a_path_has_its_own_ids(make_store) -> None:
    """While a data set of the old one is open, as in a notebook."""
    old = Dataset.open(make_store("s", external=[f"old{row}" for row in range(50)]))
    shutil.rmtree(old.path)
    with Dataset.open(make_store("s", external=[f"new{row}" for row in range(50)])) as ds:
        assert ds.path == old.path
        assert ds.external([0]) == ["new0"]
    old.close()


def test_memory_is_parsed_once(make_store) -> None:
    path = make_store()
    assert Dataset.open(path, memory="2GB").memory == 2 * 10**9
    assert Dataset.open(path).memory is None
    for setting in ({"memory": "plenty"}, {"engine": "ring"}):
        with pytest.raises(ConfigError):
            Dataset.open(path, **setting)


def foreign(tmp_path: Path, kind: str, x: np.ndarray) -> Path:
    path = tmp_path / f"features.{kind}"
    if kind == "lmdb":
        write_lmdb_rows(path, x)
    elif kind == "nested":
        zarr.create_group(path).create_array("deep/x", data=x, chunks=(7, 3))
        return path / "deep/x"
    else:
        version = 2 if kind == "zarr2" else 3
        zarr.create_array(path, data=x, chunks=(7, 3), zarr_format=version)
    return path


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", ["lmdb", "zarr", "zarr2", "nested"])
def test_features_someone_else_wrote_take_the_place_of_x(make_store, tmp_path, kind, in_memory) -> None:
    width = 8 if kind == "lmdb" else 6  # LMDB takes shape and dtype from the store
    x = np.random.default_rng(2).random((50, width), np.float32)
    path = make_store()
    with Dataset.open(path, features={"x": foreign(tmp_path, kind, x)}, in_memory=in_memory) as ds:
        out = np.empty((3, width), np.float32)
        ds.rows("x").read(np.array([40, 2, 40]), out)
        assert np.array_equal(out, x[[40, 2, 40]])
        assert ds.num_features == width
        with Dataset.open(path) as own:
            assert ds.fingerprint != own.fingerprint


def test_a_compressed_x_inside_the_store_still_reads(make_store) -> None:
    path = make_store()
    x = np.random.default_rng(3).random((50, 6), np.float32)
    zarr.open_group(path, mode="r+").create_array("node/node/x", data=x, chunks=(7, 6), overwrite=True)
    zarr.open_group(path, mode="r+").create_array("node/node/extra", data=x[:, 0], chunks=(7,))
    with Dataset.open(path) as ds:
        out = np.empty((2, 6), np.float32)
        ds.rows("x").read(np.array([49, 0]), out)
        assert np.array_equal(out, x[[49, 0]])
        assert ds.names == ["extra", "split", "x", "y"]
        assert ds.rows("extra").shape == (50,)


def test_features_that_do_not_fit_are_refused(make_store, tmp_path) -> None:
    path = make_store()
    x = np.zeros((49, 8), np.float32)
    for kind in ("lmdb", "zarr"):
        with pytest.raises(InputError, match="has 49 rows, but the store has 50 nodes"):
            Dataset.open(path, features={"x": foreign(tmp_path, kind, x)})
    zarr.create_array(tmp_path / "waves", data=np.zeros(50, np.complex64), chunks=(7,))
    with pytest.raises(InputError, match="it must hold numbers"):
        Dataset.open(path, features={"x": tmp_path / "waves"})
    with pytest.raises(InputError, match="neither a Zarr array"):
        Dataset.open(path, features={"x": tmp_path / "nothing"})
    write_lmdb_rows(tmp_path / "odd", np.zeros((50, 3), np.int8))
    with pytest.raises(StoreError, match="3 bytes in row 0"):
        Dataset.open(path, features={"other": tmp_path / "odd"})


def test_lmdb_records_of_another_dtype_or_width_are_refused(make_store, tmp_path) -> None:
    write_lmdb_rows(tmp_path / "double", np.zeros((50, 8)))
    with pytest.raises(InputError, match=r"64 bytes a record; a row of float32\[50, 8\], as the store holds, takes 32"):
        Dataset.open(make_store(), features={"x": tmp_path / "double"})


@pytest.mark.parametrize("name", ["graph/indptr", "graph/indices", "graph/weight", "node/node/x", "node/node/split"])
@pytest.mark.parametrize("harm", ["short", "gone", "array gone"])
def test_a_truncated_store_is_refused_in_one_line(make_store, name, harm) -> None:
    path = make_store(weight=True)
    shard = next(each for each in (path / name / "c").rglob("*") if each.is_file())
    if harm == "short":
        shard.write_bytes(shard.read_bytes()[:100])
    else:
        (shard if harm == "gone" else path / name / "zarr.json").unlink()
    with pytest.raises(StoreError, match=name.rpartition("/")[2]) as caught:
        Dataset.open(path)
    assert "\n" not in str(caught.value)


def test_a_weighted_store_without_the_weights_of_its_loops_is_to_be_built_again(make_store) -> None:
    path = make_store(src=np.array([0, 1, 1]), dst=np.array([0, 1, 2]), weight=np.ones(3, np.float32))
    shutil.rmtree(path / "graph" / "loop_weight")
    with pytest.raises(StoreError, match=r"graph/loop_weight is missing.*build the store again"):
        Dataset.open(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_edges": 299, "edge_types": [{"count": 299}]}, r"\[300\].*\[299\]|within 0\.\.299"),
        ({"num_nodes": 51, "node_types": [{"ranges": [[0, 51]], "count": 51}]}, r"\[51\], the manifest says int64\[52\]"),
        ({"columns": ["edge_id", "time"]}, "time"),
        ({"format_version": 99}, "format version 99"),
    ],
)
def test_a_manifest_that_does_not_fit_the_arrays_is_refused(make_store, changes, words) -> None:
    path = make_store()
    metadata = json.loads((path / "zarr.json").read_text())
    metadata["attributes"]["ooc"] |= changes
    del metadata["attributes"]["ooc_checksums"]  # as in a store of an earlier ooc
    (path / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match=words):
        Dataset.open(path)


def test_missing_rows_name_what_there_is(make_store) -> None:
    with Dataset.open(make_store()) as ds, pytest.raises(InputError, match="no node array 'z': there are split, x, y"):
        ds.rows("z")


def test_a_failed_or_refused_write_leaves_nothing(tmp_path) -> None:
    graph = Graph.from_edges([0], [1], 2)
    with pytest.raises(InputError, match="'x' has 3 rows; the graph has 2 nodes"):
        write_store(tmp_path / "s", graph, x=np.zeros((3, 1)))
    with pytest.raises(OocError):
        write_store(tmp_path / "s", graph, external=["a", "a"])
    with pytest.raises(InputError, match="labels y need a task"):
        write_store(tmp_path / "s", graph, y=np.zeros(2, int))
    assert list(tmp_path.iterdir()) == []
    write_store(tmp_path / "s", graph)
    with pytest.raises(StoreError, match="exists already"):
        write_store(tmp_path / "s", graph)


def test_closing_twice_is_fine_and_leaves_the_graph_valid(make_store, arrays) -> None:
    ds = Dataset.open(make_store(**arrays))
    graph, labels = ds.graph, ds.labels
    ds.close()
    ds.close()
    assert np.array_equal(graph.indptr[-1:], [300])
    assert labels is not None
    assert np.array_equal(labels, arrays["y"])
