"""A training step of PyG's ready models on subgraphs and windows: loss and gradients are those of the same model in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ooc
from ooc.config.snapshots import SnapshotsConfig
from ooc.training.registry import mode_of
from ooc.training.snapshot_mode import SnapshotMode
from tests.conftest import MakeStore
from tests.ooc.models.test_pyg_models import MODELS, in_memory, whole
from tests.ooc.runs import configure
from tests.ooc.temporal_stores import Edges


def gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any(each.abs().max() > 1e-4 for each in found.values())
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_saint_is_pygs_on_the_same_subgraph(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    """The subgraph has all edges between its nodes; the loss is the sum over training nodes, each times its coefficient."""
    store = make_store()
    x, edge_index, y, node = whole(store)
    settings: dict[str, Any] = {"mode": "saint", "saint": "node", "roots": 40, "fanout": [], "layers": 2, "dropout": 0.0}
    config = configure(store, tmp_path / "run", model=f"torch_geometric.nn:{name}", eval_splits=[], **settings)
    with ooc.open(store) as ds:
        mode = mode_of(config)(config, ds)
        model = in_memory(name, edge_index)
        model.load_state_dict(mode.model.state_dict())
        for batch in mode.batches(0, 0, 2):
            found_loss = mode.loss(batch)
            found = gradients(found_loss, mode.model)
            subset = batch.n_id
            place = torch.full((len(x),), -1)
            place[subset] = torch.arange(len(subset))
            inside = (place[edge_index] >= 0).all(dim=0)
            logits = model(x[subset], place[edge_index[:, inside]])
            each = nn.functional.cross_entropy(logits, y[subset], reduction="none")
            expected = (each * batch.node_norm)[torch.isin(subset, node)].sum()
            assert found_loss.item() == pytest.approx(expected.item(), rel=1e-4)
            check_same(found, gradients(expected, model))
        mode.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_a_window_is_pygs_on_its_events(tmp_path: Path, name: str) -> None:
    """In both directions, then the GRU of the state and the loss of the next window's events against negatives."""
    edges = Edges(nodes=20, span=400)
    store = edges.store(tmp_path)
    config = SnapshotsConfig(
        store=store, out=tmp_path / "run", window="50", hidden=8, seed=5, model=f"torch_geometric.nn:{name}"
    )
    with ooc.open(store) as ds:
        mode = SnapshotMode(config, ds)
        loader = mode.loaders["train"]
        pairs = list(loader.window_pairs())
        net: Any = mode.model
        held = torch.randn(20, 8)
        with torch.no_grad():
            net.head.out.weight.mul_(3)
        run = loader.run(0, 1, negatives=mode.negatives["train"], key=1)
        forecast = next(run)
        run.close()
        outcome = net.outcome(forecast, [held[forecast.node]])
        loss = mode._loss(forecast, outcome, "train")
        found = gradients(loss, net)
        window, node = pairs[0].window, forecast.node
        place = torch.full((20,), -1)
        place[node] = torch.arange(len(node))
        ends = torch.from_numpy(np.stack([edges.src, edges.dst])[:, window.first : window.last])
        assert torch.equal(node[: forecast.present], torch.unique(ends))
        both = torch.cat([place[ends], place[ends].flip(0)], dim=1)
        gnn, cell = net.model.gnn, net.model.cell
        assert type(gnn).__module__.startswith("torch_geometric")
        rows = gnn(forecast.x, both)
        state = cell(rows, held[node])
        target = slice(pairs[0].first, pairs[0].last)
        src, dst = (place[torch.from_numpy(each[target])] for each in (edges.src, edges.dst))
        logits = [
            net.head.out((net.head.src(a) + net.head.dst(b) + net.head.both(a * b)).relu()).squeeze(-1)
            for a, b in ((state[src], state[dst]), (state[src], state[forecast.negative[:, 0]]))
        ]
        cost = nn.functional.binary_cross_entropy_with_logits
        expected = sum(cost(each, torch.full_like(each, float(true))) for each, true in zip(logits, (1, 0), strict=True))
        assert loss.item() == pytest.approx(float(expected), rel=1e-4)
        check_same(found, gradients(expected, net))
        mode.close()
