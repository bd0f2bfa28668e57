"""GINE and PyG's models that take edge features, against PyG in memory: layers, batches, gradients, runs and inference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.utils import degree

import ooc
from ooc.config.nodes import FullConfig
from ooc.models import edge_messages
from ooc.models.builders import build_model, full_blocks
from ooc.models.convs import BlockGINEConv
from ooc.models.edge_messages import relu_message_sum
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.models.receptive_field import hops_on
from ooc.models.user_models import edge_features_for, forward_batch, takes_edge_attr
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.errors import ConfigError
from ooc.training.infer import embed, infer
from ooc.training.loop import train
from tests.conftest import random_edges
from tests.ooc.models.test_pyg_models import PNA, first_loss
from tests.ooc.runs import configure
from tests.pretended_cuda import SYNC, pretended_cuda

N, E, D = 50, 300, 4


class OwnGINE(nn.Module):
    """A user's module of PyG's layers."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, edge_dim: int) -> None:
        super().__init__()
        self.conv1 = pyg.GINEConv(nn.Linear(in_channels, hidden_channels), edge_dim=edge_dim)
        self.conv2 = pyg.GINEConv(nn.Linear(hidden_channels, out_channels), edge_dim=edge_dim)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.conv1(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class Optional(OwnGINE):
    """One that does without."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor | None = None) -> torch.Tensor:
        edge_attr = x.new_zeros(edge_index.size(1), D) if edge_attr is None else edge_attr
        return super().forward(x, edge_index, edge_attr)


@pytest.fixture(scope="module")
def data() -> Data:
    rng = np.random.default_rng(0)
    found = Data(
        x=torch.from_numpy(rng.standard_normal((N, 8), dtype=np.float32)),
        edge_index=torch.from_numpy(np.stack(random_edges(N, E))),
        edge_attr=torch.from_numpy(rng.standard_normal((E, D), dtype=np.float32)),
        y=torch.arange(N) % 3,
    )
    found.train_mask, found.val_mask = torch.arange(N) < 30, torch.arange(N) >= 30
    return found


@pytest.fixture(scope="module")
def store(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edge_models") / "test.ooc"
    ooc.from_data(data, path).close()
    return path


def gine(data: Data, **options: Any) -> tuple[nn.Module, Any]:
    """Our model, and PyG's layers with its parameters as a function of (x, edge_index, edge_attr)."""
    torch.manual_seed(0)
    model = build_model("gine", 8, 8, 3, 2, edge_dim=D, **options)
    convs = []
    for layer in model.layers:
        conv = pyg.GINEConv(layer.conv.nn, edge_dim=D)
        conv.lin = layer.conv.lin
        convs.append(conv)

    def reference(x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = convs[1](convs[0](x, edge_index, edge_attr).relu(), edge_index, edge_attr)
        return out

    return model, reference


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_gine_is_pygs_on_the_whole_graph_with_its_gradients(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_messages, "EDGES_AT_ONCE", 7)
    model, reference = gine(data)
    found = model(data.x, full_blocks(data.edge_index, N, 2, edge_attr=data.edge_attr))
    expected = reference(data.x, data.edge_index, data.edge_attr)
    assert_close(found, expected)
    for one, other in zip(*(gradients(out.square().mean(), model) for out in (found, expected)), strict=True):
        assert_close(one, other)
    assert pre_aggregation_of(model) is None
    assert set(pyg.GINEConv(nn.Sequential(nn.Linear(8, 16)), edge_dim=D).state_dict()) >= {"lin.weight", "lin.bias"}
    with pytest.raises(ConfigError, match="gine takes edge features, and the batch has none"):
        model(data.x, full_blocks(data.edge_index, N, 2))


@pytest.mark.parametrize("edges", [0, 1, 40])
@pytest.mark.parametrize("valued", [False, True])
def test_sums_of_messages_have_the_gradients_of_the_formula(monkeypatch: pytest.MonkeyPatch, edges: int, valued: bool) -> None:
    monkeypatch.setattr(edge_messages, "EDGES_AT_ONCE", 6)
    generator = torch.Generator().manual_seed(edges)
    edge_index = torch.randint(0, 9, (2, edges), generator=generator)
    block = full_blocks(edge_index, 9, 1, edge_attr=torch.randn(edges, D, generator=generator).double())[0]
    inputs = [torch.randn(*shape, generator=generator).double().requires_grad_() for shape in ((9, 5), (5, D), (5,))]
    edge_attr = block.edge_attr.requires_grad_()
    value = torch.rand(edges, generator=generator).double() if valued else None

    def found(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attr: torch.Tensor) -> torch.Tensor:
        return relu_message_sum(x, attr, weight, bias, block, value)

    x, weight, bias = inputs
    message = (x[block.edge_index[0]] + edge_attr @ weight.T + bias).relu()
    expected = (
        torch.zeros(9, 5).double().index_add(0, block.edge_index[1], message if value is None else message * value.unsqueeze(1))
    )
    torch.testing.assert_close(found(*inputs, edge_attr), expected)
    if edges:
        assert torch.autograd.gradcheck(found, (*inputs, edge_attr))


def test_sums_of_many_pieces_on_a_gpu_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_messages, "GPU_EDGES_AT_ONCE", 7)
    edge_index = torch.from_numpy(np.stack(random_edges(20, 60)))
    given = [torch.randn(20, 5), torch.randn(60, 3), torch.randn(5, 3), torch.randn(5)]

    def sums(tensors: list[torch.Tensor], device: str) -> list[torch.Tensor]:
        """The sums, and the gradients of all that makes them."""
        leaves = [each.to(device).requires_grad_() for each in tensors]
        x, attr, weight, bias = leaves
        block = full_blocks(edge_index.to(device), 20, 1)[0]
        counts = device_counts[SYNC]
        out = relu_message_sum(x, attr, weight, bias, block)
        found = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        assert device_counts[SYNC] == counts
        return [each.cpu() for each in found]

    with pretended_cuda() as device:
        device_counts = device.counts
        for one, other in zip(sums(given, "cuda"), sums(given, "cpu"), strict=True):
            torch.testing.assert_close(one, other)


def test_sums_over_sampled_edges_stand_for_all(data: Data, store: Path) -> None:
    """Each message counts degree / sampled edges; with rescale=False once, as PyG's."""
    with ooc.open(store) as ds:
        batch = next(iter(ooc.NeighborLoader(ds, [2], batch_size=N, seed=0)))
    block = batch.blocks[0]
    ratio = torch.bincount(data.edge_index[1], minlength=N)[batch.n_id[: block.num_dst]] / block.indptr.diff().clamp(min=1)
    for rescale in (True, False):
        conv = BlockGINEConv(8, 3, D, rescale)
        message = (batch.x[batch.edge_index[0]] + conv.lin(batch.edge_attr)).relu()
        message = message * (ratio[batch.edge_index[1]].unsqueeze(1) if rescale else 1)
        total = torch.zeros(block.num_dst, 8).index_add(0, batch.edge_index[1], message)
        assert_close(conv(batch.x, block), conv.nn(total + batch.x[: block.num_dst]))


def test_batches_with_all_edges_are_the_whole_graph_with_its_gradients(data: Data, store: Path) -> None:
    model, reference = gine(data)
    expected = reference(data.x, data.edge_index, data.edge_attr)
    with ooc.open(store) as ds:
        loaders = [
            ooc.NeighborLoader(ds, [-1, -1], input_nodes="train", batch_size=9),
            ooc.ClusterLoader(ds, 1, num_parts=1, num_layers=2),
        ]
        for loader in loaders:
            total = [torch.zeros_like(each) for each in model.parameters()]
            for batch in loader:
                own = expected[batch.n_id[: batch.batch_size]]
                found = forward_batch(model, batch)
                assert_close(found, own)
                for into, each in zip(total, gradients(found.sum(), model), strict=True):
                    into += each
            wanted = expected[data.train_mask] if len(loader) > 1 else expected
            whole = torch.autograd.grad(wanted.sum(), list(model.parameters()), retain_graph=True)
            for one, other in zip(total, whole, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
        assert hops_on(model, ds) == 2


def test_gine_trains_and_infers(data: Data, store: Path, tmp_path: Path) -> None:
    """In the modes with edge features; the others say so."""
    modes: dict[str, dict[str, Any]] = {
        "sampled": {"fanout": [-1, -1]},
        "cluster": {"fanout": [], "layers": 2, "parts": 1},
        "saint": {"fanout": [], "layers": 2, "roots": 20},
    }
    for mode, settings in modes.items():
        common: dict[str, Any] = {"model": "gine", "mode": mode, "max_steps": 2, "batch_size": 64, "eval_splits": ["val"]}
        common |= {"dropout": 0.0, "memory": "2GB", "plan": mode == "sampled"}
        summary = train(configure(store, tmp_path / mode, **common, **settings))
        assert np.isfinite(summary["metrics"]["val"]["loss"])
    model, reference = gine(data)
    model.load_state_dict(torch.load(tmp_path / "sampled" / "model.pt", weights_only=True)["model"])
    expected = reference(data.x, data.edge_index, data.edge_attr).detach()
    with infer(tmp_path / "sampled", store) as rows:
        np.testing.assert_allclose(rows, expected, atol=1e-5)
    out = infer(model, store, tmp_path / "p.parquet")
    assert "takes edge features: computed on batches of full neighborhoods of 2 hops" in out.moved
    with pytest.raises(ConfigError, match="takes edge features, and only its result"):
        embed(model, store, layer=1)
    with pytest.raises(ConfigError, match="use mode sampled, cluster or saint"):
        train(configure(store, tmp_path / "history", model="gine", mode="history", fanout=[], layers=2, parts=3))
    with pytest.raises(ConfigError, match="use mode sampled, cluster or saint"):
        train(FullConfig(store=store, out=tmp_path / "full", model="gine"))
    assert not (tmp_path / "full").exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["GAT", "PNA", "own"])
def test_a_step_with_edge_features_is_pygs(data: Data, store: Path, tmp_path: Path, name: str) -> None:
    more: dict[str, Any] = {"edge_dim": D}
    if name == "PNA":
        more |= {**PNA, "deg": torch.bincount(degree(data.edge_index[1], N, torch.long))}
    torch.manual_seed(key(5, Purpose.INIT) >> 1)
    model: nn.Module = OwnGINE(8, 8, 3, D) if name == "own" else getattr(pyg, name)(8, 8, 2, 3, **more)
    expected = model(data.x, data.edge_index, edge_attr=data.edge_attr)
    loss = cross_entropy(expected[data.train_mask], data.y[data.train_mask]).item()
    cls = f"{OwnGINE.__module__}:OwnGINE" if name == "own" else f"torch_geometric.nn:{name}"
    settings: dict[str, Any] = {"model": cls, "model_args": {} if name == "own" else {"edge_dim": D}}
    for mode, own in (("sampled", {"fanout": [-1, -1]}), ("cluster", {"fanout": [], "layers": 2, "parts": 1})):
        out, given = tmp_path / mode, {"mode": mode, "dropout": 0.0, "max_steps": 1, "batch_size": 64, "eval_splits": []}
        train(configure(store, out, **given, **own, **settings))
        assert float(_first(out)["loss"]) == pytest.approx(loss, rel=1e-5)
    with infer(model.eval(), store) as rows:
        np.testing.assert_allclose(rows, model(data.x, data.edge_index, edge_attr=data.edge_attr).detach(), atol=1e-5)


def _first(run: Path) -> Any:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])


