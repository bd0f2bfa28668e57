"""Stores for benchmarks, made where they are missing, without the features lying on the disk twice.

python -m tools.bench.stores STORE --nodes 32000000 --edges 80000000 --kind rmat
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from stores.dataset import Dataset
from stores.manifest import node_array
from stores.zarr_write import Appender
from tools.make_graph import feature_blocks, make_graph


def make_store(
    store: Path, *, nodes: int, edges: int, width: int, kind: str, seed: int = 0, memory: str = "2GB", order: str = "input"
) -> None:
    """Ingest a graph of `tools.make_graph` into `store`, unless it is there.

    Edges and labels go through `ooc ingest`; the features, most of the bytes, are appended as they are made: the same array as
    make_graph's x.npy would be, and never on the disk beside it. What was made on the way is removed.
    """
    if store.exists():
        return
    files = store.with_name(store.name + ".files")
    unfinished = store.with_name(store.name + ".unfinished")
    for left in (files, unfinished):
        shutil.rmtree(left, ignore_errors=True)
    make_graph(files, nodes=nodes, edges=edges, features=0, kind=kind, seed=seed)
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
    make_store(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
