"""Built-in models on batches from disk with full fan-outs give what PyG's layers give on the whole graph in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GINEConv,
    GraphSAGE,
    HeteroConv,
    HGTConv,
    RGCNConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import AttentionalAggregation

import ooc
from ooc.models.builders import Model, build_model
from ooc.models.graph_models import GraphModel, build_graph_model, forward_graphs
from ooc.models.hetero import build_hetero_model
from ooc.models.user_models import forward_batch
from tests.ooc.hetero_batches import WIDTHS, hetero_data, sizes
from tests.ooc.many_graphs import random_graphs

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
FEATURES = {**WIDTHS, "author": 0}
"""of each node type; authors have an embedding table"""


def sage_of(conv: Any, keys: list[Any]) -> HeteroConv:
    """PyG's HeteroConv of SAGEConv; the map of the own row is that of the first edge type into a node type."""
    convs, begun = {}, set()
    for key in keys:
        first = key[2] not in begun
        begun.add(key[2])
        neighbor, own = conv.neighbor[key], conv.self_row[key[2]]
        channels = (neighbor.in_features, own.in_features)
        convs[key] = SAGEConv(channels, own.out_features, root_weight=first, bias=first)
        convs[key].lin_l.weight = neighbor.weight
        if first:
            convs[key].lin_l.bias, convs[key].lin_r.weight = own.bias, own.weight
    return HeteroConv(convs, aggr="sum")


