"""A first layer's sums made while loading: by the definitions in float64, the model on rows, and rows in file order."""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ooc.graph import aggregation as sums
from ooc.graph.aggregation import (
    FirstLayerAggregates,
    PreAggregation,
    RowDecoder,
    gathered,
    scale_rows,
    scatter_aggregates,
    take_rows,
    without_last_hop,
)
from ooc.loading.batch_bytes import ScanBytes
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.shared_scan import SharedScans
from ooc.loading.shared_scan_plan import ScanDraft
from ooc.models.builders import Model, build_model
from ooc.models.convs import BlockSAGEConv
from ooc.models.layers import Layer
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import divide
from ooc.sampling import NeighborSampler
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.ooc.graphs import hub_graph
from tests.ooc.loading.test_feature_gather import TYPES, write_features

N, F = 120, 20
KINDS = ["mean", "sum", "expanded", "gcn"]


def graph_of(weighted: bool, loops: bool) -> Graph:
    """With a hub of more than 64 in-edges, nodes without any, duplicate edges and, of the weights, some 0."""
    src, dst = hub_graph(N, loops=loops).numpy()
    if not weighted:
        return Graph.from_edges(src, dst, N)
    rng = np.random.default_rng(1)
    weight = rng.exponential(size=len(src)) * (rng.random(len(src)) < 0.8)
    return Graph.from_edges(src, dst, N, weight=weight.astype(np.float32))


def degrees(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """float64[N]: GCN's degree of every node in the whole graph, its own loop's weight counted in, and that weight."""
    degree, loop = np.zeros(N), np.ones(N)
    weight = graph.columns.get("weight", np.ones(graph.num_edges))
    for v in range(N):
        for slot in range(*graph.slots(v)):
            if graph.indices[slot] != v:
                degree[v] += weight[slot]
            elif "weight" in graph.columns:
                loop[v] = weight[slot]  # the last one's
    return degree + loop, loop


def by_definition(graph: Graph, found: Any, x: np.ndarray, kind: str) -> np.ndarray:
    """float64[d, f]: each destination's sum, edge by edge."""
    x, neighbor = x.astype(np.float64), np.zeros((len(found.indptr) - 1, x.shape[1]))
    degree, _ = degrees(graph)
    for i in range(len(neighbor)):
        edges = range(found.indptr[i], found.indptr[i + 1])
        v = found.node[i]
        first, stop = graph.slots(v)
        for k in edges:
            source = found.node[found.source[k]]
            value = (stop - first) / len(edges) if found.stands_for is None else float(found.stands_for[k])
            if kind in ("mean", "sum"):
                value = 1 / len(edges) if kind == "mean" else 1
            if kind == "gcn" and source == v:
                value = 0
            if kind == "gcn" and value and degree[source] > 0 and degree[v] > 0:
                value *= (degree[source] * degree[v]) ** -0.5
                value *= graph.columns["weight"][found.slot[k]] if "weight" in graph.columns else 1
            elif kind == "gcn":
                value = 0
            neighbor[i] += value * x[source]
    return neighbor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weighted", "loops", "drawn_by", "replace"),
    [
        (False, False, None, False),
        (False, True, None, True),
        (True, True, None, False),
        (True, True, "weight", False),
        (True, False, "weight", True),
    ],
)
def test_sums_are_what_the_definitions_say(kind: Any, weighted: bool, loops: bool, drawn_by: Any, replace: bool) -> None:
    graph = graph_of(weighted, loops)
    x = np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)
    if kind == "gcn":
        assert np.allclose(
            degrees(graph)[0],
            (graph.degree(np.arange(N)) - graph.loops(np.arange(N)) if graph.weight_sum is None else graph.weight_sum)
            + degrees(graph)[1],
        )
    for fanout, seeds in ([3], [0, 1, 2, 3, 7, 119]), ([2, 3], [118, 0]), ([-1, -1] if not replace else [90, 5], [0, 119, 5]):
        found = NeighborSampler(graph, fanout, replace, drawn_by).sample(np.array(seeds), 4)
        assert (found.stands_for is None) == (drawn_by is None)
        neighbor, self_row = np.full((2, len(found.indptr) - 1, F), np.nan, np.float32)
        factors = PreAggregation(kind, 8).factors(graph, found)
        gathered(x, RowDecoder.of(Encoding.plain(x.dtype)), found.node, found, factors, neighbor, self_row)
        assert np.array_equal(self_row, x[found.node[: len(self_row)]])
        np.testing.assert_allclose(neighbor, by_definition(graph, found, x, kind), rtol=2e-5, atol=2e-5)


