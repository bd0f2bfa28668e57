"""Parts of a store (`graph/parts`), and reading ranges of rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores import array_names as names
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender, write_array
from ooc.stores.build import judge
from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError, StoreError
from ooc.stores.fingerprints import fingerprint
from ooc.stores.graph import Graph
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from ooc.stores.manifest import Partition
from tests.conftest import MakeStore

PARTS = [0, 10, 11, 50]


def test_parts_come_back_with_what_they_are_worth(make_store: MakeStore) -> None:
    path = make_store(parts=PARTS)
    with Dataset.open(path) as ds, Dataset.open(path, in_memory=True) as loaded:
        for each in (ds, loaded):
            assert each.graph.parts is not None
            assert each.graph.parts.tolist() == PARTS
        target = np.repeat(np.arange(50), np.diff(ds.graph.indptr))
        of = np.searchsorted(PARTS, np.arange(50), side="right")
        cut = float((of[ds.graph.indices] != of[target]).mean())
        assert ds.manifest.partition == Partition(parts=3, method="given", cut=cut, balance=39 / (50 / 3))
        assert judge(ds.graph, np.array([0, 50]), "given").cut == 0
    assert verify(path) == []
    assert describe(path)["partition"]["parts"] == 3
    with Dataset.open(make_store("plain.ooc")) as ds:
        assert ds.graph.parts is None
    assert "partition" not in json.loads((ds.path / "zarr.json").read_bytes())["attributes"]["ooc"]
    assert fingerprint(ds.path) != fingerprint(path)


@pytest.mark.parametrize("parts", [[0, 10], [1, 50], [0, 10, 10, 50], [0, 20, 10, 50], [0], [[0, 50]]])
def test_parts_that_do_not_divide_the_nodes_are_refused(make_store: MakeStore, parts: Any) -> None:
    with pytest.raises(InputError, match="parts must increase from 0 to the number of nodes, 50"):
        make_store(parts=parts)


def test_damaged_parts_are_named(make_store: MakeStore) -> None:
    path = make_store(parts=PARTS)
    for place in ("graph/parts", "checksums/graph/parts"):
        (path / place / "zarr.json").unlink()
    write_array(path, names.PARTS, np.array([0, 30, 20, 50]))
    with pytest.raises(StoreError, match=r"graph/parts is damaged: parts must increase"):
        Dataset.open(path)
    for place in ("graph/parts", "checksums/graph/parts"):
        (path / place / "zarr.json").unlink()
    write_array(path, names.PARTS, np.array([0, 50]))
    assert [damage.array for damage in verify(path)] == ["graph/parts"]
    with pytest.raises(StoreError, match=r"graph/parts is damaged: its zarr\.json does not match its checksum"):
        Dataset.open(path)


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path, values = tmp_path_factory.mktemp("ranges"), np.arange(40_000 * 3, dtype=np.int32).reshape(40_000, 3)
    with Appender(path, "a", (3,), np.int32, chunk_bytes=2**14, shard_bytes=2**16) as appender:
        appender.append(values)
    return path, values


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["auto", "pread", "mmap"]), st.integers(0, 40_000), st.integers(0, 40_000))
def test_a_range_is_the_rows_of_it(array: tuple[Path, np.ndarray], engine: str, one: int, other: int) -> None:
    (path, values), (first, last) = array, sorted((one, other))
    rows = open_zarr_rows(path, "a", engine)
    found, nbytes = read_range(rows, first, last)
    assert found.dtype == values.dtype
    assert np.array_equal(found, values[first:last])
    assert (last - first) * 12 <= nbytes <= (last - first) * 12 + 2 * 4096
    rows.close()
    assert np.array_equal(read_range(ArrayRows(values), first, last)[0], values[first:last])


def test_a_range_beyond_the_rows_is_refused(array: tuple[Path, np.ndarray]) -> None:
    rows = open_zarr_rows(array[0], "a", "pread")
    for first, last in ((-1, 3), (5, 4), (0, 40_001)):
        for each in (rows, ArrayRows(array[1])):
            with pytest.raises(IndexError, match="out of range: there are 40000 rows"):
                read_range(each, first, last)
    rows.close()


def test_a_graph_from_arrays_takes_parts() -> None:
    graph = Graph.from_arrays([0, 1, 2], [1, 0], parts=[0, 1, 2])
    assert graph.in_memory().parts is not graph.parts
    assert graph.topology_bytes == 3 * 8 + 2 * 4 + 3 * 8
