"""Exact steps on small graphs cut into many parts, and the same step made at once on all nodes in memory."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.layerwise import edge_tiles
from ooc.layerwise import executor as layerwise_executor
from ooc.layerwise import pass_plan as layerplan
from ooc.models.builders import build_model, full_blocks
from ooc.runtime.transfer import to_device
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.graphs import hub_graph

NODES, FEATURES, CLASSES = 203, 12, 5
NAMES = ("sage", "gcn", "gat", "gin", "gcnii", "appnp", "sgc")


def cut_into(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of so many rows that the graph has about `parts`, and pieces of 32 rows."""
    rows = max(8, -(-NODES // parts))
    for module in (layerplan, layerwise_executor):
        monkeypatch.setattr(module, "CHUNK_ROWS", rows)
    monkeypatch.setattr(edge_tiles, "_LEAST_PIECE_ROWS", 32)
    monkeypatch.setattr(edge_tiles, "PIECE_BYTES", 1)


def store_of(make_store: MakeStore, weighted: bool = False, loops: bool = True, **arrays: Any) -> Path:
    """A directed graph with a hub, isolated nodes, duplicates and perhaps self-loops; weights are exact in float32."""
    rng = np.random.default_rng(2)
    src, dst = hub_graph(NODES, loops=loops).numpy()
    x = rng.standard_normal((NODES, FEATURES), dtype=np.float32)
    weight = (rng.integers(1, 16, len(src)) / 8).astype(np.float32) if weighted else None
    y = rng.integers(0, CLASSES, NODES)
    settings = {"x": x, "y": y, "num_classes": CLASSES, **arrays}
    return make_store(num_nodes=NODES, src=src, dst=dst, weight=weight, **settings)


def inputs(ds: Dataset, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(x, edge_index in the store's order, weight, the mask of labelled nodes)."""
    graph, x = ds.graph, np.empty((NODES, FEATURES), ds.rows("x").dtype)
    ds.rows("x").read(np.arange(NODES), x)
    target = np.repeat(np.arange(NODES), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    weight = torch.from_numpy(np.array(graph.columns["weight"])) if "weight" in graph.columns else None
    mask = torch.zeros(NODES, dtype=torch.bool)
    mask[torch.from_numpy(np.array(ds.split("train")))] = True
    return torch.from_numpy(x).to(dtype), edge_index, weight, mask


def make(name: str, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    return build_model(name, FEATURES, 16, CLASSES, 3, **{"heads": 2, **settings})


class LossOf:
    """Cross entropy over the nodes of the training split."""

    def __init__(self, ds: Dataset) -> None:
        self.y = torch.from_numpy(np.array(ds.labels).astype(np.int64))
        self.mask = inputs(ds, torch.float32)[3]

    def __call__(self, first: int, logits: Tensor) -> Tensor | None:
        own = slice(first, first + len(logits))
        if not self.mask[own].any():
            return None
        at, known = to_device([self.mask[own].nonzero()[:, 0], self.y[own][self.mask[own]]], logits.device)
        each = F.cross_entropy(logits[at], known, reduction="sum")
        return each / int(self.mask.sum())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module, ds: Dataset, dtype: torch.dtype, seed: int = 7) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of a step of our model on all nodes at once."""
    x, edge_index, weight, _ = inputs(ds, dtype)
    model.zero_grad()
    torch.manual_seed(seed)
    loss = LossOf(ds)(0, model(x, full_blocks(edge_index, NODES, len(model.layers), weight)))
    loss.backward()
    return float(loss.detach()), gradients(model)


def stepped(
    model: nn.Module,
    ds: Dataset,
    folder: Path | None,
    seed: int = 7,
    placements: dict[str, TensorPlacement] | TensorPlacement | None = None,
    **settings: Any,
) -> tuple[float, dict[str, Tensor]]:
    """The same of an exact step. placements: one for all values that can have it, or by value, others on disk."""
    with closing(FullGraph(model, ds, folder, **settings)) as full:
        if placements is not None:
            placed = {}
            for value in full.program.values:
                wanted = (
                    placements if isinstance(placements, TensorPlacement) else placements.get(value.name, TensorPlacement.DISK)
                )
                placed[value.name] = wanted if wanted in value.placements else TensorPlacement.DISK
            full.placement = Placement(placed)
        model.zero_grad()
        torch.manual_seed(seed)
        return full.step(LossOf(ds)), gradients(model)


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Each gradient within `relative` of the largest number in it; of one that is zero but for rounding (a bias before a batch
    norm) within as much of a tenth of the model's largest."""
    assert found.keys() == expected.keys()
    least = max(float(gradient.abs().max()) for gradient in expected.values()) / 10
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), least)
        error = float((found[name] - gradient).abs().max()) / scale
        assert error <= relative, f"{name}: off by {error}"
