"""A width a layer, jumping knowledge, blocks of their own: against PyG's networks, in batches and in passes over all nodes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.graph.blocks import Block
from ooc.layerwise.shape import parts_of
from ooc.models.builders import Model, build_model, full_blocks
from ooc.models.hetero import build_hetero_model
from ooc.models.initialization import initialize
from ooc.stores.errors import ConfigError
from tests.ooc.graphs import hub_graph, sample

NODES, X_CHANNELS, OUT, LAYERS = 60, 12, 3, 3


def make(name: str = "sage", hidden: Any = 16, **settings: Any) -> Model:
    torch.manual_seed(1)
    return build_model(name, X_CHANNELS, hidden, OUT, LAYERS, heads=4, **settings)


def in_steps(model: Model, x: Tensor, block: Block) -> Tensor:
    """As a pass over all nodes computes it."""
    encoder, layers, decoder = parts_of(model)
    h = x if encoder is None else encoder(x)
    for layer in layers:
        h = layer(h, block)
    out: Tensor = h if decoder is None else decoder(h)
    return out


@pytest.mark.parametrize("jk", ["cat", "max", "lstm"])
@pytest.mark.parametrize(("name", "theirs"), [("sage", GraphSAGE), ("gcn", GCN)])
def test_jumping_knowledge_equals_pygs_models(name: str, theirs: type[BasicGNN], jk: str) -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    model, plain = make(name, jk=jk), theirs(X_CHANNELS, 16, LAYERS, OUT, jk=jk)
    for conv, layer in zip(plain.convs, model.layers, strict=True):
        conv.load_state_dict(layer.conv.state_dict())
    assert model.jump is not None
    assert model.decoder is not None
    plain.jk.load_state_dict(model.jump.jump.state_dict())  # type: ignore[union-attr, operator]
    plain.lin.load_state_dict(model.decoder.lin.state_dict())  # type: ignore[union-attr]
    want = plain(x, edge_index)
    torch.testing.assert_close(model(x, full_blocks(edge_index, NODES, LAYERS)), want, atol=1e-5, rtol=1e-5)
    batch = sample(edge_index, x, torch.tensor([0, 59, 4]), [-1] * LAYERS)
    torch.testing.assert_close(model(batch.x, batch.blocks), want[[0, 59, 4]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"jk": mode} for mode in ("cat", "max", "lstm", "sum")] + [{"jk": "cat", "hidden": [8, 32, 4]}]
)
def test_a_pass_over_all_nodes_carries_the_rows_of_all_layers(settings: dict[str, Any]) -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    model, blocks = make(dropout=0.5, norm="layer", **settings).eval(), full_blocks(edge_index, NODES, LAYERS)
    torch.testing.assert_close(in_steps(model, x, blocks[0]), model(x, blocks))
    _, layers, decoder = parts_of(model, 2)
    assert decoder is None
    assert layers == list(model.layers[:2])


def test_sums_over_layers_are_sums() -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    model, blocks = make(jk="sum"), full_blocks(edge_index, NODES, LAYERS)
    h, total = x, torch.zeros(NODES, 16)
    for layer in model.layers:
        h = layer(h, blocks[0])
        total = total + h
    assert model.decoder is not None
    torch.testing.assert_close(model(x, blocks), model.decoder(total))


def test_widths_are_those_behind_each_layer() -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    model = make(hidden=[64, 8])
    h, found = x, []
    for layer in model.layers:
        h = layer(h, full_blocks(edge_index, NODES, 1)[0])
        found.append(h.size(1))
    assert found == [64, 8, OUT]
    torch.testing.assert_close(model(x, full_blocks(edge_index, NODES, LAYERS)), h)
    same, one = make(hidden=[16, 16]), make(hidden=16)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), one.parameters(), strict=True))


def test_blocks_are_what_they_say() -> None:
    blocks: list[dict[str, Any]] = [
        {"conv": "gat", "norm": "layer", "activation": "tanh", "heads": 2},
        {"mlp": 20, "residual": True, "dropout": 0.25},
        {"conv": "gcn", "activation": None},
    ]
    model = make(dropout=0.5, blocks=blocks)
    first, second, last = model.layers
    assert type(first.conv).__name__ == "BlockGATConv"
    assert first.conv.heads == 2
    assert isinstance(first.norm, nn.LayerNorm)
    assert isinstance(first.activation, nn.Tanh)
    assert (second.residual, second.dropout, last.dropout) == (True, 0.25, 0.5)
    assert type(last.conv).__name__ == "BlockGCNConv"
    assert isinstance(last.activation, nn.Identity)
    model.eval()
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    (block,) = full_blocks(edge_index, NODES, 1)
    h = first(x, block)
    row = (second.conv(h, block) + h).relu()
    lin, _, out = second.mlp
    torch.testing.assert_close(second(h, block), out(F.relu(lin(row))))
    torch.testing.assert_close(model(x, [block] * LAYERS), last(second(h, block), block))


def test_heads_of_a_last_block_are_averaged() -> None:
    last = make(blocks=[{}, {}, {"conv": "gat", "heads": 2}]).layers[-1]
    assert (last.conv.heads, last.conv.concat) == (2, False)


@pytest.mark.parametrize("name", ["kaiming", "xavier"])
def test_matrices_are_drawn_within_their_bounds(name: str) -> None:
    model = initialize(make("sage", hidden=256), name)  # type: ignore[arg-type]
    for layer in model.layers:
        for lin in (layer.conv.lin_l, layer.conv.lin_r):
            out, into = lin.weight.shape
            bound = (6 / into) ** 0.5 if name == "kaiming" else (6 / (into + out)) ** 0.5
            assert 0.8 * bound < float(lin.weight.abs().max()) <= bound
        assert not layer.conv.lin_l.bias.any()
    assert initialize(model, "default") is model


def test_matrices_of_edge_types_and_of_the_node_itself_are_drawn_too() -> None:
    metadata = ["a", "b"], [("a", "x", "b"), ("b", "y", "a")]
    sizes = {"hidden_channels": 16, "out_channels": 64, "num_layers": 1}
    model = build_hetero_model("rgcn", {"a": 16, "b": 16}, metadata=metadata, node_type="a", **sizes)  # type: ignore[arg-type]
    root = model.layers[-1].conv.root
    assert root.shape == (16, 64)
    for name, bound in (("kaiming", (6 / 16) ** 0.5), ("xavier", (6 / 80) ** 0.5)):
        initialize(model, name)  # type: ignore[arg-type]
        assert 0.9 * bound < float(root.abs().max()) <= bound


def test_what_does_not_fit_is_refused() -> None:
    for settings, said in (
        ({"hidden": [16]}, "1 width for 2 hidden layers"),
        ({"hidden": [16, 16], "jk": "cat"}, "2 widths for 3 hidden layers"),
        ({"hidden": [16, 8, 16], "jk": "max"}, "one width"),
        ({"name": "gcnii", "jk": "cat"}, "leave out jk"),
        ({"name": "appnp", "hidden": [16, 8]}, "one hidden width"),
        ({"blocks": [{}]}, "blocks are 1 and layers are 3"),
        ({"blocks": [{"conv": "appnp"}] * 3}, "conv 'appnp'"),
        ({"blocks": [{"activation": "sine"}] * 3}, "block 1 has activation 'sine': use relu, "),
        ({"blocks": [{"width": 3}] * 3}, "'width'"),
        ({"blocks": [{}, {"heads": 4}, {}]}, "block 2 has heads, which apply to conv gat"),
        ({"blocks": [{"conv": "gine"}, {}, {}]}, "gine takes edge features"),
        ({"name": "gat", "hidden": [16, 6]}, "^hidden = 6 is the width of all 4 heads together: use a multiple of 4"),
        ({"blocks": [{}, {"conv": "gat", "heads": 5}, {}]}, "^block 2: hidden = 16 is the width of all 5 heads"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(**settings)  # type: ignore[arg-type]
