"""Links by GraphSAGE: ROC AUC of `ooc.LinkNeighborLoader` and of PyG's in RAM, with the same model, split and evaluation.

    python -m tools.scores.links DATA OUT --graphs pubmed gowalla --seeds 10 --epochs 20

DATA has `planetoid/pubmed.npz` (x, edge_index) and `gowalla/gowalla.npz` (train_user, train_item, test_user, test_item: pairs
of users and items, without features, so nodes have an embedding table). Edges are divided by an `EdgeSplit`, 10 % of them for
test. PyG's loader samples from the training edges; the links of a batch and their reverses are taken out of its edges by hand.
Its sampler needs pyg-lib or torch-sparse; where there is neither, `ooc` is measured alone. A model is scored with all training
edges, its test links against as many pairs that are no edges. Prints JSON.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import typing as compiled
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader as PygLoader
from torch_geometric.nn import GraphSAGE
from torchmetrics.functional.classification import binary_auroc

import ooc
from ooc.sampling.links import EdgeLookup, LinkNegatives

FANOUT, HIDDEN, BATCH, LR = [10, 10], 64, 1024, 0.005
GRAPHS = ("pubmed", "gowalla")


class Links(NamedTuple):
    """A graph and the parts of its edges."""

    x: Tensor | None
    edge_index: Tensor
    part: Tensor
    num_nodes: int

    def edges(self, *parts: int) -> Tensor:
        """Those of the parts (0: training, 1: validation, 2: test), int64[2, k]."""
        return self.edge_index[:, torch.isin(self.part, torch.tensor(parts))]


class Encoder(nn.Module):
    """GraphSAGE over features, or over an embedding table of the nodes."""

    def __init__(self, links: Links) -> None:
        super().__init__()
        self.table = None if links.x is not None else nn.Embedding(links.num_nodes, HIDDEN)
        channels = HIDDEN if links.x is None else links.x.size(1)
        self.convs = GraphSAGE(channels, HIDDEN, num_layers=len(FANOUT))

    def forward(self, x: Tensor | None, node: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs(x if self.table is None else self.table(node), edge_index)


def graph_of(name: str, data: Path, split: ooc.EdgeSplit) -> Links:
    """A graph with every edge in both directions."""
    if name == "pubmed":
        with np.load(data / "planetoid" / "pubmed.npz") as found:
            x, edges = torch.from_numpy(found["x"].astype(np.float32)), found["edge_index"].astype(np.int64)
        num_nodes = len(x)
    else:
        with np.load(data / "gowalla" / "gowalla.npz") as found:
            user = np.concatenate([found["train_user"], found["test_user"]]).astype(np.int64)
            item = np.concatenate([found["train_item"], found["test_item"]]).astype(np.int64) + int(user.max()) + 1
        x, num_nodes = None, int(item.max()) + 1
        edges = np.stack([np.concatenate([user, item]), np.concatenate([item, user])])
    return Links(x, torch.from_numpy(edges), torch.from_numpy(split.parts(*edges)).long(), num_nodes)


def store_of(links: Links, path: Path) -> Path:
    """The store of a graph, anew."""
    shutil.rmtree(path, ignore_errors=True)
    ooc.from_data(Data(x=links.x, edge_index=links.edge_index, num_nodes=links.num_nodes), path)
    return path


def without_links(batch: Data) -> Tensor:
    """The edges of PyG's batch but for its links, in both directions."""
    true = batch.n_id[batch.edge_label_index[:, batch.edge_label > 0]]
    edges, many = batch.n_id[batch.edge_index], int(batch.n_id.max()) + 1
    links = torch.cat([true[0] * many + true[1], true[1] * many + true[0]])
    return batch.edge_index[:, ~torch.isin(edges[0] * many + edges[1], links)]


def train(links: Links, loader: Iterable[Any], epochs: int, edges_of: Callable[[Any], Tensor]) -> Encoder:
    """Train an encoder on a loader's batches; edges_of: those that carry messages."""
    model = Encoder(links)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(epochs):
        total, steps = 0.0, 0
        for batch in loader:
            optimizer.zero_grad()
            src, dst = model(getattr(batch, "x", None), batch.n_id, edges_of(batch))[batch.edge_label_index]
            loss = F.binary_cross_entropy_with_logits((src * dst).sum(-1), (batch.edge_label > 0).float())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total, steps = total + float(loss), steps + 1
        print(f"epoch {epoch + 1}: loss {total / steps:.4f}", file=sys.stderr)
    return model


@torch.no_grad()
def score(links: Links, model: Encoder, negative: Tensor) -> float:
    """ROC AUC of the test links, in points."""
    rows = model.eval()(links.x, torch.arange(links.num_nodes), links.edges(0))
    scores = [(rows[pair[0]] * rows[pair[1]]).sum(-1) for pair in (links.edges(2), negative)]
    true = torch.cat([torch.ones(len(scores[0])), torch.zeros(len(scores[1]))]).long()
    return 100 * float(binary_auroc(torch.cat(scores), true))


def measure(name: str, data: Path, out: Path, seed: int, epochs: int) -> dict[str, float]:
    """The scores of one seed: {"ooc": ..., "pyg": ...}."""
    split = ooc.EdgeSplit(val=0.05, test=0.1, seed=seed)
    links = graph_of(name, data, split)
    found: dict[str, float] = {}
    with ooc.open(store_of(links, out / f"{name}.ooc")) as ds:
        test = links.edges(2)
        lists = LinkNegatives("binary", 1, links.num_nodes, edges=EdgeLookup(ds.graph))
        negative = torch.from_numpy(np.stack(lists.draw(test[0].numpy(), np.arange(test.size(1)), seed)))
        common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "neg_sampling": "binary"}
        torch.manual_seed(seed)
        mine = ooc.LinkNeighborLoader(ds, FANOUT, "train", edge_split=split, seed=seed, **common)
        found["ooc"] = score(links, train(links, mine, epochs, lambda batch: batch.edge_index), negative)
        if compiled.WITH_PYG_LIB or compiled.WITH_TORCH_SPARSE:
            torch.manual_seed(seed)
            graph = Data(x=links.x, edge_index=links.edges(0), num_nodes=links.num_nodes)
            theirs = PygLoader(graph, FANOUT, edge_label_index=links.edges(0), **common)
            found["pyg"] = score(links, train(links, theirs, epochs, without_links), negative)
    print(name, seed, found, file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    runs = {
        name: [measure(name, given.data, given.out, seed, given.epochs) for seed in range(given.seeds)] for name in given.graphs
    }
    settings = {"fanout": FANOUT, "hidden": HIDDEN, "batch_size": BATCH, "lr": LR, "epochs": given.epochs}
    print(json.dumps({"auroc": runs, **settings}))


if __name__ == "__main__":
    main()