def rgcn_of(conv: Any, data: HeteroData, keys: list[Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    """PyG's RGCNConv on the graph of all node types in one."""
    theirs = RGCNConv(conv.in_channels, conv.out_channels, len(keys), conv.num_bases)
    theirs.load_state_dict(conv.state_dict())
    starts = dict(zip(x, torch.tensor([0, *map(len, x.values())]).cumsum(0).tolist(), strict=False))
    ends = [data[key].edge_index + torch.tensor([[starts[key[0]]], [starts[key[2]]]]) for key in keys]
    number = torch.cat([torch.full((edges.size(1),), at) for at, edges in enumerate(ends)])
    out = theirs(torch.cat([*x.values()]), torch.cat(ends, dim=1), number)
    return dict(zip(x, out.split([len(rows) for rows in x.values()]), strict=True))


def by_pyg(name: str, model: Model, data: HeteroData, metadata: tuple[list[str], list[Any]]) -> Tensor:
    """Outputs of all papers."""
    encoder, keys = model.encoder, metadata[1]
    x = {each: encoder.tables[each].weight if each in encoder.tables else data[each].x for each in metadata[0]}
    x = {each: encoder.maps[each].lin(rows).relu() if each in encoder.maps else rows for each, rows in x.items()}
    for number, layer in enumerate(model.layers):
        conv: Any = layer.conv
        if name == "rsage":
            x = sage_of(conv, keys)(x, data.edge_index_dict)
        elif name == "rgcn":
            x = rgcn_of(conv, data, keys, x)
        else:
            theirs = HGTConv({each: rows.size(1) for each, rows in x.items()}, conv.out_channels, metadata, conv.heads)
            theirs.load_state_dict(conv.state_dict())
            x = theirs(x, data.edge_index_dict)
        if name != "hgt" and number == 0:
            x = {each: rows.relu() for each, rows in x.items()}
    return model.decoder.head(x["paper"])  # type: ignore[no-any-return, union-attr]


@pytest.fixture(scope="module")
def hetero(tmp_path_factory: pytest.TempPathFactory) -> tuple[HeteroData, Path]:
    data, path = hetero_data(3, FEATURES), tmp_path_factory.mktemp("full") / "papers.ooc"
    ooc.from_data(data, path).close()
    return data, path


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["rsage", "rgcn", "hgt"])
def test_nodes_of_several_types(hetero: tuple[HeteroData, Path], name: str) -> None:
    data, path = hetero
    torch.manual_seed(0)
    with ooc.open(path) as ds, torch.no_grad():
        metadata = ds.metadata()
        model = build_hetero_model(name, FEATURES, 8, 3, metadata, "paper", num_nodes=sizes(data), heads=2)
        wanted, seen = by_pyg(name, model, data, metadata), 0
        for batch in ooc.NeighborLoader(ds, [-1, -1], "paper", batch_size=7, shuffle=True, seed=1):
            found = forward_batch(model, batch)
            torch.testing.assert_close(found, wanted[batch["paper"].n_id[: len(found)]], **CLOSE)
            seen += len(found)
    assert seen == len(wanted) == data["paper"].num_nodes


@pytest.mark.parametrize("negatives", ["binary", "triplet"])
def test_links_without_those_of_their_batch(tmp_path: Path, negatives: str) -> None:
    torch.manual_seed(0)
    edges, x = torch.randint(0, 50, (2, 240)), torch.randn(50, 6)
    edges = torch.cat([edges, edges[:, ::3].flip(0)], dim=1)
    model = build_model("sage", 6, 16, 4, num_layers=2)
    theirs = GraphSAGE(6, 16, num_layers=2, out_channels=4)
    for conv, layer in zip(theirs.convs, model.layers, strict=True):
        conv.load_state_dict(layer.conv.state_dict())
    with ooc.from_data(Data(x=x, edge_index=edges), tmp_path / "links.ooc") as ds, torch.no_grad():
        loader = ooc.LinkNeighborLoader(ds, [-1, -1], neg_sampling=negatives, batch_size=30, shuffle=True, seed=1)
        for batch in loader:
            links = edges[:, batch.input_id]
            pair = edges[0] * 50 + edges[1]
            left = torch.isin(pair, torch.cat([links[0] * 50 + links[1], links[1] * 50 + links[0]]))
            assert left.sum() >= 30
            wanted = theirs(x, edges[:, ~left])
            found, n_id = forward_batch(model, batch), batch.n_id
            torch.testing.assert_close(found, wanted[n_id[: batch.batch_size]], **CLOSE)
            if negatives == "binary":
                src, dst = batch.edge_label_index
            else:
                src, dst = batch.src_index, batch.dst_pos_index
            scores = (wanted[n_id[src]] * wanted[n_id[dst]]).sum(-1)
            torch.testing.assert_close((found[src] * found[dst]).sum(-1), scores, **CLOSE)
    assert len(loader) == -(-edges.size(1) // 30)


def test_links_of_several_types_without_those_of_their_batch(tmp_path: Path) -> None:
    """R-SAGE; the links of a batch are missing from their own edge type and from its reverse, and from no other."""
    torch.manual_seed(0)
    likes, near = torch.stack([torch.randint(0, 20, (90,)), torch.randint(0, 15, (90,))]), torch.randint(0, 15, (2, 50))
    data, keys = HeteroData(), [("user", "likes", "item"), ("item", "rev_likes", "user"), ("item", "near", "item")]
    data["user"].x, data["item"].x = torch.randn(20, 6), torch.randn(15, 4)
    for key, edges in zip(keys, (likes, likes.flip(0), near), strict=True):
        data[key].edge_index = edges
    widths = {"user": 6, "item": 4}, dict.fromkeys(("user", "item"), 8)
    first, second = (HeteroConv({key: SAGEConv((each[key[0]], each[key[2]]), 8) for key in keys}) for each in widths)
    with ooc.from_data(data, tmp_path / "links.ooc") as ds, torch.no_grad():
        how: dict[str, Any] = {"neg_sampling": "binary", "batch_size": 20, "shuffle": True, "seed": 1}
        for batch in ooc.LinkNeighborLoader(ds, [-1, -1], (keys[0], None), **how):
            links = likes[:, batch[keys[0]].input_id]
            rest = likes[:, ~torch.isin(likes[0] * 15 + likes[1], links[0] * 15 + links[1])]
            edge_index = dict(zip(keys, (rest, rest.flip(0), near), strict=True))
            wanted, found = (
                second({name: rows.relu() for name, rows in first(x, edges).items()}, edges)
                for x, edges in ((data.x_dict, edge_index), (batch.x_dict, batch.edge_index_dict))
            )
            for name, end in zip(("user", "item"), batch[keys[0]].edge_label_index, strict=True):
                torch.testing.assert_close(found[name][end], wanted[name][batch[name].n_id[end]], **CLOSE)


def graphs_by_pyg(model: GraphModel, pooling: str, batch: Any) -> Tensor:
    """Outputs of PyG's GINE with the model's parameters."""
    rows, last = batch.x, len(model.nodes.layers) - 1
    for number, layer in enumerate(model.nodes.layers):
        wide = rows.size(1)
        perceptron = nn.Sequential(nn.Linear(wide, wide if number == last else 8), nn.ReLU(), nn.Linear(8, 8))
        conv = GINEConv(perceptron, edge_dim=3)
        conv.load_state_dict(layer.conv.state_dict())  # type: ignore[union-attr]
        rows = conv(rows, batch.edge_index, batch.edge_attr)
        rows = rows if number == last else rows.relu()
    if pooling == "attention":
        attention = AttentionalAggregation(nn.Linear(8, 1))
        attention.load_state_dict(model.pooling.state_dict())
        pooled = attention(rows, batch.batch)
    else:
        pooled = {"mean": global_mean_pool, "sum": global_add_pool, "max": global_max_pool}[pooling](rows, batch.batch)
    return model.readout.lin(pooled)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Data], Path]:
    found, path = random_graphs(40), tmp_path_factory.mktemp("full") / "graphs.ooc"
    ooc.from_data(found, path).close()
    return found, path


@pytest.mark.parametrize("pooling", ["mean", "sum", "max", "attention"])
def test_whole_graphs_with_edge_features(graphs: tuple[list[Data], Path], pooling: str) -> None:
    given, path = graphs
    torch.manual_seed(0)
    model = build_graph_model("gine", 5, 8, 2, num_layers=2, pooling=pooling, edge_dim=3)
    with ooc.open(path) as ds, torch.no_grad():
        pairs = zip(ooc.GraphLoader(ds, 16), DataLoader(given, batch_size=16), strict=True)
        for batch, theirs in pairs:
            torch.testing.assert_close(forward_graphs(model, batch), graphs_by_pyg(model, pooling, theirs), **CLOSE)
