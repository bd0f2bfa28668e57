"""Disk speed, measured between the runs of a benchmark, because a virtual disk's speed drifts by the minute.

Sequential reads of 1 MiB and random reads of 4 KiB, O_DIRECT with many in flight, over the files of node features or events:
with fio if installed, else with `ooc`'s own engine.
"""

import json
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.errors import ConfigError
from ooc.stores.io.engines import open_engine
from ooc.stores.io.read_plan import plan_reads
from tools.bench.lib.pages import PAGE_BYTES


@dataclass(frozen=True)
class Disk:
    """A measurement of the disk."""

    sequential_bytes_per_s: float
    random_pages_per_s: float
    """random 4 KiB reads, many in flight"""


SCAN_BYTES = 2**20
LEAST = 5
"""measurements of which the median is taken"""
_REQUEST_BYTES = 64 * 2**20
_DEPTH = {SCAN_BYTES: 32, PAGE_BYTES: 128}


class Rates:
    """Takes and stores measurements; `median` is used for bounds.

    `store` is the one whose rows `x` are read, or the column `events` of its events; `seconds` is per measurement.

    >>> rates = Rates("graph.ooc")
    >>> rates.measure()
    >>> rates.median().sequential_bytes_per_s
    """

    def __init__(self, store: Path | str, seconds: float = 3.0, events: str | None = None) -> None:
        import ooc

        with ooc.open(store) as ds:
            rows = ds.stored("x") if events is None else ds.events.rows(events)
            if not isinstance(rows, ShardedRows):
                raise ConfigError(f"the features of {store} are not plain shards: measure on a store that ooc ingested")
            self._segments = rows.segments
        self._seconds = seconds
        self._fio = shutil.which("fio") is not None
        self.taken: list[Disk] = []

    def measure(self) -> Disk:
        """Take one more measurement of both, starting elsewhere in the files."""
        number = len(self.taken)
        read = self._by_fio if self._fio else self._by_engine
        sequential, random = (read(block, number) for block in (SCAN_BYTES, PAGE_BYTES))
        self.taken.append(Disk(sequential * SCAN_BYTES, random))
        return self.taken[-1]

    def complete(self) -> None:
        """Measure until there are LEAST measurements."""
        while len(self.taken) < LEAST:
            self.measure()

    def median(self) -> Disk:
        """Median of each figure over all measurements."""
        return Disk(
            statistics.median(disk.sequential_bytes_per_s for disk in self.taken),
            statistics.median(disk.random_pages_per_s for disk in self.taken),
        )

    def asdict(self) -> dict[str, Any]:
        """The medians and all measurements, for JSON."""
        median = {"median": vars(self.median())} if self.taken else {}
        return {"by": "fio" if self._fio else "ooc's engine", **median, "taken": [vars(disk) for disk in self.taken]}

    def _by_fio(self, block: int, number: int) -> float:
        """Reads per second."""
        paths = [str(path).replace(":", r"\:") for path in self._segments.paths]
        turned = paths[number % len(paths) :] + paths[: number % len(paths)]
        how = {"rw": "read" if block == SCAN_BYTES else "randread", "bs": block, "iodepth": _DEPTH[block]}
        where = {"filename": ":".join(turned), "runtime": self._seconds, "randseed": number + 1}
        service = "sequential" if block == SCAN_BYTES else "random"
        fixed = "--name=bench --readonly --direct=1 --ioengine=io_uring --time_based --output-format=json"
        words = [f"--{key}={value}" for key, value in (how | where | {"file_service_type": service}).items()]
        done = subprocess.run(["fio", *fixed.split(), *words], check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"])

    def _by_engine(self, block: int, number: int) -> float:
        """Reads per second."""
        count = max(1, self._segments.total // block)
        engine = open_engine("auto", self._segments)
        rng = np.random.default_rng(number)
        most = max(1, min(_REQUEST_BYTES, self._segments.total // 2) // block)
        out = np.ones(most * block, np.uint8)
        at, reads, wall = int(rng.integers(count)), 0, 0.0
        try:
            while wall < self._seconds:
                in_order = np.arange(at, at + most) % count
                at += most
                ids = in_order if block == SCAN_BYTES else rng.choice(count, most, replace=False)
                plan = plan_reads(ids, block, count=count, gap_bytes=0, max_extent_bytes=block)
                begin = time.perf_counter()
                engine.gather(plan, out)
                wall += time.perf_counter() - begin
                reads += len(plan.length)
        finally:
            engine.close()
        return reads / wall
