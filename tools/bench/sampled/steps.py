"""Seconds per batch of `ooc`: GraphSAGE steps on a store, everything in RAM or from disk under a limit.

    python -m tools.bench.sampled.steps STORE --features disk --limit 2GB --fanout 10,10 --batches 20

Prints one JSON line. The clock runs from the first request to the end of the last step, including the first fill of the
pipeline. Kernels are compiled beforehand on a tiny graph. `--limit` needs root and counts page cache.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.bench.lib.machine import limit_memory

Steps = list[dict[str, float]]
"""What imports much is imported in functions, after the limit is set: memory counts where it is first touched."""


def seeds_of_run(num_nodes: int, batch_size: int, batches: int, seed: int) -> NDArray[np.int64]:
    """int64[batch_size * batches]: the seeds of a run, batch after batch, all distinct (fewer where nodes run out)."""
    return np.random.default_rng(seed).permutation(num_nodes)[: batch_size * batches].copy()  # not a view of all nodes


def warm_up(
    fanout: list[int], hidden: int, sums: int, like: Any, options: dict[str, Any], dropout: float = 0.0, labor: int = 0
) -> None:
    """Compile the kernels in use (same dtypes) and let torch make its thread pools, on a graph of 2,000 nodes."""
    from tools.graphs.make_graph import make_graph

    with tempfile.TemporaryDirectory() as folder:
        files, store = Path(folder) / "files", Path(folder) / "tiny.ooc"
        make_graph(files, nodes=2000, edges=20000, features=like.num_features, classes=like.num_classes)
        flags = ["--edges", f"{files}/edges/*.parquet", "--features", f"x={files}/x.npy", "--labels", f"{files}/y.npy"]
        subprocess.run([sys.executable, "-m", "ooc.cli", "ingest", str(store), *flags], check=True, capture_output=True)
        import ooc

        with ooc.open(store, **options) as tiny:
            train(tiny, np.arange(1024), fanout, 256, hidden, 0, sums, dropout=dropout, labor=labor)


def learner(ds: Any, layers: int, hidden: int, seed: int, dropout: float = 0.0) -> Callable[[Any], float]:
    """A GraphSAGE of `layers` layers with Adam: takes one step on a batch, returns its loss. dropout: of hidden rows."""
    import torch
    import torch.nn.functional as F

    from ooc.models.builders import build_model
    from ooc.models.user_models import forward_batch
    from ooc.runtime.crew import few, in_one_call, threads_kept, with_few
    from ooc.training.mode import clear_gradients

    torch.manual_seed(seed)
    model = build_model("sage", ds.num_features, hidden, ds.num_classes, layers, dropout)
    parameters = sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=in_one_call([*model.parameters()]))  # as `ooc train` does

    def step(batch: Any) -> float:
        logits = forward_batch(model, batch)
        loss = with_few(logits, lambda rows: F.cross_entropy(rows, batch.y[: batch.batch_size]))  # as `ooc train` does
        clear_gradients(optimizer)
        with threads_kept():
            loss.backward()  # type: ignore[no-untyped-call]
        with few(parameters):
            optimizer.step()
        return loss.item()

    return step


def loader_of(
    ds: Any,
    seeds: Any,
    fanout: list[int],
    batch_size: int,
    budget: Any = None,
    sums: int = 0,
    shuffle: bool = False,
    labor: int = 0,
    pack: str | None = None,
) -> Any:
    """The loader of a run. sums: width of the first layer's output where the loader is to make that layer's sums of neighbors,
    0 where batches are to have the rows; budget: a division of the memory that is known already; labor: batch dependency of
    LABOR sampling with layer dependency, 0 for neighbor sampling; pack: disk to pack batches in."""
    import ooc
    from ooc.graph.aggregation import PreAggregation
    from ooc.loading.ranks import WHOLE

    pre_aggregation = PreAggregation("mean", sums) if sums else None
    options: dict[str, Any] = {**WHOLE, "batch_size": batch_size, "shuffle": shuffle, "seed": 0}  # as `ooc train` does
    options |= {"budget": budget, "pre_aggregation": pre_aggregation, "pack": pack}
    if labor:
        options["sampler"] = ooc.Labor(layer_dependency=True, batch_dependency=labor)
    return ooc.NeighborLoader(ds, fanout, input_nodes=seeds, **options)


def sums_of(a: argparse.Namespace, fanout: list[int], ds: Any) -> int:
    """The first layer's width, unless batches are to have rows (`--rows`)."""
    return 0 if a.rows else int(a.hidden if len(fanout) > 1 else ds.num_classes)


