"""Lower bound of a run's seconds per batch from its reads alone, for loaders that read superbatches. PURE except for `main`.

    python -m tools.bench.sampled.bound STORE --run run.json --sequential 1.2e9 --random 100000

Assumptions:

- A superbatch holds the rows of consecutive batches, each row once. Superbatches are formed greedily: a batch joins while the
  union fits; a larger batch is a superbatch by itself. The future beyond a superbatch is unknown.
- Two superbatches of equal size fill the memory that the process and its topology leave, one being read while the other is
  used, so each holds `left / 2` bytes of rows. Labels, buffers, batches and activations take nothing.
- Rows of the previous superbatch are reused, older ones are not. The first superbatch starts empty.
- A page (4 KiB) is read if any row on it must be. The pages of a superbatch are read once, by one sequential scan from the
  first to the last at the disk's sequential bandwidth, or individually at the disk's rate of random 4 KiB reads, whichever is
  cheaper. `ooc`'s planner, which merges nearby pages, may be faster.
- Sampling, copying and computing take no time. Edges on disk are not counted.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable
from tools.bench.lib.disk_rates import Disk
from tools.bench.lib.pages import PAGE_BYTES, pages_of
from tools.bench.sampled.trace import Trace


@dataclass(frozen=True)
class Reads:
    """The reads of one superbatch."""

    batches: int
    rows: int
    """rows in the superbatch"""
    new_rows: int
    """those not in the previous superbatch"""
    pages: int
    """distinct pages with a new row"""
    span_pages: int
    """from the first of those pages to the last"""

    def ways(self, disk: Disk) -> tuple[float, float]:
        """Seconds of a scan, and of page-by-page reads."""
        return self.span_pages * PAGE_BYTES / disk.sequential_bytes_per_s, self.pages / disk.random_pages_per_s


def unions(batches: Iterable[NDArray[Any]], window_rows: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (batches, distinct rows ascending) of every superbatch; batches: the node ids of each, int[n]."""
    union, count, size = RelabelTable(), 0, 0
    for nodes in (ids.astype(np.int64, copy=False) for ids in batches):
        union.add(nodes)
        if count and union.size > window_rows:
            yield count, union.ascending(size)[0]
            union, count = RelabelTable(), 0
            union.add(nodes)
        count, size = count + 1, union.size
    if count:
        yield count, union.ascending(size)[0]


def window_reads(batches: Iterable[NDArray[Any]], row_bytes: int, window_bytes: int) -> Iterator[Reads]:
    """Yield the reads of every superbatch of `window_bytes` of rows of `row_bytes`.

    >>> list(window_reads([np.array([1, 9]), np.array([9, 20])], row_bytes=512, window_bytes=1024))[1].new_rows
    1
    """
    before = np.empty(0, np.int64)
    for count, row in unions(batches, window_bytes // row_bytes):
        new = np.setdiff1d(row, before, assume_unique=True)
        page = pages_of(new, row_bytes)
        yield Reads(count, len(row), len(new), len(page), int(page[-1] - page[0]) + 1 if len(page) else 0)
        before = row


def bound(reads: list[Reads], disk: Disk) -> dict[str, float]:
    """Sum of all superbatches of a run: the bound in seconds per batch, and its parts."""
    batches = sum(each.batches for each in reads)
    ways = [each.ways(disk) for each in reads]
    return {
        "seconds_per_batch": sum(map(min, ways)) / batches,
        "windows": len(reads),
        "windows_scanned": sum(scan <= pages for scan, pages in ways),
        "batches": batches,
        "new_rows": sum(each.new_rows for each in reads),
        "page_bytes": sum(each.pages for each in reads) * PAGE_BYTES,
    }


def window_bytes(budget: dict[str, int]) -> int:
    """Bytes of rows per superbatch, from the memory division that a run reports."""
    return max(0, budget["memory"] - budget["baseline"] - budget["topology"]) // 2


def main() -> None:
    """Parse the command line, draw the run's batches again, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--run", type=Path, required=True, help="what tools.bench.sampled.steps printed of the run")
    parser.add_argument("--sequential", type=float, required=True, help="bytes per second")
    parser.add_argument("--random", type=float, required=True, help="reads of 4 KiB per second")
    a = parser.parse_args()
    disk = Disk(a.sequential, a.random)
    run = json.loads(a.run.read_text())
    with Trace.of(a.store, run) as trace:
        size = window_bytes(run["budget"])
        reads = list(window_reads(trace.nodes(), trace.row_bytes, size))
    print(json.dumps({"window_bytes": size, **asdict(disk), **bound(reads, disk)}))


if __name__ == "__main__":
    main()
