"""Batches of whole graphs from disk: bytes per second beside the disk's, and beside PyG's OnDiskDataset (sqlite).

    python -m tools.bench.io.graphs WORK --graphs 5000000 --nodes 25 --width 32 --limit 2GB

Random graphs of --nodes nodes (on average), twice as many edges, --width features a node and a label each, ingested into WORK
if missing, and --pyg-graphs like them in an OnDiskDataset. Each round is the disk's sequential speed (fio), a cold, shuffled
pass of `GraphLoader` in a separate process under a memory limit that counts page cache (needs root), the disk again, and a
cold, shuffled pass of PyG's DataLoader over --pyg-read graphs of its data set under the same limit. The bytes are those of the
graphs' rows, each counted once; the clock runs from the first request to the last batch, after a batch that loads the kernels.
Prints JSON: the median ratio to the disk, graphs per second of both, and stages.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.io.snapshots import share_of_disk
from tools.bench.lib.machine import describe, limit_memory
from tools.bench.sampled.cost import run_cold

Result = dict[str, Any]
GRAPHS_AT_ONCE = 2**14
PASSED_ON = ("limit", "memory", "batch_size", "shuffle_block", "pyg_read", "graphs")


class Shape:
    """Sizes and contents of the graphs, a piece at a time; piece p depends on p alone."""

    def __init__(self, graphs: int, nodes: int, width: int) -> None:
        self.graphs, self.width = graphs, width
        self.sizes = np.random.default_rng(0).integers(max(1, nodes // 2), 2 * nodes - nodes // 2 + 1, graphs)
        self.ptr = np.concatenate([[0], np.cumsum(self.sizes)])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and last graph of each piece."""
        for first in range(0, self.graphs, GRAPHS_AT_ONCE):
            yield first, min(first + GRAPHS_AT_ONCE, self.graphs)

    def x(self) -> Iterator[np.ndarray[Any, Any]]:
        """float32[n, width] of each piece."""
        for first, last in self.pieces():
            count = int(self.ptr[last] - self.ptr[first])
            yield np.random.default_rng([1, first]).random((count, self.width), np.float32)

    def edges(self) -> Iterator[np.ndarray[Any, Any]]:
        """int64[2, e] of each piece, by nodes of the whole: each node has two random in-edges."""
        for first, last in self.pieces():
            sizes = self.sizes[first:last]
            begin, size = np.repeat(self.ptr[first:last], sizes), np.repeat(sizes, sizes)
            target = np.repeat(np.arange(self.ptr[first], self.ptr[last]), 2)
            draw = np.random.default_rng([2, first]).random(len(target))
            yield np.stack([np.repeat(begin, 2) + (draw * np.repeat(size, 2)).astype(np.int64), target])

    def labels(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(3).integers(0, 10, self.graphs)


def make_store(path: Path, shape: Shape, memory: str) -> None:
    """Ingest the graphs, in bounded memory."""
    from ooc.stores.ingest import IngestSpec, ingest
    from ooc.stores.ingest.arrays import RowBlocks

    count = int(shape.ptr[-1])

    def both() -> Iterator[np.ndarray[Any, Any]]:
        for end in (0, 1):
            yield from (piece[end][None] for piece in shape.edges())

    arrays: dict[str, Any] = {
        "x": RowBlocks((count, shape.width), np.dtype(np.float32), shape.x),
        "edge_index": RowBlocks((2, 2 * count), np.dtype(np.int64), both),
        "num_nodes": np.array(count),
        "graphs.ptr": shape.ptr,
        "graphs.y": shape.labels(),
    }
    ingest(IngestSpec(out=path, pyg="random graphs", memory=memory), arrays=arrays)


def on_disk(folder: Path, width: int) -> Any:
    """PyG's data set in `folder`, with a schema, which it says is most efficient."""
    import torch
    from torch_geometric.data import Data, OnDiskDataset

    class Graphs(OnDiskDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            schema = {
                "x": {"dtype": torch.float32, "size": (-1, width)},
                "edge_index": {"dtype": torch.int64, "size": (2, -1)},
                "y": {"dtype": torch.int64, "size": (1,)},
            }
            super().__init__(str(folder), schema=schema)

        def serialize(self, data: Any) -> dict[str, Any]:
            return {"x": data.x, "edge_index": data.edge_index, "y": data.y}

        def deserialize(self, row: dict[str, Any]) -> Any:
            return Data(**row)

    return Graphs()


def make_on_disk(folder: Path, shape: Shape) -> None:
    """Write the graphs into PyG's data set."""
    import torch
    from torch_geometric.data import Data

    dataset, labels = on_disk(folder, shape.width), torch.from_numpy(shape.labels())
    for (first, last), x, edges in zip(shape.pieces(), shape.x(), shape.edges(), strict=True):
        rows, both, low = torch.from_numpy(x), torch.from_numpy(edges), int(shape.ptr[first])
        graphs = []
        for graph in range(first, last):
            begin, end = int(shape.ptr[graph]) - low, int(shape.ptr[graph + 1]) - low
            own = both[:, 2 * begin : 2 * end] - (low + begin)
            graphs.append(Data(x=rows[begin:end], edge_index=own, y=labels[graph : graph + 1]))
        dataset.extend(graphs)
    dataset.close()


def by_ooc(a: argparse.Namespace) -> Result:
    """One pass of `GraphLoader` under the limit, in a separate process."""
    if a.limit:
        limit_memory(a.limit)
    import ooc

    with ooc.open(a.child, memory=a.memory or a.limit or None) as ds:
        loader = ooc.GraphLoader(ds, a.batch_size, shuffle=True, seed=0, shuffle_block=a.shuffle_block)
        first = iter(loader)
        next(first)  # loads the kernels
        first.close()
        loader.set_epoch(1)
        begin, cpu = time.perf_counter(), time.process_time()
        graphs = nodes = edges = 0
        for batch in loader:
            graphs, nodes, edges = graphs + batch.num_graphs, nodes + len(batch.x), edges + batch.edge_index.shape[1]
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        index = ds.edge_rows("indices").row_bytes
        nbytes = nodes * (ds.stored("x").row_bytes + 8) + edges * index + graphs * ds.graphs.stored("y").row_bytes
        return _result(graphs, nbytes, seconds, cpu) | {"stages": loader.times()}


def by_pyg(a: argparse.Namespace) -> Result:
    """One pass of PyG's DataLoader over its own data set, under the limit, in a separate process."""
    if a.limit:
        limit_memory(a.limit)
    import torch
    from torch_geometric.loader import DataLoader

    dataset = on_disk(a.child, a.width)
    torch.manual_seed(0)
    wanted = torch.randperm(len(dataset))[: a.pyg_read].tolist()
    begin, cpu = time.perf_counter(), time.process_time()
    graphs = nbytes = 0
    for batch in DataLoader(dataset, batch_size=a.batch_size, sampler=wanted):
        graphs += batch.num_graphs
        nbytes += batch.x.nbytes + batch.edge_index.nbytes // 4 + 8 * len(batch.x) + batch.num_graphs
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return _result(graphs, nbytes, seconds, cpu)


def _result(graphs: int, nbytes: int, seconds: float, cpu: float) -> Result:
    """Figures of a pass."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rates = {"graphs_per_s": graphs / seconds, "bytes_per_s": nbytes / seconds, "core": cpu / seconds}
    return {"graphs": graphs, "bytes": nbytes, "seconds": seconds, **rates, "peak_rss_bytes": peak}


def cold(a: argparse.Namespace, kind: str, path: Path) -> Result:
    """A pass in a process of its own, with a cold cache."""
    words = [f"--{name.replace('_', '-')}={getattr(a, name)}" for name in (*PASSED_ON, "width", "nodes")]
    command = [sys.executable, "-m", "tools.bench.io.graphs", str(a.work), "--kind", kind, "--child", str(path), *words]
    found = run_cold(command)
    if "failed" in found:
        raise SystemExit(f"{path}: {found['error']}")
    return found


def compare(a: argparse.Namespace) -> Result:
    """All rounds."""
    from tools.bench.lib.disk_rates import Rates

    a.work.mkdir(parents=True, exist_ok=True)
    name = f"{a.graphs}x{a.nodes}x{a.width}"
    store, other = a.work / f"graphs{name}.ooc", a.work / f"pyg{min(a.graphs, a.pyg_graphs)}x{a.nodes}x{a.width}"
    if not store.exists():
        make_store(store, Shape(a.graphs, a.nodes, a.width), a.limit or "2GB")
    if a.pyg_graphs and not other.exists():
        make_on_disk(other, Shape(min(a.graphs, a.pyg_graphs), a.nodes, a.width))
    cold(a, "ooc", store)  # compiles the kernels
    rates, rounds = Rates(store, a.rate_seconds), []
    rates.measure()
    for _ in range(a.rounds):
        found = cold(a, "ooc", store)
        rates.measure()
        before, after = (disk.sequential_bytes_per_s for disk in rates.taken[-2:])
        found["share_of_disk"] = share_of_disk(found["bytes_per_s"], before, after)
        rounds.append({"ooc": found, **({"pyg": cold(a, "pyg", other)} if a.pyg_graphs else {})})
        print(json.dumps({"seconds": found["seconds"], "share_of_disk": found["share_of_disk"]}), file=sys.stderr)
    median = {who: statistics.median(each[who]["graphs_per_s"] for each in rounds) for who in rounds[0]}
    share = statistics.median(each["ooc"]["share_of_disk"] for each in rounds)
    return {"share_of_disk": share, "graphs_per_s": median, "rounds": rounds, "disk": rates.asdict()}


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--graphs", type=int, default=5_000_000)
    parser.add_argument("--nodes", type=int, default=25, help="of a graph, on average")
    parser.add_argument("--width", type=int, default=32, help="features of a node")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--shuffle-block", default="128MB")
    parser.add_argument("--pyg-graphs", type=int, default=200_000, help="graphs in PyG's data set; 0: none")
    parser.add_argument("--pyg-read", type=int, default=20_000, help="graphs that PyG reads in a round")
    parser.add_argument("--limit", default="2GB", help="page cache counted; '' for none")
    parser.add_argument("--memory", default="", help="memory budget of ooc; default: the limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate-seconds", type=float, default=3)
    parser.add_argument("--kind", choices=["ooc", "pyg"], help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child is not None:
        print(json.dumps(by_ooc(a) if a.kind == "ooc" else by_pyg(a)))
        return
    settings = {name: getattr(a, name) for name in (*PASSED_ON, "nodes", "width")}
    print(json.dumps({"machine": describe(), **settings, **compare(a)}))


if __name__ == "__main__":
    main()
