"""`ooc` compared with PyG's NeighborLoader and DGL GraphBolt: same graph, fan-out, batch and model, interleaved in one run.

    python -m tools.bench.sampled.peers WORK --peers DIR --pyg-python PY --graphbolt-python PY --limit 2GB --plot compare.png

WORK has (or receives) the graph and its store. DIR has `pyg_neighborloader.py` and `graphbolt.py`, which take --x --y --indptr
--indices --features --limit --fanout --dropout --batches and print a JSON line; their interpreters need those packages.

Arms: ooc in RAM and from disk under the limit; both peers in RAM, and on a memory map with MADV_RANDOM under the same limit, in
bytes. Before every run the page cache is dropped and the disk measured. `ooc`'s clock runs from the first request to the end of
the last step; a peer's excludes its first batch, and on a memory map it runs --memmap-batches only. Prints JSON: each arm's
seconds per batch (median over --rounds), the bound of ooc's own trace (`tools.bench.sampled.bound`), and the ratios. Needs root
for the limit and the cold cache.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.sizes import parse_bytes
from tools.bench.lib.chart import bars
from tools.bench.lib.disk_rates import Rates
from tools.bench.lib.machine import describe
from tools.bench.lib.stores import make_store
from tools.bench.sampled.cost import Job, Result, beside_bound, run_cold, short_of
from tools.graphs.make_graph import KINDS

OOC_RAM, OOC_DISK = "ooc-ram", "ooc-disk"
PEERS = ("pyg-ram", "pyg-trim-ram", "graphbolt-ram", "pyg-memmap", "graphbolt-memmap")


def prepare(a: argparse.Namespace) -> Path:
    """Make the store where WORK lacks it, and what peers read: x, y and the CSC as npy files; returns the store."""
    import ooc
    from tools.graphs.make_graph import write_features

    store: Path = a.work / "graph.ooc"
    a.work.mkdir(parents=True, exist_ok=True)
    make_store(store, nodes=a.nodes, edges=a.edges, width=a.width, kind=a.kind, order=a.order)
    if a.peers is None:
        return store
    with ooc.open(store) as ds:
        found = {"indptr": ds.graph.indptr, "indices": ds.graph.indices, "y": np.asarray(ds.labels, np.int64)}
        for name, array in found.items():
            if not (a.work / f"{name}.npy").exists():
                np.save(a.work / f"{name}.unfinished.npy", array)
                (a.work / f"{name}.unfinished.npy").rename(a.work / f"{name}.npy")
        if not (a.work / "x.npy").exists():
            write_features(a.work / "x.unfinished.npy", found["y"], ds.num_features, classes=32, seed=0)
            (a.work / "x.unfinished.npy").rename(a.work / "x.npy")
    return store


def peer_command(a: argparse.Namespace, arm: str) -> list[str] | None:
    """The command of a peer's arm, None where its interpreter is not given."""
    peer, *how = arm.split("-")
    python = a.pyg_python if peer == "pyg" else a.graphbolt_python
    if python is None or a.peers is None:
        return None
    script = a.peers / ("pyg_neighborloader.py" if peer == "pyg" else "graphbolt.py")
    arrays = [part for name in ("x", "y", "indptr", "indices") for part in (f"--{name}", str(a.work / f"{name}.npy"))]
    command = [python, str(script), *arrays, "--fanout", a.fanout, "--batch-size", str(a.batch_size)]
    command += ["--dropout", str(a.dropout)] if a.dropout else []
    if how[-1] == "memmap":
        limit = ["--limit", str(parse_bytes(a.limit))]
        return [*command, "--features", "memmap-random", *limit, "--batches", str(a.memmap_batches)]
    return [*command, *(["--trim"] if "trim" in how else []), "--batches", str(a.peer_batches)]


def commands(a: argparse.Namespace, store: Path) -> dict[str, list[str]]:
    """The command of every arm that was asked for and can be run."""
    jobs = {
        OOC_RAM: Job(store, "ram", a.fanout, a.batches, a.batch_size, rows=a.rows, dropout=a.dropout),
        OOC_DISK: Job(store, "disk", a.fanout, a.batches, a.batch_size, a.limit, a.rows, a.dropout),
    }
    found = {arm: jobs[arm].command if arm in jobs else peer_command(a, arm) for arm in a.arms}
    return {arm: command for arm, command in found.items() if command is not None}


def run_all(a: argparse.Namespace, store: Path, rates: Rates) -> dict[str, list[Result]]:
    """Every arm in turn, --rounds times, the disk measured before each."""
    runs: dict[str, list[Result]] = {}
    for _ in range(a.rounds):
        for arm, command in commands(a, store).items():
            rates.measure()
            runs.setdefault(arm, []).append(run_cold(command))
            shown = {key: runs[arm][-1].get(key) for key in ("seconds_per_batch", "failed", "error")}
            print(arm, json.dumps(shown), vars(rates.taken[-1]), file=sys.stderr)
    rates.complete()
    return runs


