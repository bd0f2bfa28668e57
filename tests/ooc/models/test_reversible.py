"""Reversible models: gradients of the plain model, of PyG's own network; activations that do not grow with depth."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.models.rev_gnn import GroupAddRev

from ooc.graph.blocks import squared
from ooc.models.builders import Model, build_model, full_blocks
from ooc.models.graph_models import build_graph_model
from ooc.models.layers import evaluating
from ooc.models.reversible import NAMES, WIDTHS_ALIVE
from ooc.stores.errors import ConfigError
from tests.ooc.graphs import hub_graph, sample
from tests.ooc.live_bytes import LiveBytes

NODES, X_CHANNELS, HIDDEN, OUT = 60, 12, 32, 3


def make(name: str, layers: int, dropout: float = 0.0, groups: int = 2, stores: bool = False, hidden: int = HIDDEN) -> Model:
    torch.manual_seed(1)
    settings = {"dropout": dropout, "norm": "layer", "groups": groups, "heads": 4}
    model = build_model(name, X_CHANNELS, hidden, OUT, layers, **settings)  # type: ignore[arg-type]
    for layer in model.layers:
        layer.disable = stores
    return model


def gradients(model: Model, x: Tensor, blocks: list) -> list[Tensor]:
    torch.manual_seed(2)
    out = model(x, blocks)
    F.cross_entropy(out, torch.arange(len(out)) % OUT).backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


class Block(nn.Module):
    """A group's block as PyG's example of RevGNN writes it."""

    def __init__(self, name: str, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        made = {"revsage": SAGEConv(channels, channels), "revgat": GATConv(channels, channels // 4, heads=4)}
        self.conv = made.get(name) or GCNConv(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(x).relu(), edge_index)
        return out


def test_rows_of_all_layers_are_in_one_place_and_the_users_stay() -> None:
    model, places = make("revsage", 3), list[int]()
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, given, out: places.append(out.untyped_storage().data_ptr()))
    blocks = full_blocks(hub_graph(), NODES, 3)
    model(torch.randn(NODES, X_CHANNELS), blocks)
    assert len(set(places)) == 1
    rows = torch.randn(NODES, HIDDEN)
    before = rows.clone()
    model.layers[0](rows, blocks[0])
    torch.testing.assert_close(rows, before, rtol=0, atol=0)


def test_rows_that_others_hold_stay() -> None:
    """Those that autograd saved, and those that are read again behind the layer."""
    (block,), found = full_blocks(hub_graph(), NODES, 1), []
    for stores in (False, True):
        layer = make("revsage", 1, stores=stores).layers[0]
        torch.manual_seed(3)
        weight, x = torch.randn(X_CHANNELS, HIDDEN, requires_grad=True), torch.randn(NODES, X_CHANNELS)
        rows = F.relu(x @ weight)
        (layer(rows, block) - rows).square().mean().backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_pygs_layers(name: str, groups: int) -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    model = make(name, 5, groups=groups, hidden=64)
    h = model.encoder(x)
    for layer in model.layers:
        theirs = GroupAddRev(nn.ModuleList([Block(name, 64 // groups) for _ in range(groups)]), disable=True)
        theirs.load_state_dict(layer.state_dict())
        h = theirs(h, edge_index)
    torch.testing.assert_close(model(x, full_blocks(edge_index, NODES, 1)), model.decoder(h), atol=1e-5, rtol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_stored_activations(name: str) -> None:
    """The gradient of 112 layers to 1e-5 in float32, and each parameter's in float64, with dropout."""
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    blocks = full_blocks(edge_index, NODES, 1)
    ours, plain = (gradients(make(name, 112, 0.2, stores=stores), x, blocks) for stores in (False, True))
    assert len(ours) == len(plain) > 112
    whole, other = (torch.cat([each.flatten() for each in found[1:]]) for found in (ours, plain))
    assert (whole - other).norm() <= 1e-5 * other.norm()
    ours, plain = (gradients(make(name, 112, 0.2, stores=stores).double(), x.double(), blocks) for stores in (False, True))
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


