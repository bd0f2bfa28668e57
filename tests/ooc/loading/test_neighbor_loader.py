"""NeighborLoader against PyG's own functions on the whole graph in memory, and its arguments, bounds and failures."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
import zarr
from torch_geometric.data import Data
from torch_geometric.utils import degree, k_hop_subgraph

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.subgraph_loaders import ClusterLoader
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import Blocks
from ooc.runtime.memory_plan import SCRATCH_BYTES, divide, plan_memory
from ooc.stores.arrays.zarr_rows import BLOCK_BYTES
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.ooc.runs import tight
from tests.waiting import no_threads

N, E = 60, 240
FIELDS = {
    "x": torch.float32,
    "y": torch.int64,
    "edge_index": torch.int64,
    "n_id": torch.int64,
    "e_id": torch.int64,
    "input_id": torch.int64,
}


@pytest.fixture
def whole():
    """The graph of `ds` as PyG has it, in input order."""
    src, dst = random_edges(N, E, seed=3)
    rng = np.random.default_rng(3)
    return Data(
        x=torch.from_numpy(rng.standard_normal((N, 5), dtype=np.float32)),
        y=torch.from_numpy(rng.integers(0, 4, N)),
        edge_index=torch.from_numpy(np.stack([src, dst])),
        weight=torch.from_numpy(rng.random(E, np.float32)),
    )


@pytest.fixture
def ds(whole, make_store):
    src, dst = whole.edge_index.numpy()
    with Dataset.open(store_of(whole, make_store, src, dst)) as opened:
        yield opened


def store_of(whole, make_store, src, dst, **arrays):
    given = {"x": whole.x.numpy(), "y": whole.y.numpy(), "num_classes": 4, **arrays}
    return make_store(num_nodes=N, src=src, dst=dst, **given)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_full_fanout_is_pygs_k_hop_neighborhood(ds, whole, hops):
    whole_degree = degree(whole.edge_index[1], N, torch.int64)
    own = whole.edge_index[1][whole.edge_index[0] == whole.edge_index[1]]
    seeds = torch.tensor([7, 3, 41, 12, 9])
    for batch in NeighborLoader(ds, [-1] * hops, seeds, batch_size=2):
        ids = batch.n_id[: batch.batch_size]
        assert torch.equal(ids, seeds[batch.input_id])
        nodes, _, _, mask = k_hop_subgraph(ids, hops, whole.edge_index, directed=True)
        assert torch.equal(batch.n_id.sort().values, nodes)
        assert torch.equal(batch.e_id.sort().values, mask.nonzero().view(-1))
        assert torch.equal(batch.n_id[batch.edge_index], whole.edge_index[:, batch.e_id])
        assert torch.equal(batch.x, whole.x[batch.n_id])
        assert torch.equal(batch.y, whole.y[batch.n_id])
        assert torch.equal(batch.blocks[0].degree, whole_degree[batch.n_id])
        assert torch.equal(batch.blocks[0].loops, (own.unsqueeze(0) == batch.n_id.unsqueeze(1)).sum(1))


def test_a_batch_has_the_fields_of_pygs(ds):
    batch = next(iter(NeighborLoader(ds, [3, -1], torch.arange(9, 17), batch_size=4)))
    assert {key: batch[key].dtype for key in FIELDS} == FIELDS
    assert isinstance(batch, Data)
    assert set(batch.keys()) - set(FIELDS) == {
        "num_nodes", "batch_size", "num_sampled_nodes", "num_sampled_edges", "blocks", "train_mask", "val_mask", "test_mask",
    }  # fmt: skip
    assert batch.batch is None
    assert batch.num_nodes == len(batch.n_id) == sum(batch.num_sampled_nodes)
    assert batch.num_edges == sum(batch.num_sampled_edges)
    assert batch.input_id.tolist() == [0, 1, 2, 3]
    assert len(batch.num_sampled_nodes) == 3
    assert (batch.edge_index[1].diff() >= 0).all()


def test_blocks_are_prefixes_of_one_edge_index_without_copies(ds):
    batch = next(iter(NeighborLoader(ds, [2, 2, 2], batch_size=5)))
    assert [block.num_src for block in batch.blocks] == np.cumsum(batch.num_sampled_nodes).tolist()[:0:-1]
    assert [block.num_dst for block in batch.blocks] == np.cumsum(batch.num_sampled_nodes).tolist()[-2::-1]
    for block in batch.blocks:
        assert block.edge_index.data_ptr() == batch.edge_index.data_ptr()
        num_edges = block.edge_index.size(1)
        assert torch.equal(block.edge_index, batch.edge_index[:, :num_edges])
        assert torch.equal(torch.arange(block.num_dst).repeat_interleave(block.indptr.diff()), block.edge_index[1])
        assert int(block.edge_index[0].max()) < block.num_src


def test_weights_come_along_and_are_sampled_by(whole, make_store):
    src, dst = whole.edge_index.numpy()
    weight = whole.weight.clone()
    weight[::2] = 0
    path = store_of(whole, make_store, src, dst, weight=weight.numpy())
    loop = src == dst
    with Dataset.open(path) as ds:
        batch = next(iter(NeighborLoader(ds, [2, 2], batch_size=30, weight_attr="edge_attr")))
        assert torch.equal(batch.edge_weight, weight[batch.e_id])
        assert torch.equal(batch.edge_attr, batch.edge_weight)
        assert (batch.edge_weight > 0).all()
        assert (batch.blocks[0].stands_for >= 1).all()
        assert (batch.blocks[0].stands_for > 1).any()
        plain = next(iter(NeighborLoader(ds, [-1, -1], batch_size=30)))
        assert plain.blocks[0].stands_for is None
        assert (plain.edge_weight == 0).any()
        first = plain.blocks[0]
        assert torch.equal(first.weight, plain.edge_weight)
        sums = np.bincount(dst[~loop], weight.numpy()[~loop].astype(np.float64), N)
        assert np.allclose(first.weight_sum, sums[plain.n_id], atol=1e-6)
        last_loop = {v: weight[e].item() for e, v in enumerate(dst) if loop[e]}
        assert first.loop_weight.tolist() == [last_loop.get(v, 1.0) for v in plain.n_id.tolist()]


def test_input_nodes_in_every_form(ds):
    mask = torch.zeros(N, dtype=torch.bool)
    mask[20:33] = True
    ids = mask.nonzero().view(-1)

    def seeds_and_numbers(given, **more):
        batches = list(NeighborLoader(ds, [1], given, batch_size=5, **more))
        seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
        return seeds.tolist(), torch.cat([batch.input_id for batch in batches]).tolist()

    places = list(range(13))
    for given in (ids, ids.numpy(), ids.tolist(), ids.int(), (None, ids)):
        assert seeds_and_numbers(given) == (ids.tolist(), places)
    for given in (mask, mask.numpy(), ("node", mask), mask.int(), mask.to(torch.uint8), mask.long().tolist()):
        assert seeds_and_numbers(given) == (ids.tolist(), ids.tolist())  # PyG numbers the nodes of a mask so
    assert seeds_and_numbers(None) == (list(range(N)), list(range(N)))
    assert seeds_and_numbers("val") == (ds.split("val").tolist(), list(range(len(ds.split("val")))))
    assert seeds_and_numbers(ids, input_id=ids + 100) == (ids.tolist(), (ids + 100).tolist())
    assert seeds_and_numbers(torch.tensor([4, 4, 9])) == ([4, 4, 9], [0, 1, 2])
    assert seeds_and_numbers([1, 0, 1]) == ([1, 0, 1], [0, 1, 2])  # not one a node
    assert seeds_and_numbers([*range(1, N), 0])[0] == [*range(1, N), 0]
    assert list(NeighborLoader(ds, [1], [])) == list(NeighborLoader(ds, [1], torch.zeros(N, dtype=torch.long))) == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"input_nodes": [3, N]}, InputError, f"input node {N} at position 1"),
        ({"input_nodes": torch.ones(N - 1, dtype=torch.bool)}, InputError, "59 entries"),
        ({"input_nodes": "trian"}, InputError, "trian"),
        ({"input_nodes": torch.rand(3)}, ConfigError, "whole numbers"),
        ({"input_nodes": [1], "input_id": [1, 2]}, ConfigError, "2 entries for 1"),
        ({"num_neighbors": {("a", "b", "c"): [1]}}, ConfigError, "edge types"),
        ({"num_neighbors": 5}, ConfigError, r"\[10, 10\]"),
        ({"num_neighbors": [3, -2]}, ConfigError, "fan-out"),
        ({"batch_sise": 4}, ConfigError, "did you mean 'batch_size'"),
        ({"batch_size": 0}, ConfigError, "1 or more"),
        ({"pre_aggregation": "mean"}, ConfigError, "pre_aggregation_of"),
        ({"subgraph_type": "both"}, ConfigError, "subgraph_type"),
        (
            {"time_attr": "moment"},
            ConfigError,
            "time_attr 'moment' is neither an array of nodes nor the time of edges",
        ),
        ({"input_time": [0]}, ConfigError, "input_time needs time_attr"),
        ({"temporal_strategy": "last"}, ConfigError, "temporal_strategy='last' needs time_attr"),
        ({"temporal_strategy": "first"}, ConfigError, "temporal_strategy 'first' is unknown: use uniform or last"),
        ({"directed": False}, ConfigError, "directed"),
        ({"transform_sampler_output": lambda out: out}, ConfigError, "use transform"),
        ({"generator": torch.Generator()}, ConfigError, "seed"),
        ({"weight_attr": "weight"}, ConfigError, "no edge column 'weight'"),
        ({"split_seeds": True, "shuffle": True}, ConfigError, "split_seeds"),
        ({"rank": 2, "world_size": 2}, ConfigError, "rank"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_refused(ds, arguments, error, words):
    with pytest.raises(error, match=words):
        NeighborLoader(ds, **{"num_neighbors": [2], **arguments})


def test_pygs_harmless_arguments_are_accepted_and_idle_ones_warned_about(ds):
    from torch_geometric.sampler.base import SubgraphType

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(
            ds, [2], directed=True, disjoint=False, subgraph_type=SubgraphType.directional, time_attr=None, timeout=0,
            filter_per_worker=None, persistent_workers=False, generator=None,
        )  # fmt: skip
    with pytest.warns(UserWarning, match="num_workers, persistent_workers changes nothing: threads do the work") as caught:
        NeighborLoader(ds, [2], num_workers=4, persistent_workers=True)
    assert caught[0].filename == __file__
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="pin_memory has no effect"):
            NeighborLoader(ds, [2], pin_memory=True)
    with pytest.warns(UserWarning, match="prefetch_factor changes nothing: rows on disk") as caught:
        NeighborLoader(ds, [2], prefetch_factor=4)
    assert caught[0].filename == __file__
    with Dataset.open(ds.path, in_memory=True) as held, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert NeighborLoader(held, [2], prefetch_factor=4).prefetch == 4


def small_budget(max_batch):
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch)


def test_a_batch_over_the_budget_is_refused_or_split(make_store):
    path = make_store(num_nodes=N, num_edges=E, x=np.ones((N, 500), np.float32))
    with Dataset.open(path) as ds:
        check_over_budget(ds, small_budget(80_000))


def check_over_budget(ds, budget):
    with pytest.raises(BudgetError, match="batch size"):
        list(NeighborLoader(ds, [-1, -1], batch_size=N, budget=budget))
    with pytest.raises(BudgetError, match="use a smaller fan-out or more memory"):  # a batch of one node is not split
        list(NeighborLoader(ds, [-1, -1], batch_size=N, budget=small_budget(100), split_seeds=True))
    options = {"batch_size": 32, "seed": 0}
    whole_batches = list(NeighborLoader(ds, [2, 2], **options))
    loader = NeighborLoader(ds, [2, 2], **options, budget=budget, split_seeds=True)
    states, parts = [], []
    for batch in loader:
        parts.append(batch)
        states.append(loader.state_dict()["step"])
    assert len(parts) > len(whole_batches) == len(loader) == 2
    assert torch.cat([batch.n_id[: batch.batch_size] for batch in parts]).tolist() == list(range(N))
    assert states.count(1) >= 1
    assert (states[0], states[-1]) == (0, 2)
    drawn = {(v, e) for batch in whole_batches[:1] for v, e in seed_edges(batch)}
    again = {pair for batch, step in zip(parts, states, strict=True) for pair in seed_edges(batch) if pair[0] < 32}
    assert drawn == again  # the draw at a node does not depend on the split
    assert same(parts, list(NeighborLoader(ds, [2, 2], **options, budget=budget, split_seeds=True)))


def seed_edges(batch):
    first = batch.edge_index[1] < batch.batch_size
    return zip(batch.n_id[batch.edge_index[1][first]].tolist(), batch.e_id[first].tolist(), strict=True)


def test_reserved_bytes_cover_what_a_batch_holds(ds):
    loader = NeighborLoader(ds, [4, 4], batch_size=16)
    batch = next(iter(loader))
    held = sum(t.nbytes for t in (batch.x, batch.y, batch.edge_index, batch.n_id, batch.e_id))
    held += batch.blocks[0].degree.nbytes + batch.blocks[0].indptr.nbytes + batch.blocks[0].loops.nbytes
    drawn, memory = loader.strategy.stages.sample.sample(Cursor(0, 0)), loader.strategy.memory
    assert held <= memory.nbytes(drawn) <= 1.5 * held


def test_a_failing_transform_is_raised_where_the_consumer_stands(ds):
    def transform(batch):
        if batch.input_id[0] >= 20:
            raise ZeroDivisionError("mine")
        return batch.n_id

    loader = NeighborLoader(ds, [2], batch_size=10, transform=transform)
    got = []
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == ["in stage 'collate' at step 2 of the pipeline"]
    assert len(got) == 2
    assert isinstance(got[0], torch.Tensor)
    assert no_threads()


def test_other_kinds_of_rows(whole, make_store):
    src, dst = whole.edge_index.numpy()
    half = whole.x.numpy().astype(np.float16)
    many = (whole.x.numpy() > 0).astype(np.int8)
    path = store_of(whole, make_store, src, dst, x=half, y=many, task="multilabel", num_classes=5)
    with Dataset.open(path) as ds:
        batch = next(iter(NeighborLoader(ds, [2], batch_size=8)))
        assert torch.equal(batch.x, torch.from_numpy(half.astype(np.float32))[batch.n_id])
        assert torch.equal(batch.y, torch.from_numpy(many.astype(np.int64))[batch.n_id])
        kept = next(iter(NeighborLoader(ds, [2], batch_size=8, dtype=torch.float16, edge_ids=False)))
        assert kept.x.dtype == torch.float16
        assert "e_id" not in kept
    path = store_of(whole, make_store, src, dst, x=None, y=None, task=None, num_classes=None, name="bare.ooc")
    with Dataset.open(path) as ds:
        batch = next(iter(NeighborLoader(ds, [2, 2], batch_size=8)))
        assert "x" not in batch
        assert "y" not in batch
        assert batch.num_nodes == len(batch.n_id)


def test_a_batch_moves_with_its_blocks(ds):
    batch = next(iter(NeighborLoader(ds, [2, 2], batch_size=8, device="cpu")))
    moved = batch.to("meta")
    assert moved.blocks[1].edge_index.device.type == moved.x.device.type == "meta"
    assert moved.blocks[1].num_dst == 8


def test_loaders_of_a_data_set_divide_the_same_memory(ds, make_store):
    first = NeighborLoader(ds, [1])
    held = np.ones(30 * 2**20)  # 240 MB, as batches of the first loader would be
    assert NeighborLoader(ds, [2]).budget == first.budget == plan_memory(ds)
    assert plan_memory(ds, model=10**6).baseline == first.budget.baseline
    del held
    with Dataset.open(ds.path, memory="100MB") as tight, pytest.raises(BudgetError, match="give at least"):
        NeighborLoader(tight, [1])


def test_a_loader_that_is_built_changes_nothing_for_another(ds, monkeypatch):
    policy = []
    monkeypatch.setattr("ooc.loading.base.keep_large_blocks", policy.append)
    with Dataset.open(ds.path, memory="3GB", in_memory=True) as limited:
        free, tight = NeighborLoader(ds, [1], batch_size=50), NeighborLoader(limited, [1], batch_size=50)
        parts = ClusterLoader(limited, num_parts=2)
        assert policy == []
        for loader in (free, tight, parts, free):
            next(iter(loader))
    assert policy == [Blocks.KEEP_ALL, Blocks.RETURN, Blocks.KEEP_ALL], "batches of parts leave it as it is"


def test_features_in_chunks_larger_than_a_block_are_in_the_budget(ds, make_store, tmp_path):
    path, width = make_store("chunks.ooc"), 2**20
    zarr.create_array(tmp_path / "x", shape=(50, width), chunks=(50, width), dtype="float32")
    with Dataset.open(path, features={"x": tmp_path / "x"}) as other:
        beyond = 2 * (50 * width * 4 - BLOCK_BYTES)
        assert plan_memory(other).scratch == SCRATCH_BYTES + beyond
    refused = pytest.raises(BudgetError, match=r"read buffers 453 MB and the smallest batches .* take .*; give at least")
    with Dataset.open(path, features={"x": tmp_path / "x"}, memory=tight()) as other, refused:
        plan_memory(other)
    with Dataset.open(path) as own:
        assert plan_memory(own).scratch == SCRATCH_BYTES


def test_times_and_reads_add_up_over_epochs(ds):
    with Dataset.open(ds.path) as fresh:
        loader = NeighborLoader(fresh, [2], batch_size=20)
        assert loader.times() == {}
        batches = [batch for _ in range(2) for batch in loader]
    assert list(loader.times()) == ["sample", "group", "read", "collate", "consumer"]
    items = {name: stage["items"] for name, stage in loader.times().items()}
    assert items == {"sample": 6, "group": 2, "read": 2, "collate": 6, "consumer": 6}  # a window an epoch
    assert loader.rows_read == len(torch.cat([batch.n_id for batch in batches]).unique())
    assert loader.bytes_read > 0