def test_the_rest_is_what_the_hops_before_would_have_drawn() -> None:
    graph = graph_of(weighted=True, loops=True)
    seeds = np.array([0, 5, 7, 119])
    for fanout in [4], [4, 3], [4, 3, 2]:
        found = NeighborSampler(graph, fanout, weight="weight").sample(seeds, 9)
        rest = without_last_hop(found)
        assert rest.node.tolist() == found.node[: len(found.indptr) - 1].tolist()
        assert not any(np.shares_memory(getattr(rest, name), getattr(found, name)) for name in ("node", "source", "slot"))
        if len(fanout) > 1:
            fewer = NeighborSampler(graph, fanout[:-1], weight="weight").sample(seeds, 9)
            for name in ("node", "indptr", "source", "slot", "stands_for"):
                assert np.array_equal(getattr(rest, name), getattr(fewer, name))
            assert (rest.num_nodes, rest.num_edges) == (fewer.num_nodes, fewer.num_edges)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: Any) -> Iterator[dict[str, Dataset]]:
    """Graphs with features in memory, by name."""
    folder = tmp_path_factory.mktemp("sums")
    x = np.random.default_rng(3).standard_normal((N, F), dtype=np.float32)
    opened = {}
    for name, weighted in ("plain", False), ("weighted", True):
        path = write_store(folder / f"{name}.ooc", graph_of(weighted, loops=True), x=x)
        opened[name] = Dataset.open(path, in_memory=True)
    for kind in TYPES[1:]:
        source, _ = write_features(folder / kind, kind, x)
        opened[kind] = Dataset.open(folder / "weighted.ooc", in_memory=True, features={"x": source})
    opened["float32"] = opened["weighted"]
    yield opened
    for ds in opened.values():
        ds.close()


def outcome(model: Model, batch: Any) -> list[torch.Tensor]:
    """The seeds' rows and the parameters' gradients."""
    model.zero_grad()
    out = model(batch.x, batch.blocks)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach().float(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["sage", "gin", "gcn"])