def medians(runs: dict[str, list[Result]]) -> dict[str, float]:
    """Seconds per batch of every arm whose runs all ended well.

    >>> medians({"pyg-ram": [{"seconds_per_batch": s} for s in (0.3, 0.9, 0.5)], "pyg-memmap": [{"failed": -9}]})
    {'pyg-ram': 0.5}
    """
    return {
        arm: statistics.median(run["seconds_per_batch"] for run in results)
        for arm, results in runs.items()
        if not any("failed" in run for run in results)
    }


def ratios(seconds: dict[str, float], bound_seconds: float | None) -> dict[str, float]:
    """What the promises are about: above 1 a peer is slower, but for `ooc-disk / ...`, which is `ooc`'s own excess."""
    found = {f"{arm} / {OOC_RAM}": seconds[arm] / seconds[OOC_RAM] for arm in PEERS if arm in seconds and OOC_RAM in seconds}
    if OOC_DISK not in seconds:
        return found
    disk = seconds[OOC_DISK]
    floor = {OOC_RAM: seconds.get(OOC_RAM), "bound": bound_seconds}
    known = {name: value for name, value in floor.items() if value is not None}
    found |= {f"{OOC_DISK} / {name}": disk / value for name, value in known.items()}
    if known:
        found[f"{OOC_DISK} / larger of {' and '.join(known)}"] = disk / max(known.values())
    found |= {f"{arm} / {OOC_DISK}": seconds[arm] / disk for arm in PEERS if arm in seconds}
    maps = [seconds[arm] for arm in PEERS if arm.endswith("memmap") and arm in seconds]
    return found | ({f"best memmap / {OOC_DISK}": min(maps) / disk} if maps else {})


def same_losses(runs: dict[str, list[Result]]) -> dict[str, bool] | None:
    """Whether all of `ooc`'s runs, in RAM and from disk, have the same losses, to the bit; None where either has none."""
    each = [[run["losses"] for run in runs.get(arm, []) if "losses" in run] for arm in (OOC_RAM, OOC_DISK)]
    if not all(each):
        return None
    losses = [*each[0], *each[1]]
    return {"first": len({one[0] for one in losses}) == 1, "all": all(one == losses[0] for one in losses)}


def summarize(a: argparse.Namespace, store: Path, runs: dict[str, list[Result]], rates: Rates) -> dict[str, Any]:
    """Medians, the bound, ratios and what was checked."""
    seconds = medians(runs)
    disk: Result = {}
    if OOC_DISK in seconds:
        own = runs[OOC_DISK]
        chosen = own[
            [run["seconds_per_batch"] for run in own].index(statistics.median_low(r["seconds_per_batch"] for r in own))
        ]
        disk = {"windows": chosen["windows"], "batches": chosen["batches"], "short_of": short_of(chosen)}
        disk |= beside_bound(store, chosen, rates.median())
    least = disk["bound"]["seconds_per_batch"] if disk else None
    batches = {OOC_RAM: a.batches, OOC_DISK: a.batches}
    peers = {arm: a.memmap_batches if arm.endswith("memmap") else a.peer_batches for arm in PEERS}
    return {
        "seconds_per_batch": seconds,
        "batches": {arm: (batches | peers)[arm] for arm in runs},
        "ratios": ratios(seconds, least),
        "losses_identical": same_losses(runs),
        OOC_DISK: disk,
        "disk": rates.asdict(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--width", type=int, default=128, help="feature columns")
    parser.add_argument("--kind", default="uniform", choices=sorted(KINDS))
    parser.add_argument("--order", default="input", choices=["input", "degree"], help="of the nodes, for every arm")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--pyg-python")
    parser.add_argument("--graphbolt-python")
    parser.add_argument("--arms", nargs="+", choices=[OOC_RAM, OOC_DISK, *PEERS], default=[OOC_RAM, OOC_DISK, *PEERS])
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--dropout", type=float, default=0.0, help="of hidden rows, in every arm")
    parser.add_argument("--rows", action="store_true", help="batches with rows, not with the first layer's sums")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--peer-batches", type=int, default=10)
    parser.add_argument("--memmap-batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate-seconds", type=float, default=3.0, help="of each measurement of the disk")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    """Parse the command line, run every arm in turn, print JSON."""
    a = parse()
    store = prepare(a)
    rates = Rates(store, a.rate_seconds)
    runs = run_all(a, store, rates)
    summary = summarize(a, store, runs, rates)
    if a.plot:
        least = {"bound of ooc-disk": summary[OOC_DISK]["bound"]["seconds_per_batch"]} if summary[OOC_DISK] else {}
        bars(a.plot, summary["seconds_per_batch"] | least, "seconds per batch")
    graph = {"nodes": a.nodes, "edges": a.edges, "width": a.width, "kind": a.kind, "order": a.order}
    settings = {
        "graph": graph,
        "fanout": a.fanout,
        "dropout": a.dropout,
        "batch_size": a.batch_size,
        "limit": a.limit,
        "rounds": a.rounds,
        "rows": a.rows,
    }
    print(json.dumps({"machine": describe(), **settings, **summary, "runs": runs}))


if __name__ == "__main__":
    main()
