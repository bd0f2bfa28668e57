"""A layer-wise pass over all nodes from disk: bytes compared with the cheapest bound, seconds with compute and bandwidth.

    python -m tools.bench.full.layerwise WORK --store graph.ooc --limit 2GB --plot sweep.png

GraphSAGE of --layers layers, --hidden wide, over all nodes and edges of the store, under a memory limit that counts page cache
(needs root). WORK is a directory for the pass's rows (about four times the hidden layer's) and a graph an eighth of the size.

Bound of the bytes: for each layer the cheapest of (passes x input + output), where a pass computes the sums of as many
destinations as the budget holds, with the destination's own row or reading it again, summed at the input's width or after the
layer's map if that is narrower. Bound of the seconds: the larger of the compute time (the same pass in RAM on a graph of the
same degree and an eighth of the size, times eight) and those bytes at the disk's bandwidth, measured before and after. Prints
JSON.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe, drop_page_cache, limit_memory

SHARE = 8
"""the graph computed in RAM is smaller by this factor"""
_WRITE_BYTES = 2**30
_FLOAT = 4


def bound_of(nodes: int, x_bytes: int, widths: list[int], room: int) -> int:
    """Bytes of the cheapest of passes x input + output, summed over the layers.

    `x_bytes` are those of a feature row, `widths` the columns of the input and of every layer's output, `room` the bytes for
    sums.
    """
    total, ways = 0, len(widths) - 1
    for layer in range(ways):
        wide, out = widths[layer : layer + 2]
        read = x_bytes if layer == 0 else wide * _FLOAT
        written = out * _FLOAT if layer + 1 == ways or 2 * widths[layer + 2] >= out else 2 * widths[layer + 2] * _FLOAT
        found = [_passes(nodes, 2 * wide, room) * read, (_passes(nodes, wide, room) + 1) * read]
        if layer and 2 * out < wide:  # mapped by the previous layer, which wrote as many columns for either use
            found = [_passes(nodes, out, room) * out * _FLOAT + out * _FLOAT]
        total += nodes * (min(found) + written)
    return total


def _passes(nodes: int, columns: int, room: int) -> int:
    return -(-nodes * columns * _FLOAT // room)


def sweep(a: argparse.Namespace) -> dict[str, Any]:
    """Run a pass over `a.store`, in RAM or from disk: seconds and bytes. Kernels are compiled by a pass over a tiny graph
    first."""
    import numpy as np
    import torch

    import ooc
    from ooc.layerwise.layerwise_pass import LayerwisePass
    from ooc.models.builders import build_model
    from ooc.stores.sizes import parse_bytes

    folder = None if a.ram else a.work / "rows"
    with ooc.open(a.store, in_memory=a.ram, memory=None if a.ram else a.limit) as ds:
        torch.manual_seed(0)
        model = build_model("sage", ds.num_features, a.hidden, ds.num_classes or 2, a.layers)
        limits: dict[str, Any] = {"room": 2**62} if a.ram else {"memory": parse_bytes(a.limit)}
        with closing(LayerwisePass(model, ds, folder, **limits)) as swept:
            stages: dict[str, float] = {}
            begin = last = time.perf_counter()

            def progress(what: str, done: int, total: int) -> None:
                nonlocal last
                now = time.perf_counter()
                stages[what] = stages.get(what, 0.0) + now - last
                last = now

            rows = swept.run(progress)
            seconds = time.perf_counter() - begin
            sample = np.empty((5, rows.shape[1]), rows.dtype)
            rows.read(np.arange(5), sample)
            widths = [ds.num_features, *[a.hidden] * (a.layers - 1), rows.shape[1]]
            found = {
                "seconds": seconds,
                "stages": stages,
                "nodes": ds.num_nodes,
                "edges": ds.num_edges,
                "widths": widths,
                "x_bytes": ds.stored("x").row_bytes,
                "bytes_read": swept.stats.bytes_read,
                "bytes_written": swept.stats.bytes_written,
                "room": swept.plan.memory,
                "plan": asdict(swept.plan),
                "first_rows": sample.tolist(),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
            swept.discard()
    return found


def write_rate(work: Path) -> float:
    """Bytes per second of writing 1 GiB in ranges of 8 MiB, bypassing the page cache."""
    import numpy as np

    from ooc.layerwise.row_files import RowWriter
    from ooc.runtime.buffers import Buffers
    from ooc.stores.arrays.mutable_rows import DiskRows

    path = work / "rate"
    shutil.rmtree(path, ignore_errors=True)
    rows, writer = DiskRows.create(path, (_WRITE_BYTES // 1024, 256), "float32"), RowWriter()
    chunk = Buffers(kept=1, direct=True).empty((8192, 256), np.dtype(np.float32))
    chunk[:] = 1
    try:
        begin = time.perf_counter()
        for first in range(0, rows.shape[0], len(chunk)):
            writer.put(rows, first, chunk)
        writer.drain()
        rows.sync()
        return _WRITE_BYTES / (time.perf_counter() - begin)
    finally:
        writer.close()
        rows.close()
        shutil.rmtree(path)


def _child(a: argparse.Namespace, store: Path, *flags: str) -> dict[str, Any]:
    """A pass in a separate process, after a warm-up that compiles what it needs and with a cold page cache."""
    shape = ["--hidden", str(a.hidden), "--layers", str(a.layers), "--limit", a.limit]
    command = [
        sys.executable,
        "-m",
        "tools.bench.full.layerwise",
        str(a.work),
        "--child",
        "--store",
        str(store),
        *shape,
        *flags,
    ]
    drop_page_cache()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """The pass from disk compared with its bounds."""
    import ooc
    from tools.bench.lib.disk_rates import Rates
    from tools.bench.lib.stores import make_store

    with ooc.open(a.store) as ds:
        nodes, edges, width = ds.num_nodes, ds.num_edges, ds.num_features
    a.work.mkdir(parents=True, exist_ok=True)
    small, rates = a.work / "eighth.ooc", Rates(a.store)
    make_store(small, nodes=nodes // SHARE, edges=edges // SHARE, width=width, kind="uniform")
    _child(a, small, "--ram")  # compiles the kernels
    in_ram = _child(a, small, "--ram")
    rates.measure()
    writes = [write_rate(a.work)]
    found = _child(a, a.store)
    rates.complete()
    writes.append(write_rate(a.work))
    bandwidth = min(rates.median().sequential_bytes_per_s, max(writes))
    moved, bound = (
        found["bytes_read"] + found["bytes_written"],
        bound_of(nodes, found["x_bytes"], found["widths"], found["room"]),
    )
    compute = in_ram["seconds"] * nodes / in_ram["nodes"]
    floor = max(compute, bound / bandwidth)
    return {
        "sweep": found,
        "bytes": moved,
        "bound_bytes": bound,
        "bytes_ratio": moved / bound,
        "seconds": found["seconds"],
        "compute_seconds": compute,
        "bound_bytes_seconds": bound / bandwidth,
        "moved_bytes_seconds": moved / bandwidth,
        "seconds_ratio": found["seconds"] / floor,
        "disk": rates.asdict() | {"write_bytes_per_s": writes},
        "limit": a.limit,
        "machine": describe(),
    }


def main() -> None:
    """Parse the command line, run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ram", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        if not a.ram:
            limit_memory(a.limit)
        print(json.dumps(sweep(a)))
        return
    result = compare(a)
    print(json.dumps(result))
    if a.plot:
        from tools.bench.lib.chart import bars

        names = {"sweep from disk": "seconds", "compute in RAM": "compute_seconds", "bound's bytes": "bound_bytes_seconds"}
        bars(a.plot, {name: result[key] for name, key in names.items()}, "seconds")


if __name__ == "__main__":
    main()
