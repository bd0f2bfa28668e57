"""Features, labels and splits: against numpy in RAM; whole data sets; errors by file, row and value."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from ooc.stores.array_names import edge_array
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.ingest import IngestSpec, ingest, nodes, sources
from tests.stores.damage import flip, shard

RNG = np.random.default_rng(0)
N = 50


def build(tmp_path: Path, **options: Any) -> Dataset:
    """A store of a ring with `options`; arrays among them are saved as npy first."""
    out = tmp_path / f"s{len(list(tmp_path.iterdir()))}.ooc"
    edges = tmp_path / "e.parquet"
    ring = np.arange(N)
    pq.write_table(pa.table({"src": ring, "dst": (ring + 1) % N}), edges)
    given: dict[str, Any] = {"edges": str(edges), "num_nodes": N}
    for name, value in options.items():
        if isinstance(value, np.ndarray):
            np.save(tmp_path / f"{name}.npy", value)
            value = tmp_path / f"{name}.npy"
            given |= {"features": [f"x={value}"]} if name == "x" else {name: value}
        else:
            given[name] = value
    if given.get("nodes"):
        del given["num_nodes"]
    ingest(IngestSpec(out=out, **given))
    return Dataset.open(out)


def x_of(ds: Dataset) -> Any:
    return np.asarray(zarr.open_group(ds.path, mode="r")["node/node/x"])


@pytest.mark.parametrize("source", [np.float32, np.float64, np.float16, np.int8, np.bool_])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_features_arrive(tmp_path: Path, source: Any, dtype: Any) -> None:
    x = (RNG.random((N, 7)) * 3).astype(source)
    with build(tmp_path, x=x, dtype=dtype) as ds:
        np.testing.assert_array_equal(x_of(ds), x.astype(dtype))


def test_parts_are_joined_in_natural_order(tmp_path: Path) -> None:
    x = RNG.random((N, 3)).astype(np.float32)
    for number, part in zip((2, 10, 1), (x[10:30], x[30:], x[:10]), strict=True):
        np.save(tmp_path / f"part_{number}.npy", part)
    with build(tmp_path, features=[f"x={tmp_path}/part_*.npy"]) as ds:
        np.testing.assert_array_equal(x_of(ds), x)


@pytest.mark.parametrize("order", ["C", "F"])
def test_normalisations(tmp_path: Path, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BLOCK_BYTES", 400)
    x = np.asarray(RNG.random((N, 6)) * 10 + 100 * RNG.random(6) - 3, dtype=np.float32, order=order)
    x[:, 2] = 5
    train = np.arange(0, N, 3)
    with build(tmp_path, x=x, normalize="standard", train=train) as ds:
        deviation = x[train].astype(float).std(axis=0)
        want = (x - x[train].astype(float).mean(axis=0)) / np.where(deviation > 0, deviation, 1)
        np.testing.assert_allclose(x_of(ds), want, rtol=1e-5, atol=1e-5)
    with build(tmp_path, x=x, normalize="row") as ds:
        moved = x.astype(float) - x.min()
        np.testing.assert_allclose(x_of(ds), moved / np.maximum(moved.sum(1, keepdims=True), 1), rtol=1e-5)


def test_standard_without_training_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give `train`"):
        build(tmp_path, x=np.ones((N, 2)), normalize="standard")


def wild() -> Any:
    x = np.ones((N, 2), np.float32)
    x[17, 1], x[20, 0] = np.nan, np.inf
    return x


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"x": wild()}, r"x\.npy row 17 column 1 is NaN, infinite or beyond float32, the first of 2 such"),
    "float16": ({"x": np.full((N, 1), 1e6), "dtype": "float16"}, r"row 0 column 0 .* beyond float16, the first of 50"),
    "rows": ({"x": np.ones((N - 1, 2))}, r"x\.npy has 49 rows, but there are 50 nodes \(`num_nodes`\)"),
    "dtype": ({"x": np.full((N, 1), "a")}, r"x\.npy holds <U1 \[50, 1\]: numbers"),
    "labels": ({"labels": np.r_[np.zeros(N - 1, int), -2]}, r"labels\.npy row 49: label -2 is out of range"),
    "many classes": ({"labels": np.r_[np.zeros(N - 1, int), 10**6]}, r"row 49: label 1000000 is out of range"),
    "halves": (
        {"labels": np.full(N, 0.5), "task": "classification"},
        r"row 0: label 0\.5 is no whole number: labels are 0\.\.999, -1",
    ),
    "a fraction": ({"labels": np.r_[np.ones(N - 1), 1.5]}, r"labels\.npy row 49: label 1\.5 is no whole number"),
    "infinite": ({"labels": np.r_[np.ones(N - 1), np.inf]}, r"row 49: label inf is out of range: labels are 0\.\.999"),
    "multilabel": ({"labels": np.full((N, 3), 2)}, r"row 0 column 0: label 2 is out of range: labels are 0\.\.1"),
    "label rows": ({"labels": np.zeros(N + 1, int)}, r"labels\.npy has 51 rows, but there are 50 nodes"),
    "split id": ({"train": np.array([1, 2, N])}, r"train\.npy entry 2: node 50 is out of range 0\.\.49"),
    "mask size": ({"val": np.ones(N + 1, bool)}, r"val\.npy is a mask of shape \[51\], but there are 50 nodes"),
    "mask choice": ({"val": np.ones((4, N), bool)}, r"holds 4 splits: choose one with `split_index`, 0 to 3"),
    "mask index": ({"val": np.ones((4, N), bool), "split_index": 4}, r"`split_index=4` is none of 0\.\.3"),
    "needless index": ({"val": np.ones(N, bool), "split_index": 0}, r"`split_index` chooses among masks"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_name_file_and_numbers(tmp_path: Path, case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(InputError, match=message) as caught:
        build(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.ooc*"))


def test_pickled_truncated_and_misnamed_arrays_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "pickled.npy", np.array([{}] * N, object), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.ones((N, 9)))
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-40])
    (tmp_path / "other.npy").write_text("1,2\n")
    for name, message in (("pickled", "pickled objects"), ("short", "damaged or truncated"), ("other", "not what its name")):
        with pytest.raises(InputError, match=message):
            build(tmp_path, features=[f"x={tmp_path}/{name}.npy"])


def test_allowed_nan_is_counted_and_kept(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", wild())
    pq.write_table(pa.table({"src": [0], "dst": [1]}), tmp_path / "e.parquet")
    spec = IngestSpec(
        out=tmp_path / "s.ooc", edges=str(tmp_path / "e.parquet"), features=[f"x={tmp_path}/x.npy"], allow_nan=True
    )
    assert ingest(spec).non_finite == 2
    with Dataset.open(spec.out) as ds:
        np.testing.assert_array_equal(x_of(ds), wild())


LABELS: dict[str, tuple[Any, str, int, Any]] = {
    "multiclass": (np.arange(N) % 5, "multiclass", 5, np.arange(N) % 5),
    "column": ((np.arange(N) % 5)[:, None], "multiclass", 5, np.arange(N) % 5),
    "float with NaN": (np.where(np.arange(N) == 3, np.nan, 2.0), "multiclass", 3, np.where(np.arange(N) == 3, -1, 2)),
    "binary": (np.arange(N) % 2, "binary", 2, np.arange(N) % 2),
    "multilabel": (np.eye(N, 4), "multilabel", 4, np.eye(N, 4)),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_make_the_task(tmp_path: Path, case: str) -> None:
    given, task, classes, want = LABELS[case]
    with build(tmp_path, labels=given) as ds:
        assert (ds.task, ds.num_classes) == (task, classes)
        np.testing.assert_array_equal(np.asarray(ds.labels), want)


def test_splits_of_ids_and_masks_and_overlaps(tmp_path: Path) -> None:
    masks = RNG.random((3, N)) < 0.4
    with build(tmp_path, train=np.array([4, 1]), test=np.arange(N) > 40) as ds:
        assert ds.split("train").tolist() == [1, 4]
        assert ds.split("test").tolist() == list(range(41, N))
        assert ds.splits == ["train", "test"]
    for shape in (masks, masks.T.copy()):
        with build(tmp_path, train=shape, test=shape, split_index=2) as ds:
            assert ds.split("train").tolist() == ds.split("test").tolist() == np.flatnonzero(masks[2]).tolist()


def test_an_empty_split_is_a_split(tmp_path: Path) -> None:
    with build(tmp_path, train=np.arange(3), val=np.zeros(N, bool)) as ds:
        assert ds.splits == ["train", "val"]
        assert ds.split("val").tolist() == []


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_table_of_nodes(tmp_path: Path, form: str) -> None:
    ids = [f"v{i}" for i in RNG.permutation(N)]
    split = [("train", "valid", "test", "")[i % 4] for i in range(N)]
    f1, f2, y = RNG.random(N).round(4), RNG.integers(0, 9, N), np.arange(N) % 3
    rows = pa.table({"id": ids, "f_one": f1, "y": y, "f_two": f2, "split": split})
    path = tmp_path / f"nodes.{form}"
    if form == "parquet":
        pq.write_table(rows, path)
    else:
        lines = [",".join(map(str, line)) for line in zip(ids, f1, y, f2, split, strict=True)]
        path.write_text("\n".join(["id,f_one,y,f_two,split", *lines]) + "\n")
    pq.write_table(pa.table({"src": ids[:3], "dst": ids[1:4]}), tmp_path / "own.parquet")
    spec: dict[str, Any] = {"nodes": str(path), "label": "y", "split": "split", "x_cols": "f*"}
    with build(tmp_path, **spec, edges=str(tmp_path / "own.parquet")) as ds:
        np.testing.assert_array_equal(x_of(ds), np.stack([f1, f2], 1).astype(np.float32))
        np.testing.assert_array_equal(np.asarray(ds.labels), y)
        assert ds.split("val").tolist() == list(range(1, N, 4))
        assert list(ds.external(np.arange(N))) == ids
        assert np.asarray(ds.graph.indices).tolist() == [0, 1, 2]


def test_bad_node_tables(tmp_path: Path) -> None:
    pq.write_table(pa.table({"src": ["a"], "dst": ["b"]}), tmp_path / "own.parquet")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("id\na\nb\na\n", {}, r"n\.csv line 4: id 'a' stands there already"),
        ("id,f\na,1\nb,x\n", {"x_cols": "f"}, r"n\.csv line 3: f is 'x', not a number"),
        ("id,f\na,1\nb,\n", {"x_cols": "f"}, r"n\.csv line 3 column f is NaN"),
        ("id,s\na,train\nb,trian\n", {"split": "s"}, r"n\.csv line 3: s is 'trian'"),
        ("name\na\nb\n", {}, r"no column 'id' for node ids: it has name"),
        ("id\na\nb\n", {"x_cols": "f*"}, r"no column like 'f\*' for `x_cols`: it has id"),
        ("id,y\na,1\nb,1.5\n", {"label": "y", "task": "classification"}, r"n\.csv line 3: label 1\.5 is no whole number"),
        ("id,y\na,0.5\nb,inf\n", {"label": "y"}, r"n\.csv line 3: target inf is infinite or beyond float32: correct it"),
        (
            "id,y\na,1\nb,x\n",
            {"label": "y", "task": "regression"},
            r"n\.csv line 3: y is 'x', not a number; correct it, or leave",
        ),
        ("id\na\nb\n", {"label": "y"}, r"no column 'y' for labels"),
    ]
    for content, options, message in cases:
        (tmp_path / "n.csv").write_text(content)
        with pytest.raises(InputError, match=message):
            build(tmp_path, nodes=str(tmp_path / "n.csv"), edges=str(tmp_path / "own.parquet"), **options)


def ogb_parts() -> dict[str, Any]:
    return {
        "edges": RNG.integers(0, N, (2, 120)), "x": RNG.random((N, 4)).round(3), "y": np.arange(N) % 4,
        "train": np.arange(0, 20), "valid": np.arange(20, 30), "test": np.arange(30, N),
    }  # fmt: skip


def save_csv(path: Path, array: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(",".join(map(str, np.atleast_1d(row).tolist())) for row in array)
    path.write_bytes(gzip.compress((lines + "\n").encode()))


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", ["csv", "npz"])
def test_ogb_layouts(tmp_path: Path, layout: str) -> None:
    parts = ogb_parts()
    more = {"edge_feat": RNG.random((120, 2)).round(3), "node_year": 2000 + np.arange(N)}
    folder = tmp_path / "ogbn_tiny"
    for name in ("train", "valid", "test"):
        save_csv(folder / "split" / "time" / f"{name}.csv.gz", parts[name])
    (folder / "raw").mkdir()
    if layout == "csv":
        for name, array in (
            ("edge", parts["edges"].T),
            ("node-feat", parts["x"]),
            ("node-label", parts["y"]),
            ("num-node-list", [N]),
            ("num-edge-list", [120]),
            ("edge-feat", more["edge_feat"]),
            ("node_year", more["node_year"]),
            ("graph-name", [1, 2]),
        ):
            save_csv(folder / "raw" / f"{name}.csv.gz", array)
    else:
        known = {"edge_index": parts["edges"], "node_feat": parts["x"], "num_nodes_list": [N]}
        np.savez(folder / "raw" / "data.npz", **known, **more, num_edges_list=[120], graph_name=[1, 2])
        np.savez(folder / "raw" / "node-label.npz", node_label=parts["y"][:, None])
    notes = ingest(IngestSpec(out=tmp_path / "s.ooc", ogb=folder)).notes
    assert "left out" in notes[0]
    assert "graph" in notes[0]
    assert ["node_year" in notes[1], len(notes)] == [True, 2]
    with Dataset.open(tmp_path / "s.ooc") as ds:
        values = np.empty((120, 2), np.float32)
        ds.edge_features("edge_attr").read(np.arange(120), values)
        np.testing.assert_array_equal(values, more["edge_feat"].astype(np.float32))
    flip(shard(tmp_path / "s.ooc", edge_array("edge_attr")), 40)
    with Dataset.open(tmp_path / "s.ooc", verify_reads=True) as ds, pytest.raises(StoreError, match="edge_attr is damaged"):
        ds.edge_features("edge_attr").read(np.arange(3), values[:3])
    flip(shard(tmp_path / "s.ooc", edge_array("edge_attr")), 40)
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert (ds.num_nodes, ds.num_edges, ds.task, ds.num_classes) == (N, 120, "multiclass", 4)
        np.testing.assert_array_equal(x_of(ds), parts["x"].astype(np.float32))
        np.testing.assert_array_equal(np.asarray(ds.labels), parts["y"])
        assert ds.split("val").tolist() == parts["valid"].tolist()
        order = np.argsort(parts["edges"][1], kind="stable")
        np.testing.assert_array_equal(np.asarray(ds.graph.columns["edge_id"]), order)
        np.testing.assert_array_equal(np.asarray(ds.graph.indices), parts["edges"][0][order])


def test_npz_by_either_set_of_names(tmp_path: Path) -> None:
    parts, masks = ogb_parts(), RNG.random((10, N)) < 0.5
    names = {"train_masks": masks, "val_masks": ~masks}
    np.savez_compressed(
        tmp_path / "a.npz", node_features=parts["x"], node_labels=parts["y"] % 2, edges=parts["edges"].T, **names
    )
    ingest(IngestSpec(out=tmp_path / "a.ooc", npz=tmp_path / "a.npz", split_index=7, undirected=True))
    with Dataset.open(tmp_path / "a.ooc") as ds:
        assert ds.task == "binary"
        assert ds.split("train").tolist() == np.flatnonzero(masks[7]).tolist()
        assert ds.num_edges == 240 - int((parts["edges"][0] == parts["edges"][1]).sum())
        assert ds.manifest.undirected
    with pytest.raises(InputError, match=r"a\.npz\[train_masks\] holds 10 splits: choose one"):
        ingest(IngestSpec(out=tmp_path / "b.ooc", npz=tmp_path / "a.npz"))


@pytest.mark.parametrize("form", ["[2, E]", "[E, 2]", "[2, E] by columns", "[E, 2] by columns"])
@pytest.mark.parametrize("dtype", ["<i4", ">i8"])
def test_edge_arrays_of_any_order_and_byte_order(
    tmp_path: Path, form: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "STAGED_ROWS", 7)
    edges = np.random.default_rng(5).integers(0, 20, (2, 40)).astype(dtype)
    given = edges if form.startswith("[2") else edges.T
    np.save(tmp_path / "e.npy", np.asarray(given, order="F" if "columns" in form else "C"))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.npy"), num_nodes=20))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        np.testing.assert_array_equal(np.asarray(ds.graph.indices), edges[0][np.argsort(edges[1], kind="stable")])


def test_weights_of_edge_files_are_taken(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", edge_index=[[0, 1], [1, 2]], edge_weight=[0.5, 2.0])
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=f"{tmp_path}/*.npz"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert np.asarray(ds.graph.columns["weight"]).tolist() == [0.5, 0.5, 2, 2]
    np.savez(tmp_path / "c.npz", edge_index=[[0, 1], [1, 2]])
    with pytest.raises(InputError, match="matches files with and without weights"):
        ingest(IngestSpec(out=tmp_path / "t.ooc", edges=f"{tmp_path}/*.npz"))


@pytest.mark.parametrize("dtype", ["u1", "u8", ">i8", ">f4"])
def test_labels_of_any_type(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "y.npy", np.array([2, 0, 1], dtype))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.npy"), labels=tmp_path / "y.npy"))
    assert np.asarray(zarr.open_group(tmp_path / "s.ooc", mode="r")["node/node/y"]).tolist() == [2, 0, 1]


def test_pickled_parts_of_an_npz_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "ob.npz", edge_index=np.array([[0], [1]]), x=np.array([{}, 1], object))
    with pytest.raises(InputError, match=r"ob\.npz\[x\] holds pickled objects"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", npz=tmp_path / "ob.npz"))
    assert [path.name for path in tmp_path.iterdir()] == ["ob.npz"]


def test_splits_that_overlap_are_noted(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2]]))
    for split, rows in {"train": [0, 1], "val": [1], "test": [2]}.items():
        np.save(tmp_path / f"{split}.npy", np.array(rows))
    splits: dict[str, Any] = {split: tmp_path / f"{split}.npy" for split in ("train", "test")}
    spec: dict[str, Any] = {"edges": str(tmp_path / "e.npy"), **splits}
    assert ingest(IngestSpec(out=tmp_path / "a.ooc", **spec)).notes == ()
    result = ingest(IngestSpec(out=tmp_path / "b.ooc", **spec, val=tmp_path / "val.npy"))
    assert result.notes == ("the splits train and val share 1 nodes",)


def test_nan_in_a_table_names_its_column(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n")
    (tmp_path / "n.csv").write_text("id,age,size\n0,1,2\n1,3,nan\n")
    with pytest.raises(InputError, match=r"n\.csv line 3 column size is NaN"):
        ingest(
            IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv"), nodes=str(tmp_path / "n.csv"), x_cols="age,size")
        )


@pytest.mark.parametrize("other", ["float32", "float64", "int64", "float16"])
def test_features_from_columns_of_any_width(tmp_path: Path, other: str) -> None:
    """Short floats are read as such, and columns longer than a block come in order."""
    count = 100_001
    one = np.arange(count, dtype=np.float32) / 7
    two = (np.arange(count) % 2000).astype(other)
    table = pa.table({"id": np.arange(count), "one": pa.array(one, mask=np.arange(count) == 5), "two": two})
    pq.write_table(table, tmp_path / "n.parquet", row_group_size=9999)
    pq.write_table(pa.table({"src": [0], "dst": [1]}), tmp_path / "e.parquet")
    nodes = {"nodes": str(tmp_path / "n.parquet"), "x_cols": "one,two"}
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.parquet"), allow_nan=True, **nodes))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        x = np.empty((count, 2), np.float32)
        ds.rows("x").read(np.arange(count), x)
    one[5] = np.nan
    np.testing.assert_array_equal(x, np.stack([one, two.astype(np.float32)], axis=1))