def windows_of(loader: Any) -> int:
    """Windows or sweeps that were read so far; 0 in RAM."""
    stages = loader.times()
    stage = next((name for name in ("sum", "pack") if name in stages), "read")
    return int(stages[stage]["items"]) if "group" in stages else 0


def train(
    ds: Any,
    seeds: Any,
    fanout: list[int],
    batch_size: int,
    hidden: int,
    seed: int,
    sums: int = 0,
    budget: Any = None,
    dropout: float = 0.0,
    labor: int = 0,
    pack: str | None = None,
) -> tuple[Steps, Any]:
    """One pass over `seeds`: nodes, edges and loss of every step, and the loader. sums, budget, labor, pack: as of
    `loader_of`."""
    step = learner(ds, len(fanout), hidden, seed, dropout)
    loader = loader_of(ds, seeds, fanout, batch_size, budget, sums, labor=labor, pack=pack)
    steps: Steps = []
    for batch in loader:
        loss = step(batch)
        steps.append({"nodes": batch.num_nodes, "edges": batch.num_edges, "loss": loss})
    return steps, loader


def run(a: argparse.Namespace) -> dict[str, Any]:
    """Open, warm up on a tiny graph, run the steps and measure."""
    import torch  # noqa: F401 - before the store is opened, as in a script: it counts for the memory

    import ooc
    from ooc.runtime.memory_plan import plan_memory

    fanout = [int(f) for f in a.fanout.split(",")]
    options = {"in_memory": a.features == "ram", "engine": a.engine, "memory": a.memory or a.limit}
    with ooc.open(a.store, **options) as ds:
        if a.gap is not None:
            stored: Any = ds.stored("x")
            stored.cost = replace(stored.cost, read_s=a.gap * 1024 * stored.cost.byte_s)
        seeds = seeds_of_run(ds.num_nodes, a.batch_size, a.batches, a.seed)
        # Without columns that no batch meets, as in `ooc train`.
        budget = plan_memory(ds, columns=())
        sums = sums_of(a, fanout, ds)
        warm_up(fanout, a.hidden, sums, ds, options, a.dropout, a.labor)
        begin = time.perf_counter()
        steps, loader = train(ds, seeds, fanout, a.batch_size, a.hidden, a.seed, sums, budget, a.dropout, a.labor, a.pack)
        seconds = time.perf_counter() - begin
    stages = loader.times()
    return {
        "features": a.features,
        "limit": a.limit,
        "seed": a.seed,
        "labor": a.labor,
        "pack": a.pack,
        "fanout": fanout,
        "dropout": a.dropout,
        "batch_size": a.batch_size,
        "batches": len(steps),
        "seconds_per_batch": seconds / len(steps),
        "nodes_per_batch": sum(s["nodes"] for s in steps) / len(steps),
        "edges_per_batch": sum(s["edges"] for s in steps) / len(steps),
        "losses": [s["loss"] for s in steps],
        "sums": sums,
        "windows": windows_of(loader),
        "rows_read": loader.rows_read,
        "bytes_read": loader.bytes_read - loader.topology_bytes_read,
        "topology_bytes_read": loader.topology_bytes_read,
        "bytes_written": loader.bytes_written,
        "budget": asdict(loader.budget),
        "stages": stages,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Parse the command line, run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--features", choices=["ram", "disk"], default="disk")
    parser.add_argument("--memory", help="memory budget of ooc; default: the limit")
    parser.add_argument("--limit", help="memory limit counting page cache, such as 2GB")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0, help="of hidden rows")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--gap", type=int, help="KiB between rows that share a read; default: that of the disk profile")
    parser.add_argument("--rows", action="store_true", help="batches with rows, not with the first layer's sums")
    parser.add_argument("--labor", type=int, default=0, metavar="K", help="LABOR sampling with this batch dependency")
    parser.add_argument("--pack", metavar="SIZE", help="disk to pack batches in, in place of shared scans")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    if a.limit:
        limit_memory(a.limit)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is there
    print(json.dumps(run(a)))


if __name__ == "__main__":
    main()
