"""R-SAGE and HGT on ACM (papers, authors, subjects; subjects have no features), here and by PyG in RAM with the same settings.

    python -m tools.scores.published acm DATA/acm OUT --runs 10

60 labelled papers of each class for training, 1,000 for validation and for testing; full fan-outs, all training papers in a
batch. Validation selects the epoch. DATA has `acm.npz`: paper_x, author_x, paper_y, paper_author, paper_subject, train_60, ...
"""

import copy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, HGTConv, SAGEConv

NODE_TYPE = "paper"
LABELS = 60
"""of a class, for training"""
MODELS: dict[str, dict[str, Any]] = {
    "rsage": {"hidden": 64, "dropout": 0.5, "lr": 0.005, "weight_decay": 5e-4, "epochs": 100},
    "hgt": {"hidden": 64, "heads": 4, "dropout": 0.5, "lr": 0.005, "weight_decay": 5e-4, "epochs": 100},
}


def acm(folder: Path) -> HeteroData:
    """The graph, with edges in both directions and masks of papers."""
    data, found = HeteroData(), np.load(folder / "acm.npz")
    for name in ("paper", "author"):
        data[name].x = torch.from_numpy(found[f"{name}_x"]).float()
    data[NODE_TYPE].y = torch.from_numpy(found["paper_y"]).long()
    for name in ("author", "subject"):
        edge_index = torch.from_numpy(found[f"paper_{name}"]).long()
        data["paper", "to", name].edge_index, data[name, "to", "paper"].edge_index = edge_index, edge_index.flip(0)
    data["subject"].num_nodes = int(found["paper_subject"][1].max()) + 1
    for split in ("train", "val", "test"):
        mask = torch.zeros(len(data[NODE_TYPE].y), dtype=torch.bool)
        mask[torch.from_numpy(found[f"{split}_{LABELS}"]).long()] = True
        data[NODE_TYPE][f"{split}_mask"] = mask
    return data


def write(data: HeteroData, store: Path) -> None:
    """Write the graph as a store, anew; papers have the labels."""
    from ooc.stores.build import write_hetero_store
    from ooc.stores.graph import Graph

    shutil.rmtree(store, ignore_errors=True)
    nodes: dict[str, Any] = {name: {"num_nodes": data[name].num_nodes} for name in data.node_types}
    for name, x in data.x_dict.items():
        nodes[name]["x"] = x.numpy()
    papers = data[NODE_TYPE]
    splits = {split: papers[f"{split}_mask"].nonzero().view(-1).numpy() for split in ("train", "val", "test")}
    labels = {"y": papers.y.numpy(), "task": "multiclass", "num_classes": int(papers.y.max()) + 1, "splits": splits}
    nodes[NODE_TYPE] |= labels
    edges = {}
    for key in data.edge_types:
        sources, targets = (None if key[0] == key[2] else data[key[0]].num_nodes), data[key[2]].num_nodes
        source, target = data[key].edge_index.numpy()
        edges[key] = Graph.from_edges(source, target, targets, num_sources=sources)
    write_hetero_store(store, nodes, edges)


class InRam(nn.Module):
    """PyG's R-SAGE or HGT on the whole graph, with an embedding table of every node type without features."""

    def __init__(self, name: str, data: HeteroData, settings: dict[str, Any]) -> None:
        super().__init__()
        hidden, classes = settings["hidden"], int(data[NODE_TYPE].y.max()) + 1
        self.name, self.dropout, metadata = name, settings["dropout"], data.metadata()
        features = {each: data[each].x.size(1) for each in data.node_types if "x" in data[each]}
        same = len(set(features.values())) == 1 and name == "rsage"
        width = next(iter(features.values())) if same else hidden
        sizes = {each: data[each].num_nodes for each in data.node_types if each not in features}
        tables = {each: nn.Embedding(size, width, sparse=True) for each, size in sizes.items()}
        for table in tables.values():
            nn.init.xavier_uniform_(table.weight)
        self.tables = nn.ModuleDict(tables)
        if name == "hgt":
            self.inputs = nn.ModuleDict({each: nn.Linear(size, hidden) for each, size in features.items()})
            self.convs = nn.ModuleList(HGTConv(hidden, hidden, metadata, settings["heads"]) for _ in range(2))
            self.head = nn.Linear(hidden, classes)
        else:
            widths = [features | dict.fromkeys(sizes, width), dict.fromkeys(data.node_types, hidden)]
            self.convs = nn.ModuleList(
                HeteroConv({key: SAGEConv((each[key[0]], each[key[2]]), size) for key in data.edge_types})
                for each, size in zip(widths, (hidden, classes), strict=True)
            )

    def forward(self, data: HeteroData) -> Tensor:
        """Logits of all papers."""
        x = dict(data.x_dict)
        for each, table in self.tables.items():
            x[each] = table(torch.arange(data[each].num_nodes))
        if self.name == "hgt":
            x |= {each: lin(x[each]).relu() for each, lin in self.inputs.items()}
        x = self.convs[0](x, data.edge_index_dict)
        if self.name == "rsage":
            x = {each: rows.relu() for each, rows in x.items()}
        x = {each: F.dropout(rows, self.dropout, self.training) for each, rows in x.items()}
        out: Tensor = self.convs[1](x, data.edge_index_dict)[NODE_TYPE]
        return self.head(out) if self.name == "hgt" else out


def in_ram(name: str, data: HeteroData, settings: dict[str, Any], seed: int) -> float:
    """Test accuracy of PyG's model, in points, at the best epoch on validation."""
    torch.manual_seed(seed)
    model, papers = InRam(name, data, settings), data[NODE_TYPE]
    sparse = list(model.tables.parameters())
    dense = [each for each in model.parameters() if not any(each is table for table in sparse)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(dense, lr=settings["lr"], weight_decay=settings["weight_decay"])
    ]
    optimizers += [torch.optim.SparseAdam(sparse, lr=settings["lr"])] if sparse else []
    best, best_state = -1.0, model.state_dict()
    for _ in range(settings["epochs"]):
        model.train()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(data)[papers.train_mask], papers.y[papers.train_mask])
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        found = _accuracy(model, data, papers.val_mask)
        if found > best:
            best, best_state = found, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return _accuracy(model, data, papers.test_mask)


@torch.no_grad()
def _accuracy(model: InRam, data: HeteroData, mask: Tensor) -> float:
    model.eval()
    right = model(data).argmax(1) == data[NODE_TYPE].y
    return 100 * float(right[mask].float().mean())


def here(name: str, store: Path, run: Path, settings: dict[str, Any], seed: int) -> float:
    """The same by `ooc.train`."""
    import ooc

    shutil.rmtree(run, ignore_errors=True)
    more: dict[str, Any] = {"fanout": [-1, -1], "batch_size": 2**20, "plan": False, "mode": "sampled"}
    summary = ooc.train(store=store, out=run, model=name, seed=seed, **settings, **more)
    return 100 * float(summary["metrics"]["test"]["accuracy"])


def scores(data: HeteroData, out: Path, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Test accuracy by seed, in points, of each model here and by PyG in RAM."""
    store = out / "acm.ooc"
    write(data, store)
    found: dict[str, list[float]] = {}
    for name, settings in MODELS.items():
        found[name] = [here(name, store, out / "acm-run", settings, seed) for seed in seeds]
        found[f"{name}, PyG in RAM"] = [in_ram(name, data, settings, seed) for seed in seeds]
        print(name, found[name], found[f"{name}, PyG in RAM"], file=sys.stderr)
    return found
