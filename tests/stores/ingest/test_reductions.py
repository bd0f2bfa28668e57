"""Narrower features: maps compared with scikit-learn's and NumPy's in float64, and what an ingest does with them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_selection import mutual_info_classif

from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.feature_map import FeatureMap, read_map
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest, principal, spec_of
from ooc.stores.ingest import fit_map as fit_map_module
from ooc.stores.ingest.duck import silent
from ooc.stores.ingest.fit_map import Fit, fit_map, narrowed
from ooc.stores.ingest.nodes import Rows
from ooc.stores.ingest.reductions import Reduction
from ooc.stores.integrity import verify
from ooc.stores.metadata import read_manifest
from tests.forked import python

CLOSE = 1e-5
ROOM = 10**9


def features(count: int = 3000, width: int = 30, mean: float = 0.0, seed: int = 0) -> NDArray[np.float32]:
    """Rows whose directions have well separated variances."""
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.standard_normal((width, width)))[0]
    scales = 1.3 ** -np.arange(width)
    return ((rng.standard_normal((count, width)) * scales) @ turned + mean).astype(np.float32)


def rows_of(x: NDArray[Any], sizes: Callable[[int], int] = lambda at: 700) -> Rows:
    """An array as rows in blocks of `sizes(row)`."""

    def blocks() -> Iterator[NDArray[Any]]:
        at = 0
        while at < len(x):
            yield x[at : at + sizes(at)]
            at += sizes(at)

    return Rows("x.npy", len(x), x.shape[1], x.dtype, blocks, lambda row: f"x.npy row {row}")


def fitted(x: NDArray[Any], text: str, seed: int = 0, room: int = ROOM, **more: Any) -> FeatureMap:
    argument = "select" if text.startswith(("variance", "mutual")) else "reduce"
    asked = Reduction.of(**{"reduce": None, "select": None, argument: text})
    assert asked is not None
    return fit_map(rows_of(x), Fit(asked, seed, room, **more), silent)


def up_to_sign(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Largest difference of rows, whose signs are free."""
    signs = np.sign((found * wanted).sum(axis=1, keepdims=True))
    return float(np.abs(found * signs - wanted).max())


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_pca_is_that_of_scikit_learn_whatever_the_mean(mean: float) -> None:
    x = features(mean=mean)
    found, wanted = fitted(x, "pca:8"), PCA(8, svd_solver="full").fit(x.astype(np.float64))
    assert found.components is not None
    assert found.scores is not None
    assert up_to_sign(found.components, wanted.components_) < CLOSE
    assert np.abs(found.scores / wanted.explained_variance_ - 1).max() < CLOSE
    assert found.reduced.explained == pytest.approx(wanted.explained_variance_ratio_.sum(), abs=CLOSE)
    narrow, near = found.apply(x), wanted.transform(x.astype(np.float64))
    assert narrow.dtype == np.float32
    assert up_to_sign(narrow.T, near.T) < CLOSE * np.abs(near).max()


def test_svd_is_that_of_scikit_learn() -> None:
    x = features(mean=2.0)
    found, wanted = fitted(x, "svd:8"), TruncatedSVD(8, algorithm="arpack", random_state=0).fit(x.astype(np.float64))
    assert found.components is not None
    assert found.scores is not None
    assert found.mean is None
    assert up_to_sign(found.components, wanted.components_) < CLOSE
    assert np.abs(np.sqrt(found.scores) / wanted.singular_values_ - 1).max() < CLOSE


@pytest.mark.parametrize("method", ["pca", "svd"])
def test_wide_rows_take_passes_and_give_the_same(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    x = features(1500, 120, mean=300.0)
    exact = fitted(x, f"{method}:6")
    monkeypatch.setattr(principal, "WIDE", 100)
    passes = fitted(x, f"{method}:6")
    monkeypatch.setattr(principal, "BASIS_BYTES", 8 * 120 * 50)  # begins anew after three passes
    anew = fitted(x, f"{method}:6")
    for found in (passes, anew):
        assert found.components is not None
        assert exact.components is not None
        assert up_to_sign(found.components, exact.components) < CLOSE
        assert found.reduced.explained == pytest.approx(exact.reduced.explained, abs=CLOSE)


@pytest.mark.slow
def test_more_columns_than_a_matrix_is_made_of() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 12)) * 1.5 ** -np.arange(12) @ rng.standard_normal((12, 5000))).astype(np.float32) + 10
    found, wanted = fitted(x, "pca:5"), PCA(5, svd_solver="full").fit(x.astype(np.float64))
    assert found.components is not None
    assert up_to_sign(found.components, wanted.components_) < CLOSE


