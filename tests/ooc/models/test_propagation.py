"""GCNII, APPNP and SGC against plain PyG in RAM, and the seam that lets them in."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GCN2Conv, SGConv

from ooc.graph.aggregation import FirstLayerAggregates, PreAggregation
from ooc.models.builders import Model, build_model, full_blocks
from ooc.models.convs import BlockGCN2Conv, BlockPropagation
from ooc.models.layers import run_layers, run_model
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.models.user_models import forward_batch
from ooc.stores.errors import ConfigError
from tests.ooc.graphs import hub_graph, sample

NAMES = ("gcnii", "appnp", "sgc")
LAYERS, X_CHANNELS, HIDDEN, OUT = 4, 12, 8, 5


def make(name: str, **settings: Any) -> Model:
    torch.manual_seed(1)
    return build_model(name, X_CHANNELS, HIDDEN, OUT, LAYERS, alpha=0.2, theta=0.7, **settings)


def plain(name: str, model: Model, x: Tensor, edge_index: Tensor, weight: Tensor | None) -> Tensor:
    """The network as PyG's examples write it, with the model's parameters."""
    if name == "sgc":
        conv = SGConv(X_CHANNELS, OUT, K=LAYERS).to(x.dtype)
        conv.load_state_dict(model.decoder.state_dict())
        return conv(x, edge_index, weight)
    if name == "appnp":
        first, second = model.encoder[0].lin, model.encoder[1].lin
        return APPNP(K=LAYERS, alpha=0.2)(second(first(x).relu()), edge_index, weight)
    x = initial = model.encoder.lin(x).relu()
    for index, layer in enumerate(model.layers):
        conv = GCN2Conv(HIDDEN, alpha=0.2, theta=0.7, layer=index + 1).to(x.dtype)
        conv.load_state_dict(layer.conv.state_dict())
        x = conv(x, initial, edge_index, weight).relu()
    return model.decoder.lin(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("loops", "weighted"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_fan_out_equals_pyg_on_the_whole_graph(name: str, loops: bool, weighted: bool, dtype: torch.dtype) -> None:
    edge_index = hub_graph(loops=loops)
    x = torch.randn(60, X_CHANNELS, dtype=dtype)
    weight = torch.rand(edge_index.size(1)) + 0.1 if weighted else None
    seeds = torch.tensor([59, 0, 3, 7, 12, 58, 30])
    model = make(name, dropout=0.5).to(dtype).eval()
    expected = plain(name, model, x, edge_index, None if weight is None else weight.to(dtype))
    batch = sample(edge_index, x, seeds, [-1] * LAYERS, weight)
    for out in (model(x, full_blocks(edge_index, 60, LAYERS, weight))[seeds], model(batch.x, batch.blocks)):
        torch.testing.assert_close(out, expected[seeds], atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(model(batch.x, batch.blocks).square().sum(), parameters)
    if name != "sgc":  # PyG's module has its own copy
        theirs = torch.autograd.grad(expected[seeds].square().sum(), parameters, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("replace", [False, True])
def test_sampled_propagation_is_rescaled(replace: bool) -> None:
    torch.manual_seed(0)
    edge_index, x = hub_graph(), torch.rand(60, 4)
    conv, seeds, generator = BlockPropagation(4), torch.arange(60), torch.Generator().manual_seed(3)
    full = conv(x, full_blocks(edge_index, 60, 1)[0])
    draws = []
    for _ in range(400):
        batch = sample(edge_index, x, seeds, [4], None, generator, replace)
        draws.append(conv(batch.x, batch.blocks[0]))
    mean, spread = torch.stack(draws).mean(0), torch.stack(draws).std(0)
    assert ((mean - full).abs() <= 5 * spread / 20 + 1e-5).all()
    plain_conv = BlockPropagation(4, rescale=False)
    assert not torch.allclose(plain_conv(batch.x, batch.blocks[0]), draws[-1], atol=1e-3)


def test_sums_stand_for_rows_where_nothing_is_learnt_before_them() -> None:
    assert pre_aggregation_of(make("sgc", dropout=0.5)) == PreAggregation("gcn", X_CHANNELS)
    assert pre_aggregation_of(make("sgc", input_dropout=0.5)) is None
    assert pre_aggregation_of(make("sgc", rescale=False)) is None
    assert pre_aggregation_of(make("gcnii")) is None
    assert pre_aggregation_of(make("appnp")) is None


def test_the_hook_sees_what_passes_between_the_layers() -> None:
    edge_index, x = hub_graph(), torch.randn(60, X_CHANNELS)
    blocks = full_blocks(edge_index, 60, LAYERS)
    for name in ("sage", "gcnii"):
        model, seen = make(name).eval(), []

        def between(index: int, out: Tensor, seen: list[Any] = seen) -> Tensor:
            seen.append((index, out.clone()))
            return out

        out = model(x, blocks, between=between)
        assert [index for index, _ in seen] == [0, 1, 2]
        h = x if model.encoder is None else model.encoder(x)
        initial = h
        for (_, rows), layer in zip(seen, model.layers, strict=False):
            h = layer(h, blocks[0], initial) if layer.needs_initial else layer(h, blocks[0])
            torch.testing.assert_close(rows, h)
        assert torch.equal(out, model(x, blocks))
        assert not torch.allclose(out, model(x, blocks, between=lambda index, rows: rows * 0), atol=1e-3)


def test_a_block_in_the_middle_gets_its_own_first_rows() -> None:
    """Destinations are fewer than sources: `initial` is cut to them."""
    edge_index, x, seeds = hub_graph(), torch.randn(60, X_CHANNELS), torch.tensor([5, 0, 40])
    batch = sample(edge_index, x, seeds, [-1] * LAYERS)
    conv = BlockGCN2Conv(X_CHANNELS, 0.3, 0.5, 1)
    block = batch.blocks[-1]
    rows = batch.x[: block.num_src]
    out = run_layers([conv], rows, [block])
    torch.testing.assert_close(out, conv(rows, block, rows[: block.num_dst]))


class Own(nn.Module):
    """A user's list of layers, with an encoder and a decoder and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(X_CHANNELS, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.layers = nn.ModuleList(make("gcnii").layers)


def test_a_users_list_of_layers_may_have_an_encoder_and_a_decoder() -> None:
    edge_index, x = hub_graph(), torch.randn(60, X_CHANNELS)
    model, blocks = Own(), full_blocks(edge_index, 60, LAYERS)
    batch = type("Batch", (), {"x": x, "blocks": blocks, "batch_size": 60})
    expected = model.decoder(run_layers(model.layers, model.encoder(x), blocks))
    torch.testing.assert_close(forward_batch(model, batch), expected)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_nothing(name: str) -> None:
    edge_index, x = hub_graph(), torch.randn(60, X_CHANNELS)
    blocks = full_blocks(edge_index, 60, LAYERS)
    grads = []
    for checkpoint in (False, True):
        model = make(name, dropout=0.5)
        torch.manual_seed(4)
        model(x, blocks, checkpoint).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [("gcnii", {"alpha": 1.0}, "alpha"), ("gcnii", {"theta": 0.0}, "theta"), ("sgc", {"norm": "batch"}, "norm")],
)
def test_a_setting_that_does_not_fit_is_named(name: str, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_model(name, X_CHANNELS, HIDDEN, OUT, 2, **settings)


def test_an_encoder_refuses_sums() -> None:
    edge_index, x = hub_graph(), torch.randn(60, X_CHANNELS)
    with pytest.raises(ConfigError, match="encoder"):
        run_model(make("gcnii"), FirstLayerAggregates(x, x), full_blocks(edge_index, 60, LAYERS))
