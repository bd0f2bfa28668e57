"""R-SAGE and HGT on ACM (papers, authors, subjects; subjects have no features), here and by PyG in RAM with the same settings.

    python -m tools.scores.published acm DATA/acm OUT --runs 10

60 labelled papers of each class for training, 1,000 for validation and for testing; full fan-outs, all training papers in a
batch, one thread. Validation selects the epoch, the first of the best. DATA has `acm.npz`: paper_x, author_x, paper_y,
paper_author, paper_subject, train_60, ... Each run's result is saved in OUT/kept, so a killed command goes on.

The models are the same but for one thing: R-SAGE here has one map of a node's own row, PyG's HeteroConv one for each edge type
that ends there, which are added up.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, HGTConv, SAGEConv

from tools.scores.kept import Settings, file_named, kept

NODE_TYPE = "paper"
LABELS = 60
"""of a class, for training"""
MODELS: dict[str, Settings] = {
    "rsage": {"hidden": 64, "dropout": 0.5, "lr": 0.005, "weight_decay": 5e-4, "epochs": 60},
    "hgt": {"hidden": 64, "heads": 4, "dropout": 0.5, "lr": 0.005, "weight_decay": 5e-4, "epochs": 60},
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


class InRam(nn.Module):
    """PyG's R-SAGE or HGT on the whole graph, with an embedding table of every node type without features."""

    def __init__(self, name: str, data: HeteroData, settings: Settings) -> None:
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


def in_ram(name: str, data: HeteroData, settings: Settings, seed: int) -> Settings:
    """PyG's model, trained on the whole graph: accuracies in points at the best epoch on validation."""
    torch.manual_seed(seed)
    model, papers = InRam(name, data, settings), data[NODE_TYPE]
    sparse = list(model.tables.parameters())
    dense = [each for each in model.parameters() if not any(each is table for table in sparse)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(dense, lr=settings["lr"], weight_decay=settings["weight_decay"])
    ]
    optimizers += [torch.optim.SparseAdam(sparse, lr=settings["lr"])] if sparse else []
    best: Settings = {"val": -1.0}
    best_state = model.state_dict()
    for epoch in range(settings["epochs"]):
        model.train()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(data)[papers.train_mask], papers.y[papers.train_mask])
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        found = _accuracy(model, data, papers.val_mask)
        if found > best["val"]:
            best, best_state = {"val": found, "best_epoch": epoch}, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return {**best, "test": _accuracy(model, data, papers.test_mask)}


@torch.no_grad()
def _accuracy(model: InRam, data: HeteroData, mask: Tensor) -> float:
    model.eval()
    right = model(data).argmax(1) == data[NODE_TYPE].y
    return 100 * float(right[mask].float().mean())


def here(name: str, data: HeteroData, scratch: Path, settings: Settings, seed: int) -> Settings:
    """The same by `ooc.train`."""
    import ooc

    store, run = scratch / "acm.ooc", scratch / f"{name}-{seed}"
    if not store.exists():
        ooc.from_data(data, store).close()
    more: Settings = {"fanout": [-1, -1], "batch_size": 2**20, "threads": 1, "plan": False, "mode": "sampled"}
    summary = ooc.train(store=store, out=run, model=name, seed=seed, **settings, **more)
    scores = {split: 100 * float(summary["metrics"][split]["accuracy"]) for split in ("val", "test")}
    return {**scores, "best_epoch": summary["best_epoch"]}


def scores(folder: Path, out: Path, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Test accuracy by seed, in points, of each model here ("rsage") and by PyG in RAM ("rsage-pyg")."""
    found: dict[str, list[float]] = {}
    data, file = acm(folder), file_named(folder / "acm.npz")
    with TemporaryDirectory(dir=out) as scratch:
        for name, settings in MODELS.items():
            arms: dict[str, Callable[[int], Settings]] = {
                name: partial(here, name, data, Path(scratch), settings),
                f"{name}-pyg": partial(in_ram, name, data, settings),
            }
            for arm, train in arms.items():
                results = []
                for seed in seeds:
                    asked = {"npz": file, **settings, "seed": seed}
                    results.append(kept(out / "kept" / f"acm-{arm}-{seed}.json", asked, partial(train, seed)))
                found[arm] = [result["test"] for result in results]
    return found
