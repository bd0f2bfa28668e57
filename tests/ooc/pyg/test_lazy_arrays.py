"""Data sets whose arrays are read a slice at a time: Zarr's, and objects that make their rows."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.stores.errors import InputError
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.ingest.lazy import LazyArray

NODES, EDGES = 500, 4000


class Made:
    """An array that says how many items were read at a time."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype, self.most = array, array.shape, array.dtype, 0

    def __getitem__(self, key: Any) -> Any:
        found = self.array[key]
        self.most = max(self.most, found.size)
        return found


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((NODES, 8)).astype(np.float16),
        "edge_index": rng.integers(0, NODES, (2, EDGES)),
        "y": rng.integers(-1, 5, NODES),
        "train_idx": rng.permutation(NODES)[:60],
        "pos": rng.standard_normal((NODES, 3)).astype(np.float32),
        "edge_attr": rng.standard_normal((EDGES, 2)).astype(np.float32),
    }


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def store(path: Path, given: dict[str, Any], **settings: Any) -> dict[str, bytes]:
    with pytest.warns(UserWarning, match="stored"), ooc.from_data(Data(**given), path, dtype="float16", **settings):
        pass
    return tree(path)


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", ["zarr", "made", "made [E, 2]", "with weights"])
def test_the_store_is_that_of_arrays_in_memory(tmp_path: Path, form: str) -> None:
    held = arrays() | ({"edge_weight": np.random.default_rng(1).random(EDGES, np.float32)} if form == "with weights" else {})
    want = store(tmp_path / "want.ooc", {name: torch.from_numpy(array) for name, array in held.items()})
    held |= {"edge_index": held["edge_index"].T} if form == "made [E, 2]" else {}
    given: dict[str, Any] = {name: Made(array) for name, array in held.items()}
    if form == "zarr":
        group = zarr.open_group(tmp_path / "in.zarr", mode="w")
        given = {name: group.create_array(name, data=array) for name, array in held.items()}
    assert store(tmp_path / "got.ooc", given) == want


def test_nothing_is_read_whole_or_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ooc.stores.ingest.lazy.BATCH_EDGES", "ooc.stores.ingest.nodes.BLOCK_BYTES"):
        monkeypatch.setattr(name, 640)
    monkeypatch.setattr("ooc.stores.ingest.lazy.SAMPLE_ROWS", 8)
    given = {name: Made(array) for name, array in arrays().items() if name in ("x", "edge_index")}
    staged: set[str] = set()

    def watch(step: str, done: int, total: int | None, unit: str = "rows") -> None:
        staged.update(path.name for path in (tmp_path / "s.ooc.partial" / "stage").rglob("*") if path.is_file())

    with ooc.open(ooc.from_data(Data(**given), tmp_path / "s.ooc", progress=watch).path):
        pass
    assert staged == {"num_nodes.npy"}
    assert {name: made.most for name, made in given.items()} == {"x": 320, "edge_index": 1280}


def test_an_object_that_is_not_what_it_says_is_named(tmp_path: Path) -> None:
    held = arrays()
    short, wide = Made(held["edge_index"]), Made(held["x"])
    short.shape, wide.dtype = (2, EDGES + 5), np.dtype(np.float32)
    with pytest.raises(InputError, match=r"data\.edge_index\[:, 3749:4005\] is int64 \[2, 251\], .* say int64 \[2, 256\]"):
        ooc.from_data(Data(edge_index=short, num_nodes=NODES), tmp_path / "s.ooc")
    with pytest.raises(InputError, match=r"data\.x\[0:256\] is float16 \[256, 8\], but its shape and dtype say float32"):
        ooc.from_data(Data(edge_index=Made(held["edge_index"]), x=wide), tmp_path / "s.ooc")


def test_what_an_object_raises_reaches_the_caller(tmp_path: Path) -> None:
    class Broken(Made):
        def __getitem__(self, key: Any) -> Any:
            if key[1].stop == EDGES and key[1].start == 0:  # a batch of all, not a sample
                raise LookupError("the cluster is gone")
            return super().__getitem__(key)

    with pytest.raises(LookupError, match="the cluster is gone"):
        ooc.from_data(Data(edge_index=Broken(arrays()["edge_index"]), num_nodes=NODES), tmp_path / "s.ooc")


@pytest.mark.parametrize("by", [NODES, -2 * NODES])
def test_edges_that_are_others_when_they_are_read_again_are_named(tmp_path: Path, by: int) -> None:
    class Unsteady(Made):
        whole = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            self.whole += found.shape == (2, EDGES)  # not a sample
            return found + by if self.whole > 1 else found

    with pytest.raises(InputError, match=rf"an edge ends at node -?\d+ of {NODES} .*: give the same edges each time"):
        ooc.from_data(Data(edge_index=Unsteady(arrays()["edge_index"]), num_nodes=NODES), tmp_path / "s.ooc")


def test_an_interruption_while_edges_are_sorted_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ooc.stores.ingest.key_sort._Ranges.add", interrupted)
    monkeypatch.setattr("ooc.stores.ingest.duck.MOST_ROOM", 10_000)
    with pytest.raises(KeyboardInterrupt):
        ooc.from_data(Data(edge_index=Made(arrays()["edge_index"]), num_nodes=NODES), tmp_path / "s.ooc")


def test_an_interrupted_ingest_goes_on_with_the_same_arrays(tmp_path: Path) -> None:
    held = {name: LazyArray(Made(array)) for name, array in arrays().items() if name in ("x", "edge_index", "y")}
    spec, done = IngestSpec(out=tmp_path / "s.ooc", pyg="data"), []

    def stop(step: str, *_: Any, **__: Any) -> None:
        if step == "features x":
            raise KeyboardInterrupt

    for given, resumed in ((held, True), (held | {"x": LazyArray(Made(arrays()["x"] + 1))}, False)):
        with pytest.raises(KeyboardInterrupt):
            ingest(spec, stop, held)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = ingest(spec, None, given)
        done.append("graph" in result.resumed)
        assert done[-1] == resumed
        assert any("is discarded" in str(each.message) for each in said) != resumed
        with ooc.open(spec.out) as ds:
            np.testing.assert_array_equal(ds.rows("x").shape, (NODES, 8))
            want = np.asarray(given["x"][:NODES], np.float32)
            out = np.empty((NODES, 8), np.float32)
            ds.rows("x").read(np.arange(NODES), out)
            np.testing.assert_array_equal(out, want)
        (tmp_path / "s.ooc").rename(tmp_path / f"s{len(done)}.ooc")


def test_a_heterogeneous_graph_takes_them_too(tmp_path: Path) -> None:
    held, stores = arrays(), []
    for form in (torch.from_numpy, Made):
        data = HeteroData()
        data["paper"].x, data["author"].num_nodes = form(held["x"]), NODES
        data["author", "writes", "paper"].edge_index = form(held["edge_index"])
        with ooc.from_data(data, tmp_path / f"{form.__name__}.ooc") as ds:
            stores.append(tree(ds.path))
    assert stores[0] == stores[1]
