"""Exact steps of reversible models of 7, 28 and 112 layers: rows kept, and made again from outputs.

    python -m tools.bench.full.reversible                       # revsage on a random graph, hidden width 64
    python -m tools.bench.full.reversible --model revgat --nodes 2000 --layers 7 28

Prints for each number of layers and each placement the most bytes of values and aggregates in memory and on disk, the seconds
of a step, and how far its gradient is from that of stored activations in memory, all parameters together.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

import ooc
from ooc.fullgraph.placement.step_plan import alike
from ooc.fullgraph.program import Placement, Program, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.models.builders import build_model, full_blocks
from ooc.runtime.memory import return_freed
from ooc.stores.dataset import Dataset
from ooc.stores.sizes import format_bytes

FEATURES, CLASSES, HIDDEN, DEGREE, ROOM = 32, 8, 64, 10, 2 * 10**9
RETAINED, DISK, INVERTED = TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.INVERTED


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="revsage", choices=["revsage", "revgat", "revgcn"])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--layers", type=int, nargs="+", default=[7, 28, 112])
    parser.add_argument("--rounds", type=int, default=1, help="steps timed, after one more")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), a.model, a.nodes, a.layers, a.rounds)


def measure(folder: Path, name: str, nodes: int, layers: Sequence[int], rounds: int) -> None:
    """Print a line for each depth and placement."""
    torch.manual_seed(0)
    edge_index, y = torch.randint(nodes, (2, DEGREE * nodes)), torch.randint(CLASSES, (nodes,))
    ooc.from_data(Data(x=torch.randn(nodes, FEATURES), edge_index=edge_index, y=y), folder / "store")

    def loss(first: int, out: Tensor) -> Tensor:
        return F.cross_entropy(out, y[first : first + len(out)], reduction="sum") / nodes

    with Dataset.open(folder / "store") as ds:
        for depth in layers:
            torch.manual_seed(0)
            model = build_model(name, FEATURES, HIDDEN, CLASSES, depth, dropout=0.2, norm="layer")
            exact = _stored(model, ds, loss, depth)
            with closing(FullGraph(model, ds, folder / f"full{depth}", room=ROOM)) as full:
                for words, placement in _placements(full.program).items():
                    full.placement = placement
                    print(f"{depth} layers, {words}: {_steps(full, loss, exact, rounds)}", flush=True)
                full.discard()


def _placements(program: Program) -> dict[str, Placement]:
    """The placements that are compared."""
    inverted = alike(program, INVERTED, RETAINED)
    rows = {name: RETAINED if at is INVERTED else at for name, at in inverted.placements.items()}
    found = {"all retained": Placement({}), "rows retained, the rest recomputed": Placement(rows)}
    return {**found, "rows inverted, in memory": inverted, "rows inverted, on disk": alike(program, INVERTED, DISK)}


def _stored(model: Any, ds: Dataset, loss: Any, depth: int) -> Tensor:
    """The gradient with all activations stored in memory."""
    graph, x = ds.graph, np.empty((ds.num_nodes, FEATURES), np.float32)
    ds.rows("x").read(np.arange(ds.num_nodes), x)
    target = np.repeat(np.arange(ds.num_nodes), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    for layer in model.layers:
        layer.disable = True
    torch.manual_seed(1)
    loss(0, model(torch.from_numpy(x), full_blocks(edges, ds.num_nodes, depth))).backward()
    for layer in model.layers:
        layer.disable = False
    return _gradient(model)


def _gradient(model: nn.Module) -> Tensor:
    """All parameters' in one vector; they are without one afterwards."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def _steps(full: FullGraph, loss: Any, exact: Tensor, rounds: int) -> str:
    """Steps of a placement, in words."""
    taken = []
    for _ in range(1 + rounds):
        torch.manual_seed(1)
        began = time.perf_counter()
        full.step(loss)
        taken.append(time.perf_counter() - began)
        error = float((_gradient(full.model) - exact).norm() / exact.norm())
    memory, disk = (max(getattr(sample, tier) for sample in full.traffic.samples) for tier in ("memory", "disk"))
    full.make_room()
    return_freed()
    return (
        f"{format_bytes(memory)} in memory, {format_bytes(disk)} on disk, {min(taken[1:]):.2f} s, gradient off by {error:.1e}"
    )


if __name__ == "__main__":
    main()
