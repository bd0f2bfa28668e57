"""Labels that are numbers: the targets of a regression, from every kind of input, through growth, splits and checks."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from ooc.cli.store_verbs import _info_lines
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.resplit import resplit
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify

N = 30
RNG = np.random.default_rng(0)
AGE = np.where(np.arange(N) == 4, np.nan, RNG.normal(40, 9, N))
TWO = np.c_[AGE, RNG.random(N)]


def edges(folder: Path) -> str:
    ring = np.arange(N)
    pq.write_table(pa.table({"src": ring, "dst": (ring + 1) % N}), folder / "e.parquet")
    return str(folder / "e.parquet")


def of_table(folder: Path, table: dict[str, Any], form: str = "parquet", **options: Any) -> Path:
    frame = pd.DataFrame({"id": range(N), **table})
    path = folder / f"nodes.{form}"
    frame.to_parquet(path) if form == "parquet" else frame.to_csv(path, index=False)
    spec = IngestSpec(out=folder / f"s{len(list(folder.iterdir()))}.ooc", edges=edges(folder), nodes=str(path), **options)
    return ingest(spec).path


def of_array(folder: Path, y: Any, **options: Any) -> Path:
    np.save(folder / "y.npy", y)
    out = folder / f"s{len(list(folder.iterdir()))}.ooc"
    return ingest(IngestSpec(out=out, edges=edges(folder), labels=folder / "y.npy", **options)).path


def targets(store: Path) -> tuple[str | None, int | None, Any]:
    with Dataset.open(store) as ds:
        assert ds.labels is not None
        return ds.task, ds.num_classes, np.array(ds.labels)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_column_of_numbers_is_a_regression(tmp_path: Path, form: str) -> None:
    store = of_table(tmp_path, {"age": AGE}, form, label="age")
    task, count, y = targets(store)
    assert (task, count, y.dtype) == ("regression", 1, np.float32)
    np.testing.assert_array_equal(y, AGE.astype(np.float32))
    assert _info_lines(describe(store))[1] == "  task         regression, 1 target"
    assert verify(store) == []
    description = zarr.open_group(store, mode="r")["node/node/y"].attrs["description"]
    assert description == "targets of a regression; NaN for unknown ones"


def test_several_columns_keep_their_names(tmp_path: Path) -> None:
    store = of_table(tmp_path, {"t_age": TWO[:, 0], "t_size": TWO[:, 1]}, label="t_*")
    task, count, y = targets(store)
    assert (task, count) == ("regression", 2)
    np.testing.assert_array_equal(y, TWO.astype(np.float32))
    assert _info_lines(describe(store))[1] == "  task         regression, 2 targets: t_age, t_size"
    listed = of_table(tmp_path, {"t": [row.tolist() for row in np.nan_to_num(TWO)]}, label="t")
    np.testing.assert_array_equal(targets(listed)[2], np.nan_to_num(TWO).astype(np.float32))


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 2)])
def test_arrays_keep_their_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    y = np.resize(AGE, shape)
    task, count, found = targets(of_array(tmp_path, y))
    assert (task, count) == ("regression", shape[1] if len(shape) == 2 else 1)
    np.testing.assert_array_equal(found, y.astype(np.float32))


def test_whole_numbers_are_classes_unless_said_otherwise(tmp_path: Path) -> None:
    y = np.array([0.0, 1.0, 2.0] * 10)
    assert targets(of_array(tmp_path, y))[0] == "multiclass"
    assert targets(of_array(tmp_path, y, task="classification"))[0] == "multiclass"
    for given in (y, y.astype(int) - 5, y.astype(np.uint8), np.c_[y, y]):
        task, _, found = targets(of_array(tmp_path, given, task="regression"))
        assert task == "regression"
        np.testing.assert_array_equal(found, given.astype(np.float32))
    words = of_table(tmp_path, {"y": [str(each) for each in y]}, "csv", label="y", task="regression")
    assert targets(words)[0] == "regression"


def test_few_fractions_among_classes_are_mistakes(tmp_path: Path) -> None:
    y = np.r_[np.ones(N - 2), 1.5, np.nan]
    with pytest.raises(InputError, match=r"y\.npy row 28: label 1\.5 is no whole number: .*say `task='regression'` if"):
        of_array(tmp_path, y)
    assert targets(of_array(tmp_path, y, task="regression"))[0] == "regression"
    with pytest.raises(InputError, match=r"y\.npy row 0: label 5000000 is out of range: .*say `task='regression'` if"):
        of_array(tmp_path, np.arange(N) + 5_000_000)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.where(np.arange(N) == 7, -np.inf, AGE), r"y\.npy row 7: target -inf is infinite or beyond float32: correct it"),
        (np.where(np.arange(N) == 7, 1e300, AGE), r"y\.npy row 7: target 1e\+300 is infinite or beyond float32"),
        (np.where(TWO[9, 1] == TWO, np.inf, TWO), r"y\.npy row 9 column 1: target inf is infinite"),
        (np.full(N, np.nan), "has no labels: every value is NaN or empty"),
    ],
)
def test_targets_that_are_no_numbers_are_named(tmp_path: Path, y: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        of_array(tmp_path, y, task="regression")
    assert not list(tmp_path.glob("*.ooc*"))


def test_words_among_targets_are_named(tmp_path: Path) -> None:
    column = [*map(str, AGE[:9]), "unknown", *map(str, AGE[10:])]
    advice = "not a number; correct it, or leave the cell empty where the label is unknown"
    with pytest.raises(InputError, match=rf"nodes\.csv line 11: age is 'unknown', {advice}"):
        of_table(tmp_path, {"age": column}, "csv", label="age")
    with pytest.raises(InputError, match=rf"nodes\.csv line 11: age is 'unknown', {advice}"):
        of_table(tmp_path, {"age": column, "b": TWO[:, 1]}, "csv", label="age,b")
    mostly = [*["a"] * 9, *map(str, AGE[9:])]
    with pytest.raises(InputError, match=r"nodes\.csv line 2: age is 'a', not a number"):
        of_table(tmp_path, {"age": mostly}, "csv", label="age", task="regression")


def test_a_task_of_edge_labels_alone(tmp_path: Path) -> None:
    (tmp_path / "rated.csv").write_text("src,dst,stars\n0,1,5\n1,2,3\n2,0,1\n")
    for task, want in (("auto", "multiclass"), ("regression", "regression")):
        spec = IngestSpec(out=tmp_path / task, edges=str(tmp_path / "rated.csv"), edge_label="stars", task=task)
        ingest(spec)
        with Dataset.open(spec.out) as ds:
            assert ds.edges().task == want


def test_a_task_needs_labels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`task='regression'` says what the labels are, and there are none"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges(tmp_path), task="regression"))
    with pytest.raises(ConfigError, match="`task` is settled when a store is ingested"):
        AppendSpec(out=tmp_path / "s.ooc", edges="e.parquet", task="regression")


def test_npz_and_ogb_bring_targets(tmp_path: Path) -> None:
    ring = np.arange(N)
    np.savez(tmp_path / "a.npz", edge_index=[ring, (ring + 1) % N], x=np.ones((N, 1)), y=TWO)
    store = ingest(IngestSpec(out=tmp_path / "a.ooc", npz=tmp_path / "a.npz")).path
    np.testing.assert_array_equal(targets(store)[2], TWO.astype(np.float32))
    raw = tmp_path / "ogb" / "raw"
    raw.mkdir(parents=True)
    pd.DataFrame({"a": ring, "b": (ring + 1) % N}).to_csv(raw / "edge.csv.gz", header=False, index=False)
    pd.DataFrame(np.nan_to_num(AGE)).to_csv(raw / "node-label.csv.gz", header=False, index=False)
    pd.DataFrame({"n": [N]}).to_csv(raw / "num-node-list.csv.gz", header=False, index=False)
    task, _, y = targets(ingest(IngestSpec(out=tmp_path / "o.ooc", ogb=tmp_path / "ogb")).path)
    assert (task, y.shape) == ("regression", (N,))
    np.testing.assert_allclose(y, np.nan_to_num(AGE), rtol=1e-6)


def test_random_splits_are_drawn_among_known_targets(tmp_path: Path) -> None:
    y = np.where(np.arange(N) % 3 == 0, np.nan, -1.5)
    y[1] = -1.0
    store = of_array(tmp_path, y, random_split="0.5,0.25,0.25")
    again = of_array(tmp_path, y)
    resplit(again, shares=(0.5, 0.25, 0.25))
    for each in (store, again):
        with Dataset.open(each) as ds:
            split = np.concatenate([ds.split(name) for name in ds.splits])
            assert sorted(split.tolist()) == np.flatnonzero(~np.isnan(y)).tolist()


@pytest.mark.cases(1)
@pytest.mark.parametrize("several", [False, True])
def test_targets_are_appended(tmp_path: Path, several: bool) -> None:
    """New nodes with a target, without one, and a new target of an old node; compacted, or read from the delta."""
    table = {"f": np.ones(N), "a": AGE, "b": TWO[:, 1]}
    label = "a,b" if several else "a"
    store = of_table(tmp_path, table, label=label, x_cols="f")
    rows = {"id": [N, N + 1, 3], "f": [1.0, 2.0, 3.0], "a": [7, None, 5], "b": [0.5, None, 2.5]}
    pq.write_table(pa.table(rows), tmp_path / "more.parquet")
    append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), label="b,a" if several else "a", x_cols="f"))
    pq.write_table(pa.table({"id": [N + 2], "f": [1.0]}), tmp_path / "last.parquet")
    append(AppendSpec(out=store, nodes=str(tmp_path / "last.parquet"), x_cols="f"))
    want = np.r_[TWO, [[7, 0.5], [np.nan, np.nan], [np.nan, np.nan]]].astype(np.float32)
    want[3] = [5, 2.5]
    want = want if several else want[:, 0]
    np.testing.assert_array_equal(targets(store)[2], want)
    compact(store)
    np.testing.assert_array_equal(targets(store)[2], want)
    assert verify(store) == []
    for bad, words in ((np.inf, "more.parquet row 0.*: target inf is infinite"), ("x", r"is 'x', not a number|column type")):
        pq.write_table(pa.table({"id": [N], "f": [1.0], "a": [bad], "b": [1.0]}), tmp_path / "more.parquet")
        with pytest.raises(InputError, match=words):
            append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), label=label, x_cols="f"))


def test_parts_and_order_take_targets_along(tmp_path: Path) -> None:
    store = of_array(tmp_path, AGE, parts=3, partitioner="stream", order="degree")
    with Dataset.open(store) as ds:
        assert ds.labels is not None
        np.testing.assert_array_equal(np.asarray(ds.labels), AGE[np.asarray(ds.external(np.arange(N)))].astype(np.float32))


def test_a_store_from_arrays_in_memory(tmp_path: Path) -> None:
    graph = Graph.from_edges([0, 1], [1, 2], 3)
    store = write_store(tmp_path / "a.ooc", graph, y=np.array([[0.5, 1], [np.nan, -1], [2, 3]]), task="regression")
    task, count, y = targets(store)
    assert (task, count, y.dtype) == ("regression", 2, np.float32)
    np.testing.assert_array_equal(y, np.array([[0.5, 1], [np.nan, -1], [2, 3]], np.float32))
    with pytest.raises(InputError, match=r"the label of row 1 is inf: targets of a regression are finite"):
        write_store(tmp_path / "b.ooc", graph, y=np.array([0, np.inf, 1]), task="regression")


def test_damage_to_labels_and_splits_of_edges_is_found(tmp_path: Path) -> None:
    (tmp_path / "rated.csv").write_text("src,dst,stars,part\n0,1,5,train\n1,2,3,val\n2,0,1,train\n")
    store = ingest(
        IngestSpec(out=tmp_path / "s", edges=str(tmp_path / "rated.csv"), edge_label="stars", edge_split="part")
    ).path
    assert verify(store) == []
    assert "multiclass, 6 classes, train 2, val 1" in "\n".join(_info_lines(describe(store)))
    for name in ("y", "split"):
        shutil.rmtree(store / "edge" / "edge" / name)
    assert {damage.array for damage in verify(store)} == {"edge/edge/y", "edge/edge/split"}
