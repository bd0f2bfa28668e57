"""LinkNeighborLoader against PyG's fields and the graph in memory: no batch has an edge between the ends of its links."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import NegativeSampling

import ooc
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import divide
from ooc.stores.errors import BudgetError, ConfigError, InputError
from tests.conftest import MakeStore
from tests.ooc.batches import same

N, E = 60, 400


@pytest.fixture
def edge_index() -> Tensor:
    """Edges in input order; every fifth has its reverse too, and the first twenty come twice."""
    rng = np.random.default_rng(2)
    edges = rng.integers(0, N, (2, 300))
    edges = np.concatenate([edges, edges[::-1, ::5], edges[:, :20], edges[:, :20]], axis=1)
    return torch.from_numpy(np.ascontiguousarray(edges))


@pytest.fixture
def ds(make_store: MakeStore, edge_index: Tensor) -> Any:
    src, dst = edge_index.numpy()
    with ooc.open(make_store(num_nodes=N, src=src, dst=dst)) as opened:
        yield opened


def pairs(edges: Tensor) -> set[tuple[int, int]]:
    """Ends without a direction."""
    return {(min(u, v), max(u, v)) for u, v in edges.t().tolist()}


@pytest.mark.parametrize("fanout", [[-1, -1], [3, 2]])
def test_links_are_left_out_of_the_edges_unless_they_are_kept(ds: Any, edge_index: Tensor, fanout: list[int]) -> None:
    met = 0
    for keep in (False, True):
        loader = LinkNeighborLoader(ds, fanout, edge_index[:, :100], batch_size=8, shuffle=True, keep_supervision_edges=keep)
        assert len(loader) == 13
        for batch in loader:
            links = batch.n_id[batch.edge_label_index]
            edges = batch.n_id[batch.edge_index]
            assert torch.equal(links, edge_index[:, batch.input_id])
            assert torch.equal(edges, edge_index[:, batch.e_id])
            shared = pairs(links) & pairs(edges)
            met += len(shared)
            assert keep or not shared
            if fanout[0] == -1 and not keep:
                ends, inner = batch.n_id[: batch.batch_size], pairs(links)
                wanted = torch.isin(edge_index[1], ends)
                free = torch.tensor([(min(u, v), max(u, v)) not in inner for u, v in edge_index.t().tolist()])
                own = torch.isin(batch.n_id[batch.edge_index[1]], ends)
                assert torch.equal(batch.e_id[own].sort().values, (wanted & free).nonzero().view(-1))
    assert met > 50


def test_a_batch_has_the_fields_of_pygs(ds: Any, edge_index: Tensor) -> None:
    loader = LinkNeighborLoader(ds, [2, 2], neg_sampling_ratio=1.5, batch_size=10)
    assert len(loader) == edge_index.size(1) // 10
    batch = next(iter(loader))
    assert isinstance(batch, Data)
    assert batch.edge_label_index.shape == (2, 25)
    assert batch.edge_label.dtype == torch.float
    assert batch.edge_label.tolist() == [1.0] * 10 + [0.0] * 15
    links = batch.n_id[batch.edge_label_index[:, :10]]
    assert torch.equal(links, edge_index[:, batch.input_id])
    assert batch.batch_size == batch.edge_label_index.unique().numel() == batch.num_sampled_nodes[0]
    assert torch.equal(batch.n_id[: batch.batch_size], batch.n_id[batch.edge_label_index].unique())
    assert batch.blocks[-1].num_dst == batch.batch_size
    assert torch.equal(batch.x, torch.from_numpy(np.asarray(ooc_x(ds)))[batch.n_id])
    assert {"y", "n_id", "e_id", "num_sampled_edges", "train_mask"} <= set(batch.keys())
    assert sorted(torch.cat([each.input_id for each in loader]).tolist()) == [*range(edge_index.size(1))]


def ooc_x(ds: Any) -> Any:
    out = np.empty((ds.num_nodes, ds.num_features), np.float32)
    ds.rows("x").read(np.arange(ds.num_nodes), out)
    return out


@pytest.mark.parametrize("amount", [1, 2])
def test_triplets(ds: Any, edge_index: Tensor, amount: int) -> None:
    how = NegativeSampling("triplet", amount)
    for batch in LinkNeighborLoader(ds, [2], edge_index, neg_sampling=how, batch_size=20, shuffle=True, drop_last=True):
        assert torch.equal(batch.n_id[batch.src_index], edge_index[0, batch.input_id])
        assert torch.equal(batch.n_id[batch.dst_pos_index], edge_index[1, batch.input_id])
        assert batch.dst_neg_index.shape == ((20,) if amount == 1 else (20, amount))
        assert 0 <= batch.dst_neg_index.min() <= batch.dst_neg_index.max() < batch.batch_size
        assert not {"edge_label", "edge_label_index"} & set(batch.keys())


def test_labels_follow_their_links(ds: Any, edge_index: Tensor) -> None:
    label = torch.arange(edge_index.size(1))
    for given in (None, edge_index):
        plain = LinkNeighborLoader(ds, [2], given, edge_label=label, batch_size=9, shuffle=True)
        assert all(torch.equal(batch.edge_label, batch.input_id) for batch in plain)
        drawn = LinkNeighborLoader(ds, [2], given, edge_label=label, neg_sampling="binary", batch_size=9)
        for batch in drawn:  # class 0 is a negative's, so the others are one more
            count = len(batch.input_id)
            assert torch.equal(batch.edge_label[:count], batch.input_id + 1)
            assert batch.edge_label[count:].tolist() == [0] * count
    ones = LinkNeighborLoader(ds, [2], edge_label=torch.ones(edge_index.size(1), dtype=torch.long), neg_sampling="binary")
    assert next(iter(ones)).edge_label.tolist() == [1, 0]
    assert "edge_label" not in next(iter(LinkNeighborLoader(ds, [2], edge_index)))
    numbered = LinkNeighborLoader(ds, [2], edge_index[:, :3], input_id=torch.tensor([7, 8, 9]))
    assert [batch.input_id.tolist() for batch in numbered] == [[7], [8], [9]]


def test_exact_negatives_are_no_edges(ds: Any, edge_index: Tensor) -> None:
    edges = set(map(tuple, edge_index.t().tolist()))
    loader = LinkNeighborLoader(
        ds, [2], edge_index, neg_sampling={"mode": "binary", "amount": 3}, exact_negatives=True, batch_size=50
    )
    for batch in loader:
        negative = batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]]
        assert not set(map(tuple, negative.t().tolist())) & edges
        assert (negative[0] != negative[1]).all()


def test_negatives_that_cannot_be_exact_are_edges_or_an_error(make_store: MakeStore) -> None:
    """Node 0 has edges to all others."""
    src, dst = np.array([0] * 8 + [1, 2, 3]), np.array([*range(1, 9), 4, 5, 6])
    how: dict[str, Any] = {"neg_sampling": {"mode": "triplet", "amount": 3}, "batch_size": 4}
    with ooc.open(make_store("full.ooc", num_nodes=9, src=src, dst=dst)) as ds:
        with pytest.raises(InputError, match="node 0 has edges to all other nodes, so there are no exact negatives"):
            list(LinkNeighborLoader(ds, [2], exact_negatives=True, **how))
        edges = set(zip(src.tolist(), dst.tolist(), strict=True))
        for batch in LinkNeighborLoader(ds, [2], exact_negatives="possible", **how):
            drawn = zip(batch.n_id[batch.src_index].tolist(), batch.n_id[batch.dst_neg_index].tolist(), strict=True)
            assert not [(u, v) for u, row in drawn for v in row if u != 0 and ((u, v) in edges or u == v)]
        with pytest.raises(ConfigError, match="exact_negatives='yes' is invalid: give True, False or 'possible'"):
            LinkNeighborLoader(ds, [2], exact_negatives="yes", **how)  # type: ignore[arg-type]


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight"}])
def test_batches_are_the_same_from_disk_and_in_memory(
    make_store: MakeStore, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    src, dst = edge_index.numpy()
    path = make_store(num_nodes=N, src=src, dst=dst, weight=True)
    how: dict[str, Any] = {"neg_sampling": "binary", "exact_negatives": True, "batch_size": 16, "shuffle": True, "seed": 3}

    def batches(in_memory: bool) -> list[Any]:
        with ooc.open(path, in_memory=in_memory) as ds:
            loader = LinkNeighborLoader(ds, [3, 2], **how, **options)
            assert (loader.strategy.stages.sample.frontier is None) == in_memory
            return [*loader, *loader]

    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    on_disk = batches(False)
    monkeypatch.undo()
    assert same(on_disk, batches(True))
    assert not same(on_disk[0], on_disk[len(on_disk) // 2])


def test_it_goes_on_where_it_was(ds: Any, edge_index: Tensor) -> None:
    how: dict[str, Any] = {"edge_label_index": edge_index, "neg_sampling": "triplet", "batch_size": 64, "shuffle": True}
    loader, other = (LinkNeighborLoader(ds, [2, 2], seed=5, **how) for _ in range(2))
    whole = [*loader, *loader]
    epoch = iter(other)
    for _ in range(2):
        next(epoch)
    state = other.state_dict()
    fresh = LinkNeighborLoader(ds, [2, 2], seed=5, **how)
    fresh.load_state_dict(state)
    assert same([*fresh, *fresh], whole[2:])
    assert same(list(pickle.loads(pickle.dumps(LinkNeighborLoader(ds, [2, 2], seed=5, **how)))), whole[: len(loader)])
    with pytest.raises(ConfigError, match="input_nodes was"):
        LinkNeighborLoader(ds, [2, 2], seed=5, **{**how, "neg_sampling": "binary"}).load_state_dict(state)


def test_calling_a_loader_makes_the_batch_of_links(ds: Any, edge_index: Tensor) -> None:
    batch = LinkNeighborLoader(ds, [2], edge_index)(torch.tensor([4, 17]))
    assert torch.equal(batch.n_id[batch.edge_label_index], edge_index[:, [4, 17]])
    assert batch.input_id.tolist() == [4, 17]


def test_full_fanout_is_what_a_model_gives_without_those_edges(ds: Any, edge_index: Tensor) -> None:
    torch.manual_seed(0)
    first, second, x = SAGEConv(8, 16), SAGEConv(16, 4), torch.from_numpy(ooc_x(ds))
    for batch in LinkNeighborLoader(ds, [-1, -1], edge_index[:, :24], batch_size=1):
        own = pairs(edge_index[:, batch.input_id])
        rest = edge_index[:, torch.tensor([(min(u, v), max(u, v)) not in own for u, v in edge_index.t().tolist()])]
        expected = second(first(x, rest).relu(), rest)[edge_index[:, batch.input_id]]
        found = second(first(batch.x, batch.edge_index).relu(), batch.edge_index)[batch.edge_label_index]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_hops_and_no_edges(make_store: MakeStore) -> None:
    none = np.empty(0, np.int64)
    with ooc.open(make_store(num_nodes=N, src=none, dst=none)) as ds:
        links = torch.randint(0, N, (2, 40))
        for batch in LinkNeighborLoader(ds, [2], links, batch_size=20):
            assert batch.edge_label_index.size(1) == batch.input_id.numel() == 20
            assert batch.num_nodes == batch.edge_label_index.unique().numel()
        assert len(LinkNeighborLoader(ds, [2])) == 0


def test_links_by_ones_own_ids_and_with_an_edge_type(ds: Any, edge_index: Tensor) -> None:
    for given in ((None, edge_index), (("node", "to", "node"), edge_index), edge_index.numpy(), edge_index.tolist()):
        assert next(iter(LinkNeighborLoader(ds, [2], given, batch_size=2))).input_id.tolist() == [0, 1]


def test_what_does_not_fit_is_refused(ds: Any, make_store: MakeStore, edge_index: Tensor) -> None:
    for options, error, words in (
        ({"edge_label_index": edge_index.t()}, ConfigError, r"whole numbers \[2, k\]"),
        ({"edge_label_index": edge_index.float()}, ConfigError, r"not float32"),
        (
            {"edge_label_index": torch.tensor([[0, 1], [2, N]])},
            InputError,
            rf"link 1 of edge_label_index, from 1 to {N}, is out",
        ),
        ({"edge_label_index": edge_index, "edge_label": [1]}, ConfigError, r"edge_label has shape \[1\] for"),
        ({"edge_label": torch.ones(E), "neg_sampling": "triplet"}, ConfigError, "for 400 links|beside triplets"),
        ({"neg_sampling": "both"}, ConfigError, "give 'binary', 'triplet' or dict"),
        ({"neg_sampling": {"mode": "triplet", "amount": 1.5}}, ConfigError, "integer"),
        ({"neg_sampling": {"mode": "binary", "amount": 0}}, ConfigError, "positive"),
        (
            {"neg_sampling": {"mode": "binary", "dst_weight": torch.ones(3)}},
            ConfigError,
            "dst_weight must be a number for each",
        ),
        ({"neg_sampling": {"mode": "binary", "amount": float("nan")}}, ConfigError, "the amount must be finite, not nan"),
        ({"neg_sampling": {"mode": "binary", "src_weight": ["a"] * N}}, ConfigError, "src_weight must be a number for each"),
        ({"edge_label_index": 5}, ConfigError, r"whole numbers \[2, k\]"),
        ({"edge_label_index": ([0, 1], [2])}, ConfigError, r"whole numbers \[2, k\]"),
        ({"edge_label": ["a"] * E}, ConfigError, "edge_label must be numbers, one a link, not a list of others"),
        ({"edge_features": 3}, ConfigError, "edge_features must be a list of names, not 3"),
        ({"dtype": "float32"}, ConfigError, r"dtype must be a type of torch, such as torch\.float32, not 'float32'"),
        ({"neg_sampling": "binary", "neg_sampling_ratio": 1.0}, ConfigError, "ask for the same"),
        ({"subgraph_type": "induced"}, ConfigError, "cannot take subgraph_type='induced': only NeighborLoader takes it"),
        ({"exact_negatives": True}, ConfigError, "exact_negatives needs negatives"),
        ({"edge_label_time": torch.ones(E)}, ConfigError, "edge_label_time needs time_attr"),
        ({"temporal_strategy": "last"}, ConfigError, "needs time_attr"),
        ({"neg_samplin": 1}, ConfigError, "did you mean 'neg_sampling'"),
    ):
        with pytest.raises(error, match=words):
            LinkNeighborLoader(ds, [2], **options)  # type: ignore[arg-type]
    every = np.array([(u, v) for u in range(6) for v in range(6) if u != v]).T
    with (
        ooc.open(make_store("full.ooc", num_nodes=6, src=every[0], dst=every[1])) as full,
        pytest.raises(ConfigError, match="has all possible edges, so no exact negatives"),
    ):
        LinkNeighborLoader(full, [2], neg_sampling="binary", exact_negatives=True)


@pytest.mark.parametrize("amount", [1, 40])
@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_the_links_of_a_batch_count_for_its_memory(ds: Any, mode: str, amount: int) -> None:
    loader = LinkNeighborLoader(ds, [0], neg_sampling={"mode": mode, "amount": amount}, batch_size=64, split_masks=False)
    batch, drawn = next(iter(loader)), loader.strategy.stages.sample.sample(Cursor(0, 0))
    fields = {each.data_ptr(): each.nbytes for each in batch.to_dict().values() if isinstance(each, Tensor)}
    assert drawn.links is not None
    links = sum(each.nbytes for each in (drawn.links.negative_src, drawn.links.negative_dst))
    assert sum(fields.values()) + links <= loader.strategy.memory.nbytes(drawn)


def test_a_batch_beyond_the_memory_is_refused(ds: Any) -> None:
    small = dataclasses.replace(divide(10**9, baseline=0), max_batch=10_000, in_flight=20_000)
    loader = LinkNeighborLoader(ds, [-1, -1], batch_size=400, neg_sampling="binary", budget=small)
    with pytest.raises(BudgetError, match="smaller fan-out or more memory"):
        next(iter(loader))


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_links_of_a_part_meet_training_edges_only(ds: Any, edge_index: Tensor, part: str) -> None:
    split = ooc.EdgeSplit(0.2, 0.2, seed=1)
    parts = torch.from_numpy(split.parts(*edge_index.numpy()))
    label = torch.arange(edge_index.size(1))
    loader = LinkNeighborLoader(ds, [4, -1], part, edge_label=label, edge_split=split, batch_size=16, shuffle=True)
    seen = []
    for batch in loader:
        assert torch.equal(batch.n_id[batch.edge_label_index], edge_index[:, batch.input_id])
        assert torch.equal(batch.edge_label, batch.input_id)
        assert (parts[batch.e_id] == 0).all()
        seen.append(batch.input_id)
    assert torch.equal(torch.cat(seen).sort().values, (parts == ("train", "val", "test").index(part)).nonzero().view(-1))
    with pytest.raises(ConfigError, match="edge_label_index='train': give links"):
        LinkNeighborLoader(ds, [4], "train")
    with pytest.raises(ConfigError, match=r"edge_split must be an ooc\.EdgeSplit or .*, not dict"):
        LinkNeighborLoader(ds, [4], "train", edge_split={"val": 0.1})  # type: ignore[arg-type]
