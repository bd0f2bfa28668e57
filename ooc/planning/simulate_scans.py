"""PURE: what a run in shared scans (`ooc.loading.shared_scan`) will take, from those that its first batches form and what each
stage costs.

The aggregates of a scan are made while those of the one before serve batches. `simulate_timeline` keeps both going side by
side: each has a speed while it is alone and another one beside the other, because they share the processor.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ooc.loading.collate import SampledBatch
from ooc.loading.shared_scan import SharedScans
from ooc.loading.shared_scan_plan import SharedScan, WaitingBatch
from ooc.planning.simulate_superbatches import BatchCosts, Lengths, Share, SimulatedReads, cost_of, planned
from ooc.stores.arrays.rows import Rows

MOST_SIMULATED = 256
"""Scans of an epoch that are simulated one by one; more go on like those"""
_ALL = 1 - 1e-6


class ScanLoad(NamedTuple):
    """What a scan wants of the disk and of the memory, or the mean of several.

    asked: rows its batches want, each time they do; nbytes, read_s: to read, and what that should take by the device's cost
    model. Bytes of memory: sums, of the aggregates and own rows; pair, of those of two such scans at once; rests, of what
    remains of its batches beside them; entries, as they come, one copy; table, of the entries in file order, with the rows that
    they need.
    """

    batches: float
    asked: float
    rows_read: float
    nbytes: float
    read_s: float
    sums: float
    pair: float
    rests: float
    entries: float
    table: float

    def part(self, batches: float, rows: Rows) -> "ScanLoad":
        """The same with so many batches, each of which wants as large a share of the file, regardless of what others want."""
        times = batches / self.batches
        nbytes = _covered(self.nbytes, rows.shape[0] * rows.row_bytes, times)
        return ScanLoad(*(value * times for value in self))._replace(
            batches=batches,
            rows_read=_covered(self.rows_read, rows.shape[0], times),
            nbytes=nbytes,
            read_s=self.read_s * nbytes / max(1, self.nbytes),
        )


def _covered(some: float, whole: float, times: float) -> float:
    """Of `whole`, what `times` as many batches want, where these want `some`."""
    whole = max(whole, some, 1.0)  # pages beyond the last row count too
    missed = 1 - min(some / whole, _ALL)
    return whole * (1 - missed**times)


@dataclass(frozen=True)
class SimulatedScans(SimulatedReads):
    """The scans of an epoch's first batches. most: batches that fit a scan. No row stays in memory, so all epochs are alike."""

    scans: tuple[ScanLoad, ...]
    most: float
    rows: Rows

    @property
    def groups(self) -> list[float]:
        return [scan.batches for scan in self.scans]

    def of(self, steps: float) -> Sequence[ScanLoad]:
        """The scans of an epoch of so many batches: those known, then their mean, then what is left."""
        ends = [0.0, *accumulate(self.groups)]
        if ends[-1] >= steps:
            known = [scan for scan, end in zip(self.scans, ends[1:], strict=True) if end <= steps]
            left = steps - ends[len(known)]
            return [*known, self.scans[len(known)].part(left, self.rows)] if left else known
        whole = list(self.scans[:-1])
        typical = ScanLoad(*np.mean(whole, axis=0).tolist()) if whole else self.scans[0].part(self.most, self.rows)
        left = steps - ends[len(whole)]
        count, rest = divmod(left, typical.batches)
        return [*whole, *[typical] * int(count), *([typical.part(rest, self.rows)] if rest >= 1 else [])]

    def epoch(self, costs: BatchCosts, steps: float) -> Share:
        if not steps:
            return Share()
        scans = self.of(steps)
        simulated = scans[:MOST_SIMULATED]
        line = simulate_timeline(simulated, costs)
        share = _share(simulated, line, costs, 0)
        if len(simulated) < len(scans):
            share += _share(simulated, line, costs, MOST_SIMULATED // 2).scaled(steps - share.steps)
        return share

    def peak_bytes(self, costs: BatchCosts, steps: float, row_bytes: int) -> int:
        """Of the aggregates of one scan, which serve batches, those of the next, which are made, and the entries of the one
        after, which are sorted."""
        none = ScanLoad(*[0.0] * len(ScanLoad._fields))
        known = [none, none, *self.of(steps), none, none]
        most = max(
            _rows(served, made) + (made.table + 2 * drawn.entries) + (served.rests + made.rests + drawn.rests)
            for served, made, drawn in zip(known, known[1:], known[2:], strict=False)
        )
        return round(most)


def _rows(served: ScanLoad, made: ScanLoad) -> float:
    """Bytes of aggregates and own rows of one scan that serves batches while the other one is made, at most."""
    return (served.pair + made.pair) / 2 if served.batches and made.batches else served.sums + made.sums


def simulate_scans(
    strategy: SharedScans, drawn: Iterable[SampledBatch], pool: int, lengths: Lengths, seen: Callable[[SharedScan], None]
) -> SimulatedScans:
    """Group `drawn` as training would, and count instead of reading; `seen` is called with each scan."""
    rows, memory = strategy.disk_rows, strategy.memory
    assert rows is not None
    asked: deque[tuple[int, int]] = deque()

    def prepared() -> Iterator[WaitingBatch]:
        for batch in drawn:
            one = strategy.waiting(batch)
            asked.append((memory.rows(batch), one.nbytes))
            yield one

    loads, cost, most = [], cost_of(rows), 1.0
    for scan in strategy.plan(prepared(), pool):
        # Batches like those of this scan, which may lack some, that fit one.
        fit = (pool - memory.reserved_bytes - scan.size.fixed) * len(scan.batches) // max(1, scan.size.kept)
        most = max(most, float(len(scan.batches)), fit)
        wanted = [asked.popleft() for _ in scan.batches]
        extents, nbytes = planned(scan.row.astype(np.int64), lengths)
        loads.append(
            ScanLoad(
                batches=len(scan.batches),
                asked=sum(rows for rows, _ in wanted),
                rows_read=len(scan.row),
                nbytes=nbytes,
                read_s=extents * cost.read_s + nbytes * cost.byte_s,
                sums=memory.self_row_bytes * (scan.num_rows + scan.num_self_rows),
                pair=scan.size.rows,
                rests=sum(rest.nbytes for rest in scan.batches),
                entries=sum(nbytes for _, nbytes in wanted),
                table=scan.nbytes,
            )
        )
        seen(scan)
    return SimulatedScans(tuple(loads), most, rows)


class ScanTimeline(NamedTuple):
    """done: when each scan's batches are through, in seconds from the first request; making, serving: seconds of each scan,
    and of its batches at the model."""

    done: tuple[float, ...]
    making: tuple[float, ...]
    serving: tuple[float, ...]


def simulate_timeline(scans: Sequence[ScanLoad], costs: BatchCosts) -> ScanTimeline:
    """Make scan after scan while their batches are served: two buffers, so the third waits until the first is served.

    A scan is put together once it is known who takes it: sampling begins when the last but one before it begins to serve.
    """
    pace = costs.pace
    assert pace is not None
    rate = costs.sample_s + costs.group_s
    count = len(scans)
    grouped = [scans[0].batches * rate] + ([(scans[0].batches + scans[1].batches) * rate] if count > 1 else [])
    done: list[float] = []
    making, served = [0.0] * count, [0.0] * count
    now, serving, made = 0.0, 0, 0
    batches, reads = scans[0].batches, scans[0].read_s
    while serving < count:
        may_make = made < count and made <= serving + 1
        makes, serves = may_make and grouped[made] <= now, made > serving
        slower = pace.beside if serves else pace.alone
        batch_s = pace.batch_s if makes else costs.together_s
        ends = [reads * slower] if makes else [grouped[made] - now] if may_make else []
        if serves:
            ends.append(batches * batch_s)
        step = min(ends)
        now += step
        if makes:
            making[made] += step
            reads -= step / slower if slower else reads
        if serves:
            served[serving] += step
            batches -= step / batch_s if batch_s else batches
        if makes and step == ends[0]:
            made += 1
            reads = scans[made].read_s if made < count else 0.0
        if serves and step == ends[-1]:
            done.append(now)
            serving += 1
            batches = scans[serving].batches if serving < count else 0.0
        if made > serving and len(grouped) == serving + 2 < count:  # begins to serve, so one more is put together
            grouped.append(max(grouped[-1], now) + scans[serving + 2].batches * rate)
    return ScanTimeline(tuple(done), tuple(making), tuple(served))


def _share(scans: Sequence[ScanLoad], line: ScanTimeline, costs: BatchCosts, begin: int) -> Share:
    assert costs.pace is not None
    some, pace = scans[begin:], costs.pace
    nbytes = sum(scan.nbytes for scan in some)
    return Share(
        steps=sum(scan.batches for scan in some),
        seconds=line.done[-1] - (line.done[begin - 1] if begin else 0.0),
        nbytes=nbytes,
        rows_read=sum(scan.rows_read for scan in some),
        rows_asked=sum(scan.asked for scan in some),
        read_s=sum(line.making[begin:]) * pace.reading,
        sum_s=sum(line.making[begin:]) * pace.pre_aggregation,
        model_s=sum(line.serving[begin:]),
    )
