"""Batches over features of every type are those of the values in memory, through windows and without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.loading.collate import Gather
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.pyg.remote_backend import OocFeatureStore
from ooc.runtime.buffers import Buffers
from ooc.stores.arrays.encoding import DTYPE, SCALE, Encoding, scale_of, to_bfloat16, to_int8
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.dataset import Dataset
from ooc.stores.ingest import IngestSpec, ingest
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.batches import same
from tests.ooc.runs import configure, curve
from tools.graphs.make_graph import make_graph

N, F = 300, 21
TYPES = ["float32", "float16", "bfloat16", "int8"]


def write_features(folder: Path, kind: str, x: Any) -> tuple[Path, Any]:
    """The array `folder/x` of that type, and what its rows mean."""
    if kind == "bfloat16":
        write_array(folder, "x", to_bfloat16(x), {DTYPE: kind})
        return folder / "x", torch.from_numpy(x).bfloat16().float().numpy()
    if kind == "int8":
        scale = scale_of(np.abs(x).max(axis=0))
        write_array(folder, "x", to_int8(x, scale), {DTYPE: kind, SCALE: "x_scale"})
        write_array(folder, "x_scale", scale)
        return folder / "x", (np.clip(np.rint(x / scale.astype(float)), -127, 127) * scale.astype(float)).astype(np.float32)
    write_array(folder, "x", x.astype(kind))
    return folder / "x", x.astype(kind).astype(np.float32)


@pytest.fixture
def x() -> Any:
    return np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_batches_hold_the_values_through_windows_and_from_memory(
    make_store: MakeStore, tmp_path: Path, x: Any, kind: str, dtype: Any
) -> None:
    store = make_store(num_nodes=N, num_edges=1500, x=x)
    source, values = write_features(tmp_path, kind, x)
    want = torch.from_numpy(values).to(dtype or torch.float32)

    def batches(**options: Any) -> list[Any]:
        with Dataset.open(store, features={"x": source}, **options) as ds:
            return list(NeighborLoader(ds, [4, 3], batch_size=40, shuffle=True, seed=2, dtype=dtype))

    in_superbatches, held = batches(), batches(in_memory=True)
    assert same(in_superbatches, held)
    assert len(in_superbatches) == 8
    for batch in in_superbatches:
        assert batch.x.dtype == want.dtype
        assert torch.equal(batch.x, want[batch.n_id])


@pytest.mark.parametrize("kind", TYPES)
def test_windows_keep_rows_as_they_are_stored(make_store: MakeStore, tmp_path: Path, x: Any, kind: str) -> None:
    store = make_store(num_nodes=N, num_edges=1500, x=x)
    source, _ = write_features(tmp_path, kind, x)
    with Dataset.open(store, features={"x": source}) as ds:
        loader = NeighborLoader(ds, [4, 3], batch_size=40)
        itemsize = {"float32": 4, "int8": 1}.get(kind, 2)
        assert loader.strategy.disk_rows.row_bytes == F * itemsize
        labels = 8
        assert loader.strategy.memory.row_bytes == F * 4 + labels  # a batch holds the values once
        asked = NeighborLoader(ds, [4, 3], dtype=torch.float64)
        assert asked.strategy.memory.row_bytes == F * (4 + 8) + labels
        stored = NeighborLoader(ds, [4, 3], dtype={"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kind))
        assert stored.strategy.memory.row_bytes == F * (itemsize if itemsize == 2 else 4) + labels


@pytest.mark.parametrize("kind", TYPES)
def test_pygs_feature_store_gives_the_values(make_store: MakeStore, tmp_path: Path, x: Any, kind: str) -> None:
    store = make_store(num_nodes=N, num_edges=1500, x=x)
    source, values = write_features(tmp_path, kind, x)
    with Dataset.open(store, features={"x": source}) as ds:
        got = OocFeatureStore(ds).get_tensor(group_name=None, attr_name="x", index=torch.tensor([7, 299, 7]))
        assert torch.equal(got, torch.from_numpy(values[[7, 299, 7]]))


@pytest.mark.slow
def test_training_on_short_types_scores_as_on_float32(tmp_path: Path) -> None:
    make_graph(tmp_path, nodes=1500, edges=9000, features=16, classes=5, kind="communities", seed=1)
    scores, curves = {}, set()
    for kind in TYPES:
        store = tmp_path / f"{kind}.ooc"
        parts = {name: tmp_path / f"{name}.npy" for name in ("train", "val", "test")}
        edges, features = f"{tmp_path}/edges/*.parquet", [f"x={tmp_path}/x.npy"]
        ingest(
            IngestSpec(
                out=store, edges=edges, features=features, labels=tmp_path / "y.npy", num_nodes=1500, dtype=kind, **parts
            )
        )
        settings = {"hidden": 32, "fanout": [5, 5], "batch_size": 128, "epochs": 6, "lr": 0.01}
        scores[kind] = train(configure(store, tmp_path / f"run-{kind}", **settings))["metrics"]["test"]["accuracy"]
        curves.add(curve(tmp_path / f"run-{kind}"))
    assert len(curves) == len(TYPES)  # other features, other losses
    assert scores["float32"] > 0.7
    assert min(scores.values()) > scores["float32"] - 0.03


def test_whole_numbers_without_scales_stay_so(make_store: MakeStore) -> None:
    whole = np.arange(N * 3, dtype=np.int64).reshape(N, 3).astype(np.int8)
    with Dataset.open(make_store(num_nodes=N, x=whole)) as ds:
        batch = next(iter(NeighborLoader(ds, [2], batch_size=8)))
        assert torch.equal(batch.x, torch.from_numpy(whole)[batch.n_id])


def test_what_is_stored_as_asked_for_is_not_copied() -> None:
    half = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float16)
    gather = Gather(Encoding.plain(half.dtype), torch.float16)
    taken = gather.take(half, np.arange(50, dtype=np.int32), Buffers(1))
    assert gather.tensor(taken).data_ptr() == taken.ctypes.data
    assert gather.row_bytes((4,)) == 8
