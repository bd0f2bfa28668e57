"""The trace of a run of `tools.bench.sampled.steps`, recomputed: batches are a function of (seed, epoch, step), and
superbatches of those and the memory division. So nothing is recorded during the timed run."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import ooc
from ooc.loading.collate import SampledBatch
from ooc.loading.read_strategy import ReadStrategy, first_alone
from ooc.loading.shared_scan import SharedScans
from ooc.loading.superbatch import Superbatches
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.dataset import Dataset
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
    strategy: ReadStrategy
    budget: MemoryPlan
    batches: int

    @classmethod
    def of(cls, store: Path | str, run: dict[str, Any]) -> Self:
        """Of what `tools.bench.sampled.steps` printed of a run from disk."""
        ds = ooc.open(store, memory=run["budget"]["memory"])  # what loaders do depends on there being a limit
        try:
            budget = MemoryPlan(**run["budget"])
            seeds = seeds_of_run(ds.num_nodes, run["batch_size"], run["batches"], run["seed"])
            sums, labor = run.get("sums", 0), run.get("labor", 0)
            loader = loader_of(ds, seeds, run["fanout"], run["batch_size"], budget, sums, labor=labor)
            return cls(ds, loader.strategy, budget, run["batches"])  # without a pipeline: nothing is read
        except BaseException:
            ds.close()
            raise

    @property
    def row_bytes(self) -> int:
        """Bytes of a feature row as stored."""
        assert self.strategy.disk_rows is not None
        return self.strategy.disk_rows.row_bytes

    def drawn(self) -> Iterator[SampledBatch]:
        """The sampled batches."""
        return self.strategy.stages.sample.batches(Cursor(0, step) for step in range(self.batches))

    def nodes(self) -> Iterator[NDArray[np.int64]]:
        """int64[n], the node ids of every batch."""
        return (drawn.subgraph.node for drawn in self.drawn())

    def reads(self) -> Iterator[tuple[NDArray[Any], int]]:
        """Of every superbatch or scan: the rows that it had to read, int[u] ascending, and how many were in memory at once."""
        strategy, pool = self.strategy, self.strategy.pool(self.budget)
        alone = first_alone([each.rows for each in strategy.stages.disk_arrays.values()], Clock())
        if isinstance(strategy, SharedScans):
            for scan in strategy.plan(map(strategy.waiting, self.drawn()), pool, alone):
                yield scan.row, 2 * 2 * scan.num_rows  # two rows a destination, and two scans
        elif isinstance(strategy, Superbatches):
            for superbatch in replace(strategy.planner(pool), first_alone=alone).plan(self.drawn()):
                rows = superbatch.arrays[0]
                yield rows.missing, rows.used.limit

    def planned(self) -> dict[str, int]:
        """What the run's own superbatches or scans had to read.

        windows, rows; page_bytes: of the pages of each window's rows that were not in memory, summed over windows; span_bytes:
        from the first of those pages to the last; scans: windows whose plan reads nearly all of that; rows_in_memory: at
        most, at once.
        """
        x = self.strategy.disk_rows
        assert isinstance(x, ShardedRows), "rows are read from shards"
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
