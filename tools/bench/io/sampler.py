"""The neighbor sampler in RAM on one thread, compared with torch-sparse's C++ sampler: edges per second, in one run.

    python -m tools.bench.io.sampler --nodes 8000000 --edges 80000000 --peer-python PY

PY is an interpreter with torch and torch_sparse; without it only `ooc` is measured. Both sample the same graph from the same
seeds, compiled and warm, in --rounds interleaved rounds. Prints JSON.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling import NeighborSampler
from ooc.stores.graph import Graph

PEER = """
import json, sys, time
import numpy as np, torch, torch_sparse
torch.set_num_threads(1)
colptr, row, seeds = (torch.from_numpy(np.load(f"{sys.argv[1]}/{name}.npy")) for name in ("indptr", "indices", "seeds"))
def run(fanout, batch):
    return torch.ops.torch_sparse.neighbor_sample(colptr, row, batch, fanout, False, True)
print(json.dumps(torch_sparse.__version__), flush=True)
for line in sys.stdin:
    fanout = json.loads(line)
    run(fanout, seeds[0])
    edges, start = 0, time.perf_counter()
    for batch in seeds[1:]:
        edges += len(run(fanout, batch)[1])
    print(json.dumps([edges, time.perf_counter() - start]), flush=True)
"""


def make_csc(nodes: int, edges: int, seed: int) -> Graph:
    """A uniform random graph: int64[N+1] indptr, int32[E] indices."""
    rng = np.random.default_rng(seed)
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(rng.integers(0, nodes, edges), minlength=nodes), out=indptr[1:])
    return Graph(indptr, rng.integers(0, nodes, edges, dtype=np.int32))


def run_ours(graph: Graph, fanout: list[int], seeds: NDArray[np.int64]) -> tuple[int, float]:
    """(edges, seconds) of all batches except the first, which warms up; seeds: int64[batches + 1, b]."""
    sampler = NeighborSampler(graph, fanout)
    sampler.sample(seeds[0], 0)
    edges, start = 0, time.perf_counter()
    for step, batch in enumerate(seeds[1:]):
        edges += len(sampler.sample(batch, key(0, Purpose.SAMPLE, step=step)).source)
    return edges, time.perf_counter() - start


class Peer:
    """torch-sparse in a separate process, run one round at a time."""

    def __init__(self, reader: IO[str], writer: IO[str]) -> None:
        self.reader, self.writer = reader, writer
        self.version: str = json.loads(reader.readline() or "null")

    def run(self, fanout: list[int]) -> tuple[int, float]:
        """(edges, seconds), as `run_ours`."""
        print(json.dumps(fanout), file=self.writer, flush=True)
        edges, seconds = json.loads(self.reader.readline())
        return edges, seconds


@contextmanager
def start_peer(python: str, graph: Graph, seeds: NDArray[np.int64]) -> Iterator[Peer]:
    """Save the arrays in torch-sparse's format (all int64) and start it on them."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"indptr": graph.indptr, "indices": graph.indices.astype(np.int64), "seeds": seeds}
        for name, array in arrays.items():
            np.save(Path(folder) / f"{name}.npy", array)
        del arrays
        command = [python, "-c", PEER, folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            yield Peer(process.stdout, process.stdin)


def rates(rounds: list[tuple[int, float]]) -> dict[str, Any]:
    """Edges per round, and median, minimum and maximum million edges per second."""
    speed = [edges / seconds / 1e6 for edges, seconds in rounds]
    return {
        "edges": rounds[0][0],
        "m_edges_per_s": round(statistics.median(speed), 2),
        "least": round(min(speed), 2),
        "most": round(max(speed), 2),
    }


def compare(graph: Graph, fanouts: list[list[int]], seeds: NDArray[np.int64], rounds: int, peer: Peer | None) -> dict[str, Any]:
    """Rates for every fan-out, ours and the peer's, and their ratio."""
    results: dict[str, Any] = {}
    for fanout in fanouts:
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(run_ours(graph, fanout, seeds))
            theirs += [peer.run(fanout)] if peer else []
        result: dict[str, Any] = {"ooc": rates(ours)}
        if peer:
            result[f"torch_sparse {peer.version}"] = rates(theirs)
            pairs = zip(ours, theirs, strict=True)
            result["speedup"] = round(statistics.median(a[0] / a[1] / (b[0] / b[1]) for a, b in pairs), 2)
        results[str(fanout)] = result
    return results


def main() -> None:
    """Parse the command line, make the graph, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--fanout", action="append", help="repeatable; default: 10,10 and 15,10,5")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=10, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer-python", help="an interpreter that has torch_sparse")
    a = parser.parse_args()
    fanouts = [[int(k) for k in text.split(",")] for text in a.fanout or ["10,10", "15,10,5"]]
    graph = make_csc(a.nodes, a.edges, a.seed)
    seeds = np.random.default_rng(a.seed + 1).integers(0, a.nodes, (a.batches + 1, a.batch_size))
    if a.peer_python:
        with start_peer(a.peer_python, graph, seeds) as peer:
            results = compare(graph, fanouts, seeds, a.rounds, peer)
    else:
        results = compare(graph, fanouts, seeds, a.rounds, None)
    print(json.dumps({"nodes": a.nodes, "edges": a.edges, "batch_size": a.batch_size, "threads": 1, **results}))


if __name__ == "__main__":
    main()
