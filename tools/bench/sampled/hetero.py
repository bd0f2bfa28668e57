"""R-SAGE on a graph shaped as ogbn-mag: `ooc` in RAM and from disk under a limit, PyG's NeighborLoader in RAM, in one run.

    python -m tools.bench.sampled.hetero WORK --pyg-python PY --limit 2GB

1.9 M nodes of four types, 21 M edges and their reverses (`tools.graphs.mag`, made in WORK if missing). Fan-out, batch, hidden
width and optimizer are the same in every arm, and the two node types without features have embedding tables. An `ooc` arm is
`ooc.train`; a PyG arm is HeteroConv of SAGEConv with sparse embeddings, on all sampled nodes or with `trim_to_layer`, by the
interpreter PY, which needs torch-geometric and a sampler of its (pyg-lib or torch-sparse).

Each arm runs in a process of its own, after the page cache was dropped, --rounds times, interleaved. The limit counts page
cache (needs root). Seconds per batch are the mean behind --warm-up batches; those with the first fill of the pipeline are
reported too. Prints JSON: medians over the rounds, ratios, and whether the losses in RAM and from disk are equal to the bit.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe, limit_memory
from tools.bench.sampled.cost import Result, run_cold

OOC_RAM, OOC_DISK, PYG, PYG_TRIM = "ooc-ram", "ooc-disk", "pyg-ram", "pyg-trim-ram"
ARMS = (OOC_RAM, OOC_DISK, PYG, PYG_TRIM)
PASSED_ON = ("fanout", "batch_size", "hidden", "lr", "batches", "pyg_batches", "warm_up", "limit", "seed")


def timed(marks: list[float], warm_up: int) -> dict[str, float]:
    """Seconds per batch of a run, from the times at its begin and after each batch.

    >>> timed([0.0, 5.0, 6.0, 7.0, 10.0], warm_up=1)["seconds_per_batch"]
    1.6666666666666667
    """
    each = [stop - start for start, stop in zip(marks[warm_up:], marks[warm_up + 1 :], strict=False)]
    return {
        "seconds_per_batch": (marks[-1] - marks[warm_up]) / len(each),
        "median_seconds": statistics.median(each),
        "with_first_fill": (marks[-1] - marks[0]) / (len(marks) - 1),
    }


def by_ooc(a: argparse.Namespace) -> Result:
    """A run of `ooc.train`, in RAM or from disk under the limit."""
    in_ram = a.arm == OOC_RAM
    if not in_ram:
        limit_memory(a.limit, "ooc_hetero")  # a group of its own: others run benchmarks too
    import ooc
    from ooc.stores.process import resident_bytes

    marks, losses = list[float](), list[float]()

    class Clock(ooc.Callback):
        def start(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

        def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
            marks.append(time.perf_counter())
            losses.append(loss)

    run = a.work / f"run-{a.arm}"
    shutil.rmtree(run, ignore_errors=True)
    where: dict[str, Any] = {"in_memory": True} if in_ram else {"memory": a.limit}
    summary = ooc.train(
        store=a.store,
        out=run,
        model="rsage",
        fanout=[int(f) for f in a.fanout.split(",")],
        batch_size=a.batch_size,
        hidden=a.hidden,
        dropout=0.0,
        lr=a.lr,
        max_steps=a.batches,
        epochs=1000,
        seed=a.seed,
        callbacks=[Clock()],
        **where,
    )
    kept = {name: summary[name] for name in ("bytes_read", "rows_read", "rows_asked", "stages", "budget") if name in summary}
    return timed(marks, a.warm_up) | kept | {"losses": losses, "peak_rss_bytes": resident_bytes()[1]}


def by_pyg(a: argparse.Namespace) -> Result:
    """Steps of PyG's model on batches of its NeighborLoader, everything in RAM."""
    import torch
    import torch.nn.functional as F
    from torch_geometric.loader import NeighborLoader

    data = in_ram(a.store)
    torch.manual_seed(a.seed)
    model = pyg_model(data, a.hidden)
    tables = [parameter for table in model["tables"].values() for parameter in table.parameters()]
    optimizers = [torch.optim.Adam(model["convs"].parameters(), a.lr), torch.optim.SparseAdam(tables, a.lr)]
    fanout = [int(f) for f in a.fanout.split(",")]
    seeds = torch.randperm(data["paper"].num_nodes)[: a.batch_size * (a.pyg_batches + a.warm_up)]
    marks, losses, nodes = [time.perf_counter()], list[float](), list[int]()
    for batch in NeighborLoader(data, fanout, ("paper", seeds), batch_size=a.batch_size, shuffle=False):
        out = pyg_forward(model, batch, a.batch_size, len(fanout), a.arm == PYG_TRIM)
        loss = F.cross_entropy(out[: a.batch_size], batch["paper"].y[: a.batch_size])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        nodes.append(sum(batch[name].num_nodes for name in batch.node_types))
        marks.append(time.perf_counter())
    return timed(marks, a.warm_up) | {"losses": losses, "nodes_per_batch": statistics.mean(nodes)}


