"""Features of several node types that are narrower, each by its own map: `ooc reduce`, appends, a compaction, and checks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.cli.main import main
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from tests.stores.ingest.test_reductions import features

WRITES = ("author", "writes", "paper")
WIDTHS = {"author": 12, "paper": 30}
COUNTS, MORE = {"author": 60, "paper": 200}, {"author": 5, "paper": 9}


def rows_of(node_type: str) -> Any:
    """Of the input and what is appended, float32[n, F]."""
    return features(COUNTS[node_type] + MORE[node_type], WIDTHS[node_type], mean=3.0)


def store(folder: Path, **settings: Any) -> Path:
    edges = np.random.default_rng(0).integers(0, 60, (2, 300))
    x = {name: rows_of(name)[:count] for name, count in COUNTS.items()}
    ooc.ingest(
        folder / "s.ooc", edges={WRITES: edges}, num_nodes=COUNTS, features={name: {"x": x[name]} for name in x}, **settings
    )
    return folder / "s.ooc"


def append(path: Path, **x: Any) -> None:
    """New nodes of both types, whose rows are `x`, and an edge between the first ones."""
    edges = np.array([[COUNTS["author"]], [COUNTS["paper"]]])
    ooc.append(path, edges={WRITES: edges}, features={name: {"x": rows} for name, rows in x.items()})


def read(path: Path, node_type: str) -> tuple[Any, Any]:
    """(the map, all rows)."""
    with Dataset.open(path) as ds:
        nodes = ds.nodes(node_type)
        out = np.empty((nodes.num_nodes, *nodes.rows("x").shape[1:]), np.float32)
        nodes.rows("x").read(np.arange(nodes.num_nodes), out)
        return nodes.feature_map(), out


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_rows_of_each_type_are_narrowed_by_its_map_through_append_and_compaction(tmp_path: Path, dtype: str) -> None:
    path = store(tmp_path, dtype=dtype)
    ooc.reduce(path, "pca:4", node_type="paper")
    ooc.reduce(path, "variance:3", node_type="author")
    assert verify(path) == []
    was = {name: read(path, name)[1] for name in COUNTS}
    new = {name: 1.5 + rows_of(name)[count:] / 2 for name, count in COUNTS.items()}  # within the scales of int8
    append(path, **new)
    for merged in (False, True):
        if merged:
            ooc.compact(path)
        for name, count in COUNTS.items():
            kept, rows = read(path, name)
            wanted = kept.apply(new[name])
            np.testing.assert_array_equal(rows[:count], was[name])
            np.testing.assert_allclose(rows[count:], wanted, atol=1e-5 if dtype == "auto" else 0.02 * np.abs(was[name]).max())
        assert verify(path) == []
        assert {array.split("/")[1]: text[:6] for array, text in describe(path)["reduced"].items()} == {
            "author": "varian",
            "paper": "pca:4 ",
        }


def test_a_store_of_types_that_is_made_narrower_is_that_of_an_ingest(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "at once").mkdir()
    later = store(tmp_path / "later")
    ooc.reduce(later, "svd:4", node_type="paper", seed=7)
    ooc.reduce(later, "random:3", node_type="author", seed=7)
    both = {"paper": "svd:4", "author": "random:3"}
    assert describe(later)["fingerprint"] == describe(store(tmp_path / "at once", reduce=both, seed=7))["fingerprint"]


def test_what_does_not_fit_is_refused_by_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path)
    with pytest.raises(ConfigError, match=r"has several node types: give one of author, paper as `node_type`"):
        ooc.reduce(path, "pca:4")
    assert main(["reduce", str(path), "pca:4", "--node-type", "paper"]) == 0
    new = {name: rows_of(name)[count:] for name, count in COUNTS.items()}
    with pytest.raises(InputError, match=r"has 4 columns; the store's x is pca:4 of 30 columns: give all 30"):
        append(path, author=new["author"], paper=new["paper"][:, :4])
    append(path, **new)
    with pytest.raises(ConfigError, match="has appended data, which stays as wide as it is: run `ooc compact"):
        ooc.reduce(path, "pca:4", node_type="author")
    capsys.readouterr()
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "pca:4 of 30 columns" in shown
    assert "appended     1 edges, 14 new nodes" in shown
    ooc.compact(path)
    ooc.reduce(path, "pca:4", node_type="author")
    assert verify(path) == []
    assert read(path, "author")[1].shape == (65, 4)
