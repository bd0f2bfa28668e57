"""GraphSAINT's samplers against plain loops, and its normalisation against exact expectations."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.loading.subgraph_loaders import SaintLoader
from ooc.models.convs import BlockSAGEConv
from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling import saint
from ooc.sampling.cluster import Edges
from ooc.sampling.kernels import stream_of, uniform
from ooc.sampling.saint import Draw, SaintCounts, SaintSampler, count, induce, sample_nodes
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import MakeStore
from tests.ooc.batches import same

DRAWS = [Draw("walk", 7, 3), Draw("edge", 9), Draw("node", 11)]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """With hubs, isolated nodes, self-loops and equal edges."""
    size = draw(st.integers(1, 90))
    node = st.one_of(st.integers(0, size - 1), st.just(0), st.just(size - 1))
    edges = draw(st.lists(st.tuples(node, node), max_size=80)) + [(v, v) for v in draw(st.lists(node, max_size=3))]
    return Graph.from_edges([u for u, _ in edges], [v for _, v in edges], size)


def plain_draw(graph: Graph, draw: Draw, number: int) -> list[int]:
    found: set[int] = set()
    pool = [v for v in range(graph.num_nodes) for _ in range(1 + int(graph.degree(np.array([v]))[0]))]
    for i in range(draw.draws):
        stream = np.uint64(stream_of(np.uint64(number), i))
        if draw.kind == "node":
            found.add(pool[int(uniform(stream, 0) * len(pool))])
            continue
        v = int(uniform(stream, 0) * graph.num_nodes)
        found.add(v)
        for step in range(draw.length):
            first, last = graph.slots(v)
            if last > first:
                v = int(graph.indices[first + int(uniform(stream, step + 1) * (last - first))])
            found.add(v)
    return sorted(found)


@settings(deadline=None)
@given(graphs(), st.sampled_from(DRAWS), st.integers(0, 2**64 - 1))
def test_draws_are_the_plain_loops(graph: Graph, draw: Draw, number: int) -> None:
    node, _ = sample_nodes(graph, draw, number, ArrayRows(graph.indices))
    assert node.tolist() == plain_draw(graph, draw, number)
    assert len(node) <= draw.most_nodes


@settings(deadline=None)
@given(graphs(), st.data(), st.sampled_from([1, 5, 2**20]))
def test_an_induced_subgraph_has_the_edges_between_its_nodes(graph: Graph, data: st.DataObject, piece: int) -> None:
    node = np.array(sorted(data.draw(st.sets(st.integers(0, graph.num_nodes - 1)))), np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saint, "PIECE_SLOTS", piece)
        found = induce(graph, node).subgraph
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    kept = np.flatnonzero(np.isin(target, node) & np.isin(graph.indices, node))
    assert found.node.tolist() == node.tolist()
    assert found.slot.tolist() == kept.tolist()
    assert found.node[found.source].tolist() == graph.indices[kept].tolist()
    assert np.repeat(node, np.diff(found.indptr)).tolist() == target[kept].tolist()
    assert (found.num_nodes, found.num_edges) == ((len(node),), (len(kept),))


@pytest.mark.parametrize("engine", ["auto", "pread", "mmap"])
def test_from_disk_it_is_the_one_in_memory(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(saint, "PIECE_SLOTS", 100)
    with Dataset.open(make_store(num_nodes=300, num_edges=4000, weight=True), engine=engine) as ds:
        edges = Edges(ds.edge_rows("indices"), {"weight": ds.edge_rows("weight")})
        for draw in DRAWS:
            plain, read = SaintSampler(ds.graph, draw).draw(5), SaintSampler(ds.graph, draw, edges).draw(5)
            for name in ("node", "indptr", "source", "slot"):
                assert np.array_equal(getattr(plain.subgraph, name), getattr(read.subgraph, name))
            assert np.array_equal(read.subgraph.columns["weight"], ds.graph.columns["weight"][plain.subgraph.slot])
            assert plain.nbytes == 0 < read.nbytes


def test_what_cannot_be_drawn_is_refused() -> None:
    graph = Graph.from_edges(np.arange(100), np.roll(np.arange(100), 1), 100)
    for draw in (Draw("walk", 0), Draw("walk", 3, 0), Draw("edge", 3, 2), Draw("cluster", 3)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            saint.check(draw)
    with pytest.raises(BudgetError, match="sample fewer roots"):
        SaintSampler(graph, Draw("node", 50), max_bytes=100).draw(0)
    damaged = Graph(graph.indptr, np.where(graph.indices == 3, 100, graph.indices).astype(np.int32))
    with pytest.raises(StoreError, match="ooc verify"):
        induce(damaged, np.arange(100))
    with pytest.raises(StoreError, match="ooc verify"):
        SaintSampler(damaged, Draw("walk", 500, 2)).draw(0)


TINY = Graph.from_edges([0, 1, 1, 2, 2, 3, 0, 0, 4, 5], [1, 0, 2, 1, 3, 2, 0, 4, 0, 2], 7)
"""A path 0-1-2-3 both ways, a self-loop, a leaf both ways, an edge one way, an isolated node"""


def counted(folder: Path, draw: Draw, samples: float) -> SaintCounts:
    """Counts of about so many subgraphs."""
    expected = np.mean([len(SaintSampler(TINY, draw).draw(k).subgraph.node) for k in range(200)])
    count(SaintSampler(TINY, draw), folder, 1, samples * expected / TINY.num_nodes, {})
    return SaintCounts.open(folder)


def test_counts_are_the_exact_probabilities(tmp_path: Path) -> None:
    """One edge drawn: v as the root (1/7), or as the neighbor of a root."""
    counts = counted(tmp_path / "c", Draw("edge", 1), 6_000)
    wanted, degree = np.full(7, 1 / 7), np.diff(TINY.indptr)
    for v in range(7):
        for s in range(*TINY.slots(v)):
            if TINY.indices[s] != v:
                wanted[TINY.indices[s]] += 1 / 7 / degree[v]
    assert np.all(np.abs(counts.nodes / counts.samples - wanted) < 4.5 * np.sqrt(wanted / counts.samples))
    draws = [
        SaintSampler(TINY, Draw("edge", 1)).draw(key(1, Purpose.NORMALISE, step=k)).subgraph for k in range(counts.samples)
    ]
    slots = np.bincount(np.concatenate([each.slot for each in draws]), minlength=TINY.num_edges)
    edge = np.empty(TINY.num_edges, np.uint16)
    counts.edges.read(np.arange(TINY.num_edges), edge)
    assert np.array_equal(edge, slots)  # to the last, whatever the threads


def test_a_hub_in_very_many_subgraphs_keeps_its_coefficients() -> None:
    """Edges are counted up to 65,535, nodes further."""
    graph = Graph.from_edges([1, 2, 0], [0, 0, 1], 3)
    counts = SaintCounts(10**6, np.array([800_000, 5, 5], np.uint32), ArrayRows(np.array([65_535, 399, 2], np.uint16)), {})
    found, _ = counts.stands_for(induce(graph, np.arange(3)).subgraph)
    np.testing.assert_allclose(found, [1, 800_001 / 400, 6 / 3], rtol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("draw", [Draw("walk", 2, 2), Draw("edge", 2), Draw("node", 3)], ids=lambda draw: draw.kind)
def test_normalised_batches_are_the_whole_graph_on_average(tmp_path: Path, draw: Draw) -> None:
    """Sums and means over in-edges given that a node is there, and the loss: within the error of so many batches."""
    counts, batches = counted(tmp_path / "c", draw, 8_000), 5_000
    x, loss = np.array([3.0, -1, 4, 1, -5, 9, 2]), np.array([2.0, 7, 1, 8, 2, 8, 1])
    sums: dict[int, list[float]] = {v: [] for v in range(7)}
    losses = []
    for number in range(batches):
        subgraph = SaintSampler(TINY, draw).draw(key(2, Purpose.SAMPLE, step=number)).subgraph
        each = np.bincount(
            np.repeat(np.arange(len(subgraph.node)), np.diff(subgraph.indptr)),
            counts.stands_for(subgraph)[0] * x[subgraph.node[subgraph.source]],
            minlength=len(subgraph.node),
        )
        for v, value in zip(subgraph.node.tolist(), each, strict=True):
            sums[v].append(value)
        losses.append(float((counts.weights(subgraph.node) / 7 * loss[subgraph.node]).sum()))

    def close(values: list[float], wanted: float) -> bool:
        error = np.std(values) / np.sqrt(len(values)) + 0.01 * max(1, abs(wanted))  # and that of the counts
        return bool(abs(np.mean(values) - wanted) < 4 * error)

    for v in range(7):
        assert close(sums[v], x[TINY.indices[slice(*TINY.slots(v))]].sum()), (v, np.mean(sums[v]))
    assert close(losses, loss.mean())


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store(num_nodes=200, num_edges=1500, weight=True)


def test_a_batch_has_its_coefficients_and_the_models_use_them(store: Path, tmp_path: Path) -> None:
    with Dataset.open(store) as ds:
        loader = SaintLoader(ds, "walk", 20, 2, input_nodes="train", num_layers=2, save_dir=tmp_path / "norm", seed=3)
        assert len(loader) == -(-200 // 60)
        counts = None
        for batch in loader:
            counts = counts or SaintCounts.open(tmp_path / "norm")
            node, block = batch.n_id.numpy(), batch.blocks[0]
            assert torch.equal(block.degree, torch.from_numpy(ds.graph.degree(node)))
            assert np.allclose(batch.node_norm * len(ds.split("train")), (counts.samples + 1) / (counts.nodes[node] + 1))
            train = np.isin(node, ds.split("train"))
            assert np.array_equal(batch.input_mask, train)
            assert np.array_equal(batch.y, np.where(train, np.asarray(ds.labels)[node], -1))
            assert torch.equal(batch.edge_norm, block.stands_for)
            assert len(batch.blocks) == 2
            sage = BlockSAGEConv(8, 4)
            near = torch.zeros(len(node), 8)
            factor = (block.stands_for / block.degree[block.edge_index[1]]).unsqueeze(1)
            near.index_add_(0, block.edge_index[1], factor * batch.x[block.edge_index[0]])
            assert torch.allclose(sage(batch.x, block), sage.lin_l(near) + sage.lin_r(batch.x), atol=1e-5)


def test_the_same_batches_whatever_the_threads_the_memory_and_the_engine(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(number: int, **settings: Any) -> list[Any]:
        opened = {name: settings.pop(name) for name in ("engine", "in_memory", "memory") if name in settings}
        with Dataset.open(store, **opened) as ds:
            loader = SaintLoader(ds, "edge", 30, sample_coverage=5, save_dir=tmp_path / str(number), seed=1, **settings)
            return [*loader, *loader]

    want = batches(0)
    for number, each in enumerate([{"engine": "pread"}, {"engine": "mmap"}, {"in_memory": True}, {"sample_threads": 3}], 1):
        assert all(map(same, batches(number, **each), want))
        assert (tmp_path / str(number) / "edges.bin").read_bytes() == (tmp_path / "0/edges.bin").read_bytes()
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 2**62)  # edges stay on disk
    monkeypatch.setattr(saint, "MAPPED_BYTES", 0)  # and their counts
    assert all(map(same, batches(9), want))
    assert (tmp_path / "9/edges.bin").read_bytes() == (tmp_path / "0/edges.bin").read_bytes()


def test_a_state_leads_back_and_the_counts_are_kept(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(ds: Dataset, **more: Any) -> SaintLoader:
        return SaintLoader(ds, "node", 40, save_dir=tmp_path / "norm", **{"seed": 4, **more})

    with Dataset.open(store) as ds:
        loader = make(ds)
        first = list(loader)
        calls: list[Any] = []
        monkeypatch.setattr(saint, "count", lambda *arguments: calls.append(arguments))
        again = make(ds)
        again.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 2})
        assert all(map(same, again, first[2:]))
        assert not calls
        with pytest.raises(ConfigError, match="cannot resume: draws was"):
            SaintLoader(ds, "node", 41, seed=4).load_state_dict(loader.state_dict())
        with pytest.raises(StoreError, match="counts of another sampler, seed or store"):
            next(iter(make(ds, seed=5)))
        (tmp_path / "norm/counts.json").write_text("{")
        with pytest.raises(StoreError, match="are damaged"):
            next(iter(make(ds)))


def test_closing_removes_the_counts_that_nobody_asked_to_keep(store: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Dataset.open(store) as ds:
        loader = SaintLoader(ds, "node", 40, num_steps=2, sample_coverage=1)
        assert len(list(loader)) == 2
        assert list(tmp_path.glob("ooc-saint-*/norm/counts.json"))
        loader.close()
        loader.close()
        assert not list(tmp_path.glob("ooc-saint-*"))
        with pytest.raises(ConfigError, match="is closed"):
            iter(loader)


def test_counts_that_are_kept_serve_loaders_without_a_seed(store: Path, tmp_path: Path) -> None:
    with Dataset.open(store) as ds:
        for _ in range(2):
            assert list(SaintLoader(ds, "node", 40, num_steps=1, sample_coverage=1, save_dir=tmp_path / "norm"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sampler": "cluster"}, "use walk, node or edge"),
        ({"batch_size": 0}, "give at least 1"),
        ({"num_steps": 0}, "num_steps 0"),
        ({"sample_coverage": 0}, "sample_coverage 0"),
        ({"num_layers": 0}, "num_layers"),
        ({"walk_lenght": 3}, "SaintLoader has no argument 'walk_lenght': did you mean 'walk_length'"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(store: Path, arguments: dict[str, Any], error: str) -> None:
    with Dataset.open(store) as ds, pytest.raises(ConfigError, match=error):
        SaintLoader(ds, **arguments)


def test_of_several_threads_one_counts(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real: Callable[..., int] = count

    def counting(*arguments: Any) -> int:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(saint, "count", counting)
    with Dataset.open(store) as ds:
        list(SaintLoader(ds, "walk", 10, save_dir=tmp_path / "norm", sample_threads=4))
    assert calls == [1]