@pytest.mark.parametrize("data", ["plain", "weighted", "drawn by weight"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(("residual", "norm"), [(False, "none"), (True, "batch"), (True, "layer")])
def test_models_make_of_sums_what_they_make_of_rows(
    sets: Any, name: str, data: str, num_layers: int, residual: bool, norm: Any
) -> None:
    torch.manual_seed(1)
    model = build_model(name, F, 16, 16, num_layers, residual=residual, norm=norm, dropout=0.0)
    pre_aggregation = pre_aggregation_of(model)
    assert pre_aggregation is not None
    options: dict[str, Any] = {"batch_size": 30, "seed": 7, "weight_attr": "weight" if data == "drawn by weight" else None}

    def batches(**more: Any) -> Any:
        return NeighborLoader(sets["plain" if data == "plain" else "weighted"], [4, 3, 2][:num_layers], **options, **more)

    for with_sums, with_rows in islice(zip(batches(pre_aggregation=pre_aggregation), batches(), strict=True), 2):
        assert isinstance(with_sums.x, FirstLayerAggregates)
        assert with_sums.x.size(0) == with_sums.num_nodes == with_rows.blocks[0].num_dst
        assert len(with_sums.blocks) == num_layers
        got, want = outcome(model, with_sums), outcome(model, with_rows)
        assert len(got) == len(want) == 1 + len(list(model.parameters()))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-5 * max(1.0, float(b.abs().max())))
        with torch.autocast("cpu", torch.bfloat16):
            short = outcome(model, with_sums)
        assert float((short[0] - want[0]).norm()) < 0.1 * float(want[0].norm())
        assert all(bool(part.isfinite().all()) for part in short)


def test_recomputing_and_double_precision_take_sums(sets: Any) -> None:
    torch.manual_seed(1)
    model = build_model("sage", F, 16, 16, 2, norm="batch").double()
    batch = next(iter(NeighborLoader(sets["plain"], [4, 3], batch_size=30, pre_aggregation=pre_aggregation_of(model))))
    whole, again = model(batch.x, batch.blocks), model(batch.x, batch.blocks, checkpoint=True)
    assert whole.dtype == torch.float64
    assert torch.equal(whole, again)


def test_models_that_need_the_rows_say_so() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build_model("sage", F, 16, 4, 2).layers

    class OwnForward(Model):
        def forward(self, x: Any, blocks: Any, checkpoint: bool = False) -> Any:
            return super().forward(x * 2, blocks, checkpoint)

    class OwnConv(BlockSAGEConv):
        def forward(self, x: Any, block: Any) -> Any:
            return super().forward(x * 2, block)

    assert pre_aggregation_of(Model([Layer(BlockSAGEConv(F, 16), F, 16)])) == PreAggregation("mean", 16)
    assert pre_aggregation_of(build_model("sage", F, 16, 4, 2, dropout=0.5)) == PreAggregation("mean", 16)
    assert pre_aggregation_of(build_model("gin", F, 16, 4, 2, rescale=False)) == PreAggregation("sum", 16)
    assert pre_aggregation_of(build_model("gin", 500, 16, 4, 2)) == PreAggregation("expanded", 16)
    assert pre_aggregation_of(build_model("gcn", F, 16, 4, 2, dropout=0.5, input_dropout=0.0)) == PreAggregation("gcn", 16)
    for model in (
        build_model("gat", F, 16, 4, 2),
        build_model("sage", F, 16, 4, 2, input_dropout=0.1),
        build_model("gcn", F, 16, 4, 2, dropout=0.5),
        build_model("gcn", F, 16, 4, 2, rescale=False),
        build_model("sage", 500, 8, 4, 2),
        build_model("gcn", 500, 8, 4, 2),
        Own(),
        OwnForward([Layer(BlockSAGEConv(F, 16), F, 16)]),
        Model([Layer(OwnConv(F, 16), F, 16)]),
        nn.Linear(2, 2),
    ):
        assert pre_aggregation_of(model) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rows_that_are_not_float32_are_not_summed(sets: Any, dtype: torch.dtype) -> None:
    loader = NeighborLoader(sets["float32"], [3], batch_size=10, dtype=dtype, pre_aggregation=PreAggregation("mean", 8))
    assert next(iter(loader)).x.dtype == dtype


@pytest.mark.parametrize("stored", ["float64", "int8", "int64"])
def test_features_stored_as_other_numbers_are_not_summed_though_float32_is_wanted(tmp_path: Any, stored: str) -> None:
    whole = np.arange(N * F).reshape(N, F).astype(stored)
    with Dataset.open(write_store(tmp_path / "t.ooc", graph_of(False, False), x=whole)) as ds:
        for dtype in torch.float32, None:
            batch = next(iter(NeighborLoader(ds, [3], batch_size=10, dtype=dtype, pre_aggregation=PreAggregation("mean", 8))))
            want = torch.from_numpy(whole)[batch.n_id]
            assert torch.equal(batch.x, want if dtype is None else want.to(dtype))


@pytest.mark.cases(1)
@pytest.mark.parametrize("stored", ["int8", "int64"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_integers_given_as_floats_are_summed(tmp_path: Any, stored: str, in_memory: bool) -> None:
    whole, found = (np.arange(N * F) % 100).reshape(N, F).astype(stored), []
    for name, x in (("whole", whole), ("float", whole.astype(np.float32))):
        store = write_store(tmp_path / f"{name}.ooc", graph_of(False, False), x=x)
        with Dataset.open(store, in_memory=in_memory, float_features=True) as ds:
            batch = next(iter(NeighborLoader(ds, [3], batch_size=10, seed=0, pre_aggregation=PreAggregation("mean", 8))))
            found.append(batch.x)
    assert [torch.equal(one, other) for one, other in zip(*found, strict=True)] == [True, True]


def scattered(strategy: Any, drawn: list[Any], cuts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """near, root of each batch, made by a sweep over all of them, of pieces that end at `cuts`."""
    memory, load = ScanBytes(1 << 60, strategy.memory), strategy.stages.load
    draft = ScanDraft(1 << 60, memory.self_row_bytes)
    assert all(draft.add(SharedScans(strategy.stages, memory).waiting(each)) for each in drawn)
    scan = draft.finish()
    rows = load.x.array.view(np.uint16) if load.x.dtype == np.float16 else load.x.array
    neighbor, self_rows = np.zeros((scan.num_rows, F), np.float32), np.full((scan.num_self_rows, F), np.nan, np.float32)
    bounds = [0, *sorted({min(cut, len(scan.row)) for cut in cuts}), len(scan.row)]
    for a, b in pairwise(bounds):
        values = rows[scan.row[a:b]].reshape(-1)
        first, stop = int(scan.first[a]), int(scan.first[b])
        at, of_row = np.arange(b - a) * F, scan.first[a : b + 1].astype(np.int64) - first
        target, edge = scan.target[first:stop], scan.edge[first:stop]
        scatter_aggregates(values, *load.decoders[0], at, of_row, target, edge, neighbor, self_rows)
    scale_rows(neighbor, scan.scale)
    return [(neighbor[a:b], self_rows[scan.own[a:b]]) for a, b in zip(scan.start[:-1], scan.start[1:], strict=True)]


@settings(deadline=None, max_examples=60)
@given(
    encoding=st.sampled_from(TYPES),
    kind=st.sampled_from(KINDS),
    fanout=st.sampled_from([[3], [4, 2], [100, 90], [-1]]),
    by_weight=st.booleans(),
    replace=st.booleans(),
    seeds=st.lists(st.integers(0, N - 1), min_size=1, max_size=40),
    batch_size=st.integers(1, 9),
    groups=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    cuts=st.lists(st.integers(0, N), max_size=3),
)
def test_sums_of_rows_that_go_by_are_those_of_rows_in_memory(
    sets: Any, encoding: str, kind: Any, fanout: Any, by_weight: bool, replace: bool, seeds: Any, batch_size: int,
    groups: Any, cuts: Any,
) -> None:  # fmt: skip
    """To the bit, whatever the batches that share a sweep, the pieces, and duplicates among the seeds."""
    loader = NeighborLoader(
        sets[encoding],
        [80] if replace and fanout == [-1] else fanout,
        input_nodes=torch.tensor(seeds),
        batch_size=batch_size,
        replace=replace,
        weight_attr="weight" if by_weight and fanout != [-1] else None,
        pre_aggregation=PreAggregation(kind, 8),
        budget=divide(10**9, baseline=0),
    )
    strategy = loader.strategy
    drawn = [strategy.stages.sample.sample(Cursor(0, step)) for step in range(len(loader))]
    want = [strategy.stages.load.load(each).x for each in drawn]
    got, at = [], 0
    for size in groups:
        got += scattered(strategy, drawn[at : at + size], cuts) if at < len(drawn) else []
        at += size
    assert len(got) == len(want)
    for (neighbor, self_row), x in zip(got, want, strict=True):
        assert np.array_equal(neighbor.view(np.uint32), np.asarray(x.neighbor).view(np.uint32))
        assert np.array_equal(self_row.view(np.uint32), np.asarray(x.self_row).view(np.uint32))


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 150), seed=st.integers(0, 99))
def test_edges_stand_in_ascending_order_of_their_source(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    node, source = rng.permutation(50), rng.integers(0, 30, count + 7)
    order = np.empty(count, np.int64)
    sums.put_ascending(node, source, 5, 5 + count, order, np.empty(count, np.int64))
    assert np.array_equal(order, 5 + np.argsort(node[source[5 : 5 + count]], kind="stable"))


@settings(deadline=None)  # the first example may compile a kernel
@given(st.integers(0, 50), st.integers(1, 40), st.sampled_from([np.int32, np.int64]))
def test_rows_are_taken_as_numpy_takes_them(count: int, width: int, dtype: type[np.integer]) -> None:
    rng = np.random.default_rng(count)
    rows, at = rng.random((30, width), np.float32), rng.integers(0, 30, count).astype(dtype)
    out = np.empty((count, width), np.float32)
    take_rows(rows, at, out)
    assert np.array_equal(out, rows[at])