def test_frozen_parameters_have_no_gradient_and_the_others_theirs() -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    blocks = full_blocks(edge_index, NODES, 1)
    found = []
    for stores in (False, True):
        model = make("revsage", 5, 0.2, groups=4, stores=stores).double()
        frozen = [
            *model.encoder.parameters(),
            *model.layers[0].convs[1].parameters(),
            model.layers[2].convs[3].conv.lin_l.weight,
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        found.append(gradients(model, x.double(), blocks))
        assert all(parameter.grad is None for parameter in frozen)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wanted", [True, False])
def test_rows_that_are_part_of_others_stay(wanted: bool) -> None:
    """A view's storage is not the layer's to free, nor are rows without a backward pass that restores them."""
    (layer,), (block,) = make("revsage", 1).layers, full_blocks(hub_graph(), NODES, 1)
    whole = torch.randn(NODES, 2 * HIDDEN)
    before, found = whole.clone(), []
    layer.requires_grad_(wanted)
    for rows in (whole[:, :HIDDEN], whole[:, :HIDDEN].clone()):
        rows = rows.requires_grad_() if wanted else rows
        out = layer(rows, block)
        found.append([out.detach().clone(), rows])
        if wanted:
            out.square().sum().backward()
            found[-1][1] = rows.grad
    assert torch.equal(whole, before)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_second_backward_pass_is_refused() -> None:
    (layer,), (block,) = make("revsage", 1).layers, full_blocks(hub_graph(), NODES, 1)
    out = layer(torch.randn(NODES, HIDDEN), block).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        out.backward()


@pytest.mark.parametrize("name", NAMES)
def test_sampled_batches_are_the_sampled_graph_and_their_gradients_those_of_stored_activations(name: str) -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    batch = sample(edge_index, x, torch.tensor([0, 59, 4, 7]), [3, 2], generator=torch.Generator().manual_seed(3))
    ours, plain = (gradients(make(name, 9, 0.3, stores=stores), batch.x, batch.blocks) for stores in (False, True))
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    model = make(name, 9)
    block = squared(batch.blocks[0])
    assert block.num_dst == block.num_src == len(batch.x)
    torch.testing.assert_close(model(batch.x, batch.blocks), model(batch.x, [block])[:4])


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_groups_are_the_layer(name: str) -> None:
    edge_index, h = hub_graph(), torch.randn(NODES, 64)
    (block,) = full_blocks(edge_index, NODES, 1)
    model = make(name, 1, groups=4, hidden=64)
    (layer,) = model.layers
    with evaluating(model):
        rows = h
        for step in layer.steps():
            rows = step(rows, block)
        torch.testing.assert_close(rows, layer(h.clone(), block))


def peak(name: str, layers: int, stores: bool) -> int:
    torch.manual_seed(0)
    model, nodes = make(name, layers, 0.2, stores=stores), 400
    blocks, x = full_blocks(torch.randint(0, nodes, (2, 2000)), nodes, 1), torch.randn(nodes, X_CHANNELS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes(each for p in model.parameters() for each in (p, p.grad) if each is not None) as live:
        model(x, blocks).square().mean().backward()
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_activations_do_not_grow_with_depth(name: str) -> None:
    """From 7 to 112 layers by no more than 5 %, and as the memory plan has it; stored ones in proportion to the layers."""
    few, many = peak(name, 7, False), peak(name, 112, False)
    assert many <= 1.05 * few
    assert many <= 3 * 4 * WIDTHS_ALIVE[name] * HIDDEN * 400
    seven, fourteen, more = (peak(name, layers, True) for layers in (7, 14, 28))
    assert (more - fourteen) == pytest.approx(2 * (fourteen - seven), rel=0.05)
    assert more > 5 * many


@pytest.mark.parametrize("name", NAMES)
def test_blocks_have_layer_norm_unless_told_otherwise(name: str) -> None:
    def norms(**settings: str) -> set[type]:
        model = build_model(name, X_CHANNELS, HIDDEN, OUT, 2, **settings)  # type: ignore[arg-type]
        return {type(block.norm) for layer in model.layers for block in layer.convs}

    assert norms() == norms(norm="layer") != norms(norm="none")


def test_what_does_not_fit_is_refused() -> None:
    edge_index, x = hub_graph(), torch.randn(NODES, X_CHANNELS)
    sizes = {"in_channels": X_CHANNELS, "hidden_channels": HIDDEN, "out_channels": OUT, "num_layers": 2}
    for settings, said in (
        ({"name": "revsage", "groups": 1}, "groups"),
        ({"name": "revsage", "groups": 5}, "groups"),
        ({"name": "revsage", "residual": True}, "residual"),
        ({"name": "revsage", "norm": "batch"}, "norm"),
        ({"name": "revgat", "heads": 3}, "heads"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_model(**{**sizes, **settings})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="whole graphs"):
        build_graph_model("revsage", *sizes.values())
    with pytest.raises(ConfigError, match="histories"):
        make("revsage", 2)(x, full_blocks(edge_index, NODES, 2), between=lambda index, out: out)
