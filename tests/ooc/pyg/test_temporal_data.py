"""PyG's TemporalDataLoader over a store's events, against the events in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import TemporalData
from torch_geometric.loader import TemporalDataLoader

import ooc
from ooc.pyg import temporal_data
from ooc.stores.errors import InputError
from tests.conftest import MakeStore
from tests.ooc.temporal_stores import Edges


def in_memory(edges: Edges) -> TemporalData:
    """The same events as PyG has them."""
    src, dst, t = (torch.from_numpy(array) for array in (edges.src, edges.dst, edges.time))
    return TemporalData(src=src, dst=dst, t=t, msg=torch.from_numpy(edges.msg))


def mapped_file(address: int) -> str:
    """The file whose map has this address; "" for other memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *file = line.split(maxsplit=5)
        first, last = (int(each, 16) for each in span.split("-"))
        if first <= address < last:
            return file[0] if file else ""
    return ""


def test_pygs_temporal_loader_gives_the_batches_of_events_in_memory(tmp_path: Path) -> None:
    edges = Edges()
    expected, data = in_memory(edges), temporal_data(edges.store(tmp_path))
    for part, other in zip(data.train_val_test_split(), expected.train_val_test_split(), strict=True):
        torch.manual_seed(0)
        found = list(TemporalDataLoader(part, 64, neg_sampling_ratio=1.0))
        torch.manual_seed(0)
        for batch, wanted in zip(found, TemporalDataLoader(other, 64, neg_sampling_ratio=1.0), strict=True):
            assert {*batch.keys()} == {*wanted.keys()}
            for name in wanted.keys():  # noqa: SIM118, TemporalData iterates over pairs
                assert batch[name].dtype == wanted[name].dtype
                assert torch.equal(batch[name], wanted[name])


def test_columns_are_maps_whose_changes_stay_in_memory(tmp_path: Path) -> None:
    edges = Edges()
    with ooc.open(edges.store(tmp_path)) as ds:
        before = {path: path.read_bytes() for path in ds.path.rglob("*") if path.is_file()}
        data = temporal_data(ds, ["msg"])
        assert {*data.keys()} == {"src", "dst", "t", "msg"}
        assert "/msg/" in mapped_file(data.msg.data_ptr())
        data.msg[3] = 7
        data.t += 1
        assert torch.equal(data.t, torch.from_numpy(edges.time + 1))
        assert (data.msg[3] == 7).all()
        assert torch.equal(temporal_data(ds).msg, torch.from_numpy(edges.msg))
        assert all(path.read_bytes() == content for path, content in before.items())


def test_columns_in_fewer_bits_are_decoded(tmp_path: Path) -> None:
    edges = Edges()
    msg = temporal_data(edges.store(tmp_path, dtype="float16")).msg
    assert msg.dtype == torch.float32
    np.testing.assert_array_equal(msg, edges.msg.astype(np.float16).astype(np.float32))


def test_a_store_without_times_is_refused(make_store: MakeStore) -> None:
    with pytest.raises(InputError, match="has no times"):
        temporal_data(make_store())
