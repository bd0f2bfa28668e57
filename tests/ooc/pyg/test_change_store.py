"""`ooc.append` and `ooc.split`: changes of a store by arrays, data frames and files."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ooc
from ooc.cli.main import main
from ooc.stores.growth.spec import FIELDS
from ooc.stores.metadata import write_group
from tests.conftest import MakeStore


def rows_of(store: Path, nodes: list[int]) -> Any:
    with ooc.open(store) as ds:
        out = np.empty((len(nodes), ds.num_features), np.float32)
        ds.rows("x").read(np.array(nodes), out)
        return out


def splits(store: Path) -> dict[str, list[int]]:
    with ooc.open(store) as ds:
        return {name: ds.split(name).tolist() for name in ds.splits}


def test_append_has_the_fields_of_its_specification() -> None:
    parameters = inspect.signature(ooc.append).parameters
    assert set(parameters) == {"store", *FIELDS, "progress"}
    of_ingest = inspect.signature(ooc.ingest).parameters
    for name in FIELDS:
        if name != "time_unit":  # by default that of the store
            assert parameters[name].default == of_ingest[name].default, name


def test_arrays_and_data_frames_are_appended(make_store: MakeStore) -> None:
    store = make_store()
    new = np.full((2, 8), 0.5, np.float32)
    made = ooc.append(store, edges=np.array([[50, 1], [0, 51]]), features={"x": new}, labels=torch.tensor([1, 2]))
    assert (made.appended.edges, made.appended.nodes) == (2, 2)
    np.testing.assert_array_equal(rows_of(store, [50, 51]), new)
    frame = pd.DataFrame({"id": [3], **{f"f{i}": [float(i)] for i in range(8)}})
    assert ooc.append(store, nodes=frame, x_cols=[f"f{i}" for i in range(8)]).appended.rows == {"x": 1}
    np.testing.assert_array_equal(rows_of(store, [3]), [np.arange(8)])


def test_splits_from_shares_and_arrays(make_store: MakeStore) -> None:
    store, other = make_store(), make_store(name="other.ooc")
    with pytest.raises(ooc.ConfigError, match="has splits"):
        ooc.split(store, (0.5, 0.25, 0.25))
    found = ooc.split(store, (0.5, 0.25, 0.25), seed=3, replace=True)
    assert (found.sizes, found.notes) == ({"train": 25, "val": 13, "test": 12}, [])
    assert main(["split", str(other), "--random-split", "0.5,0.25,0.25", "--seed", "3", "--replace"]) == 0
    assert splits(store) == splits(other)
    found = ooc.split(store, train=np.arange(50) < 3, val=torch.tensor([2, 7]), replace=True)
    assert splits(store) == {"train": [0, 1, 2], "val": [2, 7]}
    assert found.notes == ["the splits train and val share 1 nodes"]
    with pytest.raises(ooc.InputError, match="out of range"):
        ooc.split(store, train=[0, 50], replace=True)
    for wrong in ({}, {"random_split": (0.5, 0.5, 0), "test": [1]}, {"train": [1], "seed": 2}):
        with pytest.raises(ooc.ConfigError, match="random_split"):
            ooc.split(store, **wrong, replace=True)


@pytest.mark.parametrize("verb", ["append", "split", "compact"])
def test_a_folder_that_is_no_store_stays_as_it_was(tmp_path: Path, verb: str) -> None:
    calls: dict[str, Callable[[Path], Any]] = {
        "append": lambda path: ooc.append(path, edges=np.array([[0], [1]])),
        "split": lambda path: ooc.split(path, (0.5, 0.5, 0.0)),
        "compact": ooc.compact,
    }
    folder = tmp_path / "array.zarr"
    folder.mkdir()
    write_group(folder, {"mine": 1})
    with pytest.raises(ooc.StoreError, match="not a finished ooc store"):
        calls[verb](folder)
    assert [path.name for path in folder.rglob("*")] == ["zarr.json"]
