"""Training from a URL with an imposed latency, bandwidth and share of failing requests, beside the same run on this disk.

    python -m tools.bench.io.remote WORK --nodes 2000000 --edges 8000000 --latency 0.02 --bandwidth 200MB --failures 0.01

Prints JSON: through the clients of HTTP and of S3, and for each share of failing requests, of every epoch the seconds,
the bytes and requests of the server, and the share of the bandwidth over the whole epoch and while requests are in flight. The
cache holds the store, or with `--cache SIZE` a part of it. `losses_equal` says whether the losses are those of the local store,
to the bit. The server is a process of its own; the client is `ooc.train` in this one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ooc
from ooc.stores.metadata import read_manifest, write_manifest
from ooc.stores.sizes import parse_bytes
from tools.bench.lib.machine import describe
from tools.bench.lib.range_server import COUNTS
from tools.bench.lib.stores import make_store

BUCKET, STORE = "bucket", "graph.ooc"


@contextmanager
def server(kind: str, folder: Path, a: argparse.Namespace, failures: float) -> Iterator[tuple[str, str]]:
    """Run a server in a process of its own; yields the URL of the store and that of the server."""
    imposed = ["--latency", str(a.latency), "--bandwidth", str(a.bandwidth), "--failures", str(failures)]
    command = [sys.executable, "-m", "tools.bench.lib.range_server", str(folder), *imposed]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdin is not None
    assert running.stdout is not None
    try:
        base = running.stdout.readline().strip()
        if kind == "s3":
            os.environ |= {"AWS_ENDPOINT_URL": base, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
            os.environ["AWS_REGION"] = "us-east-1"
        yield f"{base if kind == 'http' else 's3:/'}/{BUCKET}/{STORE}", base
    finally:
        running.stdin.close()
        running.wait()


def counts(base: str) -> dict[str, int]:
    """Requests, bytes and failures of a server so far, and microseconds with a request in progress."""
    with urllib.request.urlopen(base + COUNTS) as answer:
        found: dict[str, int] = json.load(answer)
    return {name: found.get(name, 0) for name in ("requests", "bytes", "failures", "busy_us")}


class Epochs(ooc.Callback):
    """Takes down what the server did in every epoch, and the losses."""

    def __init__(self, base: str | None) -> None:
        self._base, self.losses, self.epochs = base, list[float](), list[dict[str, float]]()
        self._before: dict[str, int] = {}
        self._at = 0.0

    def start(self, epoch: int, step: int, epochs: int, steps_per_epoch: int, rate: Any = None) -> None:
        self._mark()

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        self.losses.append(loss)

    def epoch(self, line: dict[str, Any]) -> None:
        before, at = self._before, self._at
        self._mark()
        found = {name: self._before[name] - before[name] for name in self._before}
        self.epochs.append({"seconds": self._at - at, **found})

    def _mark(self) -> None:
        self._before, self._at = {} if self._base is None else counts(self._base), time.perf_counter()


def train(store: str, base: str | None, work: Path, a: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    """Train on a store at a path or URL; returns its epochs and losses."""
    out, folder, epochs = work / "run", work / "cache", Epochs(base)
    for left in (out, folder):
        shutil.rmtree(left, ignore_errors=True)
    far: dict[str, Any] = {} if base is None else {"cache_dir": folder, "cache": cache}
    settings = {"fanout": a.fanout, "batch_size": a.batch_size, "hidden": a.hidden, "epochs": a.epochs, "threads": 1}
    settings |= {"train_split": "val", "val_split": "test"}  # a small one: the features are most of the work
    begun = time.perf_counter()
    ooc.train(
        store=store, out=out, memory=a.memory, eval_splits=[], eval_every=a.epochs + 1, callbacks=[epochs], **settings, **far
    )
    for each in epochs.epochs if base is not None else ():
        busy_s = each.pop("busy_us") / 1e6
        each |= {"of_bandwidth": each["bytes"] / each["seconds"] / a.bandwidth}
        each |= {"of_bandwidth_in_flight": each["bytes"] / busy_s / a.bandwidth if busy_s else 0.0}
    for left in (out, folder):
        shutil.rmtree(left, ignore_errors=True)
    return {"seconds": time.perf_counter() - begun, "epochs": epochs.epochs, "losses": epochs.losses}


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """All arms."""
    store = a.work / BUCKET / STORE
    store.parent.mkdir(exist_ok=True)
    make_store(store, nodes=a.nodes, edges=a.edges, width=a.width, kind="uniform", eval_share=a.train_share)
    write_manifest(store, read_manifest(store))  # which lists the features too, that were appended to the store
    local = train(str(store), None, a.work, a, None)
    arms = []
    for kind in a.clients:
        for failures in a.failures:
            with server(kind, a.work, a, failures) as (url, base):
                found = train(url, base, a.work, a, a.cache)
            equal = found.pop("losses") == local["losses"]
            arms.append({"client": kind, "failures": failures, "cache": a.cache, "losses_equal": equal, **found})
            print(json.dumps(arms[-1]), file=sys.stderr, flush=True)
    return {"local_seconds": local["seconds"], "local": local["epochs"], "batches": len(local["losses"]), "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--edges", type=int, default=8_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--train-share", type=float, default=0.01, help="share of the nodes to train on")
    parser.add_argument("--fanout", default="5,5")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--cache", help="size of the cache; by default it holds the store")
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--bandwidth", type=parse_bytes, default=200_000_000)
    parser.add_argument("--failures", type=float, nargs="+", default=[0.0, 0.01])
    parser.add_argument("--clients", nargs="+", default=["http", "s3"], choices=["http", "s3"])
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    graph = {"nodes": a.nodes, "edges": a.edges, "width": a.width}
    imposed = {"latency_s": a.latency, "bytes_per_s": a.bandwidth}
    print(json.dumps({"machine": describe(), "graph": graph, "imposed": imposed, **compare(a)}))


if __name__ == "__main__":
    main()
