"""Columns of words, lists and masks of node tables: as features, labels and splits."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.cli.store_verbs import _info_lines
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, columns, ingest, nodes
from ooc.stores.ingest.random_split import random_bits

N = 10
SUBJECTS = ["Theory", "Vision", None, "Agents", "Theory", "Vision", "Vision", "Agents", "Theory", "Theory"]


def build(folder: Path, table: dict[str, Any], form: str = "parquet", **options: Any) -> Path:
    """A store of a ring whose nodes are in a table."""
    frame = pd.DataFrame({"id": range(N), **table})
    path = folder / f"nodes.{form}"
    frame.to_parquet(path) if form == "parquet" else frame.to_csv(path, index=False)
    ring = np.arange(N)
    pq.write_table(pa.table({"src": ring, "dst": (ring + 1) % N}), folder / "e.parquet")
    out = folder / f"s{len(list(folder.iterdir()))}.ooc"
    return ingest(IngestSpec(out=out, edges=str(folder / "e.parquet"), nodes=str(path), **options)).path


def values(store: Path) -> Any:
    with Dataset.open(store) as ds:
        rows = ds.rows("x")
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(ds.num_nodes), out)
        return out


@pytest.mark.parametrize("form", ["parquet", "csv", "categorical"])
def test_names_of_classes_are_kept(tmp_path: Path, form: str) -> None:
    column: Any = pd.Categorical(SUBJECTS) if form == "categorical" else SUBJECTS
    store = build(tmp_path, {"y": column}, "csv" if form == "csv" else "parquet", label="y")
    with Dataset.open(store) as ds:
        assert (ds.task, ds.num_classes, ds.class_names) == ("multiclass", 3, ["Agents", "Theory", "Vision"])
        assert np.asarray(ds.labels).tolist() == [1, 2, -1, 0, 1, 2, 2, 0, 1, 1]
    assert describe(store)["class_names"] == ["Agents", "Theory", "Vision"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("form", "label"), [("parquet", "spam,new"), ("csv", "spam,new"), ("parquet", "[sn]*")])
def test_label_columns_keep_their_names(tmp_path: Path, form: str, label: str) -> None:
    table = {"spam": np.arange(N) % 2, "f": np.arange(N) / 4, "new": [1.0, np.nan] * 5}
    store = build(tmp_path, table, form, label=label, x_cols="*")
    assert values(store).shape == (N, 1), "labels are no features"
    with Dataset.open(store) as ds:
        assert (ds.task, ds.num_classes, ds.class_names) == ("multilabel", 2, ["spam", "new"])
        assert np.asarray(ds.labels).tolist() == [[0, 1], [1, -1]] * 5
    assert _info_lines(describe(store))[1] == "  task         multilabel, 2 labels: spam, new"
    pq.write_table(pa.table({"id": [0, N], "new": [0, 1], "spam": [1, 0], "f": [0.0, 1.0]}), tmp_path / "more.parquet")
    append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), label="new,spam", x_cols="f"))
    compact(store)
    with Dataset.open(store) as ds:
        assert np.asarray(ds.labels)[[0, 1, N]].tolist() == [[1, 0], [1, -1], [0, 1]]
        assert ds.class_names == ["spam", "new"]
    with pytest.raises(InputError, match=r"labels are not those .*only given: f; only in the store: new.: name the"):
        append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), label="f,spam"))


def test_label_columns_that_are_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"row 2 column new: label 2 is out of range"):
        build(tmp_path, {"spam": np.zeros(N, int), "new": np.arange(N)}, label="spam,new")
    with pytest.raises(InputError, match=r"no column like 'old' for `label`"):
        build(tmp_path, {"spam": np.zeros(N, int), "new": np.arange(N)}, label="spam,old")


def test_labels_of_numbers_with_a_word_among_them_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nodes\.csv line 4: y is 'x', not a number; correct it"):
        build(tmp_path, {"y": ["0", "1", "x", *"0123012"]}, "csv", label="y")


def test_labels_that_name_no_class_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.stores.ingest.labels.MOST_CLASSES", 3)
    with pytest.raises(InputError, match="names 10 classes in 10 rows"):
        build(tmp_path, {"y": [f"node {i}" for i in range(N)]}, label="y")


def test_labels_with_fractions_that_are_to_be_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"row 0: label 0\.5 is no whole number: .* `task='regression'` if the labels are numbers"
    ):
        build(tmp_path, {"y": np.arange(N) + 0.5}, label="y", task="classification")


def test_names_of_classes_are_appended_by_name(tmp_path: Path) -> None:
    store = build(tmp_path, {"y": SUBJECTS}, label="y")
    pq.write_table(pa.table({"id": [N, N + 1], "y": ["Vision", None]}), tmp_path / "more.parquet")
    append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), label="y"))
    compact(store)
    with Dataset.open(store) as ds:
        assert np.asarray(ds.labels)[N:].tolist() == [2, -1]
        assert ds.class_names == ["Agents", "Theory", "Vision"]
    pq.write_table(pa.table({"id": [0], "y": ["Sound"]}), tmp_path / "more.parquet")
    with pytest.raises(InputError, match=r"more\.parquet row 0: y is 'Sound', a value that the store does not have"):
        append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), label="y"))


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_words_become_codes_or_columns(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BLOCK_BYTES", 200)
    monkeypatch.setattr(columns, "BLOCK_BYTES", 200)
    table = {"f": np.arange(N) / 4, "subject": SUBJECTS, "zip": [f"0{i % 3}" for i in range(N)]}
    found = values(build(tmp_path, table, form, x_cols="f", one_hot="subject,zip"))
    dummies = pd.get_dummies(pd.DataFrame(table)[["subject", "zip"]]).to_numpy()
    np.testing.assert_array_equal(found, np.c_[table["f"], dummies].astype(np.float32))
    found = values(build(tmp_path, table, form, codes="subject,zip"))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.c_[pd.Categorical(SUBJECTS).codes, np.arange(N) % 3])


def test_words_are_appended_as_the_store_encodes_them(tmp_path: Path) -> None:
    store = build(tmp_path, {"f": np.arange(N) / 4, "subject": SUBJECTS}, x_cols="f", one_hot="subject")
    pq.write_table(pa.table({"id": [N], "f": [0.5], "subject": ["Vision"]}), tmp_path / "more.parquet")
    append(AppendSpec(out=store, nodes=str(tmp_path / "more.parquet"), x_cols="f,subject"))
    assert values(store)[N].tolist() == [0.5, 0, 0, 1]


def test_words_among_features_name_the_options(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"column 'subject' holds \w+: features are numbers; encode its words by `one_hot='subject'`"
    ):
        build(tmp_path, {"subject": SUBJECTS}, x_cols="subject")
    with pytest.raises(InputError, match=r"line 2: subject is 'Theory', not a number; .*by `one_hot='subject'` or"):
        build(tmp_path, {"subject": SUBJECTS}, "csv", x_cols="subject")


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 3), pa.large_list(pa.float64())])
def test_lists_are_features(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK_BYTES", 200)
    x = np.random.default_rng(0).random((N, 3)).astype(np.float32)
    table = pa.table({"id": range(N), "f": np.arange(N, dtype=np.float32), "emb": pa.array(x.tolist(), kind)})
    pq.write_table(table, tmp_path / "n.parquet")
    pq.write_table(pa.table({"src": [0], "dst": [1]}), tmp_path / "e.parquet")
    given: dict[str, Any] = {"edges": str(tmp_path / "e.parquet"), "nodes": str(tmp_path / "n.parquet")}
    ingest(IngestSpec(out=tmp_path / "s.ooc", **given, x_cols="emb,f"))
    np.testing.assert_array_equal(values(tmp_path / "s.ooc"), np.c_[x, np.arange(N, dtype=np.float32)])


@pytest.mark.parametrize(("cell", "message"), [([1.0], "has 1 items, the first row 2"), (None, "is empty"), ([], "is empty")])
def test_lists_of_other_lengths_are_refused(tmp_path: Path, cell: Any, message: str) -> None:
    lists = [[1.0, 2.0]] * (N - 1) + [cell]
    with pytest.raises(InputError, match=rf"nodes\.parquet row 9: emb {message}; lists of features are equally long"):
        build(tmp_path, {"emb": lists}, x_cols="emb")


def test_lists_of_integers_stay_integers(tmp_path: Path) -> None:
    found = values(build(tmp_path, {"tokens": [[i, 2**40 + i] for i in range(N)]}, x_cols="tokens"))
    assert found.dtype == np.int64
    assert found[3].tolist() == [3, 2**40 + 3]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_boolean_columns_are_splits(tmp_path: Path, form: str) -> None:
    at = np.arange(N)
    masks = {"train_mask": at < 5, "valid": (at == 6).astype(int), "test_mask": at > 7}
    with Dataset.open(build(tmp_path, masks, form, split="train_mask,valid,test_mask")) as ds:
        assert [ds.split(name).tolist() for name in ("train", "val", "test")] == [[0, 1, 2, 3, 4], [6], [8, 9]]


def test_columns_that_are_no_masks_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"train_mask": ["maybe"] * N, "val_mask": [1] * N}, "train_mask,val_mask", "row 0: train_mask is 'maybe': a mask is"),
        ({"mine": [True] * N}, "mine", "a boolean column's name begins with train, val or test"),
        ({"train_a": [True] * N, "train_b": [True] * N}, "train_a,train_b", "names two columns for one split"),
    ]
    for table, split, message in cases:
        with pytest.raises(InputError, match=message):
            build(tmp_path, table, split=split)


def test_random_splits_have_exact_sizes_among_labelled_nodes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"label": "y", "random_split": "0.6,0.2,0.2"}
    found = []
    for more in ({}, {"seed": 1}, {"order": "degree"}):
        with Dataset.open(build(tmp_path, {"y": SUBJECTS}, **options, **more)) as ds:
            sizes = [len(ds.split(name)) for name in ("train", "val", "test")]
            found.append([sorted(np.asarray(ds.external(ds.split(name))).tolist()) for name in ds.splits])
        assert sizes == [5, 2, 2]
        assert 2 not in np.concatenate(found[-1])  # it has no label
    assert found[0] == found[2]  # whatever the order of the rows
    assert found[0] != found[1]


@given(st.integers(0, 300), st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), st.integers(0, 2**63 - 1))
def test_random_splits_are_what_sorting_says(count: int, parts: list[int], seed: int) -> None:
    shares: Any = tuple(part / sum(parts) for part in parts)
    eligible = np.random.default_rng(seed).random(count) < 0.7
    cuts = [eligible[: count // 2], eligible[count // 2 :]]
    bits = np.concatenate([np.empty(0, np.uint8), *random_bits(seed, shares, lambda: iter(cuts))])
    whole = np.concatenate([np.empty(0, np.uint8), *random_bits(seed, shares, lambda: iter([eligible]))])
    np.testing.assert_array_equal(bits, whole)
    ends = np.rint(np.cumsum(shares) * eligible.sum()).astype(int)
    assert [int((bits == 1 << code).sum()) for code in range(3)] == np.diff([0, *ends]).tolist()
    assert not bits[~eligible].any()


@pytest.mark.parametrize("text", ["0.6,0.2", "a,b,c", "0.9,0.2,0.2", "-0.1,0.5,0.5", "nan,0,1", "0,0,0"])
def test_shares_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="`random_split"):
        IngestSpec(out=tmp_path / "s.ooc", edges="e.csv", random_split=text)
