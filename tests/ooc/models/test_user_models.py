"""Modules of the user's own."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import GraphSAGE

from ooc.config.nodes import TrainConfig
from ooc.models.builders import build_model
from ooc.models.user_models import forward_batch, kind_of, load_model, parameters_of
from ooc.stores.errors import ConfigError
from ooc.training.build import make_model
from tests.ooc.graphs import Sample, hub_graph, sample

SOURCE = """
import torch
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv
from ooc.models.convs import BlockSAGEConv

class Plain(nn.Module):
    def __init__(self, in_channels, out_channels, depth=2):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(in_channels, 8), SAGEConv(8, out_channels)])
    def forward(self, x, edge_index):
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

class Weighted(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, out_channels)
    def forward(self, x, edge_index, edge_weight=None):
        return self.conv(x, edge_index, edge_weight)

class Listed(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layers = nn.ModuleList([BlockSAGEConv(in_channels, 8), BlockSAGEConv(8, out_channels)])

class OnBlocks(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.convs = nn.ModuleList([BlockSAGEConv(12, 8), BlockSAGEConv(8, 3)])
    def forward(self, x, blocks):
        for conv, block in zip(self.convs, blocks):
            x = conv(x, block)
        return x

class Odd(nn.Module):
    def forward(self, nodes, temperature):
        return nodes

class Needy(nn.Module):
    def __init__(self, in_channels, wavelength):
        super().__init__()

class Empty(nn.Module):
    pass

class Fails(nn.Module):
    def __init__(self):
        raise ValueError("no luck")

class NoModule:
    pass

NUMBER = 3
"""
OFFERED = {"in_channels": 12, "out_channels": 3, "hidden_channels": 8, "num_layers": 2}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module in the working directory, of a name no other test uses."""
    name = f"user_nets_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def full_batch(weighted: bool = False) -> tuple[Sample, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    edge_index, x = hub_graph(), torch.randn(60, 12)
    weight = torch.rand(edge_index.size(1)) if weighted else None
    return sample(edge_index, x, torch.tensor([4, 0, 59]), [-1, -1], weight), edge_index, x, weight


def test_a_plain_pyg_module_runs_on_the_subgraph(module: str) -> None:
    batch, edge_index, x, _ = full_batch()
    model = load_model(f"{module}:Plain", OFFERED)
    assert kind_of(model) == "edge_index"
    torch.testing.assert_close(forward_batch(model, batch), model(x, edge_index)[[4, 0, 59]], atol=1e-5, rtol=1e-5)


def test_pygs_own_models_run(module: str) -> None:
    batch, edge_index, x, _ = full_batch()
    model = load_model("torch_geometric.nn:GraphSAGE", OFFERED)
    assert isinstance(model, GraphSAGE)
    torch.testing.assert_close(forward_batch(model, batch), model(x, edge_index)[[4, 0, 59]], atol=1e-5, rtol=1e-5)


def test_edge_weight_is_given_to_a_forward_that_names_it(module: str) -> None:
    batch, *_ = full_batch(weighted=True)
    model = load_model(f"{module}:Weighted", OFFERED)
    expected = model(batch.x, batch.edge_index, batch.blocks[0].weight)[:3]
    assert torch.equal(forward_batch(model, batch), expected)
    assert not torch.equal(model(batch.x, batch.edge_index)[:3], expected)


@pytest.mark.parametrize(("name", "kind"), [("Listed", "layers"), ("OnBlocks", "blocks")])
def test_modules_on_blocks(module: str, name: str, kind: str) -> None:
    batch, *_ = full_batch()
    model = load_model(f"{module}:{name}", OFFERED)
    assert kind_of(model) == kind
    convs = model.layers if name == "Listed" else model.convs
    expected = convs[1](convs[0](batch.x, batch.blocks[0]), batch.blocks[1])
    assert torch.equal(forward_batch(model, batch), expected)
    assert torch.equal(forward_batch(model, _half(batch)), forward_batch(model, _half(batch, torch.float32)))


def _half(batch: Sample, dtype: torch.dtype | None = None) -> Sample:
    half = batch.x.half()
    return Sample(batch.x_rows, batch.edge_index, batch.blocks, batch.batch_size, half if dtype is None else half.to(dtype))


def test_checkpointing_is_refused_where_it_cannot_act(module: str) -> None:
    batch, *_ = full_batch()
    with pytest.raises(ConfigError, match="its own forward"):
        forward_batch(load_model(f"{module}:Plain", OFFERED), batch, checkpoint=True)
    for model in (load_model(f"{module}:Listed", OFFERED), build_model("sage", 12, 8, 3, 2)):
        assert torch.equal(forward_batch(model, batch, checkpoint=True), forward_batch(model, batch))


def test_required_arguments_reach_the_class(module: str) -> None:
    load_model(f"{module}:Plain", OFFERED, {"depth": 3})
    with pytest.raises(ConfigError, match="does not accept width: the constructor has depth, in_channels, out_channels"):
        load_model(f"{module}:Plain", OFFERED, {"width": 3})
    load_model(f"{module}:OnBlocks", OFFERED, {"width": 3})


def test_what_somebody_set_must_be_taken(module: str) -> None:
    def make(**settings: Any) -> nn.Module:
        return make_model(TrainConfig(store="s", out="o", model=f"{module}:Plain", **settings), 12, 3)

    make(hidden=7, dropout=0.0)
    for name, value in {"dropout": 0.3, "heads": 2, "norm": "batch", "residual": True}.items():
        with pytest.raises(ConfigError, match=f"Plain does not accept {name}: leave it out"):
            make(**{name: value})


def test_a_list_of_layers_is_as_long_as_was_said(module: str) -> None:
    config = {"store": "s", "out": "o", "model": f"{module}:Listed"}
    assert len(make_model(TrainConfig(**config, layers=2), 12, 3).layers) == 2
    with pytest.raises(ConfigError, match="Listed has 2 layers, and layers is 3: give `layers=2`"):
        make_model(TrainConfig(**config, layers=3), 12, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}", "package.module:Class"),
        ("no_such_module_at_all:Net", "cannot import no_such_module_at_all: ModuleNotFoundError"),
        ("{}:Missing", "has no Missing"),
        ("{}:NUMBER", "is a int"),
        ("{}:Needy", "needs wavelength"),
        ("{}:NoModule", "not a torch.nn.Module"),
        ("{}:Fails", "ValueError: no luck"),
        ("{}:Odd", r"forward\(nodes, temperature\) cannot be called"),
        ("{}:Empty", "neither a forward nor"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        kind_of(load_model(name.format(module), OFFERED))
    assert "\n" not in str(caught.value)


def test_a_bare_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither"):
        kind_of(nn.Module())


def test_the_parameters_of_a_forward_are_those_that_inspect_finds() -> None:
    """Of a class, an instance's own forward, one that is put in place of the class's, and one without a named self."""

    class Module(nn.Module):
        def forward(self, x: Any, edge_index: Any, *, scale: float = 1.0) -> Any:
            return x

    class Loose(nn.Module):
        def forward(*given: Any, **more: Any) -> Any:
            return given

    def own(x: Any, blocks: Any) -> Any:
        return x

    plain, changed, loose = Module(), Module(), Loose()
    changed.forward = own  # type: ignore[method-assign,assignment]
    for model in (plain, changed, loose, plain):
        assert dict(parameters_of(model)) == dict(inspect.signature(model.forward).parameters)
    Module.forward = lambda self, x, blocks, checkpoint=False: x  # type: ignore[assignment]
    assert list(parameters_of(plain)) == ["x", "blocks", "checkpoint"]