def test_variance_keeps_the_columns_that_vary_most() -> None:
    x = features(mean=1e4) * np.linspace(1, 3, 30, dtype=np.float32)
    x[:, 7] = 5  # constant
    found, variance = fitted(x, "variance:9"), x.astype(np.float64).var(axis=0)
    assert found.columns is not None
    assert found.columns.tolist() == sorted(np.argsort(-variance)[:9].tolist())
    np.testing.assert_allclose(found.scores, variance, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found.apply(x), x[:, found.columns])


def labelled(x: NDArray[Any]) -> NDArray[np.int64]:
    return np.asarray((x[:, 3] > x[:, 3].mean()) * 2 + (x[:, 5] > 0.1 * x[:, 3].std()), np.int64)


def test_mutual_is_the_estimate_of_scikit_learn_on_the_training_rows() -> None:
    x = features(900)
    x[:, 11:14] = np.round(x[:, 11:14] * 2)  # many equal values
    y = labelled(x)
    y[17] = 9  # the only row of its class
    known = np.where(np.arange(900) < 500, y, -1)
    found = fitted(x, "mutual:4", labels=lambda first, last: known[first:last])
    wanted = mutual_info_classif(x[:500].astype(np.float64), y[:500], random_state=0)
    np.testing.assert_allclose(found.scores, wanted, atol=1e-9)
    assert found.columns is not None
    assert {3, 5} <= set(found.columns.tolist())


def test_random_projections_keep_distances_and_follow_the_seed() -> None:
    x = features(200, 300)
    maps = [fitted(x, "random:100", seed=seed) for seed in (0, 0, 1)]
    assert all(each.components is not None for each in maps)
    np.testing.assert_array_equal(maps[0].components, maps[1].components)
    assert (maps[0].components != maps[2].components).all()
    pairs = np.random.default_rng(0).integers(0, 200, (500, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    near, far = (np.linalg.norm(each[pairs[:, 0]] - each[pairs[:, 1]], axis=1) for each in (maps[0].apply(x), x))
    ratio = near / far
    assert abs(np.mean(ratio**2) - 1) < 0.1
    assert ratio.std() < 2 * np.sqrt(1 / 200)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=6), st.sampled_from(["pca:4", "svd:4", "variance:4"]))
def test_blocks_do_not_matter(sizes: list[int], text: str) -> None:
    x = features(1000, 12, mean=50.0)
    argument = "select" if "variance" in text else "reduce"
    asked = Reduction.of(**{"reduce": None, "select": None, argument: text})
    assert asked is not None
    found = fit_map(rows_of(x, lambda at: sizes[at % len(sizes)]), Fit(asked, 0, ROOM), silent)
    for part, array in fitted(x, text).parts.items():
        np.testing.assert_array_equal(found.parts[part], array)
    narrow = np.concatenate(list(narrowed(rows_of(x, lambda at: sizes[at % len(sizes)]), found).blocks()))
    np.testing.assert_array_equal(narrow, found.apply(x))


@pytest.mark.slow
def test_threads_do_not_matter() -> None:
    """One core and one thread of BLAS, or all of them."""
    script = """
import hashlib, os, sys
if sys.argv[1] == "one":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import numpy as np
from ooc.stores.ingest import principal
from tests.stores.ingest.test_reductions import features, fitted
digest = hashlib.sha256()
for wide in (4096, 100):
    principal.WIDE = wide
    for text in ("pca:20", "svd:20"):
        x = features(5000, 300, mean=100.0)
        found = fitted(x, text)
        for array in (*found.parts.values(), found.apply(x)):
            digest.update(array.tobytes())
print(digest.hexdigest())
"""
    made = [python("-c", script, which) for which in ("one", "all")]
    assert [each.returncode for each in made] == [0, 0], made[0].stderr + made[1].stderr
    assert len({each.stdout for each in made}) == 1