def in_ram(store: Path) -> Any:
    """The store as PyG's HeteroData, its edges sorted already (`adj_t`), so that its loader need not sort them."""
    import numpy as np
    import torch
    from torch_geometric.data import HeteroData
    from torch_geometric.typing import SparseTensor

    from ooc.stores.dataset import Dataset

    data = HeteroData()
    with Dataset.open(store) as ds:
        for name in ds.node_types:
            nodes = ds.nodes(name)
            data[name].num_nodes = nodes.num_nodes
            if "x" in nodes.names:
                x = np.empty(nodes.rows("x").shape, np.float32)
                nodes.rows("x").read(np.arange(nodes.num_nodes), x)
                data[name].x = torch.from_numpy(x)
            if nodes.labels is not None:
                data[name].y = torch.from_numpy(np.asarray(nodes.labels, np.int64))
        for key in ds.edge_types:
            graph = ds.edges(key).graph
            indptr, indices = (torch.from_numpy(np.array(each, np.int64)) for each in (graph.indptr, graph.indices))
            sizes = (graph.num_nodes, graph.num_sources)
            data[key].adj_t = SparseTensor(rowptr=indptr, col=indices, sparse_sizes=sizes, is_sorted=True, trust_data=True)
    return data


def pyg_model(data: Any, hidden: int) -> Any:
    """Two layers of SAGEConv for every edge type, and sparse embeddings of the node types without features."""
    from torch import nn
    from torch_geometric.nn import HeteroConv, SAGEConv
    from torch_geometric.nn.module_dict import ModuleDict

    width = next(iter(data.x_dict.values())).size(1)
    classes = int(data["paper"].y.max()) + 1
    tables = {name: nn.Embedding(data[name].num_nodes, width, sparse=True) for name in data.node_types if "x" not in data[name]}
    sizes = ((width, hidden), (hidden, classes))
    convs = (HeteroConv({key: SAGEConv((size, size), out) for key in data.edge_types}) for size, out in sizes)
    return ModuleDict({"tables": ModuleDict(tables), "convs": nn.ModuleList(convs)})


def pyg_forward(model: Any, batch: Any, batch_size: int, layers: int, trim: bool) -> Any:
    """The rows of a batch's papers; trim: by `trim_to_layer`, of the nodes that the next layer needs."""
    from torch_geometric.utils import trim_to_layer

    x = dict(batch.x_dict) | {name: table(batch[name].n_id) for name, table in model["tables"].items()}
    edges, hops = batch.adj_t_dict, None
    if trim:
        edges, *hops = by_hop(batch, batch_size, layers)
    for layer, conv in enumerate(model["convs"]):
        if hops is not None:
            x, edges, _ = trim_to_layer(layer, *hops, x, edges)
        x = conv(x, edges)
        if layer + 1 < layers:
            x = {name: rows.relu() for name, rows in x.items()}
    return x["paper"]


