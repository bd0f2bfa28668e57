"""PURE: what a run of packed batches (`ooc.loading.packed`) will take, from the groups that its first batches form.

A group is packed while the one before serves batches, as a shared scan is made, so the same timeline holds: a group's reads are
followed by writing its rows, and a batch is served once its rows are read back and added up.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from ooc.loading.collate import SampledBatch
from ooc.loading.packed import PackedBatches
from ooc.loading.packed_plan import DrawnBatch, PackDraft
from ooc.loading.packed_rows import GroupPass
from ooc.loading.read_strategy import grouped
from ooc.loading.shared_scan_plan import ScanDraft, SharedScan
from ooc.planning.simulate_scans import ScanLoad, SimulatedScans
from ooc.planning.simulate_superbatches import BatchCosts, Lengths, Share, cost_of, planned
from ooc.stores.arrays.rows import Rows


@dataclass(frozen=True)
class SimulatedPacked(SimulatedScans):
    """The groups of an epoch's first batches. packed: bytes of a batch on disk, which are written and read once; peak: bytes in
    memory beside the model's activations."""

    packed: float
    peak: int
    makes = "pack"

    def of(self, steps: float) -> Sequence[ScanLoad]:
        written_s = self.packed * cost_of(self.rows).byte_s
        return [load._replace(read_s=load.read_s + load.batches * written_s) for load in super().of(steps)]

    def epoch(self, costs: BatchCosts, steps: float) -> Share:
        pace = costs.pace
        assert pace is not None
        back_s = self.packed * cost_of(self.rows).byte_s * pace.beside
        served_s = costs.collate_s + back_s
        own = replace(
            costs, together_s=max(costs.together_s, served_s), pace=replace(pace, batch_s=max(pace.batch_s, served_s))
        )
        share = super().epoch(own, steps)
        moved = steps * self.packed
        return replace(share, nbytes=share.nbytes + moved, read_s=share.read_s + steps * back_s, packed_nbytes=moved)

    def peak_bytes(self, costs: BatchCosts, steps: float, row_bytes: int) -> int:
        return self.peak


def simulate_packed(
    strategy: PackedBatches, drawn: Iterable[SampledBatch], pool: int, lengths: Lengths, seen: Callable[[SharedScan], None]
) -> SimulatedPacked:
    """Group `drawn` as training would, and count instead of reading and writing; `seen` is called, for each group, with a scan
    of its first batch."""
    rows, memory, scans = strategy.disk_rows, strategy.memory, strategy.scans
    assert rows is not None
    asked: deque[tuple[int, SharedScan | None]] = deque()
    sizes: list[tuple[int, int, int]] = []  # of each batch: bytes of disk, rows, bytes of memory to serve it

    def prepared() -> Iterator[DrawnBatch]:
        for batch in drawn:
            one, scan = strategy.waiting(batch), None
            if not sizes:
                draft = ScanDraft(1, memory.scan.self_row_bytes)
                draft.add(scans.waiting(batch))
                scan = draft.finish()
            asked.append((memory.rows(batch), scan))
            sizes.append((one.packed_bytes(memory), len(one.row), one.size.memory - one.size.activations))
            yield one

    loads, cost, first = [], cost_of(rows), None
    drafts = (PackDraft(pool, memory, 0, 0) for _ in repeat(None))
    for group in grouped(prepared(), drafts):
        wanted = [asked.popleft() for _ in group.batches]
        first = wanted[0][1] if first is None else first
        found = [(len(row), *planned(row, lengths)) for row in GroupPass(group, rows, memory).rows()]
        rows_read, extents, nbytes = map(sum, zip(*found, strict=True))
        load = ScanLoad(*[0.0] * len(ScanLoad._fields))._replace(
            batches=len(group.batches), asked=sum(count for count, _ in wanted), rows_read=rows_read, nbytes=nbytes
        )
        loads.append(load._replace(read_s=extents * cost.read_s + nbytes * cost.byte_s))
        assert first is not None
        seen(first)
    return SimulatedPacked(tuple(loads), *_most(strategy, pool, loads, sizes))


def _most(
    strategy: PackedBatches, pool: int, loads: Sequence[ScanLoad], sizes: Sequence[tuple[int, int, int]]
) -> tuple[float, Rows, float, int]:
    """`SimulatedPacked.most`, `rows`, `packed` and `peak`."""
    memory = strategy.memory
    packed, count, _ = np.mean(sizes, axis=0)
    serving = max(size for _, _, size in sizes)
    fixed, each = memory.group_bytes(0, 0, 4), memory.group_bytes(1, round(count), 4) - memory.group_bytes(0, 0, 4)
    fit = max(1.0, min(memory.group_disk / packed, (pool - serving - fixed) / each))
    most = max(fit, *(load.batches for load in loads))
    assert strategy.disk_rows is not None
    return most, strategy.disk_rows, float(packed), round(serving + fixed + most * each)
