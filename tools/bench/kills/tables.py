"""kill -9 of runs of embedding tables: in the exchange of a bucket, in a checkpoint, in the sort of the edges, and in steps.

    python -m tools.bench.kills.tables WORK --kills 50 [--places exchange checkpoint sorting step] [--seed 7]

For each place, runs are killed until --kills kills fell inside it, a random time after it was entered, as reported by memory
that outlives the process (`tools.bench.lib.killed_process`). After at most `_A_RUN` kills a run is completed: metrics.jsonl and
all buckets, rows and optimizer state, must be those of an uninterrupted run, to the bit. Memory holds the buckets of a visit
and one more, so that every swap writes and reads. Prints JSON; exits with 1 and keeps WORK if something differs.
"""

import random
import shutil
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.killed_process import Difference, Places, command, end_of, fork, killed_inside

PLACES = ("exchange", "checkpoint", "sorting", "step")
_A_RUN = 6
_SHARE = {"exchange": 1.5, "checkpoint": 1.5, "sorting": 1.0, "step": 3.0}
"""how long after the entry the kill comes at the latest, in durations of a stay"""


def make_store(path: Path, nodes: int) -> Path:
    """Make a random graph without features."""
    from ooc.stores.build import write_store
    from ooc.stores.graph import Graph

    rng = np.random.default_rng(0)
    src, dst = (rng.random((2, 4 * nodes)) ** 2 * nodes).astype(np.int64)
    return write_store(path, Graph.from_edges(src, dst, nodes))


def train(store: Path, out: Path, places: Places | None) -> int:
    """Train, or go on, in this process; its exit code."""
    from ooc.cli.main import main
    from ooc.history.bucket_table import BucketTable
    from ooc.loading.bucket_edges import BucketEdges
    from ooc.training.run import Run
    from ooc.training.table_memory import TableMemory
    from ooc.training.table_mode import TableMode

    few: Any = property(lambda self: min(self.shape.buckets, self.resident + 1))
    TableMemory.room = few  # type: ignore[method-assign]
    if places is not None:
        places.watch(BucketTable, "_exchange", "exchange")
        places.watch(Run, "checkpoint", "checkpoint")
        places.watch(BucketEdges, "sort", "sorting")
        places.watch(TableMode, "step", "step")
    flags = (
        "--task link --mode table --model complex --hidden 64 --batch-size 500 --ratio 32 --epochs 3 --eval-every 1 --threads 1"
    )
    flags += " --buckets 6 --resident 2 --checkpoint-every 40 --val 0.02 --test 0.02"
    return main(["train", str(store), "--out", str(out), *flags.split(), *(["--resume"] if out.exists() else [])])


def contents(out: Path) -> tuple[bytes, list[bytes]]:
    """metrics.jsonl, and the buckets of the run's model."""
    import torch

    from ooc.stores.arrays.bucket_rows import BucketRows
    from ooc.stores.io.pages import page_buffer

    rows = BucketRows.open(out / "table", torch.load(out / "model.pt", weights_only=True)["table"]["files"])
    found = []
    for bucket in range(rows.buckets):
        buffer = page_buffer(rows.bucket_bytes)
        rows.load(bucket, buffer)
        found.append(buffer.tobytes())
    rows.close()
    return (out / "metrics.jsonl").read_bytes(), found


def kill(work: Path, kills: int, places: list[str], seed: int, nodes: int) -> dict[str, Any]:
    """Kill, complete, compare; see the module."""
    work.mkdir(parents=True)
    rng, watched, log = random.Random(seed), Places(*PLACES), work / "log.txt"
    with (work / "store.txt").open("w") as text, redirect_stdout(text), redirect_stderr(text):
        store = make_store(work / "store.ooc", nodes)
    if end_of(fork(partial(train, store, work / "whole", watched), log)):
        raise Difference(f"a run that nobody killed failed: see {log}")
    whole, tally, runs = contents(work / "whole"), Counter[str](), 0
    entries = {place: watched.entered(place) for place in PLACES}
    for place in places:
        while tally[place] < kills:
            runs += 1
            out = work / f"run{runs}"
            for _ in range(rng.randint(1, _A_RUN)):
                stay = watched.seconds(place) or 0.01
                watched.reset()
                nth, delay = rng.randint(1, max(1, entries[place] // 3)), rng.uniform(0, _SHARE[place]) * stay
                ended = killed_inside(fork(partial(train, store, out, watched), log), watched, place, nth, delay)
                if ended > 0:
                    raise Difference(f"{out} ended with {ended}: see {log}")
                tally[place] += place in watched.inside()
                tally[f"beside {place}"] += place not in watched.inside()
            if end_of(fork(partial(train, store, out, None), log)):
                raise Difference(f"{out} did not go on: see {log}")
            if contents(out) != whole:
                raise Difference(f"{out} differs from a run that nobody killed")
            shutil.rmtree(out)
    shutil.rmtree(work)
    return {"kills": {name: tally[name] for name in places}, "all_kills": sum(tally.values()), "runs": runs, "differences": 0}


if __name__ == "__main__":
    import ooc.training.loop  # noqa: F401 - forked processes have it imported

    command(__doc__, PLACES, 20_000, kill)