@pytest.mark.parametrize(
    ("text", "x", "words"),
    [
        ("pca:30", features(), "pca:30 asks for 30 columns, and x.npy has 30: give fewer than 30"),
        ("pca:10", features(5), "x.npy has 5 rows, which have no 10 components"),
        ("pca:3", np.where(np.arange(30) == 4, np.nan, features(900)), r"x.npy row 0 column 4 is nan, and pca needs finite"),
        ("random:3", np.where(np.arange(900)[:, None] == 801, np.inf, features(900)), "x.npy row 801 column 0 is inf"),
        ("variance:3", np.where(np.arange(30) == 4, np.nan, features(900)), "x.npy row 0 column 4 is nan"),
        ("pca:3", features().astype(np.float64) * 1e200, "whose squares are beyond float64"),
    ],
)
def test_what_has_no_map_is_refused(text: str, x: NDArray[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        list(narrowed(rows_of(x), fitted(x, text)).blocks())


def test_matrices_that_do_not_fit_are_refused_before_a_row_is_read() -> None:
    x = np.zeros((1, 3000), np.float32)
    with pytest.raises(BudgetError, match=r"1 components of 3,000 columns need 360 MB .* 100 MB: give 260 MB more as `memory`"):
        fitted(x, "pca:1", room=10**8)
    with pytest.raises(BudgetError, match=r"2500 components of 3,000 columns need 120 MB .* 100 MB: .* or ask for fewer"):
        fitted(x, "random:2500", room=10**8)


def test_mutual_takes_a_sample_of_more_training_rows_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a part at a time, and of all parts alike."""
    monkeypatch.setattr(fit_map_module, "SAMPLE_BYTES", 8 * 30 * 400)
    monkeypatch.setattr(fit_map_module, "_LABELS", 250)
    x = features(3000)
    y, asked = labelled(x), list[int]()

    def labels(first: int, last: int) -> NDArray[np.int64]:
        asked.append(last - first)
        return y[first:last]

    rows, known = fit_map_module._training(labels, 3000, 400, seed=0)
    assert (len(rows), max(asked)) == (400, 250)
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(known, y[rows])
    assert np.histogram(rows, 3, (0, 3000))[0].min() > 100, "of all parts alike"
    found = fitted(x, "mutual:2", labels=labels)
    assert found.columns is not None
    assert found.columns.tolist() == [3, 5]
    np.testing.assert_array_equal(found.scores, fitted(x, "mutual:2", labels=labels).scores)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reduce": "pca"}, "`reduce='pca'`: write METHOD:COLUMNS, pca:64 or svd:64 or random:64"),
        ({"reduce": "pca:0"}, "write METHOD:COLUMNS"),
        ({"reduce": "variance:3"}, "^`reduce='variance:3'`: use `select='variance:3'`$"),
        ({"reduce": "mutual"}, "^`reduce='mutual'`: use `select='mutual:64'`$"),
        ({"select": "mutual:x"}, "variance:64 or mutual:64"),
        ({"reduce": "pca:3", "select": "mutual:3"}, "give one of them"),
        ({"reduce": "pca:3", "shard": "1/2"}, "need the rows of all shards"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        IngestSpec(out=Path("s.ooc"), edges="e.npy", **settings)


def files(folder: Path, x: NDArray[Any]) -> dict[str, Any]:
    """Settings of an ingest of a graph with these features, labels and training nodes."""
    rng = np.random.default_rng(1)
    arrays = {"x": x, "y": labelled(x), "train": np.arange(len(x) // 2), "e": rng.integers(0, len(x), (2, 2 * len(x)))}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    given = {"edges": f"{folder}/e.npy", "features": [f"x={folder}/x.npy"], "labels": folder / "y.npy"}
    return {**given, "train": folder / "train.npy"}


def all_rows(path: Path, name: str = "x") -> NDArray[Any]:
    with Dataset.open(path) as ds:
        rows = ds.rows(name)
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(len(out)), out)
    return out


@pytest.mark.cases(2)
@pytest.mark.parametrize("text", ["pca:5", "random:5", "variance:5", "mutual:5"])
def test_an_ingest_stores_narrow_rows_and_the_map(tmp_path: Path, text: str) -> None:
    x = features(1000)
    argument = "select" if text.startswith(("variance", "mutual")) else "reduce"
    path = ingest(IngestSpec(out=tmp_path / "s.ooc", **files(tmp_path, x), **{argument: text})).path
    manifest = read_manifest(path)
    found = read_map(path, "x", manifest.node_type())
    assert found is not None
    np.testing.assert_array_equal(all_rows(path), found.apply(x))
    assert describe(path)["reduced"] == {"node/node/x": found.reduced.text}
    assert verify(path) == []
    with Dataset.open(path) as ds:
        assert ds.num_features == 5
        kept = ds.feature_map()
        assert kept is not None
        np.testing.assert_array_equal(kept.apply(x[:3]), all_rows(path)[:3])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrow_rows_are_stored_as_asked(tmp_path: Path, dtype: str) -> None:
    x = features(1000)
    path = ingest(IngestSpec(out=tmp_path / "s.ooc", **files(tmp_path, x), reduce="pca:5", dtype=dtype)).path
    exact = fitted(x, "pca:5").apply(x)
    assert np.abs(all_rows(path) - exact).max() < np.abs(exact).max() / (100 if dtype != "float16" else 1000)


def test_labels_of_nodes_that_are_not_for_training_decide_nothing(tmp_path: Path) -> None:
    x = features(1000)
    given = files(tmp_path, x)
    scores = []
    for number in range(2):
        path = ingest(IngestSpec(out=tmp_path / f"{number}.ooc", **given, select="mutual:5", order="degree")).path
        found = read_map(path, "x", read_manifest(path).node_type())
        assert found is not None
        scores.append(found.scores)
        other = labelled(x)
        other[500:] = np.random.default_rng(2).integers(0, 4, 500)
        np.save(tmp_path / "y.npy", other)
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_allclose(
        scores[0], mutual_info_classif(x[:500].astype(float), labelled(x)[:500], random_state=0), atol=1e-9
    )


def test_rows_are_normalized_first(tmp_path: Path) -> None:
    x = features(1000) * np.linspace(1, 9, 30, dtype=np.float32)
    path = ingest(IngestSpec(out=tmp_path / "s.ooc", **files(tmp_path, x), normalize="standard", reduce="pca:5")).path
    train = x[:500].astype(np.float64)
    exact = (x - train.mean(axis=0)) / train.std(axis=0)
    wanted = PCA(5, svd_solver="full").fit_transform(exact)
    assert up_to_sign(all_rows(path).T, wanted.T) < 1e-5 * np.abs(wanted).max()


def test_a_map_has_a_short_text_and_refuses_what_is_no_array() -> None:
    rows = features(300)
    found = fitted(rows, "variance:5")
    assert repr(found) == f"FeatureMap(variance, {rows.shape[1]} -> 5 columns)"
    for other in ("x", np.array([["a"]])):
        with pytest.raises(InputError, match=r"^rows are an array of <U1; variance:5 of .* takes numbers"):
            found.apply(other)
    np.testing.assert_array_equal(found.apply(torch.from_numpy(rows)), found.apply(rows))


def test_types_have_maps_of_their_own(tmp_path: Path) -> None:
    x = features(300)
    np.save(tmp_path / "p.npy", x)
    np.save(tmp_path / "a.npy", x[:50, :7])
    edges = {("a", "writes", "p"): tmp_path / "w.npy"}
    np.save(tmp_path / "w.npy", np.random.default_rng(0).integers(0, 50, (2, 400)))
    given = {"edges": {key: str(each) for key, each in edges.items()}}
    given["features"] = {"p": [f"x={tmp_path}/p.npy"], "a": [f"x={tmp_path}/a.npy"]}  # type: ignore[assignment]
    path = ingest(spec_of({"out": tmp_path / "s.ooc", **given, "reduce": {"p": "pca:4"}, "select": {"a": "variance:2"}})).path
    with Dataset.open(path) as ds:
        assert [ds.nodes(name).num_features for name in ("p", "a")] == [4, 2]
        kept = ds.nodes("p").feature_map()
        assert kept is not None
        assert kept.apply(x).shape == (300, 4)
    assert set(describe(path)["reduced"]) == {"node/p/x", "node/a/x"}
    assert verify(path) == []
    with pytest.raises(InputError, match=r"pca:9 asks for 9 columns, and .* has 7: .*node type 'a'"):
        ingest(spec_of({"out": tmp_path / "t.ooc", **given, "reduce": {"a": "pca:9"}}))
    assert not (tmp_path / "t.ooc").exists()


def test_damage_to_a_map_is_found(tmp_path: Path) -> None:
    path = ingest(IngestSpec(out=tmp_path / "s.ooc", **files(tmp_path, features(1000)), reduce="pca:5")).path
    shard = path / "reductions/node/x/components/c/0/0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert [damage.array for damage in verify(path)] == ["reductions/node/x/components"]
    os.unlink(path / "reductions/node/x/mean/zarr.json")
    assert "reductions/node/x/mean" in {damage.array for damage in verify(path)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"select": "mutual:3", "labels": None}, "`mutual` compares columns with the labels of training nodes"),
        ({"select": "mutual:3", "train": None}, "`mutual` compares columns with the labels of training nodes"),
        ({"select": "mutual:3", "task": "regression"}, "the labels are those of a regression task"),
        ({"reduce": "pca:3", "features": []}, "make the feature x narrower, and there is none"),
    ],
)
def test_what_an_ingest_lacks_is_said(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    given = {**files(tmp_path, features(1000)), "num_nodes": 1000, **settings}
    with pytest.raises(ConfigError, match=words):
        ingest(IngestSpec(out=tmp_path / "s.ooc", **given))
    assert not (tmp_path / "s.ooc").exists()
