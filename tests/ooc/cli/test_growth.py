"""`ooc append`, `ooc compact`, and what the other verbs say of a store that grows."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ooc.cli.flags import APPEND
from ooc.cli.main import main
from ooc.stores.dataset import Dataset
from ooc.stores.growth.append import append
from ooc.stores.growth.spec import FIELDS, AppendSpec
from tests.ooc.cli.test_main import arrays, fails

__all__ = ["arrays"]


def test_append_flags_are_the_fields_that_an_append_has() -> None:
    assert sorted(flag.name for flag in APPEND) == sorted(FIELDS)


@pytest.fixture
def store(arrays: Path) -> Path:
    path = arrays / "a.ooc"
    nodes = ["--num-nodes", "40", "--features", f"x={arrays}/x.npy", "--labels", f"{arrays}/y.npy"]
    assert main(["ingest", str(path), "--edges", f"{arrays}/edges.npy", *nodes, "--train", f"{arrays}/train.npy"]) == 0
    return path


def test_edges_and_nodes_are_appended_seen_and_folded_in(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, x = store.parent, np.ones((3, 6), np.float32)
    np.save(folder / "more.npy", np.array([[41, 42, 0], [0, 1, 40]]))
    np.save(folder / "x2.npy", x)
    np.save(folder / "y2.npy", np.array([2, -1, 0]))
    given = ["--edges", f"{folder}/more.npy", "--features", f"x={folder}/x2.npy", "--labels", f"{folder}/y2.npy"]
    capsys.readouterr()
    assert main(["append", str(store), *given]) == 0
    assert "3 edges, 3 new nodes, 3 rows of x, 3 rows of y appended in" in capsys.readouterr().out
    assert main(["info", str(store)]) == 0
    out = capsys.readouterr().out
    assert "40 nodes, 200 edges" in out
    assert "appended     3 edges, 3 new nodes" in out
    assert main(["verify", str(store)]) == 0
    for verb in ("compact", "verify", "info"):
        with Dataset.open(store) as ds:
            assert (ds.num_nodes, ds.num_edges) == (43, 203)
            rows = np.empty((3, 6), np.float32)
            ds.rows("x").read(np.array([42, 40, 41]), rows)
            np.testing.assert_array_equal(rows, x)
            assert ds.labels is not None
            assert ds.labels[40:].tolist() == [2, -1, 0]
            assert len(ds.split("train")) == 24
        capsys.readouterr()
        assert main([verb, str(store)]) == 0
        out = capsys.readouterr().out
        if verb == "compact":
            assert "appended once, merged; 43 nodes, 203 edges in" in out
    assert "43 nodes, 203 edges" in out
    assert "appended" not in out
    assert main(["compact", str(store)]) == 0
    assert "nothing was appended" in capsys.readouterr().out


def test_the_first_reader_shows_how_it_merges_where_there_is_a_terminal(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(store.parent / "more.npy", np.array([[1, 2, 0], [0, 1, 4]]))
    for terminal in (True, False):
        assert main(["append", str(store), "--edges", f"{store.parent}/more.npy"]) == 0
        for shown in (terminal, False):  # the second reader has nothing to merge
            capsys.readouterr()
            with monkeypatch.context() as patch:
                patch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
                assert main(["info", str(store), "--id", "3"]) == 0
            assert ("merge the graph" in capsys.readouterr().err) == shown
    append(AppendSpec(out=store, edges=f"{store.parent}/more.npy"))
    capsys.readouterr()
    Dataset.open(store).close()
    assert capsys.readouterr() == ("", "")


def test_what_is_refused_is_one_line(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store.parent
    np.save(folder / "more.npy", np.array([[41], [0]]))
    np.save(folder / "x2.npy", np.ones((1, 6), np.float32))
    capsys.readouterr()
    edges = ["append", store, "--edges", folder / "more.npy"]
    assert "row 0: src 41 is out of range 0..39" in fails(capsys, *edges)
    assert "row 0: src 41 is out of range 0..40" in fails(capsys, *edges, "--features", f"x={folder}/x2.npy")
    assert "have no 'z': there are split, x, y" in fails(capsys, *edges, "--features", f"z={folder}/x2.npy")
    assert "nothing to append" in fails(capsys, "append", store)
    assert "there is no store at" in fails(capsys, "append", folder / "none.ooc", "--edges", folder / "more.npy")
    assert "there is no store at" in fails(capsys, "compact", folder / "none.ooc")
    assert "--grown continues a run" in fails(capsys, "train", store, "--out", folder / "run", "--grown")
