"""Exact training over several processes, what a sampled halo and one of earlier epochs save in bytes and cost in accuracy, and
what recomputed rows save in bytes and cost in time.

    python -m tools.bench.full.ranks DATA OUT --ranks 2 4 --seeds 10 --epochs 200
    python -m tools.bench.full.ranks DATA OUT --only pubmed --ranks 2 --seeds 1
    python -m tools.bench.full.ranks DATA OUT --seeds 1 --arms exact first all auto --bandwidth 10MB

DATA has `planetoid/pubmed.npz` and `tolokers/tolokers.npz` (see `ooc ingest --npz`). Processes are connected by gloo on this
machine, with one thread each. Trains `ooc train --mode full` once per seed (of tolokers, split): all rows of the halo in every
epoch, a tenth of them drawn anew each epoch (BNS-GCN), rows that are sent every second or fourth epoch (PipeGCN), and without
dropout rows that drifted by more than a share of their length (Sancus); and all rows, of which processes recompute those that
follow from features, all, or whichever are cheaper. With --bandwidth an exchange takes at least as long as its bytes would at
so many a second. Results are kept in OUT, so that a command that was ended goes on.

Prints JSON: by data, processes and arm the mean and deviation of the test score in points, megabytes sent by all processes an
epoch, seconds of an epoch (the median, and the fastest of all, which other work on the machine disturbs least), and the rows
that all processes recompute.
"""

import argparse
import json
import shutil
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from ooc.runtime.ranks import Ranks
from ooc.stores.sizes import parse_bytes
from tools.bench.lib.machine import describe
from tools.scores.kept import Settings, kept, spread
from tools.scores.stores import ingest

COMMON: Settings = {"threads": 1, "plan": False, "placement": "planned", "eval_every": 20}
DRIFT: Settings = {"halo": "stale", "halo_every": 16, "dropout": 0.0}
ARMS: dict[str, Settings] = {
    "exact": {},
    "sampled 0.1": {"halo": "sampled", "halo_rate": 0.1},
    "stale 2": {"halo": "stale", "halo_every": 2},
    "stale 4": {"halo": "stale", "halo_every": 4},
    "exact, no dropout": {"dropout": 0.0},
    "drift 0.1, no dropout": {**DRIFT, "halo_tolerance": 0.1},
    "drift 0.2, no dropout": {**DRIFT, "halo_tolerance": 0.2},
    "drift 0.3, no dropout": {**DRIFT, "halo_tolerance": 0.3},
    "drift 0.5, no dropout": {**DRIFT, "halo_tolerance": 0.5},
    "first": {"halo_recompute": "first"},
    "all": {"halo_recompute": "all"},
    "auto": {"halo_recompute": "auto"},
    "first, stale 2": {"halo_recompute": "first", "halo": "stale", "halo_every": 2},
}
CASES: dict[str, Settings] = {
    "pubmed": {"model": "gcn", "hidden": 16, "layers": 2, "weight_decay": 5e-4, "dropout": 0.5, "epochs": 40, "lr": 0.02},
    "tolokers": {"model": "sage", "hidden": 32, "layers": 3, "dropout": 0.2, "epochs": 40, "lr": 0.02, "monitor": "auroc"},
}
METRIC = {"pubmed": "accuracy", "tolokers": "auroc"}


def store_of(name: str, data: Path, out: Path, seed: int) -> Path:
    """The store of a seed, built where there is none: PubMed's is that of all seeds, tolokers has a split for each."""
    store = out / (f"tolokers-{seed}.ooc" if name == "tolokers" else "pubmed.ooc")
    if not store.exists():
        if name == "tolokers":
            ingest(data / "tolokers/tolokers.npz", store, undirected=True, split_index=seed)
        else:
            ingest(data / "planetoid/pubmed.npz", store, normalize="row")
    return store


def impose(bandwidth: int) -> None:
    """Have exchanges between processes take at least as long as their bytes would at so many a second."""
    exchange = Ranks.exchange

    def slowly(self: Ranks, parts: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        began = time.perf_counter()
        found = exchange(self, parts, counts)
        nbytes = max(sum(part.nbytes for part in each) for each in (parts, found))
        time.sleep(max(0.0, began + nbytes / bandwidth - time.perf_counter()))
        return found

    Ranks.exchange = slowly  # type: ignore[method-assign]


def trained(store: Path, run: Path, settings: Settings, metric: str) -> Settings:
    """The result of one run, on every rank."""
    from ooc.config.nodes import FullConfig
    from ooc.training.loop import train

    summary = train(FullConfig(store=store, out=run, **settings))
    full = summary["full"]
    return {
        "test": 100 * float(summary["metrics"]["test"][metric]),
        "sent_mb": full.get("bytes_exchanged", 0) / settings["epochs"] / 1e6,
        "seconds": statistics.median(full["step_seconds"]),
        "fastest": min(full["step_seconds"]),
        "recomputed": full.get("rows_recomputed", 0),
    }


def work(rank: int, a: argparse.Namespace, ranks: int, port: int) -> None:
    """What each process does: all runs, one after the other."""
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    if a.bandwidth:
        impose(parse_bytes(a.bandwidth, "bandwidth"))
    for name in a.only:
        for seed in range(a.seeds):
            for arm in a.arms:
                asked = COMMON | CASES[name] | ARMS[arm] | {"seed": seed} | ({"epochs": a.epochs} if a.epochs else {})
                file, run = result_file(a, name, ranks, arm, seed), a.out / f"run-{ranks}"
                if rank == 0:
                    shutil.rmtree(run, ignore_errors=True)
                distributed.barrier()
                if file.exists() and json.loads(file.read_text())["asked"] == json.loads(json.dumps(asked)):
                    continue
                found = trained(store_of(name, a.data, a.out, seed), run, asked, METRIC[name])
                if rank == 0:
                    kept(file, asked, lambda found=found: found)  # type: ignore[misc]
                distributed.barrier()
    distributed.destroy_process_group()


def result_file(a: argparse.Namespace, name: str, ranks: int, arm: str, seed: int) -> Path:
    """Where the result of a run is kept."""
    limit = f"-{a.bandwidth}" if a.bandwidth else ""
    file: Path = a.out / "kept" / f"{name}-{ranks}-{arm.replace(' ', '-').replace(',', '')}{limit}-{seed}.json"
    return file


def table(a: argparse.Namespace) -> dict[str, Any]:
    """What all runs came to."""
    found: dict[str, Any] = {}
    for name in a.only:
        for ranks in a.ranks:
            for arm in a.arms:
                files = [result_file(a, name, ranks, arm, seed) for seed in range(a.seeds)]
                results = [json.loads(file.read_text())["result"] for file in files]
                sent, seconds = (statistics.median(each[key] for each in results) for key in ("sent_mb", "seconds"))
                scores = spread([each["test"] for each in results])
                own = {"sent_mb": round(sent, 3), "seconds": round(seconds, 4)}
                own |= {"fastest": min(each["fastest"] for each in results), "recomputed": results[0]["recomputed"]}
                found[f"{name}, {ranks} processes, {arm}"] = {**scores, **own}
    return found


def main() -> None:
    """Parse the command line, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=0, help="in place of those of each case")
    parser.add_argument("--bandwidth", default="", help="bytes a second that a process may send, such as 10MB")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for name in a.only:
        for seed in range(a.seeds):
            store_of(name, a.data, a.out, seed)
    for ranks in a.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn(work, (a, ranks, port), nprocs=ranks)  # type: ignore[no-untyped-call]
    print(json.dumps({"machine": describe(), "runs": table(a)}, indent=1))


if __name__ == "__main__":
    main()
