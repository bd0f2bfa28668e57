"""The demo graph: the same every time, and one on which neighbors help."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.cli.main import main
from ooc.examples import SCRIPTS, graph, source
from ooc.examples.graph import CLASSES, EDGES, FEATURES, NODES, write_graph
from ooc.stores.errors import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("graph") / "demo")


def columns(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def test_the_graph_has_the_columns_that_it_promises(folder: Path) -> None:
    edges, nodes = columns(folder / "edges.parquet"), columns(folder / "nodes.parquet")
    assert list(edges) == ["src", "dst"]
    assert edges["src"].shape == (EDGES,)
    assert max(each.max() for each in edges.values()) < NODES
    assert list(nodes) == ["id", "label", "split", *(f"f{number}" for number in range(FEATURES))]
    np.testing.assert_array_equal(nodes["id"], np.arange(NODES))
    assert np.bincount(nodes["label"]).min() > NODES / CLASSES / 2
    assert set(nodes["split"]) == {"train", "val", "test"}


def test_neighbors_say_more_than_a_nodes_own_features(folder: Path) -> None:
    """The most likely class by the known means, from a node's own row and from the mean row of its neighbors."""
    edges, nodes = columns(folder / "edges.parquet"), columns(folder / "nodes.parquet")
    x = np.stack([nodes[f"f{number}"] for number in range(FEATURES)], 1)
    label = nodes["label"]
    means = np.stack([x[label == each].mean(0) for each in range(CLASSES)])
    sums, degree = np.zeros_like(x), np.zeros(NODES)
    for one, other in (("src", "dst"), ("dst", "src")):
        np.add.at(sums, edges[one], x[edges[other]])
        np.add.at(degree, edges[one], 1)
    around = sums / np.maximum(degree, 1)[:, None]
    smoothed = np.stack([around[label == each].mean(0) for each in range(CLASSES)])

    def accuracy(rows: np.ndarray, centers: np.ndarray) -> float:
        return float((((rows[:, None] - centers) ** 2).sum(2).argmin(1) == label).mean())

    own, neighbors = accuracy(x, means), accuracy(around, smoothed)
    assert own < 0.6
    assert neighbors > own + 0.2


def test_it_is_the_same_graph_every_time(folder: Path, tmp_path: Path) -> None:
    again = write_graph(tmp_path)
    for name in ("edges.parquet", "nodes.parquet"):
        assert hashlib.sha256((again / name).read_bytes()).digest() == hashlib.sha256((folder / name).read_bytes()).digest()
    with pytest.raises(InputError, match="exists already"):
        write_graph(tmp_path)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_graph_whose_writing_was_killed_is_completed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    class Killed(BaseException):
        pass

    write_table = pq.write_table

    def dying(table: pa.Table | None, path: Path) -> None:
        if len([*tmp_path.iterdir()]) == written:
            path.write_bytes(b"PAR1 and no more")
            raise Killed
        write_table(table, path)

    with monkeypatch.context() as patched:
        patched.setattr(graph.pq, "write_table", dying)
        patched.setattr(graph.os, "replace", lambda source, _: dying(None, Path(source)))
        with pytest.raises(Killed):
            write_graph(tmp_path)
    again = write_graph(tmp_path)
    assert sorted(path.name for path in again.iterdir()) == ["edges.parquet", "nodes.parquet"]
    assert (again / "edges.parquet").read_bytes() == (folder / "edges.parquet").read_bytes()


def test_edges_of_a_killed_call_are_kept_and_those_of_others_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "edges.parquet", tmp_path)
    write_graph(tmp_path)
    (tmp_path / "nodes.parquet").unlink()
    (tmp_path / "edges.parquet").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"edges\.parquet exists already"):
        write_graph(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"edges.parquet": b"mine"}


def test_the_examples_are_listed_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    listed = capsys.readouterr().out
    for name in SCRIPTS:
        assert f"ooc example {name} > FILE" in listed
        assert main(["example", name]) == 0
        text = capsys.readouterr().out
        assert text == source(name)
        if not text.startswith("#!/bin/bash"):
            compile(text, name, "exec")
    for words, message in (
        (["x"], "'x' is no example"),
        (["graph"], "name the directory"),
        (["train_nodes", "x.py"], "train_nodes > FILE"),
    ):
        assert main(["example", *words]) == 2
        assert message in capsys.readouterr().err
