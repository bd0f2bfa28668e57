"""First-layer pre-aggregation by edge type: by its definition, the models on rows, and to the bit wherever the rows are."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from ooc.graph.aggregation import PreAggregation
from ooc.graph.hetero import EdgeKey
from ooc.loading import scan_memory
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.read_strategy import InMemory
from ooc.loading.shared_scan import SharedScans
from ooc.loading.superbatch import Superbatches
from ooc.models.hetero import build_hetero_model
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.models.user_models import forward_batch
from ooc.runtime.memory_plan import divide
from ooc.stores.build import write_hetero_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph
from tests.ooc.batches import same
from tests.waiting import no_threads

F, HIDDEN = 128, 16
COUNTS = {"author": 600, "paper": 900, "topic": 9, "venue": 4}
FEATURED = ("author", "paper")
CITES: EdgeKey = ("paper", "cites", "paper")
WRITES: EdgeKey = ("author", "writes", "paper")
BACK: EdgeKey = ("paper", "rev_writes", "author")
ABOUT: EdgeKey = ("topic", "of", "paper")
HAS: EdgeKey = ("paper", "about", "topic")
NUM_EDGES = {CITES: 2500, WRITES: 2000, BACK: 2000, ABOUT: 800, HAS: 800}
SUMMED = (CITES, WRITES, BACK, HAS)
MEAN = PreAggregation("mean", HIDDEN)


def features_of() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "author": rng.standard_normal((COUNTS["author"], F)).astype(np.float16),
        "paper": rng.standard_normal((COUNTS["paper"], F), np.float32),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, graphs = np.random.default_rng(0), {}
    for key, count in NUM_EDGES.items():
        ends = rng.integers(0, COUNTS[key[0]], count), rng.integers(0, COUNTS[key[2]], count)
        graphs[key] = Graph.from_edges(*ends, COUNTS[key[2]], num_sources=None if key[0] == key[2] else COUNTS[key[0]])
    nodes: dict[str, dict[str, Any]] = {name: {"num_nodes": count} for name, count in COUNTS.items()}
    for name, rows in features_of().items():
        nodes[name]["x"] = rows
    nodes["paper"] |= {"y": rng.integers(0, 4, COUNTS["paper"]), "task": "multiclass", "num_classes": 4}
    return write_hetero_store(tmp_path_factory.mktemp("means") / "s", nodes, graphs)


@pytest.fixture(scope="module")
def ds(path: Path) -> Iterator[Dataset]:
    with Dataset.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def resident(path: Path) -> Iterator[Dataset]:
    with Dataset.open(path, in_memory=True) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_thread_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scan_memory, "GRACE_SECONDS", 0.02)  # most consumers here keep their batches
    yield
    gc.collect()
    assert no_threads()


def budget(batches: int) -> Any:
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=batches // 5, in_flight=batches - 3 * (batches // 5))


def loader_of(ds: Dataset, batches: int = 10**8, **options: Any) -> NeighborLoader:
    given = {"batch_size": 10, "shuffle": True, "seed": 3, "pre_aggregation": MEAN, "budget": budget(batches)} | options
    return NeighborLoader(ds, given.pop("fanout", [4, 3]), ("paper", np.arange(200)), **given)


def test_a_batch_has_the_means_over_edge_types_whose_sources_have_features(resident: Dataset) -> None:
    x, whole = features_of(), list(loader_of(resident, pre_aggregation=None))
    for batch, rows in zip(loader_of(resident), whole, strict=True):
        assert set(batch.blocks[0].neighbor) == set(SUMMED)
        for key, found in batch.blocks[0].neighbor.items():
            block = rows.blocks[0].blocks[key]
            source, target = block.edge_index.numpy()
            want = np.zeros((block.num_dst, F))
            np.add.at(want, target, x[key[0]].astype(np.float64)[rows[key[0]].n_id.numpy()[source]])
            want /= np.maximum(np.bincount(target, minlength=block.num_dst), 1)[:, None]
            assert found.dtype == torch.float32
            np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-6)
            assert batch.blocks[0].blocks[key].edge_index.size(1) == 0
        check_rest(batch, rows)


def check_rest(batch: HeteroData, rows: HeteroData) -> None:
    """What a pre-aggregated batch has beside its means, against the batch of rows."""
    for name in COUNTS:
        own, whole = batch[name], rows[name]
        kept = sum(whole.num_sampled_nodes[:-1]) if name in FEATURED else len(whole.n_id)
        assert torch.equal(own.n_id, whole.n_id[:kept])
        assert ("x" in own) == (name in FEATURED)
        if "x" in own:
            assert torch.equal(own.x, whole.x[:kept])
    assert torch.equal(batch["paper"].y[:10], rows["paper"].y[:10])
    assert batch["paper"].batch_size == rows["paper"].batch_size
    assert same(batch.blocks[1], rows.blocks[1])
    assert same(batch.blocks[0].blocks[ABOUT]._replace(num_src=0), rows.blocks[0].blocks[ABOUT]._replace(num_src=0))
    for key in SUMMED:
        first = rows[key].num_sampled_edges[0]
        assert torch.equal(batch[key].edge_index, rows[key].edge_index[:, :first])
        assert torch.equal(batch[key].e_id, rows[key].e_id[:first])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["rsage", "rgcn"])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_models_of_means_have_the_outputs_of_models_of_rows(resident: Dataset, name: str, norm: Any) -> None:
    torch.manual_seed(0)
    widths = {each: F if each in FEATURED else 0 for each in COUNTS}
    options: dict[str, Any] = {"norm": norm, "residual": norm != "none"}
    model = build_hetero_model(name, widths, HIDDEN, 4, resident.metadata(), "paper", **options)
    step = pre_aggregation_of(model)
    assert step == PreAggregation("mean", HIDDEN, more_rows=2.0 if norm != "none" else 0.0)
    tables = {each: torch.randn(COUNTS[each], F) for each in COUNTS if each not in FEATURED}
    pairs = zip(loader_of(resident, pre_aggregation=step), loader_of(resident, pre_aggregation=None), strict=True)
    for batch, rows in pairs:
        for each in (batch, rows):
            for node_type, table in tables.items():
                each[node_type].x = table[each[node_type].n_id]
        outputs = [forward_batch(model, each) for each in (batch, rows)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        parameters = list(model.parameters())
        gradients = [torch.autograd.grad(out.square().sum(), parameters, allow_unused=True) for out in outputs]
        for one, other in zip(*gradients, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_models_that_need_rows_have_no_means(resident: Dataset) -> None:
    widths = {each: F if each in FEATURED else 0 for each in COUNTS}

    def made(name: str, widths: dict[str, int], hidden: int = HIDDEN, **options: Any) -> Any:
        return build_hetero_model(name, widths, hidden, 4, resident.metadata(), "paper", **options)

    assert pre_aggregation_of(made("hgt", widths, heads=2)) is None
    assert pre_aggregation_of(made("rsage", widths, input_dropout=0.5)) is None
    assert pre_aggregation_of(made("rgcn", widths | {"author": 3})) is None, "widths differ, so that rows are mapped first"
    assert pre_aggregation_of(made("rsage", widths, hidden=4)) is None, "mapping wide rows first is cheaper"


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"fanout": [-1, 2]}, {"fanout": [3]}, {"fanout": [2, 2, 2], "batch_size": 7}])
def test_batches_from_shared_scans_are_those_from_memory(ds: Dataset, resident: Dataset, options: dict[str, Any]) -> None:
    wanted = list(loader_of(resident, **options))
    scans, superbatches = loader_of(ds, 1_000_000, **options), loader_of(ds, **options)
    assert isinstance(loader_of(resident, **options).strategy, InMemory)
    assert isinstance(scans.strategy, SharedScans)
    assert isinstance(superbatches.strategy, Superbatches)
    for loader in (scans, superbatches):
        found = list(loader)
        assert len(found) == len(wanted)
        assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    made = scans.times()["sum"]["items"]
    assert (1 if options.get("fanout") == [3] else 2) <= made < len(wanted), "scans of several batches"
    assert scans.rows_read <= made * sum(COUNTS[name] for name in FEATURED)


@pytest.mark.cases(1)
@pytest.mark.parametrize("disjoint", [False, True])
def test_links_from_shared_scans_are_those_from_memory(ds: Dataset, resident: Dataset, disjoint: bool) -> None:
    def links_of(ds: Dataset, batches: int, step: PreAggregation | None = MEAN) -> LinkNeighborLoader:
        how: dict[str, Any] = {"neg_sampling": "binary", "batch_size": 10, "shuffle": True, "seed": 3, "disjoint": disjoint}
        return LinkNeighborLoader(ds, [4, 3], (WRITES, None), **how, pre_aggregation=step, budget=budget(batches))

    scans = links_of(ds, 1_000_000)
    assert isinstance(scans.strategy, SharedScans)
    for number, (one, other) in enumerate(zip(scans, links_of(resident, 10**8), strict=True)):
        assert same(one, other)
        assert one["author"].batch_size == one["author"].num_sampled_nodes[0] > 10
        if number == 60:
            break
    rows = next(iter(links_of(resident, 10**8, None)))
    check_rest(next(iter(links_of(resident, 10**8))), rows)


def test_a_batch_over_the_memory_of_a_scan_is_refused_or_split(ds: Dataset, resident: Dataset) -> None:
    with pytest.raises(BudgetError, match=r"a batch of 200 seeds|use a batch size below 200"):
        list(loader_of(ds, 1_000_000, fanout=[-1, -1], batch_size=200))
    options = {"fanout": [-1, -1], "batch_size": 200, "shuffle": False, "split_seeds": True}
    parts = list(loader_of(ds, 1_000_000, **options))
    assert len(parts) > 1
    whole = next(iter(loader_of(resident, **options)))
    sizes = [part["paper"].batch_size for part in parts]
    for begin, part in zip(np.cumsum([0, *sizes]), parts, strict=False):
        size = part["paper"].batch_size
        assert torch.equal(part["paper"].n_id[:size], torch.arange(begin, begin + size))
        for key in (CITES, WRITES):
            assert torch.equal(part.blocks[0].neighbor[key][:size], whole.blocks[0].neighbor[key][begin : begin + size])


def test_features_of_several_widths_stay_rows(tmp_path: Path) -> None:
    edges = {WRITES: Graph.from_edges([0, 1, 2], [0, 0, 1], num_nodes=2, num_sources=3)}
    nodes = {"author": {"x": np.ones((3, 2), np.float32)}, "paper": {"x": np.ones((2, 5), np.float32)}}
    with Dataset.open(write_hetero_store(tmp_path / "s", nodes, edges)) as opened:
        batch = next(iter(NeighborLoader(opened, [2], "paper", batch_size=2, pre_aggregation=MEAN)))
    assert batch.blocks[0].neighbor is None
    assert batch["author"].x.shape == (3, 2)
