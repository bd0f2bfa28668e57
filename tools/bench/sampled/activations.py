"""What autograd keeps of a step, and a step's peak, with activations as they are and compressed.

    python -m tools.bench.sampled.activations                 # sage, gcn, gin and gat, three layers of 256
    python -m tools.bench.sampled.activations --models sage --rows

A batch of made-up blocks with the sizes of a sampled one: 300,000, 55,000, 9,000 and 1,024 nodes, six in-edges each. Counted
are the storages that torch allocates (`ooc.runtime.step_memory`): those that stand between the passes, without what is outside
of the model, and the most at a time. --rows: of rows in place of first-layer aggregates, which the batch has anyway. JSON.
"""

import argparse
import json
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.graph.blocks import Block, aggregated_block
from ooc.models.builders import build_model
from ooc.models.compression import compressed_activations
from ooc.runtime.step_memory import OUTSIDE, StepMemory

NODES, DEGREE, CLASSES = (300_000, 55_000, 9_000, 1_024), 6, 32
WIDTHS = 128, 256
KINDS: tuple[Any, ...] = (None, "int8", "int4", "int2")


def block(src: int, dst: int) -> Block:
    """A block with random sources."""
    edges = dst * DEGREE
    ends = torch.stack([torch.randint(src, (edges,)), torch.arange(dst).repeat_interleave(DEGREE)])
    return Block(ends, torch.arange(0, edges + 1, DEGREE), src, dst, torch.full((src,), DEGREE + 3), None, None, None)


def measured(name: str, rows: bool, nodes: tuple[int, ...] = NODES) -> dict[str, dict[str, float]]:
    """Kind -> megabytes kept and at the peak, and both as shares of those without compression."""
    torch.manual_seed(0)
    blocks = [block(src, dst) for src, dst in pairwise(nodes)]
    model = build_model(name, *WIDTHS, CLASSES, num_layers=len(blocks), dropout=0.5, heads=4, input_dropout=0.0)
    x: Any = torch.randn(nodes[0], WIDTHS[0])
    if not rows and name != "gat":
        x = FirstLayerAggregates(torch.randn(nodes[1], WIDTHS[0]), torch.randn(nodes[1], WIDTHS[0]))
        blocks[0] = aggregated_block(blocks[1])
    y, found = torch.randint(CLASSES, (nodes[-1],)), dict[str, dict[str, float]]()
    for compress in KINDS:
        torch.manual_seed(1)
        with StepMemory(model) as step:
            with compressed_activations(compress, model, (x, blocks)):
                out = model(x, blocks)
            F.cross_entropy(out, y).backward()  # type: ignore[no-untyped-call]
        kept = sum(line.kept for line in step.lines if line.layer != OUTSIDE)
        first = next(iter(found.values()), {"kept_mb": kept / 1e6, "peak_mb": step.peak / 1e6})
        own = {"kept_mb": kept / 1e6, "peak_mb": step.peak / 1e6}
        shares = {"kept_share": own["kept_mb"] / first["kept_mb"], "peak_share": own["peak_mb"] / first["peak_mb"]}
        found[str(compress)] = {**own, **shares}
    return found


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="sage,gcn,gin,gat")
    parser.add_argument("--rows", action="store_true")
    a = parser.parse_args()
    found = {name: measured(name, a.rows) for name in a.models.split(",")}
    print(
        json.dumps(
            {name: {k: {n: round(v, 3) for n, v in own.items()} for k, own in by.items()} for name, by in found.items()},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
