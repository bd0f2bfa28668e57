"""Models of windows against dense formulas in float64, window after window."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ooc.models.builders import full_blocks
from ooc.stores.errors import ConfigError
from ooc.temporal.window_models import EvolveGCN, Recurrent, Roland, WindowModel, window_model

IN, CHANNELS = 5, 8


def adjacency(edges: Any, count: int, conv: str) -> Any:
    """float64[count, count]: GCN's normalised matrix with self-loops, or the mean over in-neighbors."""
    dense = np.zeros((count, count))
    np.add.at(dense, (edges[1], edges[0]), 1.0)
    if conv == "sage":
        return dense / np.maximum(dense.sum(1, keepdims=True), 1)
    np.fill_diagonal(dense, 1.0)
    scale = 1 / np.sqrt(dense.sum(1))
    return scale[:, None] * dense * scale


def array(tensor: Any) -> Any:
    return tensor.detach().double().numpy()


def convolved(layer: Any, near: Any, x: Any, relu: bool) -> Any:
    if hasattr(layer.conv, "lin_l"):
        out = near @ x @ array(layer.conv.lin_l.weight).T + array(layer.conv.lin_l.bias) + x @ array(layer.conv.lin_r.weight).T
    else:
        out = near @ x @ array(layer.conv.lin.weight).T + array(layer.conv.bias)
    return np.maximum(out, 0) if relu else out


def gru(cell: nn.GRUCell, x: Any, h: Any) -> Any:
    ours = np.split(x @ array(cell.weight_ih).T + array(cell.bias_ih), 3, axis=1)
    theirs = np.split(h @ array(cell.weight_hh).T + array(cell.bias_hh), 3, axis=1)
    reset, keep = (1 / (1 + np.exp(-(a + b))) for a, b in zip(ours[:2], theirs[:2], strict=True))
    return (1 - keep) * np.tanh(ours[2] + reset * theirs[2]) + keep * h


class Dense:
    """A model's windows by formulas; what each node carries, in a dictionary of whole arrays."""

    def __init__(self, model: Any, conv: str, count: int) -> None:
        self.model, self.conv, self.count = model, conv, count
        self.carried = [np.zeros((count, width)) for width in model.widths]
        if isinstance(model, EvolveGCN):
            self.weights = [array(layer.initial) for layer in model.layers]

    def window(self, x: Any, edges: Any) -> Any:
        near, model, last = adjacency(edges, self.count, self.conv), self.model, len(self.model.layers) - 1
        if isinstance(model, EvolveGCN):
            self.weights = [
                gru(layer.cell, w.T, w.T).T
                for layer, w in zip(model.layers, self.weights, strict=True)  # type: ignore[arg-type]
            ]
            for index, (layer, weight) in enumerate(zip(model.layers, self.weights, strict=True)):
                x = near @ x @ weight + array(layer.bias)
                x = x if index == last else np.maximum(x, 0)
            return x
        now: list[Any] = []
        degree = np.bincount(edges[1], minlength=self.count)[:, None]
        for index, layer in enumerate(model.layers):
            x = convolved(layer, near, x, relu=index < last)
            if isinstance(model, Recurrent):
                continue
            old, update = self.carried[index], model.updates[index]
            if model.update == "gru":
                x = gru(update, x, old)
            elif model.update == "mlp":
                first, second = update.nn[0], update.nn[2]
                inner = np.maximum(np.hstack([x, old]) @ array(first.weight).T + array(first.bias), 0)
                x = inner @ array(second.weight).T + array(second.bias)
            else:
                before = self.carried[-1]
                share = before / np.maximum(before + degree, 1)
                x = share * old + (1 - share) * x
            now.append(x)
        if isinstance(model, Recurrent):
            x = gru(model.cell, x, self.carried[0])
            now = [x]
        elif model.update == "average":
            now.append(self.carried[-1] + degree)
        self.carried = now
        return x


MODELS: dict[str, dict[str, Any]] = {
    "recurrent gcn": {"family": "recurrent", "conv": "gcn"},
    "recurrent sage": {"family": "recurrent", "conv": "sage"},
    "roland gru": {"family": "roland", "conv": "gcn"},
    "roland mlp": {"family": "roland", "conv": "sage", "update": "mlp"},
    "roland average": {"family": "roland", "conv": "gcn", "update": "average"},
    "evolvegcn": {"family": "evolvegcn"},
}


