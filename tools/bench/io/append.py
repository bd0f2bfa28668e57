"""Cost of appending compared with ingesting everything: the same edges at once, and all but a share followed by that share.

    python -m tools.bench.io.append WORK --nodes 1000000 --edges 20000000 --features 64 --share 0.01

Random edges with times, --edge-features per edge and node features; ids are rows. Each step is timed in a process that has
imported and compiled everything, under --limit, which counts page cache (needs root); files are in the page cache. Then
`compact`, and the first and second reader after the append. Prints JSON with the peak memory of each, and removes WORK.
"""

import argparse
import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tools.bench.lib.killed_process import end_of, fork
from tools.bench.lib.machine import limit_memory

_PIECE = 2**20


def write_edges(path: Path, nodes: int, first: int, last: int, width: int) -> None:
    """Write edges first..last-1 of one sequence, with `width` features m*; times ascend except for some late ones."""
    names = [f"m{j}" for j in range(width)]
    schema = pa.schema([*[(name, pa.int64()) for name in ("src", "dst", "t")], *[(name, pa.float32()) for name in names]])
    with pq.ParquetWriter(path, schema) as writer:
        for piece in range(first // _PIECE, -(-last // _PIECE)):
            rng, start = np.random.default_rng(piece), piece * _PIECE
            src, dst = rng.integers(0, nodes, (2, _PIECE))
            times = np.maximum(np.arange(start, start + _PIECE) - rng.geometric(0.1, _PIECE) * 100, 0)
            wanted = slice(max(first - start, 0), last - start)
            columns = [src, dst, times, *rng.standard_normal((width, _PIECE), np.float32)]
            writer.write_table(pa.table([column[wanted] for column in columns], schema=schema))


def write_features(path: Path, nodes: int, width: int) -> None:
    """Write random float32[nodes, width]."""
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (nodes, width))
    for start in range(0, nodes, _PIECE):
        part = rows[start : start + _PIECE]
        np.random.default_rng(start).standard_normal(part.shape, np.float32, out=part)
    rows.flush()


def timed(work: Callable[[], Any], limit: str, log: Path) -> dict[str, Any]:
    """Run `work` in a fork of this process; returns {"s", "peak_rss_bytes"} and its result."""
    found = log.with_suffix(".json")

    def run() -> int:
        if limit:
            limit_memory(limit)
        began = time.perf_counter()
        gave = work()
        seconds = round(time.perf_counter() - began, 3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found.write_text(json.dumps({"s": seconds, "peak_rss_bytes": peak, "gave": gave}))
        return 0

    if end_of(fork(run, log)):
        raise SystemExit(f"a step failed; see {log}")
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def measure(
    work: Path, nodes: int, edges: int, widths: tuple[int, int], share: float, memory: str, limit: str
) -> dict[str, Any]:
    """Run everything; see the module. widths: of nodes' and of edges' features."""
    from ooc.stores.dataset import Dataset
    from ooc.stores.fingerprints import fingerprint
    from ooc.stores.growth.append import append
    from ooc.stores.growth.compact import compact
    from ooc.stores.growth.spec import AppendSpec
    from ooc.stores.ingest import IngestSpec, ingest

    work.mkdir(parents=True)
    cut, log = edges - int(edges * share), work / "log"
    parts = {"whole": (0, edges), "base": (0, cut), "new": (cut, edges), "warm": (0, 1000)}
    given: dict[str, Any] = {"time": "t", "memory": memory, "edge_features": ["msg=m*"] if widths[1] else []}
    own: dict[str, Any] = {"num_nodes": nodes, "features": [f"x={work / 'x.npy'}"]}
    files = {name: str(work / f"{name}.parquet") for name in parts}

    def prepare() -> None:
        for name, span in parts.items():
            write_edges(Path(files[name]), nodes, *span, widths[1])
        write_features(work / "x.npy", nodes, widths[0])

    timed(prepare, "", log)
    ingest(IngestSpec(out=work / "warm.ooc", edges=files["warm"], num_nodes=nodes, **given))  # here, so that forks have it
    append(AppendSpec(out=work / "warm.ooc", edges=files["warm"], **given))
    compact(work / "warm.ooc")

    grown, whole = work / "grown.ooc", work / "whole.ooc"
    steps: dict[str, Callable[[], Any]] = {
        "ingest_whole": lambda: str(ingest(IngestSpec(out=whole, edges=files["whole"], **given, **own)).path),
        "ingest_rest": lambda: str(ingest(IngestSpec(out=grown, edges=files["base"], **given, **own)).path),
        "append": lambda: append(AppendSpec(out=grown, edges=files["new"], **given)).appended.edges,
        "first_open": lambda: Dataset.open(grown, memory=memory).close(),
        "second_open": lambda: Dataset.open(grown, memory=memory).close(),
        "compact": lambda: compact(grown).appends,
    }
    found = {name: timed(step, limit, log) for name, step in steps.items()}
    same = fingerprint(grown) == fingerprint(whole)
    shutil.rmtree(work)
    return {
        "nodes": nodes,
        "edges": edges,
        "features": widths,
        "memory": memory,
        "limit": limit,
        "appended_edges": found["append"]["gave"],
        **{f"{name}_s": each["s"] for name, each in found.items()},
        "append_share_of_ingest": round(found["append"]["s"] / found["ingest_whole"]["s"], 4),
        "peak_rss_bytes": {name: each["peak_rss_bytes"] for name, each in found.items()},
        "equals_the_whole": same,
    }


def main() -> None:
    """Parse the command line, measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a directory to make; removed again")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.01, help="of the edges, appended")
    parser.add_argument("--edge-features", type=int, default=0, help="features of an edge")
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--limit", default="", help="page cache counted; '' for none")
    a = parser.parse_args()
    widths = a.features, a.edge_features
    print(json.dumps(measure(a.work.absolute(), a.nodes, a.edges, widths, a.share, a.memory, a.limit)))


if __name__ == "__main__":
    main()
