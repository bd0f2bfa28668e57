"""Edges in a sweep's order and the sums made along them, against plain Python; the planner's choices by hand."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.aggregation import RowDecoder
from ooc.layerwise import edge_tiles as tiles
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.edge_tiles import SOURCE_BITS, SlotReader, Tiles, count_entries, sort_slots
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.pass_plan import LayerShape, LayerwisePlan, ModelShape, plan_layerwise
from ooc.layerwise.row_files import Files
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import MemoryRows, read_range, write_range
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph
from tests.ooc.graphs import hub_graph

N = 150


def graph_of(weighted: bool) -> Graph:
    src, dst = hub_graph(N).numpy()
    weight = np.random.default_rng(0).random(len(src), np.float32)
    return Graph.from_edges(src, dst, N, **({"weight": weight} if weighted else {}))


def dealt(graph: Graph, piece_rows: int, cell_rows: int, folder: Path | None, weighted: bool) -> Tiles:
    weight = ArrayRows(graph.columns["weight"]) if weighted else None
    slots, files = SlotReader(graph, ArrayRows(graph.indices), weight), Files(folder, "auto")
    grid = count_entries(slots, piece_rows, cell_rows)
    entry = files.rows("tiles", (grid.size,), "int64")
    made = Tiles(grid, entry, files.rows("tile-weights", (grid.size,), "float32") if weighted else None)
    done: list[int] = []
    made.fill(slots.parts(), done.append)
    assert done[-1] == graph.num_edges
    return made


def by_definition(graph: Graph, piece: range, targets: range) -> list[tuple[int, int, float]]:
    """(destination, source, weight) of the edges between, by destination, then source, then slot."""
    found = []
    for v in targets:
        if v < graph.num_nodes:
            slots = range(*graph.slots(v))
            weights = graph.columns.get("weight", np.zeros(graph.num_edges))
            found += [(v, int(graph.indices[k]), float(weights[k])) for k in slots if graph.indices[k] in piece]
    return sorted(found, key=lambda edge: edge[:2])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("at_once", [1 << 20, 7])
def test_every_edge_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighted: bool, on_disk: bool, at_once: int
) -> None:
    """With parts of seven slots the hub comes in many, each sorted by itself."""
    monkeypatch.setattr(tiles, "_SLOTS_AT_ONCE", at_once)
    monkeypatch.setattr(tiles, "ENTRIES_AT_ONCE", 5)
    graph = graph_of(weighted)
    made = dealt(graph, 32, 16, tmp_path if on_disk else None, weighted)
    for first, stop in ((0, N), (16, 48), (144, N)):
        found: dict[int, list[Any]] = {}
        for piece, low, high in made.spans(first, stop):
            entry, weight, _ = made.read(low, high)
            assert 0 < len(entry) <= 5
            heft = weight if weighted else np.zeros(len(entry))
            source = (entry & ((1 << SOURCE_BITS) - 1)) + piece * 32
            found.setdefault(piece, []).extend(
                zip((entry >> SOURCE_BITS).tolist(), source.tolist(), heft.tolist(), strict=True)
            )
        for piece in range(-(-N // 32)):
            expected = by_definition(graph, range(piece * 32, piece * 32 + 32), range(first, stop))
            own = found.get(piece, [])
            assert [edge[0] for edge in own] == [edge[0] for edge in expected]
            if at_once > 7:
                assert [edge[:2] for edge in own] == [edge[:2] for edge in expected]
                np.testing.assert_allclose([edge[2] for edge in own], [edge[2] for edge in expected])
            assert sorted(edge[:2] for edge in own) == sorted(edge[:2] for edge in expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=60), min_size=1, max_size=5))
def test_slots_are_sorted_stably(rows: list[list[int]]) -> None:
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    source = np.array([s for row in rows for s in row], np.int64)
    weight = np.arange(len(source), dtype=np.float32)
    expected = [np.argsort(row, kind="stable") + begin for row, begin in zip(rows, indptr, strict=False)]
    order = np.concatenate([part.astype(np.int64) for part in expected])
    after, heft = source.copy(), weight.copy()
    sort_slots(indptr, after, heft)
    np.testing.assert_array_equal(after, source[order])
    np.testing.assert_array_equal(heft, weight[order])


@pytest.mark.parametrize("kind", ["mean", "sum", "gcn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_a_range(tmp_path: Path, kind: Any, weighted: bool, threads: int) -> None:
    graph, x = graph_of(weighted), np.random.default_rng(1).standard_normal((N, 6)).astype(np.float32)
    degree, loop = np.zeros(N), np.ones(N)
    weight = graph.columns.get("weight", np.ones(graph.num_edges))
    for v in range(N):
        for k in range(*graph.slots(v)):
            degree[v] += weight[k] * (graph.indices[k] != v)
            if graph.indices[k] == v and weighted:
                loop[v] = weight[k]
    inverse = 1 / np.sqrt(degree + loop)
    expected = np.zeros((N, 6))
    for v in range(N):
        for k in range(*graph.slots(v)):
            u = graph.indices[k]
            by = 1.0 if kind != "gcn" else inverse[u] * inverse[v] * weight[k] * (u != v)
            expected[v] += by * x[u] / (max(1, graph.degree(np.array([v]))[0]) if kind == "mean" else 1)
    rows = DiskRows.create(tmp_path / "x", x.shape, "float32")
    rows.write(np.arange(N), x)
    stats = IoStats()
    adder = SumKernel(dealt(graph, 32, 16, None, weighted), graph, kind, threads, read=stats.read)
    for source in (rows, ArrayRows(x)):
        for first, stop in ((0, N), (48, 112)):
            near = np.full((stop - first, 6), 7, np.float32)
            adder.add(source, RowDecoder.of(Encoding.plain(x.dtype)), first, stop, near)
            adder.scale(first, near)
            np.testing.assert_allclose(near, expected[first:stop], atol=1e-5)
    assert stats.bytes_read > 0
    adder.close()
    rows.close()


def test_ranges_are_read_and_written_whole(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5000, 3)).astype(np.float32)
    buffers = Buffers(kept=2, direct=True, least_bytes=1)
    for rows in (DiskRows.create(tmp_path / "rows", values.shape, "float32"), MemoryRows.create(values.shape, "float32")):
        for first, stop in ((0, 4096), (4096, 4099), (4099, 5000)):
            part = buffers.empty((stop - first, 3), np.dtype(np.float32))
            part[:] = values[first:stop]
            write_range(rows, first, part)
        for first, stop in ((0, 5000), (17, 18), (4095, 4097), (300, 300)):
            found, nbytes = read_range(rows, first, stop, buffers)
            np.testing.assert_array_equal(found, values[first:stop])
            assert nbytes >= found.nbytes or isinstance(rows, MemoryRows)
        rows.close()


def shape_of(**changes: Any) -> ModelShape:
    layers = (
        LayerShape(128, 256, "mean", (256, 256)),
        LayerShape(256, 256, "mean", (256, 256)),
        LayerShape(256, 32, "mean", (32, 32)),
    )
    return ModelShape(**{**WIDE, "layers": layers, **changes})


WIDE: dict[str, Any] = {"num_nodes": 8_000_000, "num_edges": 80_000_000, "x_bytes": 512, "x_plain": True, "x_width": 128}
WIDE |= {"encoded": 0, "slot_bytes": 8, "out": 32}


def test_the_plan_of_a_large_graph() -> None:
    plan = plan_layerwise(shape_of(), 10**9)
    first, second, third = plan.layers
    assert not plan.in_ram
    assert not plan.mapped
    assert (first.narrow, first.blocks) == (False, 1)
    assert first.rows * 512 <= 10**9 < 2 * first.rows * 512
    assert second.blocks > 1
    assert second.rows >= 8_000_000, "a pass over a block serves every destination"
    assert -(-256 // second.blocks) * 4 * 8_000_000 <= 1.1 * 10**9
    assert (third.narrow, third.blocks) == (True, 1)
    assert plan.nbytes < 90e9
    assert LayerwisePlan.of(asdict(plan)) == plan


def test_more_memory_costs_no_more_bytes() -> None:
    moved = [plan_layerwise(shape_of(), memory).nbytes for memory in (10**8, 3 * 10**8, 10**9, 3 * 10**9, 10**10)]
    assert moved == sorted(moved, reverse=True)
    assert plan_layerwise(shape_of(), 10**11).in_ram
    with pytest.raises(BudgetError, match="give at least"):
        plan_layerwise(shape_of(), 10**5)


def test_features_pass_a_map_only_where_that_saves() -> None:
    narrowing = (LayerShape(128, 8, "gcn", (8, 0)), LayerShape(8, 8, "gcn", (8, 0)))
    assert plan_layerwise(shape_of(layers=narrowing), 10**8).mapped
    assert not plan_layerwise(shape_of(layers=narrowing, x_bytes=60), 10**8).mapped
    assert plan_layerwise(shape_of(encoded=64), 10**9).mapped
    assert plan_layerwise(shape_of(x_plain=False), 10**9).mapped
