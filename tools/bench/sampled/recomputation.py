"""A step's activations and seconds: all kept, every layer recomputed, sqrt(n) segments, and as planned in less memory.

    python -m tools.bench.sampled.recomputation                     # a made graph of skewed degrees
    python -m tools.bench.sampled.recomputation tolokers.ooc --model gcn --layers 12

The batch is the whole graph: eight layers of 128 on all of its nodes, as in modes cluster and saint. With --sampled it is the
one of `tools.bench.sampled.activations`: three layers on 300,000, 55,000, 9,000 and 1,024 nodes. Budgets are shares of what the
step takes where all is kept, and what the single ways take. Bytes are those of storages that torch allocates, without gradients
of parameters; seconds are the median of steps that the ways take in turns. Seconds that were predicted are those beside all
kept.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.models.builders import build_model, full_blocks
from ooc.models.recomputation import Recomputation
from ooc.planning.measure_layers import MeasuredLayers, measured_layers
from ooc.planning.recomputation_plan import plan_recomputation, predicted
from ooc.runtime.step_memory import StepMemory
from ooc.stores.dataset import Dataset
from tools.bench.sampled.activations import NODES as SAMPLED
from tools.bench.sampled.activations import block

NODES, EDGES, SKEW, FEATURES = 20_000, 1_000_000, 4.0, 128
SHARES = (0.9, 0.8, 0.6, 0.5)
ROUNDS = 3


class Row(NamedTuple):
    """Of a way. Bytes, seconds; planned: those that were predicted, seconds beside all kept."""

    way: str
    budget: int | None
    recomputation: Recomputation
    planned_peak: int
    planned_seconds: float
    peak: int
    seconds: float

    def __str__(self) -> str:
        layers = sum(stop - first for first, stop in self.recomputation.segments)
        budget = "-" if self.budget is None else f"{self.budget / 1e6:.1f}"
        return (
            f"{self.way:>8} {budget:>8} {layers:>7} {sum(self.recomputation.kept_sums):>9,} {self.planned_peak / 1e6:>9.1f} "
            f"{self.peak / 1e6:>8.1f} {self.planned_seconds:>9.3f} {self.seconds:>8.3f}"
        )


def made_graph(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    """(edge_index, x): destinations skewed as u**SKEW, so that some have a large share of the edges."""
    torch.manual_seed(0)
    target = (nodes * torch.rand(edges) ** SKEW).long()
    return torch.stack([torch.randint(nodes, (edges,)), target]), torch.randn(nodes, FEATURES)


def stored_graph(path: Path) -> tuple[Tensor, Tensor]:
    """The same of a store."""
    with Dataset.open(path) as ds:
        indptr, source = (torch.from_numpy(np.array(each, np.int64)) for each in (ds.graph.indptr, ds.graph.indices))
        x = np.empty((ds.num_nodes, ds.num_features), np.float32)
        ds.stored("x").read(np.arange(ds.num_nodes), x)
    target = torch.arange(len(x)).repeat_interleave(indptr.diff())
    return torch.stack([source, target]), torch.from_numpy(x)


def compared(model: nn.Module, x: Tensor, blocks: list[Block], rounds: int = ROUNDS) -> list[Row]:
    """Every way, measured in turns; the plans by one measurement of the layers."""
    costs, plain = measured_layers(model, x, blocks), _peak(model, x, blocks, Recomputation())
    ways: list[tuple[str, int | None, Recomputation]] = [
        ("none", None, Recomputation()),
        ("layers", None, Recomputation.of(True, len(blocks))),
        ("sqrt", None, Recomputation.by_sqrt(len(blocks))),
    ]
    single = [predicted(costs.costs, plan, costs.fixed, costs.least).peak for _, _, plan in ways[1:]]
    for room in sorted([*(int(share * plain) for share in SHARES), *single], reverse=True):
        plan = plan_recomputation(costs.costs, room, costs.fixed, costs.least)
        ways.append(("auto" if plan.fits else "least", room, plan.recomputation))
    taken: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):  # the first warms up
        for at, (_, _, way) in enumerate(ways):
            begun = time.perf_counter()
            _step(model, x, blocks, way)
            taken[at] += [time.perf_counter() - begun] * bool(number)
    return [_row(model, x, blocks, costs, way, statistics.median(own)) for way, own in zip(ways, taken, strict=True)]


def _row(model: nn.Module, x: Tensor, blocks: Any, costs: MeasuredLayers, way: Any, seconds: float) -> Row:
    name, budget, plan = way
    found = predicted(costs.costs, plan, costs.fixed, costs.least)
    return Row(name, budget, plan, found.peak, found.seconds, _peak(model, x, blocks, plan), seconds)


def _step(model: nn.Module, x: Tensor, blocks: Any, plan: Recomputation) -> None:
    model.zero_grad(set_to_none=True)
    model(x, blocks, checkpoint=plan).square().mean().backward()


def _peak(model: nn.Module, x: Tensor, blocks: Any, plan: Recomputation) -> int:
    """Bytes of a step's activations at their peak."""
    with StepMemory(model) as step:
        _step(model, x, blocks, plan)
    return step.peak - sum(p.nbytes for p in model.parameters())


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--model", default="sage")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    a = parser.parse_args()
    if a.sampled:
        blocks, x = [block(src, dst) for src, dst in pairwise(SAMPLED)], torch.randn(SAMPLED[0], FEATURES)
    else:
        edge_index, x = made_graph(NODES, EDGES) if a.store is None else stored_graph(a.store)
        blocks = full_blocks(edge_index, len(x), a.layers)
    torch.manual_seed(0)
    model = build_model(a.model, x.size(1), a.hidden, 32, len(blocks), dropout=0.2, norm="layer")
    rows = compared(model, x, blocks, a.rounds)
    size = f"{len(x):,} nodes, {blocks[0].edge_index.size(1):,} edges"
    print(f"{a.store or 'made'}: {size}; {a.model}, {len(blocks)} layers of {a.hidden}")
    titles = f"{'way':>8} {'budget':>8} {'layers':>7} {'sums kept':>9} {'predicted':>9} {'peak, MB':>8}"
    print(f"{titles} {'predicted':>9} {'seconds':>8}")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
