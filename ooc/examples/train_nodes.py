"""Classify the nodes of a graph with your own PyTorch loop: a script to copy and change.

    ooc example graph demo
    ooc ingest demo.ooc --edges demo/edges.parquet --nodes demo/nodes.parquet --label label --split split --x-cols 'f*'
    ooc example train_nodes > train_nodes.py
    python train_nodes.py demo.ooc

Features and edges stay on disk; a batch is the PyG `Data` that PyG's own NeighborLoader would give. `ooc train` is a loop of
the same kind that also resumes, plans its memory and writes a report.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

import ooc


class GraphSAGE(nn.Module):
    """Two layers of GraphSAGE."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(features, hidden), SAGEConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits of all nodes of a batch, float32[n, classes]."""
        x = functional.dropout(functional.relu(self.first(x, edge_index)), 0.3, self.training)
        return self.second(x, edge_index)


def train_epoch(model: nn.Module, loader: Iterable[Any], optimizer: torch.optim.Optimizer) -> float:
    """One pass over the training nodes; the mean loss."""
    model.train()
    losses = []
    for batch in loader:
        logits = model(batch.x, batch.edge_index)[: batch.batch_size]  # the seeds come first
        loss = functional.cross_entropy(logits, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Any]) -> float:
    """Share of the seeds whose class is predicted correctly."""
    model.eval()
    correct = total = 0
    for batch in loader:
        predicted = model(batch.x, batch.edge_index)[: batch.batch_size].argmax(1)
        correct += int((predicted == batch.y[: batch.batch_size]).sum())
        total += batch.batch_size
    return correct / total


@torch.no_grad()
def predict(model: nn.Module, ds: ooc.Dataset, loader: Iterable[Any], path: str) -> None:
    """Write the class of every node to a CSV file, by your own ids."""
    model.eval()
    with open(path, "w") as file:
        print("id,class", file=file)
        for batch in loader:
            predicted = model(batch.x, batch.edge_index)[: batch.batch_size].argmax(1)
            for name, label in zip(ds.external(batch.n_id[: batch.batch_size]), predicted.tolist(), strict=True):
                print(f"{name},{label}", file=file)


def main() -> None:
    """Train, keep the model that is best on validation, test it, predict all nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a store with labels and splits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--memory", help="memory for the process, such as 2GB")
    parser.add_argument("--out", default="predictions.csv", help="where the predictions go")
    a = parser.parse_args()

    torch.manual_seed(0)
    with ooc.open(a.store, memory=a.memory) as ds:
        fanout: dict[str, Any] = {"num_neighbors": [10, 10], "batch_size": 1024}
        train = ooc.NeighborLoader(ds, input_nodes="train", shuffle=True, seed=0, **fanout)
        val = ooc.NeighborLoader(ds, input_nodes="val", **fanout)
        test = ooc.NeighborLoader(ds, input_nodes="test", **fanout)
        everything = ooc.NeighborLoader(ds, input_nodes=None, **fanout)

        model = GraphSAGE(ds.num_features, a.hidden, ds.num_classes or 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        best, best_state = 0.0, model.state_dict()
        for epoch in range(1, a.epochs + 1):
            begin = time.perf_counter()
            loss, score = train_epoch(model, train, optimizer), accuracy(model, val)
            print(f"epoch {epoch}: loss {loss:.4f}, val accuracy {score:.4f}, {time.perf_counter() - begin:.1f} s")
            if score > best:
                best, best_state = score, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(best_state)
        print(f"test accuracy {accuracy(model, test):.4f}")
        predict(model, ds, everything, a.out)
        print(f"{a.out}: {ds.num_nodes:,} predictions")


if __name__ == "__main__":
    try:
        main()
    except ooc.OocError as error:  # what a user can mend, in one line
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
