"""The recipes of tables on small files of the same form."""

import gzip
from pathlib import Path

import numpy as np
import pytest

import ooc
from tools.scores import tables


def test_stores_have_the_words_relations_and_splits_of_the_files(tmp_path: Path) -> None:
    draw, folder = np.random.default_rng(0), tmp_path / "wn18rr"
    folder.mkdir()
    for file, count in (("train", 60), ("valid", 10), ("test", 12)):
        lines = (f"w{h}\tis-{r}\tw{t}\n" for h, r, t in draw.integers(0, (12, 3, 12), (count, 3)))
        (folder / f"{file}.txt.gz").write_bytes(gzip.compress("".join(lines).encode()))
    tables.knowledge_graph(folder, tmp_path / "own.ooc")
    with ooc.open(tmp_path / "own.ooc") as ds:
        edges = ds.edges()
        assert edges.class_names == ["is-0", "is-1", "is-2"]
        assert [len(edges.members(name)) for name in ("train", "val", "test")] == [60, 10, 12]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(tables.RECIPES, "small", ("wn18rr", {**tables.RECIPES["wn18rr-complex"][1], "hidden": 8, "ratio": 4}))
        found = tables.score(tmp_path, tmp_path, "small", {"epochs": 1, "threads": 1})
        assert found["epochs"] == 1
        assert 0 < found["test"]["mrr"] <= 1
        assert tables.score(tmp_path, tmp_path, "small", {"epochs": 2, "threads": 1})["epochs"] == 2


def test_users_and_items_are_two_types(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    pairs = {
        f"{part}_{name}": draw.integers(0, 9, count)
        for part, count in (("train", 50), ("test", 20))
        for name in ("user", "item")
    }
    np.savez(tmp_path / "pairs.npz", **pairs)
    tables.users_and_items(tmp_path / "pairs.npz", tmp_path / "pairs.ooc")
    with ooc.open(tmp_path / "pairs.ooc") as ds:
        edges = ds.edges(("user", "visits", "item"))
        assert [len(edges.members(name)) for name in ("train", "test")] == [50, 20]
    tables.users_and_items(tmp_path / "pairs.npz", tmp_path / "held-out.ooc", held_out=True)
    with ooc.open(tmp_path / "held-out.ooc") as ds:
        edges = ds.edges(("user", "visits", "item"))
        assert set(edges.splits) == {"train", "val"}
        count = {name: len(edges.members(name)) for name in edges.splits}
        assert sum(count.values()) == 50, "none of test"
        assert 0 < count["val"] < 15
