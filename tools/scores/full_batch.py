"""`--mode full` compared with training the same model on the whole graph in memory: losses per epoch, and test scores.

The model in memory has PyG's convolutions on `edge_index` instead of ours, the same parameters, and no dropout; or, to compare
dropout too, ours on the whole graph's blocks (`ooc.models.builders.full_blocks`) with the same random numbers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

from tools.scores.kept import Settings
from tools.scores.modes import CASES

EPOCHS = 50
LEFT_OUT = ("fanout", "batch_size", "evaluate")
"""settings of the cases that are of batches"""


class InMemory(nn.Module):
    """A model of ours with PyG's convolutions (sage, gcn) and without dropout, on a whole graph: (x, edge_index) -> rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = model.layers
        convs = [_pyg(layer.conv) for layer in model.layers]
        for ours, theirs in zip(model.layers, convs, strict=True):
            theirs.load_state_dict(ours.conv.state_dict())
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer, conv in zip(self.layers, self.convs, strict=True):
            out = layer.norm(conv(x, edge_index))
            x = layer.activation(out + layer.skip(x) if layer.residual else out)
        return x

    def trained(self) -> list[nn.Parameter]:
        """Its parameters: those of PyG's convolutions, and of our norms and skips."""
        return [p for name, p in self.named_parameters() if ".conv." not in name]


def _pyg(conv: Any) -> nn.Module:
    made = SAGEConv if isinstance(conv, SAGEConv) else GCNConv
    found: nn.Module = made(conv.in_channels, conv.out_channels)
    return found


def settings_of(case: str, **more: Any) -> Settings:
    """Of the case's training on the whole graph, in mode full."""
    kept = {name: value for name, value in CASES[case].full.items() if name not in LEFT_OUT}
    return {**kept, "mode": "full", **more}


def losses(store: Path, run: Path, settings: Settings) -> list[float]:
    """Of every epoch of `ooc train --mode full`."""
    from ooc.config.nodes import FullConfig
    from ooc.training.loop import train

    shutil.rmtree(run, ignore_errors=True)
    train(FullConfig(store=store, out=run, **{**settings, "eval_every": EPOCHS, "epochs": EPOCHS}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def losses_in_memory(store: Path, settings: Settings) -> list[float]:
    """Of the same training at once on all nodes; without dropout by PyG's own convolutions."""
    from ooc.config.nodes import FullConfig
    from ooc.metrics.nodes import Loss, out_channels
    from ooc.models.builders import full_blocks
    from ooc.runtime.keyed_random import Purpose, key
    from ooc.stores.dataset import Dataset
    from ooc.training.build import make_model, make_optimizer

    config, found = FullConfig(store=store, out=store.parent / "none", **settings), []
    with Dataset.open(store, in_memory=True) as ds:
        model = make_model(config, ds.num_features, out_channels(str(ds.task), ds.num_classes or 2))
        target = np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))
        edge_index = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        x = torch.empty(ds.num_nodes, ds.num_features)
        ds.rows("x").read(np.arange(ds.num_nodes), x.numpy())
        labels: Any = ds.labels
        node = torch.from_numpy(np.array(ds.split("train")))
        y = torch.from_numpy(np.array(labels))[node]
        ours = bool(config.dropout)
        whole: Any = model if ours else InMemory(model)
        graph = full_blocks(edge_index, ds.num_nodes, config.layers) if ours else edge_index
        optimizer = make_optimizer(config, whole) if ours else torch.optim.Adam(whole.trained(), lr=config.lr)
        for epoch in range(EPOCHS):
            torch.manual_seed(key(config.seed, Purpose.TORCH, epoch, 0) >> 1)
            loss = Loss(str(ds.task))(whole(x, graph)[node], y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(float(loss.detach()))
    return found


def curves(data: Path, out: Path) -> dict[str, Any]:
    """By case and kind of comparison: the largest difference of an epoch's loss, relative, and the first and last losses."""
    from tools.scores.stores import ingest

    found = {}
    for case in ("pubmed", "tolokers"):
        store = out / f"{case}-full.ooc"
        ingest(data / CASES[case].npz, store, **CASES[case].ingest)
        for name, more in {"PyG, no dropout": {"dropout": 0.0, "weight_decay": 0.0}, "dropout": {}}.items():
            settings = settings_of(case, **more)
            one, two = losses(store, out / f"{case}-full-run", settings), losses_in_memory(store, settings)
            apart = float(np.max(np.abs(np.array(one) - two) / np.abs(two)))
            found[f"{case}, {name}"] = {"largest difference": apart, "first": two[0], "last": two[-1], "epochs": len(two)}
    return found


def accuracy(data: Path, out: Path, runs: int) -> list[float]:
    """PubMed test accuracy by seed, of the model that is best on validation, in points."""
    from ooc.config.nodes import FullConfig
    from ooc.training.loop import train
    from tools.scores.stores import ingest

    store, found = out / "pubmed-full.ooc", []
    ingest(data / CASES["pubmed"].npz, store, **CASES["pubmed"].ingest)
    for seed in range(runs):
        shutil.rmtree(run := out / "pubmed-full-run", ignore_errors=True)
        summary = train(FullConfig(store=store, out=run, seed=seed, **settings_of("pubmed")))
        found.append(100 * float(summary["metrics"]["test"]["accuracy"]))
    return found
