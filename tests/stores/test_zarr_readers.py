"""What zarr-python and xarray make of a store: every array with names of its dimensions, no warnings, and growth is said."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from ooc.stores.dataset import Dataset
from ooc.stores.errors import StoreError
from ooc.stores.fingerprints import array_names, fingerprint
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.integrity import verify
from tests.stores.growth.test_rules import E, N, edges, more, store


def arrays_of(path: Path) -> dict[str, zarr.Array[Any]]:
    """Every array that zarr lists, at any depth, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = zarr.open_group(path, mode="r").members(max_depth=None)
    return {name: each for name, each in found if isinstance(each, zarr.Array)}


def known(path: Path) -> AppendSpec:
    """Ten further edges between nodes of the store."""
    ends = {name: [f"n{v}" for v in np.random.default_rng(k).integers(0, N, 10)] for k, name in enumerate(("src", "dst"))}
    return more(path, edges=edges(path.parent / "known.parquet", 100, 10, **ends))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return store(tmp_path, text=True, dtype="int8")


def test_zarr_lists_every_array_with_its_dimensions(path: Path) -> None:
    found = arrays_of(path)
    named = {name: each.metadata.dimension_names for name, each in found.items()}
    assert set(found) >= {*array_names(path), *(f"checksums/{name}" for name in array_names(path)), "ids.lmdb"}
    assert all(names is not None and len(names) == found[name].ndim for name, names in named.items())
    assert named["node/node/x"] == ("node", "x_column")
    assert named["node/node/x_scale"] == ("x_column",)
    assert named["graph/indices"] == named["graph/edge_id"] == ("slot",)
    assert named["events/time"] == ("event",)
    assert named["edge/edge/msg"] == ("edge", "msg_column")
    assert "CSC" in str(found["graph/indptr"].attrs["description"])
    assert found["node/node/x"].attrs["description"] == "int8: the value in column j is x[:, j] * x_scale[j]"


def test_xarray_opens_every_group(path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    append(known(path))
    compact(path)
    for group in ("graph", "node/node", "events", "edge/edge", "checksums/graph", "checksums/node/node"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            opened = xarray.open_zarr(path, group=group, consolidated=False)
        assert set(opened.data_vars) == {name.rpartition("/")[2] for name in arrays_of(path) if name.startswith(f"{group}/")}
    nodes = xarray.open_zarr(path, group="node/node", consolidated=False)
    with Dataset.open(path) as ds:
        want = np.empty((N, 2), np.float32)
        ds.rows("x").read(np.arange(N), want)
    np.testing.assert_array_equal((nodes.x * nodes.x_scale).values, want)


def test_a_grown_store_says_what_its_arrays_lack_and_then_holds_it(path: Path) -> None:
    before = dict(zarr.open_group(path, mode="r").attrs)
    append(known(path))
    group = zarr.open_group(path, mode="r")
    said = group.attrs["ooc_appended"]
    assert isinstance(said, dict)
    assert {name: said[name] for name in ("appends", "edges", "nodes")} == {"appends": 1, "edges": 10, "nodes": 0}
    assert group["events/time"].shape == (E,)
    arrays_of(path)
    with Dataset.open(path):  # merges a view, which is no part of the group
        arrays_of(path)
    for version in (1, 2):
        compact(path)
        group = zarr.open_group(path, mode="r")
        assert "ooc_appended" not in group.attrs
        assert group.attrs["ooc_arrays"] == f"versions/{version}"
        assert group["events/time"].shape == (E + 10 * version,)
        with Dataset.open(path) as ds:
            np.testing.assert_array_equal(group["graph/indices"][:], ds.graph.indices)
        assert arrays_of(path).keys() >= {*array_names(path / f"versions/{version}"), "versions/state", "ids.lmdb"}
        append(known(path))
    assert before.keys() == {"ooc", "ooc_checksums"}


def test_attributes_are_no_part_of_a_fingerprint(path: Path) -> None:
    """So that stores and runs of earlier versions, which lack them, go on."""
    was = fingerprint(path)
    for name in array_names(path):
        file = path / name / "zarr.json"
        metadata = json.loads(file.read_bytes())
        metadata.pop("dimension_names")
        metadata["attributes"].pop("description", None)
        file.write_text(json.dumps(metadata))
    (path / "ids.lmdb/zarr.json").unlink()
    assert fingerprint(path) == was
    assert verify(path) == []


def test_what_was_appended_and_is_gone_is_an_error(path: Path) -> None:
    append(known(path))
    (path / "delta.lmdb/data.mdb").write_bytes(b"")
    assert "missing or empty" in str(verify(path)[0])
    with pytest.raises(StoreError, match="missing or empty: copy the whole store again"):
        Dataset.open(path)
