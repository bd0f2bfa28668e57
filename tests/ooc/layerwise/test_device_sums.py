"""Sums that a device makes have the bits of those that the host makes, in both directions, of all kinds."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from ooc.graph.aggregation import RowDecoder
from ooc.layerwise import device_sums
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.device_rows import DeviceRows
from ooc.layerwise.device_sums import DeviceSums
from ooc.layerwise.edge_tiles import EdgeTiles
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.row_files import Files
from ooc.loading.row_pool import stored_tensor
from ooc.runtime.range_io import MemoryRows
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import NODES, store_of
from tests.pretended_cuda import PAGEABLE, SYNC, pretended_cuda

STEP = 41


def slots_of(graph: Graph) -> device_sums.Slots:
    def slots(first: int, stop: int) -> Any:
        part = slice(int(graph.indptr[first]), int(graph.indptr[stop]))
        weight = np.asarray(graph.columns["weight"][part]) if "weight" in graph.columns else None
        return np.asarray(graph.indices[part], np.int64), weight

    return slots


@pytest.mark.parametrize("width", [5, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["sum", "mean", "gcn"])
def test_sums_have_the_bits_of_the_host_s(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, kind: Any, weighted: bool, dtype: Any, width: int
) -> None:
    monkeypatch.setattr(device_sums, "_EDGES_AT_ONCE", 100)
    monkeypatch.setattr(device_sums, "_GATHERED", 300)  # a few columns at a time
    values = np.random.default_rng(1).standard_normal((NODES, width)).astype(dtype)
    code = RowDecoder.of(Encoding.plain(np.dtype(np.float32)))
    with Dataset.open(store_of(make_store, weighted)) as ds:
        files, graph = Files(None, "auto", in_ram=True), ds.graph
        tiles = EdgeTiles(ds, files, 32, 64, IoStats(), weighted=weighted)
        forth = tiles.open(lambda done: None)
        both = forth, tiles.open(lambda done: None, forth)
        with pretended_cuda() as device:
            sums = DeviceSums(graph, slots_of(graph), {kind}, np.dtype(dtype), torch.device("cuda"), STEP)
            rows, waits = DeviceRows.plain(torch.from_numpy(values).pin_memory().cuda(non_blocking=True)), device.counts[SYNC]
            found = {
                back: torch.cat([sums.sum(rows, kind, back, at, min(at + STEP, NODES)) for at in range(0, NODES, STEP)])
                for back in (False, True)
            }
            assert device.counts[SYNC] == waits
            assert device.counts[PAGEABLE] == 0, device.counts.told(PAGEABLE)
            made = {back: each.cpu().numpy() for back, each in found.items()}
        for back in (False, True):
            wanted = np.empty((NODES, width), dtype)
            with closing(SumKernel(both[back], graph, kind, 2, dtype)) as kernel:
                kernel.add(MemoryRows(values), code, 0, NODES, wanted)
                kernel.scale(0, wanted)
            np.testing.assert_array_equal(made[back], wanted)
        files.close()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8"])
def test_stored_rows_are_decoded_as_the_host_decodes_them(make_store: MakeStore, kind: Any) -> None:
    rng, width = np.random.default_rng(1), 7
    plain = rng.standard_normal((NODES, width), dtype=np.float32)
    scale = rng.random(width, np.float32) + 0.1 if kind == "int8" else np.empty(0, np.float32)
    encoding = Encoding(np.dtype({"bfloat16": np.uint16}.get(kind, kind)), kind, scale)
    if kind == "int8":
        stored: Any = rng.integers(-128, 128, (NODES, width)).astype(np.int8)
    elif kind == "float16":
        stored = plain.astype(np.float16)
    else:
        stored = (plain.view(np.uint32) >> 16).astype(np.uint16)
    wanted = np.empty((NODES, width), np.float32)
    encoding.gather(stored, np.arange(NODES), wanted)
    with Dataset.open(store_of(make_store)) as ds, pretended_cuda():
        cuda, graph = torch.device("cuda"), ds.graph
        rows = DeviceRows(stored_tensor(stored, encoding).to(cuda), torch.from_numpy(scale).to(cuda), True, torch.float32)
        decoded = DeviceRows.plain(torch.from_numpy(wanted).to(cuda))
        np.testing.assert_array_equal(rows.read(rows.values).cpu().numpy(), wanted)
        sums = DeviceSums(graph, slots_of(graph), {"sum"}, np.dtype(np.float32), cuda, NODES)
        found, expected = (sums.sum(each, "sum", False, 0, NODES).cpu().numpy() for each in (rows, decoded))
        np.testing.assert_array_equal(found, expected)
