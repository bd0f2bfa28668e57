"""The trace of a run of `tools.bench.sampled.steps`, drawn again: batches are a function of (seed, epoch, step), windows of
those and the division of the memory. So nothing is recorded while the run is timed, and what was planned is known to the row.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import ooc
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.shared_scan_plan import SharedScan, shared_scans, waiting
from ooc.loading.superbatch_plan import Superbatch, SuperbatchPlanner
from ooc.loading.work import Work
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from stores.arrays.zarr_rows import ShardedRows
from stores.dataset import Dataset
from tools.bench.lib.pages import PAGE_BYTES, pages_of
from tools.bench.sampled.steps import loader_of, seeds_of_run

SCAN_SHARE = 0.9
"""Of the bytes between a window's first and last page: a plan that reads more of them is a scan"""


def settings(store: Path | str, fanout: str, batches: int, batch_size: int, seed: int) -> dict[str, Any]:
    """What `Trace.of` takes for batches of no run: with all the memory that the machine has."""
    with ooc.open(store) as ds:
        budget = asdict(plan_memory(ds))
    layers = [int(f) for f in fanout.split(",")]
    return {"budget": budget, "fanout": layers, "batches": batches, "batch_size": batch_size, "seed": seed}


@dataclass
class Trace:
    """A run's batches and windows, on the open store. Close it, or use it as a context manager.

    >>> with Trace.of("graph.ooc", json.loads(line)) as trace:
    ...     rows = sum(len(nodes) for nodes in trace.nodes())
    """

    ds: Dataset
    work: Work
    budget: MemoryPlan
    batches: int

    @classmethod
    def of(cls, store: Path | str, run: dict[str, Any]) -> Self:
        """Of what `tools.bench.sampled.steps` printed of a run from disk."""
        ds = ooc.open(store, memory=run["budget"]["memory"])  # what loaders do depends on there being a limit
        try:
            budget = MemoryPlan(**run["budget"])
            seeds = seeds_of_run(ds.num_nodes, run["batch_size"], run["batches"], run["seed"])
            loader = loader_of(ds, seeds, run["fanout"], run["batch_size"], budget, run.get("sums", 0))
            work = loader._work  # without the pipeline around it: nothing is read
            return cls(ds, work, budget, run["batches"])
        except BaseException:
            ds.close()
            raise

    @property
    def row_bytes(self) -> int:
        """Bytes of a feature row as stored."""
        assert self.work.x is not None
        return self.work.x.row_bytes

    def drawn(self) -> Iterator[SampledBatch]:
        """The sampled batches."""
        cursors = (Cursor(0, step) for step in range(self.batches))
        yield from map(self.work.sample, cursors) if self.work.frontier is None else self.work.sampled(cursors, False)

    def nodes(self) -> Iterator[NDArray[np.int64]]:
        """int64[n], the node ids of every batch."""
        return (drawn.subgraph.node for drawn in self.drawn())

    def windows(self) -> Iterator[Superbatch]:
        """The windows that the run's own planner made."""
        return SuperbatchPlanner(self.work, self.budget.batches, 1, CachedNodes.none()).windows(self.drawn())

    def shared_scans(self) -> Iterator[SharedScan]:
        """The sweeps that the run's own planner made, where its batches have sums."""
        waits = (waiting(self.work, drawn) for drawn in self.drawn())
        pool = self.budget.batches + self.work.spare_bytes
        return shared_scans(waits, pool, self.work.self_row_bytes, self.work.kept_bytes)

    def reads(self) -> Iterator[tuple[NDArray[Any], int]]:
        """Of every window or scan: the rows that it had to read, int[u] ascending, and how many were in memory at once."""
        if self.work.scanning:
            for scan in self.shared_scans():
                yield scan.row, 2 * 2 * scan.num_rows  # two rows a sum, and two sweeps
        else:
            for window in self.windows():
                yield window.sketch.node[window.carried < 0], window.sketch.limit

    def planned(self) -> dict[str, int]:
        """What the run's own windows or sweeps had to read.

        windows, rows; page_bytes: of the pages of each window's rows that were not in memory, summed over windows; span_bytes:
        from the first of those pages to the last; scans: windows whose plan reads nearly all of that; rows_in_memory: at
        most, at once.
        """
        x = self.work.x
        assert isinstance(x, ShardedRows), "windows are read from shards"
        found = {"windows": 0, "rows": 0, "page_bytes": 0, "span_bytes": 0, "scans": 0, "rows_in_memory": 0}
        for new, held in self.reads():
            page = pages_of(new, self.row_bytes)
            span = PAGE_BYTES * int(page[-1] + 1 - page[0]) if len(page) else 0
            found["windows"] += 1
            found["rows"] += len(new)
            found["page_bytes"] += PAGE_BYTES * len(page)
            found["span_bytes"] += span
            found["scans"] += bool(span) and x.plan(new.astype(np.int64)).nbytes > SCAN_SHARE * span
            found["rows_in_memory"] = max(found["rows_in_memory"], held)
        return found

    def close(self) -> None:
        """Close the store; idempotent."""
        self.ds.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
