"""Memory and processor time of narrower features: an ingest that never has the wide rows on disk, and a store that stands.

    python -m tools.bench.io.reduce WORK --rows 20000000 --columns 512 --method pca:32 --limit 500M
    python -m tools.bench.io.reduce WORK --rows 2000000 --columns 512 --method pca:32 --limit 500M --standing

Rows are made as they are read: a block of random ones, shifted by where it stands, around a mean of 100. `--standing` builds
the wide store first, and then runs `ooc reduce`. `--limit` is that of the process's memory in a cgroup, page cache counted
(which needs root). Prints JSON.
"""

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.ingest.lazy import LazyArray
from ooc.stores.ingest.reductions import METHODS, Reduction
from tools.bench.lib.machine import describe, limit_memory

_BLOCK = 8192


class MadeRows:
    """float32 rows [count, width] that no file holds."""

    def __init__(self, count: int, width: int) -> None:
        self.shape, self.dtype = (count, width), np.dtype(np.float32)
        rng = np.random.default_rng(0)
        scales = np.linspace(3, 0.1, width, dtype=np.float32)
        self._block = rng.standard_normal((_BLOCK, width), dtype=np.float32) * scales + np.float32(100)

    def __getitem__(self, rows: slice) -> Any:
        first, stop, _ = rows.indices(self.shape[0])
        out = np.empty((stop - first, self.shape[1]), np.float32)
        at = first
        while at < stop:
            low = at % _BLOCK
            count = min(stop - at, _BLOCK - low)
            np.add(self._block[low : low + count], np.float32(at // _BLOCK % 7), out=out[at - first : at - first + count])
            at += count
        return out


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--method", default="pca:32")
    parser.add_argument("--limit", help="of the memory, page cache counted, such as 500M")
    parser.add_argument("--standing", action="store_true", help="a wide store, and `ooc reduce`")
    a = parser.parse_args()
    store = a.work / "reduced.ooc"
    shutil.rmtree(store, ignore_errors=True)
    a.work.mkdir(parents=True, exist_ok=True)
    argument = next(name for name, methods in METHODS.items() if a.method.partition(":")[0] in methods)
    edges = np.stack([np.arange(1000), np.arange(1, 1001)])
    arrays: dict[str, Any] = {"x": LazyArray(MadeRows(a.rows, a.columns), "x"), "edge_index": edges}
    wide = {} if a.standing else {argument: a.method}
    spec = IngestSpec(out=store, pyg="made", memory="1GB", **wide)
    if a.standing:
        ingest(spec, arrays=arrays)
    if a.limit:
        limit_memory(a.limit, "ooc_reduce")
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    if a.standing:
        _reduce(store, a.method)
    else:
        ingest(spec, arrays=arrays)
    after = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "rows": a.rows,
        "columns": a.columns,
        "method": a.method,
        "limit": a.limit,
        "seconds": time.perf_counter() - begin,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_rss_bytes": after.ru_maxrss * 1024,
        "wide_bytes": a.rows * a.columns * 4,
        "store_bytes": sum(each.stat().st_size for each in store.rglob("*") if each.is_file()),
    }
    print(json.dumps({**found, **describe()}, indent=1))
    print(f"remove {a.work} when it is no longer needed", file=sys.stderr)


def _reduce(store: Path, method: str) -> None:
    from ooc.stores.growth.reduce import reduce

    word, _, width = method.partition(":")
    reduce(store, Reduction(word, int(width)), memory=450_000_000)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