def by_hop(batch: Any, batch_size: int, layers: int) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """(edge_index by edge type, sampled nodes per hop, sampled edges per hop), which PyG's loader gives with pyg-lib only.

    Nodes of a type come in the order of hops, and edges sorted by destination, so both follow from the edges.
    """
    import torch

    edges = {}
    for key, adj in batch.adj_t_dict.items():
        target, source, _ = adj.coo()
        edges[key] = torch.stack([source, target])
    nodes: dict[Any, list[int]] = {name: [batch_size if name == "paper" else 0] for name in batch.node_types}
    per_hop: dict[Any, list[int]] = {key: [] for key in edges}
    for _ in range(layers):
        known = {name: sum(counts) for name, counts in nodes.items()}
        reached = dict(known)
        for key, edge_index in edges.items():
            stop = int(torch.searchsorted(edge_index[1].contiguous(), known[key[2]]))
            per_hop[key].append(stop - sum(per_hop[key]))
            if stop:
                reached[key[0]] = max(reached[key[0]], int(edge_index[0, :stop].max()) + 1)
        for name, counts in nodes.items():
            counts.append(reached[name] - known[name])
    return edges, nodes, per_hop


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """What the promises are about: the excess from disk, and how much slower PyG is.

    >>> ratios({"ooc-ram": 0.2, "ooc-disk": 0.25, "pyg-ram": 2.0})
    {'ooc-disk / ooc-ram': 1.25, 'pyg-ram / ooc-ram': 10.0, 'pyg-ram / ooc-disk': 8.0}
    """
    own = [arm for arm in (OOC_RAM, OOC_DISK) if arm in seconds]
    found = {f"{OOC_DISK} / {OOC_RAM}": seconds[OOC_DISK] / seconds[OOC_RAM]} if len(own) == 2 else {}
    return found | {
        f"{arm} / {ours}": seconds[arm] / seconds[ours] for arm in (PYG, PYG_TRIM) if arm in seconds for ours in own
    }


def same_losses(runs: dict[str, list[Result]]) -> bool | None:
    """Whether all runs of `ooc` have the same losses, to the bit; None unless it ran in RAM and from disk."""
    losses = [[run["losses"] for run in runs.get(arm, []) if "losses" in run] for arm in (OOC_RAM, OOC_DISK)]
    return all(one == losses[0][0] for one in [*losses[0], *losses[1]]) if all(losses) else None


def command(a: argparse.Namespace, store: Path, arm: str) -> list[str]:
    """The command of an arm."""
    words = [f"--{name.replace('_', '-')}={getattr(a, name)}" for name in PASSED_ON]
    python = a.pyg_python if arm in (PYG, PYG_TRIM) else sys.executable
    return [python, "-m", "tools.bench.sampled.hetero", str(a.work), "--arm", arm, "--store", str(store), *words]


def compare(a: argparse.Namespace) -> Result:
    """All arms in turn, --rounds times."""
    from tools.graphs.mag import make_mag

    store = a.work / "mag.ooc"
    a.work.mkdir(parents=True, exist_ok=True)
    make_mag(store, a.scale)
    runs: dict[str, list[Result]] = {}
    for _ in range(a.rounds):
        for arm in a.arms:
            found = run_cold(command(a, store, arm))
            runs.setdefault(arm, []).append(found)
            shown = ("seconds_per_batch", "median_seconds", "with_first_fill", "failed", "error")
            print(arm, json.dumps({key: found[key] for key in shown if key in found}), file=sys.stderr)
    good = {arm: each for arm, each in runs.items() if not any("failed" in run for run in each)}
    measures = ("seconds_per_batch", "median_seconds", "with_first_fill")
    medians = {of: {arm: statistics.median(run[of] for run in each) for arm, each in good.items()} for of in measures}
    compared = {of: ratios(each) for of, each in medians.items()}
    return {**medians, "ratios": compared, "losses_identical": same_losses(runs), "runs": runs}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="of the graph's size")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--pyg-python", default=sys.executable)
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--pyg-batches", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="batches that the seconds leave out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Parse the command line, run every arm in turn, print JSON."""
    a = parse()
    if a.arm is not None:
        print(json.dumps(by_pyg(a) if a.arm in (PYG, PYG_TRIM) else by_ooc(a)))
        return
    settings = {name: getattr(a, name) for name in (*PASSED_ON, "scale", "rounds")}
    print(json.dumps({"machine": describe(), **settings, **compare(a)}))


if __name__ == "__main__":
    main()
