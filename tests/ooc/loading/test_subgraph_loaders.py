"""`ClusterLoader` against the subgraph by brute force, and PyG's layers on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import subgraph

import ooc
from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
from ooc.models.convs import BlockGCNConv, BlockSAGEConv
from ooc.runtime.memory_plan import divide
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError
from tests.conftest import MakeStore
from tests.ooc.batches import same

N = 120
PARTS = [0, 20, 50, 51, 80, 100, 118, N]


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """With a hub, self-loops and isolated nodes."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, N - 3, (2, 900))
    src, dst = np.concatenate([src, np.arange(60), [7, 7, 9]]), np.concatenate([dst, np.zeros(60, np.int64), [7, 7, 9]])
    return make_store(num_nodes=N, src=src, dst=dst, weight=True, parts=PARTS)


def whole(ds: Dataset) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(edge_index by slot, weight, x) of all of it."""
    target = np.repeat(np.arange(N), np.diff(ds.graph.indptr))
    x = np.empty((N, 8), np.float32)
    ds.rows("x").read(np.arange(N), x)
    edge_index = np.stack([np.asarray(ds.graph.indices, np.int64), target])
    return torch.from_numpy(edge_index), torch.from_numpy(np.array(ds.graph.columns["weight"])), torch.from_numpy(x)


@pytest.mark.parametrize("where", ["disk", "memory", "edges on disk"])
def test_a_batch_is_the_subgraph_of_its_parts(store: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "edges on disk":
        monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 2**62)
    with Dataset.open(store, in_memory=where == "memory") as ds:
        edge_index, weight, x = whole(ds)
        loader, seen = ClusterLoader(ds, 3, shuffle=True, input_nodes="train", num_layers=2), []
        assert len(loader) == 3
        for batch in loader:
            seen.append(batch.n_id)
            inner, own = subgraph(batch.n_id, edge_index, weight, relabel_nodes=True, num_nodes=N)
            assert torch.equal(batch.edge_index, inner)
            assert torch.equal(batch.edge_weight, own)
            edge_id = torch.from_numpy(np.array(ds.graph.columns["edge_id"]))
            assert torch.equal(batch.e_id, subgraph(batch.n_id, edge_index, edge_id, num_nodes=N)[1])
            assert torch.equal(batch.x, x[batch.n_id])
            assert (batch.batch_size, torch.equal(batch.input_id, batch.n_id)) == (len(batch.n_id), True)
            train = torch.isin(batch.n_id, torch.from_numpy(ds.split("train")))
            assert torch.equal(batch.input_mask, train)
            assert torch.equal(batch.y, torch.where(train, torch.from_numpy(np.array(ds.labels)).long()[batch.n_id], -1))
            gcn, block = BlockGCNConv(8, 5), batch.blocks[0]
            pyg = GCNConv(8, 5)
            pyg.load_state_dict(gcn.state_dict())
            assert torch.allclose(gcn(batch.x, block), pyg(batch.x, inner, own), atol=1e-5)
            sage, plain = BlockSAGEConv(8, 5), SAGEConv(8, 5)
            plain.load_state_dict(sage.state_dict())
            assert torch.allclose(sage(batch.x, block), plain(batch.x, inner), atol=1e-5)
            assert batch.blocks[1] is block
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(N))
        assert (loader.topology_bytes_read > 0) == (where == "edges on disk")


def test_nodes_to_train_on_are_given_as_a_split_a_mask_or_ids(store: Path) -> None:
    with Dataset.open(store) as ds:
        makes = [
            lambda nodes: ClusterLoader(ds, num_parts=None, input_nodes=nodes, seed=0),
            lambda nodes: SaintLoader(ds, "node", 9, sample_coverage=1, num_steps=2, input_nodes=nodes, seed=0),
        ]
        for make in makes:
            of_split, *others = [make(nodes) for nodes in ("train", ds.train_mask, ds.split("train").tolist())]
            expected = list(of_split)
            for other in others:
                assert same(list(other), expected)
                with pytest.raises(ConfigError, match="train was 'train' and is 'array:"):
                    other.load_state_dict({**of_split.state_dict(), "epoch": 0, "step": 0})
            with pytest.raises(InputError, match="mask of input nodes has 3 entries"):
                make([True, False, True])
        with pytest.raises(ConfigError, match=r"num_steps must be a whole number, not 2\.5"):
            SaintLoader(ds, num_steps=2.5)  # type: ignore[arg-type]


def test_unweighted_batches_count_their_own_degrees(make_store: MakeStore) -> None:
    with Dataset.open(make_store(num_nodes=N, num_edges=900)) as ds:
        for batch in ClusterLoader(ds, 2, num_parts=5):
            assert torch.equal(batch.blocks[0].degree, torch.bincount(batch.edge_index[1], minlength=batch.num_nodes))
            assert torch.equal(batch.y, torch.from_numpy(np.array(ds.labels)).long()[batch.n_id])
            assert "input_mask" not in batch


def test_parts_are_grouped_anew_each_epoch_and_a_state_leads_back(store: Path) -> None:
    with Dataset.open(store) as ds:
        loader = ClusterLoader(ds, 2, shuffle=True, seed=3)
        first, second = list(loader), list(loader)
        assert [each.n_id.tolist() for each in first] != [each.n_id.tolist() for each in second]
        again = ClusterLoader(ds, 2, shuffle=True, seed=3, sample_threads=3)
        again.load_state_dict({**loader.state_dict(), "epoch": 1, "step": 1})
        assert all(map(same, again, second[1:]))
        assert all(map(same, ooc.ClusterLoader(ds, 2, shuffle=True, seed=3), first))
        with pytest.raises(ConfigError, match="cannot resume: batch_size was 2"):
            ClusterLoader(ds, 3, shuffle=True, seed=3).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 8}, "a batch of 8 parts: give 1 to 7"),
        ({"num_parts": 3}, "the store has 7 parts, not 3"),
        ({"shufle": True}, "ClusterLoader has no argument 'shufle': did you mean 'shuffle'"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"disjoint": True}, "ClusterLoader cannot take disjoint=True"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(store: Path, arguments: dict[str, Any], error: str) -> None:
    with Dataset.open(store) as ds, pytest.raises(ConfigError, match=error):
        ClusterLoader(ds, **arguments)


def test_a_transform_and_float_types(store: Path) -> None:
    def mark(batch: Any) -> Any:
        batch.mark = int(batch.n_id.sum())
        return batch

    with Dataset.open(store) as ds:
        batch = next(iter(ClusterLoader(ds, 1, transform=mark, dtype=torch.float16, edge_ids=False)))
        assert (batch.mark, batch.x.dtype) == (sum(range(20)), torch.float16)
        assert "e_id" not in batch


def test_a_batch_over_the_budget_is_refused(store: Path) -> None:
    from dataclasses import replace

    with Dataset.open(store) as ds:
        small = replace(divide(10**9, baseline=0), max_batch=3000, in_flight=6000)
        with pytest.raises(BudgetError, match="use fewer parts per batch"):
            list(ClusterLoader(ds, 7, budget=small))
