"""Exact training of a whole graph under a budget, compared with compute time and bytes, with PyG, and as the budget shrinks.

    python -m tools.bench.full.exact WORK large --nodes 4000000 --edges 40000000 --limit 3GB --epochs 3
    python -m tools.bench.full.exact WORK shrink --nodes 400000 --edges 4000000 --plot shrink.png

Both train GraphSAGE of --layers layers, --hidden wide, with `ooc train --mode full` (`tools.bench.lib.stores` makes the graph
if missing), each run in a separate process under a memory limit that counts page cache (needs root).

large: a graph that PyG's full batch could not train in the machine's memory; its minimum bytes (the rows autograd saves) are
computed. Reports the seconds of the epochs after the first (which also sorts the edges), compared with the larger of compute
time and bytes at the disk's sequential rate, and with the plan.

shrink: PyG's GraphSAGE full batch on an edge list, without a limit; its peak is the budget of ooc, then a half, a quarter and
an eighth of it, each with the plan and every static plan that fits. Also PyG on a sparse matrix (CSR), which materializes no
messages, and ooc within its peak. Prints JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe, drop_page_cache, ooc_command

Result = dict[str, Any]
PLACEMENTS = ("planned", "retained", "disk", "recomputed")


def pyg_bytes(nodes: int, edges: int, widths: list[int]) -> int:
    """Minimum bytes PyG's full-batch GraphSAGE saves for the backward pass.

    Per layer the input rows, their neighbors' means and, except for the last, ReLU's output, in float32, and the int64 edges.
    """
    rows = sum(2 * wide for wide in widths[:-1]) + sum(widths[1:-1])
    return 4 * nodes * rows + 16 * edges


def pyg(a: argparse.Namespace) -> Result:
    """Run epochs of PyG's full-batch GraphSAGE, in a separate process."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch_geometric.nn import GraphSAGE

    from ooc.stores.dataset import Dataset

    torch.set_num_threads(a.threads)
    with Dataset.open(a.child, in_memory=True) as ds:
        x = torch.empty(ds.num_nodes, ds.num_features)
        ds.rows("x").read(np.arange(ds.num_nodes), x.numpy())
        adjacency = adjacency_of(ds, a.adjacency)
        labels: Any = ds.labels
        node = torch.from_numpy(np.array(ds.split("train")))
        y = torch.from_numpy(np.array(labels))[node].long()
        model = GraphSAGE(ds.num_features, a.hidden, a.layers, ds.num_classes or 2)
    optimizer, seconds = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(a.epochs):
        began = time.perf_counter()
        loss = F.cross_entropy(model(x, adjacency)[node], y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return {
        "step_seconds": seconds,
        "seconds": statistics.median(seconds[1:] or seconds),
        "loss": float(loss.detach()),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def adjacency_of(ds: Any, form: str) -> Any:
    """A graph's edges for PyG: int64[2, E], or a sparse matrix of destinations by sources."""
    import numpy as np
    import torch

    indptr, indices = np.asarray(ds.graph.indptr, np.int64), np.asarray(ds.graph.indices, np.int64)
    if form == "edges":
        return torch.from_numpy(np.stack([indices, np.repeat(np.arange(ds.num_nodes), np.diff(indptr))]))
    ones, size = torch.ones(len(indices)), (ds.num_nodes, ds.num_nodes)
    return torch.sparse_csr_tensor(torch.from_numpy(indptr), torch.from_numpy(indices), ones, size)


def exactly(a: argparse.Namespace, store: Path, limit: str, placement: str) -> Result:
    """Run `ooc train --mode full` under a limit; returns its summary, or the line of its refusal."""
    import shutil

    out = a.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    words = ["train", str(store), "--out", str(out), "--mode", "full", "--model", "sage", "--dropout", "0", "--lr", "0.01"]
    words += ["--hidden", str(a.hidden), "--layers", str(a.layers), "--epochs", str(a.epochs), "--eval-every", str(a.epochs)]
    words += ["--memory", limit, "--placement", placement, "--threads", str(a.threads), "--eval-splits", "val"]
    drop_page_cache()
    done = subprocess.run([*ooc_command(limit), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"limit": limit, "placement": placement, "failed": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    summary = json.loads((out / "summary.json").read_bytes())
    plan = out / "plan.json"
    found = summary["full"]
    return {
        "limit": limit,
        "placement": placement,
        "seconds": statistics.median(found["step_seconds"][1:] or found["step_seconds"]),
        "peak_rss_bytes": summary["peak_rss_bytes"],
        **found,
        "plan": json.loads(plan.read_bytes()) if plan.exists() else None,
        "losses": [
            json.loads(line)["loss"] for line in (out / "metrics.jsonl").open() if '"loss"' in line and '"val"' not in line
        ],
    }


def large(a: argparse.Namespace, store: Path) -> Result:
    """A graph too large for PyG and the memory: seconds compared with compute time, bytes and the plan."""
    from tools.bench.lib.disk_rates import Rates

    rates = Rates(store)
    rates.measure()
    found = exactly(a, store, a.limit, "planned")
    rates.complete()
    if "failed" in found:
        return {"run": found}
    width, classes = shape_of(store)
    widths = [width, *[a.hidden] * (a.layers - 1), classes]
    moved = (found["bytes_read"] + found["bytes_written"]) / len(found["step_seconds"])
    disk_s = moved / rates.median().sequential_bytes_per_s
    compute_s = found["busy_seconds"].get("computing", sum(found["busy_seconds"].get(lane, 0) for lane in ("compute", "add")))
    return {
        "run": found,
        "pyg_at_least_bytes": pyg_bytes(a.nodes, a.edges, widths),
        "bytes_an_epoch": moved,
        "disk_seconds": disk_s,
        "compute_seconds": compute_s,
        "seconds": found["seconds"],
        "ratio": found["seconds"] / max(disk_s, compute_s),
        "predicted_ratio": found["plan"]["seconds"] / found["seconds"] if found["plan"] else None,
        "disk": rates.asdict(),
    }


def shape_of(store: Path) -> tuple[int, int]:
    """(features, classes) of a store."""
    from ooc.stores.dataset import Dataset

    with Dataset.open(store) as ds:
        return ds.num_features, ds.num_classes or 2


def beside(a: argparse.Namespace, store: Path, adjacency: str) -> Result:
    """Run PyG in a separate process."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.full.exact",
        str(a.work),
        "pyg",
        "--child",
        str(store),
        "--adjacency",
        adjacency,
    ]
    for name in ("hidden", "layers", "epochs", "threads"):
        command += [f"--{name}", str(getattr(a, name))]
    found: Result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    print(json.dumps({"adjacency": adjacency, **found}), file=sys.stderr)
    return found


def shrink(a: argparse.Namespace, store: Path) -> Result:
    """PyG, and ooc with shares of its memory, planned and with every static plan."""
    pyg_edges, pyg_csr = beside(a, store, "edges"), beside(a, store, "csr")
    runs = []
    for share in a.shares:
        refused = set[str]()
        for placement in a.placements * a.rounds:
            if placement in refused:
                continue
            runs.append(exactly(a, store, str(pyg_edges["peak_rss_bytes"] // share), placement) | {"share": share})
            if "failed" in runs[-1]:
                refused.add(placement)
            shown = {key: runs[-1].get(key) for key in ("share", "placement", "step_seconds", "peak_rss_bytes", "failed")}
            print(json.dumps(shown), file=sys.stderr)
    beside_csr = exactly(a, store, str(pyg_csr["peak_rss_bytes"]), "planned")
    table = [[share, name, seconds] for (share, name), seconds in seconds_of(runs).items()]
    return {"pyg": pyg_edges, "pyg_csr": pyg_csr, "seconds": table, "runs": runs, "run_beside_csr": beside_csr}


def plot(path: Path, result: Result) -> None:
    """Seconds per epoch by share of the budget, one line per plan."""
    from tools.bench.lib.chart import Panel, lines

    times, shares = seconds_of(result["runs"]), sorted({run["share"] for run in result["runs"]})
    series: dict[str, list[float | None]] = {name: [times.get((share, name)) for share in shares] for name in PLACEMENTS}
    series["PyG, full batch"] = [result["pyg"]["seconds"] if share == 1 else None for share in shares]
    lines(path, [Panel([1 / share for share in shares], series, "share of the memory that PyG takes", "seconds per epoch")])


def seconds_of(runs: list[Result]) -> dict[tuple[int, str], float]:
    """By share and placement: the median over all rounds' epochs except their first."""
    taken: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        if "failed" not in run:
            taken.setdefault((run["share"], run["placement"]), []).extend(run["step_seconds"][1:] or run["step_seconds"])
    return {arm: statistics.median(seconds) for arm, seconds in taken.items()}


def main() -> None:
    """Parse the command line, run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=["large", "shrink", "pyg"])
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--edges", type=int, default=40_000_000)
    parser.add_argument("--width", type=int, default=128, help="features")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--kind", default="uniform", help="of graph, see tools.graphs.make_graph")
    parser.add_argument("--limit", default="3GB")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shares", type=int, nargs="+", default=[1, 2, 4, 8], help="of the memory that PyG takes")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--rounds", type=int, default=1, help="of all plans, one after the other")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--adjacency", choices=["edges", "csr"], default="edges", help="of PyG")
    a = parser.parse_args()
    if a.what == "pyg":
        print(json.dumps(pyg(a)))
        return
    from tools.bench.lib.stores import make_store

    a.work.mkdir(parents=True, exist_ok=True)
    store = a.work / f"full{a.nodes}.ooc"
    make_store(store, nodes=a.nodes, edges=a.edges, width=a.width, kind=a.kind)
    result = (large if a.what == "large" else shrink)(a, store)
    shape = {name: getattr(a, name) for name in ("nodes", "edges", "width", "hidden", "layers", "kind", "threads")}
    print(json.dumps({"machine": describe(), **shape, **result}))
    if a.plot and a.what == "shrink":
        plot(a.plot, result)


if __name__ == "__main__":
    main()
