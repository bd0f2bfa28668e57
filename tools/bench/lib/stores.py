"""Stores for benchmarks, made if missing, without storing the features twice.

    python -m tools.bench.lib.stores STORE --nodes 32000000 --edges 80000000 --kind rmat
    python -m tools.bench.lib.stores STORE --nodes 20000000 --edges 200000000 --temporal 16 --limit 2GB

With --temporal W the edges are events with W features, ingested like a user's; the cost is printed as JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from ooc.stores.array_names import node_array
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.dataset import Dataset
from tools.bench.io.ingest import ingest
from tools.bench.lib.machine import describe
from tools.graphs.make_graph import feature_blocks, make_graph


def make_store(
    store: Path,
    *,
    nodes: int,
    edges: int,
    width: int,
    kind: str,
    seed: int = 0,
    memory: str = "2GB",
    order: str = "input",
    eval_share: float | None = None,
) -> None:
    """Ingest a graph of `tools.graphs.make_graph` into `store`, unless it exists. eval_share: as of `make_graph`.

    Edges and labels go through `ooc ingest`; features, most of the bytes, are appended as they are generated, equal to
    make_graph's x.npy. Intermediate files are removed.
    """
    if store.exists():
        return
    files = store.with_name(store.name + ".files")
    unfinished = store.with_name(store.name + ".unfinished")
    for left in (files, unfinished):
        shutil.rmtree(left, ignore_errors=True)
    make_graph(files, nodes=nodes, edges=edges, features=0, kind=kind, seed=seed, eval_share=eval_share)
    flags = ["--edges", f"{files}/edges/*.parquet", "--labels", f"{files}/y.npy", "--memory", memory, "--order", order]
    flags += [part for split in ("train", "val", "test") for part in (f"--{split}", f"{files}/{split}.npy")]
    subprocess.run([sys.executable, "-m", "ooc.cli", "ingest", str(unfinished), *flags], check=True, stdout=sys.stderr)
    shutil.rmtree(files)
    with Dataset.open(unfinished) as ds:
        labels = np.array(ds.labels)
    with Appender(unfinished, node_array("x"), (width,), "float32", count=nodes) as x:
        for block in feature_blocks(labels, width, classes=32, seed=seed):
            x.append(block)
    unfinished.rename(store)


def make_events(
    store: Path,
    *,
    nodes: int,
    events: int,
    width: int,
    kind: str,
    seed: int = 0,
    memory: str = "2GB",
    limit: str = "",
    undirected: bool = False,
) -> dict[str, float]:
    """Ingest a temporal graph of `tools.graphs.make_graph` into `store`: times and `width` features from Parquet.

    `limit` is that of the ingest's memory, page cache counted. The input is removed. Returns seconds and peak RSS.
    """
    files = store.with_name(store.name + ".files")
    shutil.rmtree(files, ignore_errors=True)
    make_graph(files, nodes=nodes, edges=events, features=0, kind=kind, seed=seed, temporal=width)
    flags = ["--edges", f"{files}/edges/*.parquet", "--num-nodes", str(nodes), "--time", "t", "--time-unit", "ms"]
    flags += (["--edge-features", "msg=m*"] if width else []) + (["--undirected"] if undirected else [])
    found = ingest(store, [*flags, "--memory", memory], limit)
    shutil.rmtree(files)
    return {**found, "events_per_s": events / found["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--edges", type=int, required=True)
    parser.add_argument("--width", type=int, default=128, help="feature columns")
    parser.add_argument("--kind", default="uniform")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--order", default="input", choices=["input", "degree"], help="of the nodes, for ingest")
    parser.add_argument("--memory", default="2GB", help="for ingest")
    parser.add_argument("--temporal", type=int, metavar="W", help="events with W features; nodes have none")
    parser.add_argument("--limit", default="", help="of a temporal graph's ingest, page cache counted")
    a = parser.parse_args()
    if a.temporal is None:
        make_store(
            a.store, nodes=a.nodes, edges=a.edges, width=a.width, kind=a.kind, seed=a.seed, memory=a.memory, order=a.order
        )
        return
    shape = {"nodes": a.nodes, "events": a.edges, "width": a.temporal, "kind": a.kind, "seed": a.seed}
    found = make_events(a.store, **shape, memory=a.memory, limit=a.limit)
    print(json.dumps({"machine": describe(), **shape, "memory": a.memory, "limit": a.limit, **found}))


if __name__ == "__main__":
    main()
