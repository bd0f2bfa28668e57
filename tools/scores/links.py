"""Links by GraphSAGE: ROC AUC of `ooc.LinkNeighborLoader` and of PyG's in RAM, with the same model, split and evaluation.

    python -m tools.scores.links DATA OUT --graphs pubmed gowalla --seeds 10

DATA has `planetoid/pubmed.npz` (x, edge_index) and `gowalla/gowalla.npz` (train_user, train_item, test_user, test_item: pairs
of users and items, without features, so nodes have an embedding table). Edges are divided by an `EdgeSplit`, 10 % of them for
test. PyG's loader samples from the training edges; the links of a batch and their reverses are taken out of its edges by hand.
Its sampler needs pyg-lib or torch-sparse; where there is neither, `ooc` is measured alone. Both models begin with the same
weights; negatives are pairs of random nodes, one a link. The model of the last epoch is scored on the whole graph of training
edges: its test links against as many pairs that are no edges, the same for both. Each run's result is saved in OUT/kept, so
a killed command goes on. Prints JSON: the AUCs in points.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
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
from ooc.stores.graph import Graph
from tools.scores.kept import Settings, file_named, kept, spread

FANOUT, HIDDEN, LR = [10, 10], 64, 0.005
GRAPHS: dict[str, tuple[str, Settings]] = {
    "pubmed": ("planetoid/pubmed.npz", {"batch_size": 2048, "epochs": 10}),
    "gowalla": ("gowalla/gowalla.npz", {"batch_size": 16384, "epochs": 3}),
}
"""file and settings of each"""


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


def graph_of(npz: Path, split: ooc.EdgeSplit) -> Links:
    """A graph with every edge in both directions."""
    x = None
    with np.load(npz) as found:
        if "edge_index" in found:
            x, edges = torch.from_numpy(found["x"].astype(np.float32)), found["edge_index"].astype(np.int64)
        else:
            user = np.concatenate([found["train_user"], found["test_user"]]).astype(np.int64)
            item = np.concatenate([found["train_item"], found["test_item"]]).astype(np.int64) + int(user.max()) + 1
            edges = np.stack([np.concatenate([user, item]), np.concatenate([item, user])])
    num_nodes = int(edges.max()) + 1 if x is None else len(x)
    return Links(x, torch.from_numpy(edges), torch.from_numpy(split.parts(*edges)).long(), num_nodes)


def without_links(batch: Data) -> Tensor:
    """The edges of PyG's batch but for its links, in both directions."""
    true = batch.n_id[batch.edge_label_index[:, batch.edge_label > 0]]
    edges, many = batch.n_id[batch.edge_index], int(batch.n_id.max()) + 1
    links = torch.cat([true[0] * many + true[1], true[1] * many + true[0]])
    return batch.edge_index[:, ~torch.isin(edges[0] * many + edges[1], links)]


def train(links: Links, loader: Iterable[Any], epochs: int, edges_of: Callable[[Any], Tensor]) -> tuple[Encoder, float]:
    """Train an encoder on a loader's batches; edges_of: those that carry messages. Also the last epoch's loss."""
    model, mean = Encoder(links), float("nan")
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(epochs):
        total, steps = 0.0, 0
        for batch in loader:
            optimizer.zero_grad()
            src, dst = model(getattr(batch, "x", None), batch.n_id, edges_of(batch))[batch.edge_label_index]
            loss = F.binary_cross_entropy_with_logits((src * dst).sum(-1), (batch.edge_label > 0).float())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total, steps = total + float(loss.detach()), steps + 1
        mean = total / steps
        print(f"epoch {epoch + 1}: loss {mean:.4f}", file=sys.stderr, flush=True)
    return model, mean


def no_edges(links: Links, seed: int) -> Tensor:
    """As many pairs that are no edges as there are test links, int64[2, k]."""
    source, target = links.edge_index.numpy()
    edges = EdgeLookup(Graph.from_edges(source, target, links.num_nodes))
    source = links.edges(2)[0].numpy()
    drawn = LinkNegatives("binary", 1, links.num_nodes, edges=edges).draw(source, np.arange(len(source)), seed)
    return torch.from_numpy(np.stack(drawn))


