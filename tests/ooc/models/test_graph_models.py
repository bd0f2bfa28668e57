"""Models of whole graphs are PyG's convolutions and poolings; a graph's output does not depend on others of its batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, GINConv, GINEConv, SAGEConv, global_add_pool, global_max_pool, global_mean_pool
from torch_geometric.nn.aggr import AttentionalAggregation

from ooc.models.builders import full_blocks
from ooc.models.graph_models import GraphModel, VirtualNode, build_graph_model, fields_taken, forward_graphs
from ooc.stores.errors import ConfigError
from tests.ooc.many_graphs import random_graphs

WIDE, HIDDEN, OUT, LAYERS = 5, 8, 3, 3
GRAPHS = [Data(x=graph.x, edge_index=graph.edge_index, y=graph.y) for graph in random_graphs(12)]


def pyg_conv(name: str, wide: int, inner: int) -> nn.Module:
    if name == "gin":
        return GINConv(nn.Sequential(nn.Linear(wide, inner), nn.ReLU(), nn.Linear(inner, HIDDEN)))
    return {"sage": SAGEConv, "gcn": GCNConv}[name](wide, HIDDEN)


def by_pyg(name: str, model: GraphModel, pooling: str, batch: Any) -> Tensor:
    """What PyG's own modules compute with the model's parameters."""
    rows: Tensor = batch.x
    for number, layer in enumerate(model.nodes.layers):
        last = number == LAYERS - 1
        wide = HIDDEN if number else WIDE
        conv = pyg_conv(name, wide, wide if last else HIDDEN)
        conv.load_state_dict(layer.conv.state_dict())  # type: ignore[union-attr]
        rows = conv(rows, batch.edge_index)
        rows = rows if last else rows.relu()
    if pooling == "attention":
        attention = AttentionalAggregation(nn.Linear(HIDDEN, 1))
        attention.load_state_dict(model.pooling.state_dict())
        pooled = attention(rows, batch.batch)
    else:
        pooled = {"mean": global_mean_pool, "sum": global_add_pool, "max": global_max_pool}[pooling](rows, batch.batch)
    return model.readout.lin(pooled)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["sage", "gcn", "gin"])
@pytest.mark.parametrize("pooling", ["mean", "sum", "max", "attention"])
def test_outputs_and_gradients_are_those_of_pyg(name: str, pooling: str) -> None:
    torch.manual_seed(0)
    model = build_graph_model(name, WIDE, HIDDEN, OUT, LAYERS, pooling=pooling)
    batch: Any = Batch.from_data_list(GRAPHS)
    out = forward_graphs(model, batch)
    torch.testing.assert_close(out, by_pyg(name, model, pooling, batch), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, model(batch.x, batch.edge_index, batch.batch), atol=0, rtol=0)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("virtual_node", [False, True])
@pytest.mark.parametrize("name", ["sage", "gat", "gcnii", "appnp"])
def test_a_graph_is_computed_by_itself(name: str, virtual_node: bool) -> None:
    torch.manual_seed(0)
    if name == "appnp" and virtual_node:
        with pytest.raises(ConfigError, match="leave virtual_node out"):
            build_graph_model(name, WIDE, HIDDEN, OUT, LAYERS, virtual_node=True)
        return
    model = build_graph_model(name, WIDE, HIDDEN, OUT, LAYERS, virtual_node=virtual_node, heads=2, pooling="attention").eval()
    together = forward_graphs(model, Batch.from_data_list(GRAPHS))
    alone = torch.cat([model(graph.x, graph.edge_index) for graph in GRAPHS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_gine_takes_edge_features() -> None:
    torch.manual_seed(0)
    graphs = random_graphs(9)
    model = build_graph_model("gine", WIDE, HIDDEN, OUT, LAYERS, edge_dim=3).eval()
    together = forward_graphs(model, Batch.from_data_list(graphs))
    alone = torch.cat([model(graph.x, graph.edge_index, edge_attr=graph.edge_attr) for graph in graphs])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert "edge_attr" in (fields_taken(model) or ())
    assert "edge_attr" not in (fields_taken(build_graph_model("gin", WIDE, HIDDEN, OUT, LAYERS)) or ())
    conv = GINEConv(nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)), edge_dim=3)
    conv.load_state_dict(model.nodes.layers[0].conv.state_dict())  # type: ignore[union-attr]
    batch: Any = Batch.from_data_list(graphs)
    block = full_blocks(batch.edge_index, len(batch.x), 1, edge_attr=batch.edge_attr)[0]
    expected = conv(batch.x, batch.edge_index, batch.edge_attr)
    torch.testing.assert_close(model.nodes.layers[0].conv(batch.x, block), expected, atol=1e-5, rtol=1e-5)  # type: ignore[operator]


def test_a_virtual_node_is_the_perceptron_of_sums() -> None:
    torch.manual_seed(0)
    node = VirtualNode(HIDDEN, layers=3)
    nn.init.normal_(node.first)
    rows, ptr, batch = torch.randn(5, HIDDEN), torch.tensor([0, 2, 5]), torch.tensor([0, 0, 1, 1, 1])
    first, state = node(rows, None, 1, ptr, batch)
    expected = rows + node.first
    torch.testing.assert_close(first, expected)
    sums = torch.stack([expected[:2].sum(0), expected[2:].sum(0)]) + node.first
    torch.testing.assert_close(state, sums)
    second, _ = node(first, state, 2, ptr, batch)
    torch.testing.assert_close(second, first + node.perceptrons[0](sums)[batch])


def test_forwards_are_given_what_their_parameters_name() -> None:
    class Net(nn.Module):
        def forward(self, z: Tensor, batch: Tensor, num_graphs: int, other: int = 3) -> Tensor:
            return torch.bincount(batch, z.float(), minlength=num_graphs) + other

    class Odd(nn.Module):
        def forward(self, positions: Tensor) -> Tensor:
            return positions

    batch: Any = Batch.from_data_list(random_graphs(4))
    assert forward_graphs(Net(), batch).tolist() == [[float(each.z.sum()) + 3] for each in random_graphs(4)]
    with pytest.raises(ConfigError, match=r"Odd\.forward takes 'positions', and batches of graphs have batch, bond"):
        forward_graphs(Odd(), batch)


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(ConfigError, match="pooling 'median' is unknown: use mean, sum, max, attention"):
        build_graph_model("gin", WIDE, HIDDEN, OUT, LAYERS, pooling="median")