@pytest.mark.parametrize("name", MODELS)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_windows_are_those_of_the_dense_formulas(name: str, seed: int, layers: int, count: int) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = window_model(in_channels=IN, channels=CHANNELS, num_layers=layers, **MODELS[name])
    dense = Dense(model, MODELS[name].get("conv", "gcn"), count)
    carried = [torch.zeros(count, width) for width in model.widths]
    for _ in range(4):
        x, edges = rng.normal(size=(count, IN)), rng.integers(0, count, (2, rng.integers(0, 25)))
        block = full_blocks(torch.from_numpy(edges), count, 1)[0]
        weights = model.weights()
        rows, carried = model(torch.from_numpy(x).float(), block, carried, weights)
        model.keep(weights)
        np.testing.assert_allclose(array(rows), dense.window(x, edges), atol=2e-5)
        for own, theirs in zip(carried, dense.carried, strict=True):
            np.testing.assert_allclose(array(own), theirs, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_and_backward_ends_at_the_window(name: str) -> None:
    torch.manual_seed(0)
    model = window_model(in_channels=IN, channels=CHANNELS, num_layers=2, **MODELS[name])
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    block = full_blocks(edges, 4, 1)[0]
    carried = [torch.randn(4, width) for width in model.widths]
    weights = model.weights()
    rows, now = model(torch.randn(4, IN), block, carried, weights)
    rows.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    model.keep(weights)
    for parameter in model.parameters():
        parameter.grad = None
    rows, _ = model(torch.randn(4, IN), block, [each.detach() for each in now], model.weights())
    rows.square().sum().backward()  # type: ignore[no-untyped-call]
    first = [parameter for key, parameter in model.named_parameters() if key.endswith("initial")]
    assert all(parameter.grad is None for parameter in first), "only a first window's weights come from it"


def test_evolved_weights_are_in_the_state_dict_and_begin_anew() -> None:
    def after(model: WindowModel) -> Any:
        return model(torch.ones(3, IN), block, [], model.weights())[0]

    torch.manual_seed(0)
    block = full_blocks(torch.tensor([[0, 1], [1, 2]]), 3, 1)[0]
    model, other = (window_model("evolvegcn", IN, CHANNELS, 2) for _ in range(2))
    first = after(model)
    for _ in range(3):
        model.keep(model.weights())
    other.load_state_dict(model.state_dict())
    assert torch.equal(after(other), after(model))
    assert not torch.equal(after(model), first)
    model.begin()
    assert torch.equal(after(model), first)


def test_a_node_without_edges_meets_nobody() -> None:
    """Rows computed beside others are those computed alone: what nodes of the next window are given."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1], [1, 0]])
    for setting in MODELS.values():
        model = window_model(in_channels=IN, channels=CHANNELS, num_layers=2, **setting)
        x, carried = torch.randn(3, IN), [torch.rand(3, width) for width in model.widths]
        weights = model.weights()
        together, _ = model(x, full_blocks(edges, 3, 1)[0], carried, weights)
        alone, _ = model(x[2:], full_blocks(edges[:, :0], 1, 1)[0], [each[2:] for each in carried], weights)
        torch.testing.assert_close(together[2:], alone)


@pytest.mark.parametrize(
    "setting", [{"family": "gru"}, {"update": "lstm"}, {"conv": "mean"}, {"num_layers": 0}, {"conv": "gat"}]
)
def test_what_is_unknown_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        window_model(**{"family": "roland", "in_channels": IN, "channels": 6, "num_layers": 2, **setting})


def test_an_average_of_all_windows_counts_every_edge_alike() -> None:
    """With a layer that passes a constant on, the share of each window is that of its edges."""
    model = Roland("sage", 1, 1, 1, "average")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.layers[0].conv.lin_r.weight.fill_(1.0)  # type: ignore[union-attr, operator]
    carried = [torch.zeros(2, 1), torch.zeros(2, 1)]
    for value, times in ((1.0, 3), (5.0, 1)):
        edges = torch.tensor([[0], [1]]).repeat(1, times)
        _, carried = model(torch.full((2, 1), value), full_blocks(edges, 2, 1)[0], carried)
    assert carried[0][1].item() == pytest.approx((3 * 1 + 1 * 5) / 4)
    assert carried[1][1].item() == 4