@torch.no_grad()
def score(links: Links, model: Encoder, negative: Tensor) -> float:
    """ROC AUC of the test links, in points."""
    rows = model.eval()(links.x, torch.arange(links.num_nodes), links.edges(0))
    scores = [(rows[pair[0]] * rows[pair[1]]).sum(-1) for pair in (links.edges(2), negative)]
    true = torch.cat([torch.ones(len(scores[0])), torch.zeros(len(scores[1]))]).long()
    return 100 * float(binary_auroc(torch.cat(scores), true))


def here(links: Links, split: ooc.EdgeSplit, store: Path, settings: Settings) -> tuple[Encoder, float]:
    """Trained on the batches of `ooc`, whose links are left out."""
    with ooc.from_data(Data(x=links.x, edge_index=links.edge_index, num_nodes=links.num_nodes), store) as ds:
        how: Settings = {"batch_size": settings["batch_size"], "shuffle": True, "neg_sampling": "binary"}
        loader = ooc.LinkNeighborLoader(ds, FANOUT, "train", edge_split=split, seed=split.seed, **how)
        torch.manual_seed(split.seed)
        return train(links, loader, settings["epochs"], lambda batch: batch.edge_index)


def in_ram(links: Links, split: ooc.EdgeSplit, store: Path, settings: Settings) -> tuple[Encoder, float]:
    """Trained on PyG's batches, out of which the links are taken here."""
    graph = Data(x=links.x, edge_index=links.edges(0), num_nodes=links.num_nodes)
    how: Settings = {"batch_size": settings["batch_size"], "shuffle": True, "neg_sampling": "binary"}
    loader = PygLoader(graph, FANOUT, edge_label_index=links.edges(0), **how)
    torch.manual_seed(split.seed)
    return train(links, loader, settings["epochs"], without_links)


ARMS = {"ooc": here} | ({"pyg": in_ram} if compiled.WITH_PYG_LIB or compiled.WITH_TORCH_SPARSE else {})


def measure(arm: str, npz: Path, out: Path, settings: Settings, seed: int) -> Settings:
    """Train and score: the AUC in points, the loss of the last epoch, and seconds."""
    split = ooc.EdgeSplit(val=0.05, test=0.1, seed=seed)
    links, began = graph_of(npz, split), time.perf_counter()
    with TemporaryDirectory(dir=out) as scratch:
        model, loss = ARMS[arm](links, split, Path(scratch) / "links.ooc", settings)
    seconds = time.perf_counter() - began
    return {"auroc": score(links, model, no_edges(links, seed)), "loss": loss, "seconds": seconds}


def scores(name: str, data: Path, out: Path, seeds: Sequence[int], settings: Settings, arms: Sequence[str]) -> Settings:
    """Of each arm the AUCs of all seeds, and of PyG's how much they are above those here, seed by seed."""
    npz = data / GRAPHS[name][0]
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in seeds:
        asked = {"npz": file_named(npz), "fanout": FANOUT, "hidden": HIDDEN, "lr": LR, **settings, "seed": seed}
        for arm, each in found.items():
            run = partial(measure, arm, npz, out, settings, seed)
            each.append(kept(out / "kept" / f"{name}-{arm}-{seed}.json", asked, run)["auroc"])
    lines = {arm: spread(each) for arm, each in found.items()}
    if {"ooc", "pyg"} <= set(found):
        lines["pyg above ooc"] = spread([theirs - mine for mine, theirs in zip(found["ooc"], found["pyg"], strict=True)])
    return settings | lines


def main() -> None:
    """Parse the command line, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seed", type=int, help="this one alone; its results are saved for the others")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    seeds = list(range(given.seeds)) if given.seed is None else [given.seed]
    print(json.dumps({name: scores(name, given.data, given.out, seeds, GRAPHS[name][1], given.arms) for name in given.graphs}))


if __name__ == "__main__":
    main()
