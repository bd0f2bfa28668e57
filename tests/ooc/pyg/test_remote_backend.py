"""PyG's own NodeLoader over our stores and sampler, against the graph in memory; and the stores against plain arrays."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import k_hop_subgraph

import ooc
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.pyg.remote_backend import OocFeatureStore, OocGraphStore, OocSampler
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from tests.conftest import random_edges

N, E = 50, 300


@pytest.fixture
def ds(make_store):
    x = np.random.default_rng(1).standard_normal((N, 6)).astype(np.float16)
    with Dataset.open(make_store(num_nodes=N, num_edges=E, x=x, weight=True)) as opened:
        yield opened


@pytest.fixture
def whole(ds):
    src, dst = random_edges(N, E)
    x, y = np.empty((N, 6), np.float32), np.empty(N, ds.rows("y").dtype)
    ds.rows("x").read(np.arange(N), x)
    ds.rows("y").read(np.arange(N), y)
    edge_index = torch.from_numpy(np.stack([src, dst]))
    return Data(x=torch.from_numpy(x), y=torch.from_numpy(y).long(), edge_index=edge_index)


def test_pygs_node_loader_runs_on_a_data_set(ds, whole):
    seeds = torch.tensor([4, 30, 11, 2, 49])
    stores = OocFeatureStore(ds), OocGraphStore(ds)
    loader = NodeLoader(stores, node_sampler=OocSampler(ds, [-1, -1]), input_nodes=seeds, batch_size=2)
    ours = NeighborLoader(ds, [-1, -1], seeds, batch_size=2)
    assert len(loader) == len(ours) == 3
    for batch, other in zip(loader, ours, strict=True):
        ids = batch.n_id[: batch.batch_size]
        assert torch.equal(ids, seeds[batch.input_id])
        nodes, _, _, mask = k_hop_subgraph(ids, 2, whole.edge_index, directed=True)
        assert torch.equal(batch.n_id.sort().values, nodes)
        assert torch.equal(batch.e_id.sort().values, mask.nonzero().view(-1))
        assert torch.equal(batch.n_id[batch.edge_index], whole.edge_index[:, batch.e_id])
        assert torch.equal(batch.x, whole.x[batch.n_id])
        assert torch.equal(batch.y, whole.y[batch.n_id])
        given = set(batch.keys())
        assert given <= set(other.keys())
        for name in given:  # a batch of ours has all that PyG's loader gives, and the same
            a, b = batch[name], other[name]
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert not isinstance(a, torch.Tensor) or a.dtype == b.dtype
        assert torch.equal(batch.edge_weight, ds_weights(ds)[batch.e_id])


def ds_weights(ds):
    """float32[E], in the order of the input."""
    weight = torch.empty(E)
    weight[torch.from_numpy(ds.graph.edge_ids(np.arange(E)))] = torch.from_numpy(np.array(ds.graph.columns["weight"]))
    return weight


def test_graphs_without_weights_have_none_behind_pygs_loader(make_store):
    with Dataset.open(make_store("plain.ooc")) as ds:
        stores = OocFeatureStore(ds), OocGraphStore(ds)
        batch = next(iter(NodeLoader(stores, node_sampler=OocSampler(ds, [2]), input_nodes=torch.arange(5))))
        assert "edge_weight" not in batch


def test_draws_follow_torchs_generator(ds):
    sampler, node = OocSampler(ds, [2, 2], weight_attr="weight"), torch.arange(10)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=node)))
    assert torch.equal(outs[0].edge, outs[1].edge)
    assert not torch.equal(outs[0].edge, outs[2].edge)
    assert outs[0].metadata == (None, None)


def test_the_feature_store_is_the_arrays(ds, whole):
    store = OocFeatureStore(ds)
    mask = torch.arange(N) % 7 == 0
    indices = [torch.tensor([3, 3, 0]), slice(4, 9), slice(None, None, -7), 5, -1, mask, mask.to(torch.uint8)]
    indices += [
        np.int64(4),
        torch.tensor(7),
        np.array(-2),
        torch.tensor([-1, 2], dtype=torch.int32),
        [1, 2],
        [],
        torch.arange(0),
    ]
    for index in indices:
        masked = isinstance(index, torch.Tensor) and index.shape == (N,)
        expected = whole.x[mask] if masked else np.array(whole.x.numpy()[index])
        got = store.get_tensor(group_name=None, attr_name="x", index=index)
        assert torch.equal(got, torch.as_tensor(expected))
        assert store.get_tensor_size(group_name=None, attr_name="x", index=index) == tuple(got.shape)
    for index in (mask[:-1], torch.tensor([0.0, 1.0]), 0.5, torch.zeros(2, 2, dtype=torch.long), -N - 1, N):
        for ask in (store.get_tensor, store.get_tensor_size):
            with pytest.raises(IndexError, match=r"whole numbers|out of range|does not fit"):
                ask(group_name=None, attr_name="x", index=index)
    assert torch.equal(store[None, "y", None], whole.y)
    assert store.get_tensor_size(group_name=None, attr_name="x") == (N, 6)
    assert store.get_tensor_size(group_name="paper", attr_name="x") is None
    for group, name in (("node", "z"), ("paper", "x"), (None, "edge_weight")):
        with pytest.raises(KeyError, match=name):
            store.get_tensor(group_name=group, attr_name=name, index=None)
    assert [attr.attr_name for attr in store.get_all_tensor_attrs()] == ["x", "y", "edge_weight"]
    with pytest.raises(IndexError, match=str(N)):
        store.get_tensor(group_name=None, attr_name="x", index=torch.tensor([N]))
    with pytest.raises(InputError, match="nothing"):
        OocFeatureStore(ds, names=["nothing"])


def test_views_of_the_feature_store(ds, whole):
    store, ids = OocFeatureStore(ds), torch.tensor([7, 0, 7])
    for got in (store["node", "x", :], store["node"]["x"][:], store["node"].x[:], store.view().node.x[:], store[None, "x", :]):
        assert torch.equal(got, whole.x)
    for got in (store["node", "x", ids], store["node"].x[ids], store.view(group_name=None).x[ids]):
        assert torch.equal(got, whole.x[ids])
    with pytest.raises(KeyError, match="'z'"):
        store["node"].z[:]


def test_the_graph_store_gives_every_layout(ds, whole):
    store = OocGraphStore(ds)
    row, colptr = store.get_edge_index(edge_type=None, layout="csc")
    order = torch.argsort(whole.edge_index[1], stable=True)
    assert torch.equal(row, whole.edge_index[0][order])
    assert torch.equal(colptr.diff(), torch.bincount(whole.edge_index[1], minlength=N))
    row, col, _ = store.coo()
    assert torch.equal(torch.stack([row, col]), whole.edge_index[:, order])
    rowptr, _, _ = store.csr()
    assert torch.equal(rowptr.diff(), torch.bincount(whole.edge_index[0], minlength=N))
    with pytest.raises(KeyError):
        store.get_edge_index(edge_type=("a", "to", "b"), layout="csc")


def test_what_cannot_be_done_is_refused(ds):
    features, graph, sampler = OocFeatureStore(ds), OocGraphStore(ds), OocSampler(ds, [2])
    with pytest.raises(ConfigError, match="read-only"):
        features.put_tensor(torch.zeros(N, 2), group_name=None, attr_name="z", index=None)
    with pytest.raises(ConfigError, match="read-only"):
        features.remove_tensor(group_name=None, attr_name="x", index=None)
    with pytest.raises(ConfigError, match="read-only"):
        graph.put_edge_index((torch.zeros(1), torch.zeros(1)), edge_type=None, layout="coo")
    with pytest.raises(ConfigError, match="read-only"):
        graph.remove_edge_index(edge_type=None, layout="csc")
    with pytest.raises(NotImplementedError, match="LinkLoader"):
        sampler.sample_from_edges(None)
    with pytest.raises(ConfigError, match="temporal"):
        sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.arange(2), time=torch.arange(2)))
    with pytest.raises(ConfigError, match="no edge column"):
        OocSampler(ds, [2], weight_attr="price")


def test_worker_processes_are_refused_instead_of_hanging(ds):
    stores = OocFeatureStore(ds), OocGraphStore(ds)
    loader = NodeLoader(stores, node_sampler=OocSampler(ds, [2]), input_nodes=torch.arange(4), num_workers=1)
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(loader))


@pytest.mark.slow
def test_edge_features_reach_pygs_loader(tmp_path):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.from_numpy(np.stack(random_edges(N, E)))
    data = Data(x=torch.rand(N, 3, generator=generator), edge_index=edge_index, edge_attr=torch.rand(E, 4, generator=generator))
    with ooc.from_data(data, tmp_path / "s.ooc") as ds:
        features = OocFeatureStore(ds)
        stores = features, OocGraphStore(ds)
        for batch in NodeLoader(stores, node_sampler=OocSampler(ds, [3, 3]), input_nodes=torch.arange(9), batch_size=3):
            assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
            assert torch.equal(batch.x, data.x[batch.n_id])
        group = "node", "edge", "node"
        found = features.get_tensor(group_name=group, attr_name="edge_attr", index=torch.tensor([7, 0]))
        assert torch.equal(found, data.edge_attr[[7, 0]])
        assert tuple(features.get_tensor_size(group_name=group, attr_name="edge_attr", index=None)) == (E, 4)
        with pytest.raises(KeyError, match="no edge feature 'msg'"):
            features.get_tensor(group_name=group, attr_name="msg", index=None)
        bare = NodeLoader(
            (OocFeatureStore(ds, edge_names=()), stores[1]), node_sampler=OocSampler(ds, [3]), input_nodes=torch.tensor([1])
        )
        assert "edge_attr" not in next(iter(bare))
        with pytest.raises(InputError, match="no edge feature 'msg'"):
            OocFeatureStore(ds, edge_names=["msg"])
