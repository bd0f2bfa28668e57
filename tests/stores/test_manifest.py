"""The manifest: what it accepts, what it refuses, and in which words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from pydantic import ValidationError

from ooc.stores.array_names import check_type_name, parse_edge_type
from ooc.stores.build import write_store
from ooc.stores.errors import InputError, StoreError
from ooc.stores.graph import Graph
from ooc.stores.info import describe
from ooc.stores.labels import label_dtype
from ooc.stores.manifest import FORMAT_VERSION, EdgeType, Graphs, Manifest, NodeType
from ooc.stores.metadata import read_manifest, write_manifest


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


PAPER = NodeType(name="paper", count=3, arrays=["x", "y"], task="binary", num_classes=2)
AUTHOR = NodeType(name="author", count=5)
WRITES = EdgeType(name="writes", source="author", target="paper", count=7, columns=["edge_id"])
BACK = EdgeType(name="rev_writes", source="paper", target="author", count=7, columns=["edge_id"], reverse_of=WRITES.key)


def test_a_heterogeneous_manifest_reads_back_and_says_only_what_it_has(tmp_path: Path) -> None:
    manifest = Manifest.heterogeneous([PAPER, AUTHOR], [WRITES, BACK])
    write_manifest(tmp_path, manifest)
    found = read_manifest(tmp_path)
    assert found == manifest
    assert (found.is_hetero, found.format_version, found.num_nodes, found.num_edges) == (True, 2, 8, 14)
    assert found.node_type("author").count == 5
    assert found.edge_type(BACK.key).reverse_of == WRITES.key
    written = manifest.as_json()
    assert not {"task", "columns", "weighted"} & set(written)
    assert set(written["node_types"][1]) == {"name", "count", "id_kind", "arrays", "splits"}
    with pytest.raises(StoreError, match="no node type 'venue': there are paper, author"):
        manifest.node_type("venue")
    with pytest.raises(StoreError, match="no edge type a:b:c: there are author:writes:paper"):
        manifest.edge_type(("a", "b", "c"))


def test_a_homogeneous_manifest_has_the_bytes_it_had() -> None:
    text = (
        b'{"columns":["edge_id","weight"],"created_by":"","edge_types":[{"count":7,"name":"edge","source":"node","target":"node"}'
        b'],"fingerprints":{"edges":"ab"},"format_version":1,"has_self_loops":false,"node_types":[{"arrays":["x","y"],"count":5,'
        b'"id_kind":"str","name":"node","ranges":[[0,5]],"splits":{"train":2}}],"num_classes":3,"num_edges":7,"num_nodes":5,'
        b'"task":"multiclass","undirected":false,"weighted":true}'
    )
    assert sample().canonical() == text


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, 1),
        ({"task": "binary", "num_classes": 2}, 1),
        ({"task": "regression", "num_classes": 1}, 2),
        ({"graphs": Graphs(count=3)}, 2),
        ({"edge_types": [EdgeType(count=7, arrays=["msg"])]}, 1),
        ({"edge_types": [EdgeType(count=7, arrays=["y"], task="binary", num_classes=2)]}, 2),
        ({"edge_types": [EdgeType(count=7, arrays=["split"], splits={"train": 3})]}, 2),
    ],
)
def test_a_new_store_has_the_format_that_knows_what_it_holds(tmp_path: Path, changes: dict[str, Any], version: int) -> None:
    """An older ooc then asks for an upgrade. A store that says 1 all the same, as they once did, opens and stays as it is."""
    manifest = sample().model_copy(update=changes)
    assert manifest.as_new().format_version == version
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    write_manifest(tmp_path, manifest.as_new())
    assert read_manifest(tmp_path) == manifest.as_new()


def test_stores_are_written_in_that_format(tmp_path: Path) -> None:
    graph, y = Graph.from_edges([0, 1], [2, 2], 3), np.array([0.5, 1.5, 2.5])
    target = write_store(tmp_path / "numbers.ooc", graph, y=y, task="regression", num_classes=1)
    plain = write_store(tmp_path / "plain.ooc", graph, y=np.array([0, 1, 0]), task="binary", num_classes=2)
    assert [describe(path)["format_version"] for path in (target, plain)] == [2, 1]


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        ([PAPER, PAPER], []),
        ([PAPER, AUTHOR], [WRITES, WRITES]),
        ([PAPER], [WRITES]),
        ([PAPER, AUTHOR], [BACK]),
    ],
)
def test_types_that_do_not_fit_are_refused(nodes: list[NodeType], edges: list[EdgeType]) -> None:
    with pytest.raises(ValidationError):
        Manifest.heterogeneous(nodes, edges)


@pytest.mark.parametrize("ranges", [[(0, 2), (1, 2)], [(1, 3), (0, 1)], [(0, 2)]])
def test_ranges_are_all_nodes(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValidationError):
        NodeType(ranges=ranges, count=3)


@pytest.mark.parametrize("name", ["", "a__b", "a:b", "a/b", "a=b", "_a", "a_", "..", "x" * 81, "a\nb"])
def test_names_that_are_no_types(name: str) -> None:
    with pytest.raises(InputError, match="choose another"):
        check_type_name(name)
    with pytest.raises(InputError):
        parse_edge_type(f"{name}:writes:paper")


def test_edge_types_as_on_the_command_line() -> None:
    assert parse_edge_type("field_of_study:rev_has:paper") == ("field_of_study", "rev_has", "paper")
    with pytest.raises(InputError, match="write it SOURCE:NAME:TARGET"):
        parse_edge_type("author:paper")


@pytest.mark.parametrize(("classes", "dtype"), [(2, "i1"), (128, "i1"), (129, "i2"), (40_000, "i4")])
def test_labels_take_the_smallest_type_that_holds_every_class_and_minus_one(classes: int, dtype: str) -> None:
    assert label_dtype("multiclass", classes) == np.dtype(dtype)
    assert {-1, classes - 1} == set(np.array([-1, classes - 1], label_dtype("multiclass", classes)).tolist())
    assert label_dtype("binary", 2) == label_dtype("multilabel", classes) == np.int8