def test_which_models_take_edge_features(make_store: Any, store: Path, tmp_path: Path) -> None:
    assert takes_edge_attr(build_model("gine", 8, 8, 3, 2, edge_dim=D))
    assert not takes_edge_attr(build_model("gin", 8, 8, 3, 2))
    assert takes_edge_attr(OwnGINE(8, 8, 3, D))
    assert takes_edge_attr(pyg.GAT(8, 8, 2, 3, edge_dim=D))
    assert not takes_edge_attr(pyg.GAT(8, 8, 2, 3))
    assert not takes_edge_attr(pyg.GraphSAGE(8, 8, 2, 3))
    plain = make_store()
    with ooc.open(plain) as bare, ooc.open(store) as ds:
        assert edge_features_for(Optional(8, 8, 3, D), ds) == ("edge_attr",)
        assert edge_features_for(Optional(8, 8, 3, D), bare) == ()
        assert edge_features_for(pyg.GAT(8, 8, 2, 3), ds) == ()
        with pytest.raises(ConfigError, match=r"OwnGINE takes edge features, and .* has none called edge_attr"):
            edge_features_for(OwnGINE(8, 8, 3, D), bare)
    assert np.isfinite(first_loss(plain, tmp_path / "a", "GAT", fanout=[2, 2]))
    with pytest.raises(ConfigError, match=r"gine takes edge features, and .* has none"):
        train(configure(plain, tmp_path / "run", model="gine"))
    with pytest.raises(ConfigError, match="give edge_dim"):
        build_model("gine", 8, 8, 3, 2)
