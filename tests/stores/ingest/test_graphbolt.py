"""Folders of DGL GraphBolt's OnDiskDataset."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError
from ooc.stores.ingest import IngestSpec, ingest

N, E = 20, 60
RNG = np.random.default_rng(0)
EDGES, X, YEAR, WIDTHS = RNG.integers(0, N, (2, E)), RNG.random((N, 3)), np.arange(N) + 2000, RNG.random((E, 2))


def folder(path: Path, form: str = "csv", **changes: Any) -> Path:
    """An OnDiskDataset; JSON is YAML."""
    path.mkdir()
    arrays = {"edges": EDGES, "feat": X, "year": YEAR, "width": WIDTHS}
    for name, rows in (("train", range(8)), ("valid", range(8, 12)), ("test", range(12, 15))):
        arrays |= {name: np.array(rows), f"{name}_y": np.array(rows) % 3}
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    np.savetxt(path / "edges.csv", EDGES.T, fmt="%d", delimiter=",")

    def of(name: str, file: str, domain: str | None = None) -> dict[str, Any]:
        return {"name": name, "format": "numpy", "path": f"{file}.npy"} | ({} if domain is None else {"domain": domain})

    sets = {name: [{"data": [of("seeds", file), of("labels", f"{file}_y")]}]
            for name, file in (("train_set", "train"), ("validation_set", "valid"), ("test_set", "test"))}  # fmt: skip
    described = {
        "graph": {"nodes": [{"num": N}], "edges": [{"format": form, "path": "edges.csv" if form == "csv" else "edges.npy"}]},
        "feature_data": [of("feat", "feat", "node"), of("year", "year", "node"), of("feat", "width", "edge")],
        "tasks": [{"name": "node_classification", "num_classes": 3, **sets}],
    }
    (path / "metadata.yaml").write_text(json.dumps({**described, **changes}))
    return path


@pytest.mark.parametrize("form", ["csv", "numpy"])
def test_an_on_disk_data_set_becomes_a_store(tmp_path: Path, form: str) -> None:
    notes = ingest(IngestSpec(out=tmp_path / "s.ooc", graphbolt=folder(tmp_path / "d", form))).notes
    assert ["year" in notes[0], len(notes)] == [True, 1]
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert np.asarray(ds.labels).tolist() == [*(np.arange(15) % 3), *[-1] * 5]
        assert {name: len(ds.split(name)) for name in ds.splits} == {"train": 8, "val": 4, "test": 3}
        out, order = np.empty((N, 3), np.float32), np.argsort(EDGES[1], kind="stable")
        ds.rows("x").read(np.arange(N), out)
        np.testing.assert_array_equal(out, X.astype(np.float32))
        np.testing.assert_array_equal(np.asarray(ds.graph.indices), EDGES[0][order])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": {"nodes": [{"num": 1}, {"num": 2}], "edges": [{"path": "edges.csv"}]}}, "has 2 types of nodes"),
        ({"graph": None}, "does not describe an OnDiskDataset"),
        ({"graph": {"nodes": [{"num": N}], "edges": [{}]}}, "does not describe an OnDiskDataset: 'path'"),
        ({"feature_data": [{"name": "feat"}]}, "does not describe an OnDiskDataset: 'path'"),
        ({"feature_data": [{"name": "feat", "domain": "node", "format": "numpy", "path": "no.npy"}]}, "which .* names"),
        ({"feature_data": [{"name": "feat", "domain": "node", "format": "torch", "path": "feat.npy"}]}, "the format torch"),
        ({"tasks": [{"name": "links", "train_set": [{"data": [{"name": "seeds", "path": "edges.npy"}]}]}]}, "is not of nodes"),
    ],
)  # fmt: skip
def test_what_cannot_be_ingested_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", graphbolt=folder(tmp_path / "d", **changes)))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_labels_are_classes_or_numbers(tmp_path: Path) -> None:
    made = folder(tmp_path / "d")
    np.save(made / "train_y.npy", np.array(["a"] * 8))
    with pytest.raises(InputError, match=r"train_y\.npy has labels of <U1: classes are whole numbers from 0 on"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", graphbolt=made))
    np.save(made / "train_y.npy", np.arange(8) % 3 + 0.0)
    ingest(IngestSpec(out=tmp_path / "s.ooc", graphbolt=made))
    np.save(made / "train_y.npy", np.arange(8) % 3 + 0.5)
    ingest(IngestSpec(out=tmp_path / "t.ooc", graphbolt=made))
    with Dataset.open(tmp_path / "s.ooc") as classes, Dataset.open(tmp_path / "t.ooc") as numbers:
        assert (classes.task, numbers.task) == ("multiclass", "regression")
        unlabeled = np.asarray(classes.labels) == -1
        np.testing.assert_array_equal(np.isnan(np.asarray(numbers.labels)), unlabeled)


def test_a_folder_without_a_description(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metadata\.yaml cannot be read: No such file"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", graphbolt=tmp_path))
