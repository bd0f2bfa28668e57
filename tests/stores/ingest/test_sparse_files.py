"""npz files of sparse matrices whose parts do not fit each other are refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.errors import InputError
from ooc.stores.ingest.arrays import save_arrays, sparse_adjacency

PARTS = {"data": np.ones(3), "indices": np.array([1, 2, 0]), "indptr": np.array([0, 1, 2, 3]), "shape": np.array([3, 3])}
ENTRIES = {"row": np.array([0, 1]), "col": np.array([1, 2]), "data": np.ones(2), "shape": np.array([3, 3])}


def read(folder: Path, arrays: dict[str, Any]) -> dict[str, str]:
    return sparse_adjacency(save_arrays({key: np.asarray(value) for key, value in arrays.items()}, folder), "m.npz", folder)


def compressed(**features: Any) -> dict[str, Any]:
    """An adjacency matrix and node features, some parts of which are others."""
    return {
        f"{kind}_{name}": value
        for kind, parts in (("adj", PARTS), ("attr", {**PARTS, **features}))
        for name, value in parts.items()
    }


def test_sound_files_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, compressed())
    assert np.load(found["edge_index"]).tolist() == [[0, 1, 2], [1, 2, 0]]
    assert np.load(found["x"]).tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert np.load(read(tmp_path, ENTRIES)["edge_index"]).tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (compressed(indices=[1, 3, 0]), r"out of range 0\.\.2"),
        (compressed(indices=[1, -1, 0]), r"out of range 0\.\.2"),
        (compressed(indptr=[0, 9, 2, 3]), "its indptr does not fit 3 rows and 3 entries"),
        (compressed(indptr=[0, 1, 3]), "its indptr does not fit 3 rows and 3 entries"),
        (compressed(data=[1.0]), "1 values .* for 3 entries"),
        (compressed(data=["a", "b", "c"]), r"3 values \(<U1\) for 3 entries"),
        (compressed(shape=[1, 2, 3]), r"of shape \[1, 2, 3\]"),
        (compressed(shape=["a", "b"]), r"of shape \['a', 'b'\]"),
        ({**PARTS, "indices": [0.5, 1.5, 2.5]}, "its indptr does not fit"),
        ({**PARTS, "shape": [3.0, 3.0]}, r"of shape \[3\.0, 3\.0\]"),
        ({**ENTRIES, "col": [1, 2, 0]}, "row and col are not as many"),
        ({**ENTRIES, "row": [0.5, 1.0]}, "row and col are not as many"),
        ({**ENTRIES, "data": [1.0]}, "1 values for 2 entries"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, arrays)
