"""Sampling a graph with edges on disk, under a memory limit: page reads per second compared with fio's, per round.

    python -m tools.bench.io.topology WORK --nodes 50000000 --degree 20 --limit 2GB --plot topology.svg

Makes a uniform random graph in WORK (--degree in-edges per node) and removes it. Each round is fio's random 4 KiB reads, a
separate process under the limit (page cache counted; needs root, an empty --limit disables it) that samples --batches batches
together as a loader does, and fio again. Prints JSON: pages per second (distinct pages of each hop), the ratio to fio in the
same round, peak RSS; and whether batches of a smaller graph on disk equal those sampled in RAM.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.sizes import parse_bytes
from tools.bench.lib.machine import describe, drop_page_cache, limit_memory

PAGE_BYTES = 4096
_PIECE = 2**22
IDENTICAL_NODES = 200_000
"""nodes of the graph that is also sampled in RAM"""

Result = dict[str, Any]


def make_topology(group: Path, nodes: int, degree: int, seed: int) -> int:
    """Write `graph/indptr` and `graph/indices` of a uniform graph with about `degree` in-edges per node; returns the edges."""
    rng = np.random.default_rng(seed)
    edges = 0
    group.mkdir(parents=True)
    with Appender(group, "graph/indptr", (), np.int64) as indptr:
        indptr.append(np.zeros(1, np.int64))
        for begin in range(0, nodes, _PIECE):
            count = rng.poisson(degree, min(_PIECE, nodes - begin))
            indptr.append(edges + np.cumsum(count))
            edges += int(count.sum())
    with Appender(group, "graph/indices", (), np.int32) as indices:
        for begin in range(0, edges, _PIECE):
            indices.append(rng.integers(0, nodes, min(_PIECE, edges - begin), dtype=np.int32))
    return edges


class CountedRows:
    """Rows that count the distinct pages of the (ascending) ids of each read."""

    def __init__(self, rows: Any) -> None:
        self.shape, self.dtype, self.row_bytes = rows.shape, rows.dtype, rows.row_bytes
        self.submit, self.close = rows.submit, rows.close
        self._read = rows.read
        self.pages = 0

    def read(self, ids: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64] | None = None) -> int:
        page = ids * self.row_bytes // PAGE_BYTES
        self.pages += int(np.count_nonzero(np.diff(page))) + (len(page) > 0)
        return int(self._read(ids, out, at))


def open_topology(group: Path, engine: str) -> tuple[Any, CountedRows]:
    """Return the graph, with `indptr` in memory and edges memory-mapped, and its edges as counted rows."""
    from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
    from ooc.stores.graph import Graph

    maps = [open_zarr_rows(group, f"graph/{name}", engine="mmap") for name in ("indptr", "indices")]
    assert all(isinstance(rows, ShardedRows) for rows in maps)
    graph = Graph(np.array(maps[0].map()), maps[1].map())
    for rows in maps:
        rows.close()
    return graph, CountedRows(open_zarr_rows(group, "graph/indices", engine))


def sampled(frontier: Any, nodes: int, batch_size: int, batches: int, seed: int) -> tuple[list[Any], Result]:
    """Sample batches together, as many at once as fit; returns the batches and the cost."""
    rng = np.random.default_rng(seed)
    seeds, done, calls, edges, nbytes = [rng.integers(0, nodes, batch_size) for _ in range(batches)], 0, 0, 0, 0
    found: list[Any] = []
    begin, cpu = time.perf_counter(), time.process_time()
    while done < batches:
        together = frontier.sample(seeds[done:], list(range(done, batches)))
        done, calls = done + len(together.batches), calls + 1
        edges, nbytes = edges + sum(len(each.slot) for each in together.batches), nbytes + together.nbytes
        found += [(len(batch.slot), hash(batch.slot.tobytes()), hash(batch.node.tobytes())) for batch in together.batches]
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    return found, {"seconds": seconds, "core": cpu / seconds, "calls": calls, "edges": edges, "bytes_read": nbytes}


def identical(group: Path, a: argparse.Namespace) -> bool:
    """Whether batches sampled from disk equal those sampled in RAM."""
    from ooc.sampling import NeighborSampler, OnDiskFrontier

    graph, rows = open_topology(group, a.engine)
    sampler = NeighborSampler(graph, a.fanout)
    own, _ = sampled(OnDiskFrontier(sampler, rows), graph.num_nodes, a.batch_size, a.batches, a.seed)
    rows.close()
    inner = NeighborSampler(graph.in_memory(), a.fanout)
    rng = np.random.default_rng(a.seed)
    wanted = [inner.sample(rng.integers(0, graph.num_nodes, a.batch_size), key) for key in range(a.batches)]
    return own == [(len(each.slot), hash(each.slot.tobytes()), hash(each.node.tobytes())) for each in wanted]


def one_run(group: Path, a: argparse.Namespace) -> Result:
    """Sample under the limit, in a separate process."""
    if a.limit:
        limit_memory(a.limit, "ooc_topology")
    from ooc.sampling import NeighborSampler, OnDiskFrontier

    graph, rows = open_topology(group, a.engine)
    frontier = OnDiskFrontier(NeighborSampler(graph, a.fanout), rows, max_bytes=parse_bytes(a.together))
    sampled(frontier, graph.num_nodes, 16, 1, a.seed + 1)  # compiles the kernels
    rows.pages = 0
    _, result = sampled(frontier, graph.num_nodes, a.batch_size, a.batches, a.seed)
    rows.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**result, "pages": rows.pages, "pages_per_s": rows.pages / result["seconds"], "peak_rss_bytes": peak}


def fio(group: Path, seconds: float, seed: int) -> float:
    """Random 4 KiB reads per second over all shards of the edges."""
    shards = [str(path) for path in sorted((group / "graph/indices/c").rglob("*")) if path.is_file()]
    options = {"filename": ":".join(path.replace(":", r"\:") for path in shards), "runtime": seconds, "randseed": seed + 1}
    fixed = (
        "--name=bench --readonly --rw=randread --bs=4k --direct=1 --ioengine=io_uring --iodepth=128 "
        "--file_service_type=random --time_based --output-format=json"
    )
    command = ["fio", *fixed.split(), *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"])


def one_round(group: Path, a: argparse.Namespace, number: int) -> Result:
    """fio, a run under the limit with an empty page cache, fio."""
    before = fio(group, a.seconds, 2 * number)
    if a.limit:
        drop_page_cache()
    command = [sys.executable, "-m", "tools.bench.io.topology", *a.words, "--run", str(group)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    run: Result = json.loads(done.stdout.splitlines()[-1])
    reads = (before + fio(group, a.seconds, 2 * number + 1)) / 2
    return {**run, "fio_reads_per_s": reads, "share_of_fio": run["pages_per_s"] / reads}


def plot(rounds: list[Result], path: Path) -> None:
    """Reads per second of every round."""
    from tools.bench.lib.chart import Panel, lines

    series = {"ooc, pages": [r["pages_per_s"] for r in rounds], "fio, random 4 KiB": [r["fio_reads_per_s"] for r in rounds]}
    lines(path, [Panel(list(range(1, len(rounds) + 1)), series, "round", "reads per second")])


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=50_000_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--limit", default="2GB", help="of the sampling process, page cache counted; '' for none")
    parser.add_argument("--together", default="500MB", help="for batches that are sampled together")
    parser.add_argument("--fanout", type=lambda text: [int(k) for k in text.split(",")], default=[15, 10, 5])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each of fio's measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args(words)
    a.words = words
    return a


def compare(a: argparse.Namespace) -> Result:
    """Make both graphs, compare, measure, remove them."""
    large, small = a.work / "topology", a.work / "topology.small"
    try:
        nodes = min(a.nodes, IDENTICAL_NODES)
        make_topology(small, nodes, a.degree, a.seed)
        same = identical(small, a)
        edges = make_topology(large, a.nodes, a.degree, a.seed)
        rounds = [one_round(large, a, number) for number in range(a.rounds)]
    finally:
        shutil.rmtree(large, ignore_errors=True)
        shutil.rmtree(small, ignore_errors=True)
    share = statistics.median(r["share_of_fio"] for r in rounds)
    graph = {"nodes": a.nodes, "edges": edges, "limit": a.limit, "fanout": a.fanout, "batch_size": a.batch_size}
    return {**graph, "identical": same, "identical_nodes": nodes, "share_of_fio": share, "rounds": rounds}


def main(words: list[str] | None = None) -> None:
    """Parse the command line, measure, print JSON."""
    a = parse(sys.argv[1:] if words is None else words)
    if a.run is not None:
        print(json.dumps(one_run(a.run, a)))
        return
    result = compare(a)
    if a.plot:
        plot(result["rounds"], a.plot)
    print(json.dumps({"machine": describe(), **result}))


if __name__ == "__main__":
    main()
