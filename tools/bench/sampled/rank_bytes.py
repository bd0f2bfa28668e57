"""Bytes that ranks of one host read for an epoch, sharing passes over the features or not, beside one process's.

    python -m tools.bench.sampled.rank_bytes /tmp/ranks --nodes 1000000 --edges 20000000 --room 512MB

Makes a uniform and an RMAT graph in the folder, unless they are there, with 128 float32 features a node. Every arm takes the
same global batches of GraphSAGE [10,10], by shared scans and by superbatches, and waits for all ranks after each step, as
gradients do: one process with --room for its batches; two ranks with half of it each; and two with all of it each, with shared
passes and without. Of two epochs the second is measured. Prints JSON: of every arm bytes, seconds, and bytes as a ratio to one
process's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.models import build_model, pre_aggregation_of
from ooc.runtime.memory_plan import SHARES, MemoryPlan, plan_memory
from ooc.runtime.ranks import ALONE, Ranks
from ooc.runtime.shared_reads import shared_blocks
from ooc.stores.dataset import Dataset
from ooc.stores.sizes import parse_bytes
from tools.bench.lib.machine import describe
from tools.bench.lib.stores import make_store

FANOUT = [10, 10]
ARMS = {
    "one process": (1, 1, False),
    "two ranks, half the memory each": (2, 2, True),
    "two ranks, half the memory each, by themselves": (2, 2, False),
    "two ranks, all the memory each": (2, 1, True),
    "two ranks, all the memory each, by themselves": (2, 1, False),
}
"""ranks, what their memory is divided by, whether passes are shared"""


def room_for_batches(plan: MemoryPlan, room: int) -> MemoryPlan:
    """The plan with so many bytes for batches, whatever the process takes."""
    share = room // SHARES
    return replace(plan, in_flight=2 * share, max_batch=share)


def of_rank(a: argparse.Namespace) -> dict[str, Any]:
    """What this rank read, and the seconds of the epoch."""
    torch.set_num_threads(1)
    ranks = Ranks(a.rank, a.ranks, a.rank, a.ranks)
    if a.ranks > 1:
        meet, patience = f"file://{a.meet}", timedelta(seconds=600)
        distributed.init_process_group("gloo", meet, rank=a.rank, world_size=a.ranks, timeout=patience)
    with shared_blocks(ranks if a.shared else ALONE, None) as blocks, Dataset.open(a.store) as ds:
        ds.share_reads(blocks)
        room = a.room - (blocks.nbytes // a.ranks if blocks is not None else 0)
        plan = room_for_batches(plan_memory(ds), room)
        model = build_model("sage", ds.num_features, 256, 32, len(FANOUT))
        sums = pre_aggregation_of(model) if a.strategy == "scan" else None
        loader = NeighborLoader(
            ds,
            FANOUT,
            "train",
            batch_size=a.batch_size // a.ranks,
            shuffle=True,
            seed=1,
            rank=a.rank,
            world_size=a.ranks,
            budget=plan,
            pre_aggregation=sums,
            edge_ids=False,
            split_masks=False,
        )
        seconds = nbytes = 0.0
        for _ in range(2):
            ranks.barrier()
            begun, before = time.perf_counter(), loader.bytes_read
            loader.stop_before(a.steps)
            for _batch in loader:
                ranks.barrier()
            seconds, nbytes = time.perf_counter() - begun, loader.bytes_read - before
        return {"bytes": int(nbytes), "seconds": round(seconds, 2), "groups": loader.times()["group"]["items"]}


def run_arm(a: argparse.Namespace, store: Path, strategy: str, ranks: int, parts: int, shared: bool) -> dict[str, Any]:
    """All ranks of an arm at once."""
    room = parse_bytes(a.room, "room") // parts
    with tempfile.TemporaryDirectory() as folder:
        same = ["--of-rank", "--ranks", str(ranks), "--strategy", strategy, "--room", str(room), "--meet", f"{folder}/meet"]
        same += ["--batch-size", str(a.batch_size), *(["--shared"] if shared else [])]
        same += [] if a.steps is None else ["--steps", str(a.steps)]
        command = [sys.executable, "-m", "tools.bench.sampled.rank_bytes", str(store), *same]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(ranks)
        ]
        found = [json.loads(each.communicate()[0]) for each in running]
    nbytes = [each["bytes"] for each in found]
    return {"bytes": sum(nbytes), "by rank": nbytes, "seconds": max(each["seconds"] for each in found)} | {
        "groups": [each["groups"] for each in found]
    }


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """Every arm on every graph."""
    found: dict[str, Any] = {"machine": describe()}
    for kind in a.kind:
        store = a.store / f"{kind}.ooc"
        a.store.mkdir(parents=True, exist_ok=True)
        make_store(store, nodes=a.nodes, edges=a.edges, width=128, kind=kind)
        for strategy in a.strategies:
            arms: dict[str, Any] = {}
            for name, (ranks, parts, shared) in ARMS.items():
                arms[name] = run_arm(a, store, strategy, ranks, parts, shared)
                arms[name]["ratio"] = round(arms[name]["bytes"] / max(1, arms["one process"]["bytes"]), 3)
                print(kind, strategy, name, json.dumps(arms[name]), file=sys.stderr)
            found[f"{kind}, {strategy}"] = arms
    return found


def main() -> None:
    """Parse the command line, run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="folder of the graphs")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--room", default="512MB", help="memory for batches")
    parser.add_argument("--batch-size", type=int, default=2048, help="of all ranks together")
    parser.add_argument("--steps", type=int, help="of an epoch; all of them where it is left out")
    parser.add_argument("--kind", nargs="+", default=["uniform", "rmat"])
    parser.add_argument("--strategies", nargs="+", default=["scan", "superbatch"])
    for name in ("--ranks", "--rank"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    for name in ("--strategy", "--meet"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--of-rank", "--shared"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.of_rank:
        a.room = int(a.room)
        print(json.dumps(of_rank(a)))
    else:
        print(json.dumps(measure(a), indent=1))


if __name__ == "__main__":
    main()
