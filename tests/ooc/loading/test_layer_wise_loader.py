"""Loaders with a budget of nodes a layer: what batches depend on, resuming, weights of means, and what is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ooc
from ooc.graph.aggregation import PreAggregation
from ooc.models.convs import BlockGCNConv, BlockSAGEConv
from ooc.runtime.memory_plan import plan_memory
from ooc.sampling.layer_wise import LAYER_WISE
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from tests.conftest import MakeStore
from tests.ooc.batches import same
from tests.ooc.hetero_batches import hetero_data

N, E = 80, 1600


@pytest.fixture
def ds(make_store: MakeStore) -> Iterator[Dataset]:
    with ooc.open(make_store(num_nodes=N, num_edges=E, weight=True)) as opened:
        yield opened


def loader_of(ds: Dataset, **changes: Any) -> ooc.NeighborLoader:
    given: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3, "sampler": "ladies", **changes}
    return ooc.NeighborLoader(ds, [12, 20], "train", **given)


def epochs(loader: Any, count: int) -> list[Any]:
    return [batch for _ in range(count) for batch in loader]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", LAYER_WISE)
def test_what_batches_depend_on(ds: Dataset, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on threads, nor on where features and edges are."""
    base = epochs(loader_of(ds, sampler=kind), 2)
    assert same(base, epochs(loader_of(ds, sampler=kind, sample_threads=3), 2))
    assert same(base, epochs(loader_of(ds, sampler=ooc.LayerWise(kind)), 2))  # type: ignore[arg-type]
    assert not same(base, epochs(loader_of(ds, sampler=ooc.LayerWise(kind, normalize=False)), 2))  # type: ignore[arg-type]
    for options in ({"in_memory": True}, {"engine": "mmap"}):
        with ooc.open(ds.path, **options) as other:
            assert same(base, epochs(loader_of(other, sampler=kind), 2))
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    with ooc.open(ds.path, memory="64GB") as other:
        loader = loader_of(other, sampler=kind)
        assert loader.strategy.stages.sample.frontier is None
        assert loader.strategy.stages.sample.draw.__closure__[0].cell_contents.by_source.cold
        assert same(base, epochs(loader, 2))


def test_resume_at_every_step_continues_to_the_bit(ds: Dataset) -> None:
    loader, batches, states = loader_of(ds), [], []
    states.append(loader.state_dict())
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    for taken, state in enumerate(states):
        resumed = loader_of(ds)
        resumed.load_state_dict(state)
        assert same(batches[taken:], epochs(resumed, 2 - state["epoch"]))


@pytest.mark.parametrize("changed", ["neighbor", "labor", "fastgcn", ooc.LayerWise(normalize=False)])
def test_a_state_of_another_sampler_is_refused(ds: Dataset, changed: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot resume: (sampler|normalize) was"):
        loader_of(ds, sampler=changed).load_state_dict(loader_of(ds).state_dict())


@pytest.mark.parametrize("normalize", [False, True])
def test_batches_weigh_means_whether_rows_are_aggregated_first_or_not(ds: Dataset, normalize: bool) -> None:
    how: dict[str, Any] = {"sampler": ooc.LayerWise(normalize=normalize)}
    plain, summed = loader_of(ds, **how), loader_of(ds, **how, pre_aggregation=PreAggregation("mean", 4))
    mean, gcn = BlockSAGEConv(8, 4), BlockGCNConv(8, 4)
    for one, other in zip(plain, summed, strict=True):
        block = one.blocks[0]
        assert torch.equal(one.edge_norm, block.share)
        degree = block.degree[: block.num_dst][block.edge_index[1]]
        assert torch.allclose(block.share * degree, block.stands_for)
        total = torch.zeros(block.num_dst).index_add_(0, one.edge_index[1], block.share)
        reached = total[block.indptr.diff() > 0]
        assert torch.allclose(reached, torch.ones(())) == normalize
        assert torch.allclose(mean(one.x, block), mean(other.x, other.blocks[0]), atol=1e-5)
        own = gcn.coefficients(block)[0]
        assert own.numel() == block.edge_index.size(1)
        assert [b.num_src for b in one.blocks] == [one.num_nodes, sum(one.num_sampled_nodes[:2])]


def test_links_and_edges_left_out_go_with_it(ds: Dataset) -> None:
    loader = ooc.LinkNeighborLoader(ds, [10, 10], batch_size=16, shuffle=True, seed=1, sampler="ladies")
    assert same(epochs(loader, 1), epochs(ooc.LinkNeighborLoader(ds, [10, 10], batch_size=16, shuffle=True, seed=1,
                                                                 sampler="ladies", sample_threads=2), 1))  # fmt: skip


def test_what_is_kept_of_nodes_counts_for_the_memory(ds: Dataset) -> None:
    assert loader_of(ds).budget.model == plan_memory(ds).model
    assert loader_of(ds, sampler="fastgcn").budget.model == plan_memory(ds).model + 4 * N


def test_what_does_not_fit_is_refused(ds: Dataset) -> None:
    for given, words in (
        ({"replace": True}, "sampler='ladies' draws without replacement: leave out replace"),
        ({"disjoint": True}, "sampler='ladies' shares neighbors between seeds, so it cannot be combined with disjoint"),
        ({"weight_attr": "weight"}, "sampler='ladies' cannot be combined with weight_attr: leave one of them out"),
        ({"subgraph_type": "induced"}, "sampler='ladies' cannot be combined with subgraph_type='induced'"),
        ({"sampler": "graphsage"}, "sampler must be 'neighbor', 'labor', 'ladies', 'fastgcn', 'degree', ooc.Labor"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            loader_of(ds, **given)
        assert "\n" not in str(caught.value)


def test_graphs_of_several_types_are_refused(tmp_path: Any) -> None:
    with (
        ooc.from_data(hetero_data(), tmp_path / "h.ooc") as ds,
        pytest.raises(ConfigError, match=r"sampler='ladies' is for graphs of one type, and .* has several"),
    ):
        ooc.NeighborLoader(ds, [5], ("paper", None), sampler="ladies")
