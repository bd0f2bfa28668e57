"""The graph maker's files: sizes, types, reproducibility, and that a community graph is assortative."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tools.graphs.make_graph import GAP_MS, make_graph, with_events


def edges_of(folder: Path) -> np.ndarray:
    table = pq.read_table(sorted((folder / "edges").glob("*.parquet")))
    return np.stack([table["src"].to_numpy(), table["dst"].to_numpy()])


@pytest.mark.parametrize("kind", ["uniform", "rmat", "skewed", "communities"])
def test_files(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        make_graph(tmp_path / name, nodes=1003, edges=20000, features=7, classes=5, kind=kind, seed=3)
    edges = edges_of(tmp_path / "a")
    assert edges.shape == (2, 20000)
    assert edges.min() >= 0
    assert edges.max() < 1003
    np.testing.assert_array_equal(edges, edges_of(tmp_path / "b"))
    x, y = np.load(tmp_path / "a/x.npy"), np.load(tmp_path / "a/y.npy")
    assert x.dtype == np.float32
    assert x.shape == (1003, 7)
    assert (tmp_path / "a/x.npy").stat().st_size < 1003 * 7 * 4 + 256
    assert 0.5 < x.std() < 2.5
    parts = [np.load(tmp_path / f"a/{name}.npy") for name in ("train", "val", "test")]
    assert sorted(np.concatenate(parts)) == list(range(1003))
    same = (y[edges[0]] == y[edges[1]]).mean()
    assert same > 0.6 if kind == "communities" else same < 0.4


def test_strings(tmp_path: Path) -> None:
    make_graph(tmp_path, nodes=50, edges=100, features=0, strings=True)
    assert pq.read_table(tmp_path / "edges")["src"][0].as_py().startswith("n")
    assert not (tmp_path / "x.npy").exists()


def test_temporal(tmp_path: Path) -> None:
    shape: dict[str, int] = {"nodes": 300, "edges": 4000, "features": 0, "seed": 5}
    make_graph(tmp_path / "a", **shape, temporal=3)
    make_graph(tmp_path / "b", **shape, temporal=3)
    make_graph(tmp_path / "plain", **shape)
    np.testing.assert_array_equal(edges_of(tmp_path / "a"), edges_of(tmp_path / "plain"))
    table = pq.read_table(tmp_path / "a/edges")
    assert table.equals(pq.read_table(tmp_path / "b/edges"))
    time = table["t"].to_numpy()
    assert (np.diff(time) >= 0).all()
    assert 0 <= time[0] <= time[-1] < 4000 * GAP_MS
    assert time[-1] > 3900 * GAP_MS
    for name in ("m0", "m1", "m2"):
        assert str(table.schema.field(name).type) == "float"
        assert 200 < len(np.unique(table[name])) <= 256
    assert not np.array_equal(table["m0"], table["m1"])


def test_times_rise_from_piece_to_piece() -> None:
    chunks = [{"src": np.zeros(50, np.int64), "dst": np.ones(50, np.int64)} for _ in range(4)]
    pieces = [piece["t"] for piece in with_events(iter(chunks), 10, 1, seed=0)]
    assert (np.diff(np.concatenate(pieces)) >= 0).all()
    assert not np.array_equal(pieces[1] - pieces[0][0], pieces[0] - pieces[0][0])
    again = list(with_events(iter(chunks[:2]), 10, 1, seed=0))
    np.testing.assert_array_equal(again[1]["t"], pieces[1])
