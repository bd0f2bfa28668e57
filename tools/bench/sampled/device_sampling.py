"""Neighbor sampling by torch operations on the CPU and on a GPU, with the edges there or in the host's memory, beside the CPU's
kernels: the same batches, to the bit.

    python -m tools.bench.sampled.device_sampling STORE --fanout 10,10 --batch-size 1024 --batches 50

Without a store it makes a graph whose degrees are skewed (`--nodes`, `--edges`). Every arm samples the same batches in turn,
round by round; one of each is compared. Prints a line for each arm: milliseconds a batch and edges a second, on the wall and,
where the host does the work, of processor time.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ooc
from ooc.sampling import NeighborSampler, device_draws
from ooc.sampling.device_neighbor import DeviceNeighborSampler
from ooc.stores.graph import Graph
from tools.bench.lib.machine import describe

Sample = Callable[[Any, int], Any]


def made_graph(nodes: int, edges: int) -> Graph:
    """A graph with hubs: destinations are skewed as u^3, sources uniform."""
    rng = np.random.default_rng(0)
    degree = np.bincount((nodes * rng.random(edges, np.float32) ** 3).astype(np.int64).clip(max=nodes - 1), minlength=nodes)
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(degree, out=indptr[1:])
    return Graph(indptr, rng.integers(0, nodes, edges, dtype=np.int32 if nodes < 2**31 else np.int64))


def arms_of(graph: Graph, fanout: list[int], replace: bool) -> dict[str, Sample]:
    """What samples, by name."""
    host = NeighborSampler(graph, fanout, replace)
    arms: dict[str, Sample] = {
        "kernels, one thread": host.sample,
        f"torch, {torch.get_num_threads()} threads": DeviceNeighborSampler(host, graph, torch.device("cpu")).sample,
    }
    if torch.cuda.is_available():
        there = torch.device("cuda", torch.cuda.current_device())
        compiled = any(device_draws.compiled_for(each, replace, there) for each in fanout)
        name = f"torch, {torch.cuda.get_device_name()}" + (", draws by Triton" if compiled else "")
        arms[name] = DeviceNeighborSampler(host, graph, there).sample
        arms[f"{name}, edges in the host's memory"] = DeviceNeighborSampler(host, graph, there, edges_on_host=True).sample
    return arms


def check(arms: dict[str, Sample], seeds: Any) -> int:
    """Sample a batch by each, which compiles, and give its edges. Raises SystemExit if one differs."""
    first = None
    for name, sample in arms.items():
        found = sample(seeds, 1)
        arrays = [np.asarray(getattr(found, each)) for each in ("node", "indptr", "source", "slot")]
        if first is not None and not all(map(np.array_equal, first, arrays)):
            raise SystemExit(f"the batch of {name!r} differs")
        first = arrays
    assert first is not None
    return len(first[2])


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(arms: dict[str, Sample], nodes: int, batch_size: int, batches: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each arm the best round's seconds a batch, and edges and processor time of the batches."""
    rng = np.random.default_rng(1)
    seeds = [rng.integers(0, nodes, batch_size) for _ in range(batches)]
    found: dict[str, dict[str, float]] = {}
    check(arms, seeds[0])
    for _ in range(rounds):
        for name, sample in arms.items():
            began, used, edges = time.perf_counter(), processor_seconds(), 0
            for number, each in enumerate(seeds):
                edges += sum(sample(each, number).num_edges)
            seconds, used = (time.perf_counter() - began) / batches, (processor_seconds() - used) / batches
            if name not in found or seconds < found[name]["seconds"]:
                found[name] = {"seconds": seconds, "processor_seconds": used, "edges": edges / batches}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    fanout = [int(count) for count in a.fanout.split(",")]
    ds = None if a.store is None else ooc.open(a.store)
    graph = made_graph(a.nodes, a.edges) if ds is None else ds.graph
    found = measure(arms_of(graph, fanout, a.replace), graph.num_nodes, a.batch_size, a.batches, a.rounds)
    print("| arm | ms a batch | processor ms | M edges/s |\n|---|---|---|---|")
    for name, each in found.items():
        rate = each["edges"] / each["seconds"] / 1e6
        print(f"| {name} | {1e3 * each['seconds']:.2f} | {1e3 * each['processor_seconds']:.2f} | {rate:.1f} |")
    print(json.dumps({"machine": describe(), "torch": torch.__version__, "fanout": fanout, "arms": found}), file=sys.stderr)


if __name__ == "__main__":
    main()
