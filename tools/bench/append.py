"""What appending costs beside ingesting everything: the same edges, once whole, once all but a share and then that share.

    python -m tools.bench.append WORK --nodes 1000000 --edges 20000000 --features 64 --share 0.01

Random edges with times and node features, ids that are rows. Each is timed in a process that has imported everything; files are
in the page cache. Then `compact` and the first and the second reader of what was appended. Prints JSON and removes WORK.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_PIECE = 2**20


def write_edges(path: Path, nodes: int, first: int, last: int) -> str:
    """Edges first..last-1 of one endless list, their times rising but for some late ones."""
    schema = pa.schema([("src", pa.int64()), ("dst", pa.int64()), ("t", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for piece in range(first // _PIECE, -(-last // _PIECE)):
            rng, start = np.random.default_rng(piece), piece * _PIECE
            src, dst = rng.integers(0, nodes, (2, _PIECE))
            times = np.maximum(np.arange(start, start + _PIECE) - rng.geometric(0.1, _PIECE) * 100, 0)
            wanted = slice(max(first - start, 0), last - start)
            writer.write_table(pa.table([src[wanted], dst[wanted], times[wanted]], schema=schema))
    return str(path)


def write_features(path: Path, nodes: int, width: int) -> str:
    """float32[nodes, width], random."""
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (nodes, width))
    for start in range(0, nodes, _PIECE):
        part = rows[start : start + _PIECE]
        np.random.default_rng(start).standard_normal(part.shape, np.float32, out=part)
    rows.flush()
    return str(path)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, what `work` gave)."""
    began = time.perf_counter()
    found = work()
    return round(time.perf_counter() - began, 3), found


def measure(work: Path, nodes: int, edges: int, width: int, share: float, memory: str) -> dict[str, Any]:
    """All of it; see the module's text."""
    from stores.dataset import Dataset
    from stores.growth.append import append
    from stores.growth.compact import compact
    from stores.growth.spec import AppendSpec
    from stores.ingest import IngestSpec, ingest
    from stores.integrity import fingerprint

    work.mkdir(parents=True)
    cut = edges - int(edges * share)
    whole, base, new = (
        write_edges(work / f"{name}.parquet", nodes, first, last)
        for name, first, last in (("whole", 0, edges), ("base", 0, cut), ("new", cut, edges))
    )
    given: dict[str, Any] = {"time": "t", "memory": memory}
    own: dict[str, Any] = {"num_nodes": nodes, "features": [f"x={write_features(work / 'x.npy', nodes, width)}"]}
    warm = write_edges(work / "warm.parquet", nodes, 0, 1000)  # imports, compiled kernels
    ingest(IngestSpec(out=work / "warm.ooc", edges=warm, num_nodes=nodes, **given))
    append(AppendSpec(out=work / "warm.ooc", edges=warm, **given))
    compact(work / "warm.ooc")

    whole_s, _ = timed(lambda: ingest(IngestSpec(out=work / "whole.ooc", edges=whole, **given, **own)))
    grown = work / "grown.ooc"
    base_s, _ = timed(lambda: ingest(IngestSpec(out=grown, edges=base, **given, **own)))
    append_s, done = timed(lambda: append(AppendSpec(out=grown, edges=new, **given)))
    first_s, _ = timed(lambda: Dataset.open(grown).close())
    second_s, _ = timed(lambda: Dataset.open(grown).close())
    compact_s, _ = timed(lambda: compact(grown))
    same = fingerprint(grown) == fingerprint(work / "whole.ooc")
    shutil.rmtree(work)
    return {
        "nodes": nodes,
        "edges": edges,
        "features": width,
        "appended_edges": done.appended.edges,
        "ingest_whole_s": whole_s,
        "ingest_rest_s": base_s,
        "append_s": append_s,
        "append_share_of_ingest": round(append_s / whole_s, 4),
        "first_open_s": first_s,
        "second_open_s": second_s,
        "compact_s": compact_s,
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
    parser.add_argument("--memory", default="2GB")
    a = parser.parse_args()
    print(json.dumps(measure(a.work.absolute(), a.nodes, a.edges, a.features, a.share, a.memory)))


if __name__ == "__main__":
    main()
