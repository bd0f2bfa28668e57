"""Loaders that sample by LABOR: what batches depend on, resuming, edges on disk, links, several types, and what is refused."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.loading.sample_stage import Order
from ooc.runtime.keyed_random import Cursor
from ooc.sampling import NeighborSampler
from ooc.sampling.labor import batch_key
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from tests.conftest import MakeStore
from tests.ooc.batches import same
from tests.ooc.hetero_batches import hetero_data
from tests.ooc.loading.test_ondisk_topology import without_edges
from tests.ooc.sampling.test_neighbor import random_graph

N, E = 80, 1600
BOTH = {"sampler": ooc.Labor(layer_dependency=True, batch_dependency=8)}


@pytest.fixture
def ds(make_store: MakeStore) -> Iterator[Dataset]:
    with ooc.open(make_store(num_nodes=N, num_edges=E, weight=True)) as opened:
        yield opened


def loader_of(ds: Dataset, **changes: Any) -> ooc.NeighborLoader:
    given: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3, **BOTH, **changes}
    return ooc.NeighborLoader(ds, [3, 3], "train", **given)


def epochs(loader: Any, count: int) -> list[Any]:
    return [batch for _ in range(count) for batch in loader]


@pytest.mark.cases(1)
@pytest.mark.parametrize("weight", [None, "weight"])
def test_what_batches_depend_on(ds: Dataset, weight: str | None) -> None:
    """Not on threads, nor on where the features are."""
    base = epochs(loader_of(ds, weight_attr=weight), 2)
    assert same(base, epochs(loader_of(ds, weight_attr=weight, sample_threads=3), 2))
    for options in ({"in_memory": True}, {"engine": "mmap"}):
        with ooc.open(ds.path, **options) as other:
            assert same(base, epochs(loader_of(other, weight_attr=weight), 2))
    for other in (None, "labor", ooc.Labor(layer_dependency=True), ooc.Labor(batch_dependency=8)):
        assert not same(base, epochs(loader_of(ds, weight_attr=weight, sampler=other), 2))
    assert same(epochs(loader_of(ds, sampler="labor"), 1), epochs(loader_of(ds, sampler=ooc.Labor()), 1))
    assert same(epochs(loader_of(ds, sampler="neighbor"), 1), epochs(loader_of(ds, sampler=None), 1))


@pytest.mark.parametrize(
    ("labor", "weight", "together"),
    [
        (ooc.Labor(), None, True),
        (ooc.Labor(layer_dependency=True), "weight", True),
        (ooc.Labor(batch_dependency=8), None, True),
        (ooc.Labor(layer_dependency=True, batch_dependency=8), "weight", True),
        (ooc.Labor(layer_dependency=True, batch_dependency=8), None, True),
        (ooc.Labor(importance=1), None, False),
        (ooc.Labor(importance=2), "weight", False),
        (ooc.Labor(layer_dependency=True, batch_dependency=8, importance="*"), None, False),
    ],
)
def test_edges_on_disk_change_nothing(
    ds: Dataset, monkeypatch: pytest.MonkeyPatch, labor: ooc.Labor, weight: str | None, together: bool
) -> None:
    """They are read for many batches together or, where sources have an importance, mapped and not read ahead."""
    base = epochs(loader_of(ds, weight_attr=weight, sampler=labor), 2)
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    with ooc.open(ds.path, memory="64GB") as other:
        if together:
            without_edges(other, False)
        loader = loader_of(other, weight_attr=weight, sampler=labor)
        assert (loader.strategy.stages.sample.frontier is not None) == together
        assert together or loader.strategy.stages.sample.draw.__closure__[0].cell_contents.by_source.cold
        assert same(base, epochs(loader, 2))
        assert (loader.topology_bytes_read > 0) == together


def test_draws_that_threads_keep_are_counted(ds: Dataset) -> None:
    """In what a batch may take, and in what is drawn beside the batches that are read together."""
    graph, seeds, key = random_graph(50, 30_000, seed=0), np.arange(50), batch_key(0, 0, 0, 64)
    plain = NeighborSampler(graph, [5, 5], labor=ooc.Labor())
    assert plain.kept_bytes == 0
    for layers, tables in ((False, 2), (True, 1)):
        labor = ooc.Labor(layer_dependency=layers, batch_dependency=64)
        sampler = NeighborSampler(graph, [5, 5], labor=labor)
        sampler.sample(seeds, key)
        found = [kept for _, kept in sampler.by_source.repeated._found.values()]
        assert len(found) == tables
        assert sampler.kept_bytes == sum(array.nbytes for kept in found for array in kept) > 10_000
        most = next(most for most in range(10**6) if fits(plain, most, seeds))
        assert fits(sampler, most + sampler.kept_bytes, seeds)
        assert not fits(sampler, most + sampler.kept_bytes - 1, seeds)
    by_weight = NeighborSampler(graph, [5, 5], weight="weight", labor=labor)
    assert by_weight.kept_bytes == 0
    stage, bare = (loader_of(ds, sampler=each, sample_threads=3).strategy.stages.sample for each in (BOTH["sampler"], None))
    kept = NeighborSampler(ds.graph, [3, 3], labor=BOTH["sampler"]).kept_bytes
    assert stage.drawing_bytes(100) == bare.drawing_bytes(100) + 3 * kept > bare.drawing_bytes(100)


def fits(sampler: NeighborSampler, max_bytes: int, seeds: Any) -> bool:
    sampler.max_bytes = max_bytes
    try:
        sampler.need(sampler.begin(seeds), 0)
    except BudgetError:
        return False
    return True


def test_resume_at_every_step_continues_to_the_bit(ds: Dataset) -> None:
    """Also where numbers change in the middle of an epoch."""
    loader, batches, states = loader_of(ds), [], []
    states.append(loader.state_dict())
    for _ in range(3):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    assert len(loader) % 2 == 0 and len(batches) == 18  # noqa: PT018
    for taken, state in enumerate(states):
        resumed = loader_of(ds)
        resumed.load_state_dict(state)
        assert same(batches[taken:], epochs(resumed, 3 - state["epoch"]))


@pytest.mark.parametrize("changed", [{"sampler": None}, {"sampler": "labor"}, {"sampler": ooc.Labor(True, 16)}])
def test_a_state_of_another_sampler_is_refused(ds: Dataset, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"cannot resume: (sampler|layer_dependency|batch_dependency) was"):
        loader_of(ds, **changed).load_state_dict(loader_of(ds).state_dict())
    with pytest.raises(ConfigError, match=r"cannot resume: (sampler|layer_dependency|batch_dependency) was"):
        loader_of(ds).load_state_dict(loader_of(ds, **changed).state_dict())


def neighbors(batch: Data) -> dict[int, list[int]]:
    """The edges drawn at each node of a batch."""
    found: dict[int, list[int]] = {}
    for target, edge in zip(batch.n_id[batch.edge_index[1]].tolist(), batch.e_id.tolist(), strict=True):
        found.setdefault(target, []).append(edge)
    return found


def test_batches_between_two_changes_draw_alike(ds: Dataset) -> None:
    """K = 8: the same in-edges at a node for two batches, over the ends of epochs too, and others after a change."""
    drawn = [neighbors(batch) for batch in epochs(loader_of(ds, drop_last=True), 5)]
    assert len(drawn) % 2 == 0
    changed = 0
    for step, (one, other) in enumerate(itertools.pairwise(drawn)):
        common = one.keys() & other.keys()
        alike = [one[v] == other[v] for v in common]
        assert len(common) > 5
        assert all(alike) or step % 2 == 1
        changed += not all(alike)
    assert changed > 8


def test_the_key_of_a_batch_is_of_the_step_over_all_epochs(ds: Dataset) -> None:
    order: Order = loader_of(ds)._order
    steps = len(loader_of(ds))
    assert order.key(Cursor(1, 0)) == order.key(Cursor(0, steps))
    assert order.key(Cursor(1, 0)) != order.key(Cursor(0, 0))


def test_a_batch_has_fewer_nodes(ds: Dataset) -> None:
    sizes = [
        sum(batch.num_nodes for batch in epochs(loader_of(ds, sampler=each), 2)) for each in (None, "labor", BOTH["sampler"])
    ]
    assert sizes[0] > 1.03 * sizes[1] > 1.03 * sizes[2]


def test_links_carry_no_messages(ds: Dataset) -> None:
    split = ooc.EdgeSplit(val=0.2, test=0.2, seed=1)
    given: dict[str, Any] = {"edge_split": split, "neg_sampling": "binary", "batch_size": 40, "shuffle": True, "seed": 0}
    loader = ooc.LinkNeighborLoader(ds, [3, 2], "train", **given, **BOTH)
    for batch in loader:
        src, dst = batch.n_id[batch.edge_index]
        assert not split.parts(src.numpy(), dst.numpy()).any()
        links = batch.n_id[batch.edge_label_index[:, batch.edge_label > 0]].T.tolist()
        pairs = {frozenset(pair) for pair in zip(src.tolist(), dst.tolist(), strict=True)}
        at_seeds = {frozenset(pair) for pair in links}
        ends = set(batch.n_id[: batch.num_sampled_nodes[0]].tolist())
        own = {frozenset((u, v)) for u, v in zip(src.tolist(), dst.tolist(), strict=True) if v in ends}
        assert pairs
        assert not own & at_seeds


def test_several_types_and_other_edges_of_a_batch(tmp_path: Any, ds: Dataset) -> None:
    data = hetero_data()
    with ooc.from_data(data, tmp_path / "h") as hetero:
        given: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 1, **BOTH}
        one, other = (ooc.NeighborLoader(hetero, [2, 2], "paper", **given, sample_threads=n) for n in (1, 3))
        assert same(epochs(one, 2), epochs(other, 2))
    for kind in ("bidirectional", "induced"):
        plain, directional = (epochs(loader_of(ds, subgraph_type=each), 1) for each in (kind, "directional"))
        assert [sorted(batch.n_id.tolist()) for batch in plain] == [sorted(batch.n_id.tolist()) for batch in directional]


def test_what_does_not_fit_is_refused_in_a_line(ds: Dataset) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"replace": True}, "sampler='labor' draws without replacement: leave out replace"),
        ({"disjoint": True}, "sampler='labor' .* cannot be combined with disjoint"),
        ({"sampler": "labour"}, "sampler must be 'neighbor', 'labor', 'ladies'.*, not 'labour': did you mean 'labor'"),
        ({"sampler": "LABOR"}, "did you mean 'labor'"),
        ({"sampler": ooc.Labor}, r"sampler is the class ooc.Labor: give an object, as ooc.Labor\(...\)"),
        ({"layer_dependency": True}, r"no argument 'layer_dependency': give sampler=ooc.Labor\(layer_dependency=...\)"),
        ({"sampler": torch.utils.data.SequentialSampler(range(3))}, "the order of seeds comes from shuffle"),
    ]
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            loader_of(ds, **given)


def test_loaders_without_labor_say_which_have_it(ds: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"ClusterLoader cannot take sampler='labor': .* LABOR is for NeighborLoader"):
        ooc.ClusterLoader(ds, 2, num_parts=4, sampler="labor")


def test_a_single_batch_is_sampled_by_labor_too(ds: Dataset) -> None:
    batch = loader_of(ds)(torch.arange(8))
    assert np.diff(batch.blocks[0].indptr).max() <= 3


@pytest.mark.parametrize("labor", [ooc.Labor(), ooc.Labor(True, 64), ooc.Labor(importance=1)])
def test_a_fan_out_above_all_degrees_takes_all_and_no_memory(
    ds: Dataset, monkeypatch: pytest.MonkeyPatch, labor: ooc.Labor
) -> None:
    def batch(opened: Dataset, fanout: int) -> Any:
        return next(iter(ooc.NeighborLoader(opened, [fanout, 2], "train", batch_size=8, shuffle=True, seed=1, sampler=labor)))

    wanted = batch(ds, -1)
    assert same([wanted], [batch(ds, 10**13)])
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    with ooc.open(ds.path, memory="64GB") as other:
        assert same([wanted], [batch(other, 10**13)])
