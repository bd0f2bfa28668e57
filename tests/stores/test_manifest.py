"""The manifest: what it accepts, what it refuses, and in which words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from pydantic import ValidationError

from ooc.stores.errors import StoreError
from ooc.stores.manifest import FORMAT_VERSION, EdgeType, Manifest, NodeType, label_dtype, read_manifest, write_manifest


def sample() -> Manifest:
    return Manifest.homogeneous(
        num_nodes=5,
        num_edges=7,
        columns=["edge_id", "weight"],
        weighted=True,
        arrays=["y", "x"],
        splits={"train": 2},
        id_kind="str",
        task="multiclass",
        num_classes=3,
        fingerprints={"edges": "ab"},
    )


def edit(path: Path, **changes: Any) -> None:
    metadata = json.loads((path / "zarr.json").read_text())
    metadata["attributes"]["ooc"].update(changes)
    del metadata["attributes"]["ooc_checksums"]  # as in a store of an earlier ooc
    (path / "zarr.json").write_text(json.dumps(metadata))


def test_a_manifest_reads_back_equal_and_zarr_opens_the_group(tmp_path: Path) -> None:
    manifest = sample()
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).canonical() == manifest.canonical()
    assert zarr.open_group(tmp_path, mode="r").attrs["ooc"]["num_nodes"] == 5


def test_a_newer_format_is_named_with_what_to_do(tmp_path: Path) -> None:
    write_manifest(tmp_path, sample())
    edit(tmp_path, format_version=FORMAT_VERSION + 1, surprise=1)
    with pytest.raises(StoreError, match=f"format version {FORMAT_VERSION + 1}.*up to {FORMAT_VERSION}: upgrade ooc"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"surprise": 1}, {"num_nodes": "many"}, {"num_nodes": 6}, {"num_edges": 6}, {"weighted": False}, {"format_version": 0}],
)
def test_a_damaged_manifest_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_manifest(tmp_path, sample())
    edit(tmp_path, **changes)
    with pytest.raises(StoreError, match="damaged at") as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(StoreError, match="not a store: it has no"):
        read_manifest(tmp_path)
    file = tmp_path / "a.npy"
    file.write_bytes(b"x")
    with pytest.raises(StoreError, match="not a store: it has no"):
        read_manifest(file)
    (tmp_path / "zarr.json").write_text("{")
    with pytest.raises(StoreError, match="not JSON"):
        read_manifest(tmp_path)
    zarr.create_group(tmp_path / "other")
    with pytest.raises(StoreError, match="not a finished ooc store"):
        read_manifest(tmp_path / "other")


def test_several_types_share_one_id_space() -> None:
    types = [NodeType(name="a", ranges=[(0, 2), (5, 6)], count=3), NodeType(name="b", ranges=[(2, 5)], count=3)]
    edges = [EdgeType(name="cites", source="a", target="b", count=1), EdgeType(name="likes", source="b", target="a", count=2)]
    manifest = Manifest(node_types=types, edge_types=edges, num_nodes=6, num_edges=3)
    assert manifest.node_type("b").ranges == [(2, 5)]
    with pytest.raises(StoreError, match="no node type 'c': there are a, b"):
        manifest.node_type("c")


@pytest.mark.parametrize("ranges", [[(0, 2), (1, 2)], [(1, 3), (0, 1)], [(0, 2)]])
def test_ranges_must_be_sorted_disjoint_and_complete(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValidationError):
        NodeType(ranges=ranges, count=3)


def test_types_may_not_overlap() -> None:
    types = [NodeType(name="a", ranges=[(0, 2)], count=2), NodeType(name="b", ranges=[(1, 3)], count=2)]
    with pytest.raises(ValidationError):
        Manifest(node_types=types, edge_types=[], num_nodes=4, num_edges=0)


@pytest.mark.parametrize(("classes", "dtype"), [(2, "i1"), (128, "i1"), (129, "i2"), (40_000, "i4")])
def test_labels_take_the_smallest_type_that_holds_every_class_and_minus_one(classes: int, dtype: str) -> None:
    assert label_dtype("multiclass", classes) == np.dtype(dtype)
    assert {-1, classes - 1} == set(np.array([-1, classes - 1], label_dtype("multiclass", classes)).tolist())
    assert label_dtype("binary", 2) == label_dtype("multilabel", classes) == np.int8
