"""`ooc reduce`: narrower features for a finished store, in one transaction, and for the rows that are appended to it."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.cli.main import main
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.reduce import reduce
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.ingest.reductions import Reduction
from ooc.stores.integrity import verify
from tests.stores.growth.test_killed import kill_everywhere, leftovers
from tests.stores.ingest.test_reductions import all_rows, features, files, fitted

PCA = Reduction("pca", 5)


def store(folder: Path, count: int = 200, **settings: Any) -> Path:
    return ingest(IngestSpec(out=folder / "s.ooc", **files(folder, features(count)), **settings)).path


def further(path: Path, x: Any, count: int = 200) -> AppendSpec:
    """New nodes with features `x`, and an edge from each."""
    folder = path.parent
    np.save(folder / "more.npy", x)
    new = np.arange(count, count + len(x))
    np.save(folder / "more_edges.npy", np.stack([new, np.zeros_like(new)]))
    return AppendSpec(out=path, edges=str(folder / "more_edges.npy"), features=[f"x={folder}/more.npy"])


@pytest.mark.cases(2)
@pytest.mark.parametrize("text", ["pca:5", "svd:5", "random:5", "variance:5", "mutual:5"])
def test_a_store_that_stands_becomes_the_one_of_an_ingest(tmp_path: Path, text: str) -> None:
    path = store(tmp_path)
    result = ooc.reduce(path, text)
    assert (result.before, result.now) == (200 * 30 * 4, 200 * 5 * 4)
    argument = "select" if text.startswith(("variance", "mutual")) else "reduce"
    given = files(tmp_path, features(200))
    other = ingest(IngestSpec(out=tmp_path / "other.ooc", **given, **{argument: text})).path
    assert describe(path)["fingerprint"] == describe(other)["fingerprint"]
    assert verify(path) == []
    assert leftovers(path) == []


def test_the_verb_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path, dtype="float16")
    assert main(["reduce", str(path), "pca:5", "--memory", "500MB"]) == 0
    said = capsys.readouterr().out
    assert "pca:5 of 30 columns, " in said
    assert "12 kB of features are 2 kB" in said
    assert main(["info", str(path)]) == 0
    assert "pca:5 of 30 columns, 9" in capsys.readouterr().out
    assert main(["reduce", str(path), "pca:5"]) == 2
    assert "the features are pca:5 of 30 columns already" in capsys.readouterr().err


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_rows_keep_their_type(tmp_path: Path, dtype: str) -> None:
    path = store(tmp_path, dtype=dtype)
    wide = all_rows(path)
    reduce(path, PCA)
    shown = describe(path)["arrays"]["node/node/x"]
    assert (shown["dtype"], shown["shape"]) == ("int8 scaled" if dtype == "int8" else dtype, [200, 5])
    exact = fitted(wide, "pca:5").apply(wide)
    assert np.abs(all_rows(path) - exact).max() < np.abs(exact).max() / 100


def test_appended_rows_come_as_wide_as_the_input_and_become_narrow(tmp_path: Path) -> None:
    path, x = store(tmp_path), features(210)
    reduce(path, PCA)
    with pytest.raises(InputError, match=r"more.npy has 5 columns; the store's x is pca:5 of 30 columns: give all 30"):
        append(further(path, x[200:, :5]))
    with pytest.raises(InputError, match=r"more.npy row 1 column 2 is nan, and pca needs finite numbers"):
        append(further(path, np.where((np.arange(10)[:, None] == 1) & (np.arange(30) == 2), np.nan, x[200:])))
    append(further(path, x[200:]))
    with Dataset.open(path) as ds:
        kept = ds.feature_map()
        assert kept is not None
        wanted = kept.apply(x[200:])
    np.testing.assert_array_equal(all_rows(path)[200:], wanted)
    with pytest.raises(ConfigError, match="already"):
        reduce(path, PCA)
    compact(path)
    np.testing.assert_array_equal(all_rows(path)[200:], wanted)
    assert describe(path)["reduced"] == {"node/node/x": kept.reduced.text}
    assert verify(path) == []


def test_rows_that_replace_the_stores_have_no_map(tmp_path: Path) -> None:
    path = store(tmp_path)
    reduce(path, PCA)
    write_array(tmp_path / "other", "x", features(200, 7))
    with Dataset.open(path, features={"x": tmp_path / "other" / "x"}) as ds:
        assert (ds.num_features, ds.feature_map()) == (7, None)


def test_appended_rows_of_chosen_columns(tmp_path: Path) -> None:
    path, x = store(tmp_path), features(210)
    reduce(path, Reduction("variance", 5))
    append(further(path, x[200:]))
    with Dataset.open(path) as ds:
        kept = ds.feature_map()
        assert kept is not None
        assert kept.columns is not None
        np.testing.assert_array_equal(all_rows(path)[200:], x[200:][:, kept.columns])


def test_what_waits_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path)
    with pytest.raises(BudgetError, match=r"^`ooc reduce` needs at least 350 MB of memory, not 100 MB: give that as `memory`"):
        reduce(path, PCA, memory=10**8)
    with pytest.raises(ConfigError, match="has one: leave it out"):
        reduce(path, PCA, node_type="paper")
    for text in ("tsne:2", "pca", "pca:0"):
        with pytest.raises(
            ConfigError, match=f"^'{text}' is no METHOD:COLUMNS: write pca:64 or .* or variance:64 or mutual:64$"
        ):
            ooc.reduce(path, text)
    with pytest.raises(ConfigError, match=r"s3:.*cannot be reduced where it is"):
        ooc.reduce("s3://bucket/papers.ooc", "pca:4")
    append(further(path, features(210)[200:]))
    with pytest.raises(ConfigError, match="run `ooc compact"):
        reduce(path, PCA)
    bare = ingest(IngestSpec(out=tmp_path / "bare.ooc", edges=str(tmp_path / "e.npy"))).path
    with pytest.raises(ConfigError, match="has no features x: there is nothing to make narrower"):
        reduce(bare, PCA)


def test_open_readers_keep_the_wide_rows(tmp_path: Path) -> None:
    path = store(tmp_path)
    with Dataset.open(path) as old:
        reduce(path, PCA)
        assert (old.num_features, old.feature_map()) == (30, None)
        out = np.empty((3, 30), np.float32)
        old.rows("x").read(np.arange(3), out)
        np.testing.assert_array_equal(out, features(200)[:3])
    assert all_rows(path).shape == (200, 5)


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    path = store(tmp_path, 20_000)
    before, limit = describe(path)["fingerprint"], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limit[1]))  # files end there: the nearest thing to a full disk
    try:
        with pytest.raises(StoreError, match=r"cannot write .*allows no larger file"):
            reduce(path, PCA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert describe(path)["fingerprint"] == before
    assert leftovers(path) == []
    assert reduce(path, PCA).reduced.width == 5


@pytest.mark.slow
def test_killed_at_any_call_the_store_is_the_old_or_the_new_one(quick_path: Path) -> None:
    path = store(quick_path)
    old = describe(path)["fingerprint"]

    def check(path: Path) -> None:
        assert verify(path) == []
        if describe(path)["fingerprint"] == old:
            reduce(path, PCA)
        assert all_rows(path).shape == (200, 5)
        assert verify(path) == []
        compact(path)
        assert leftovers(path) == []

    kill_everywhere(path, lambda: reduce(path, PCA), check)
