"""PURE: what a run of tables will take: what is in memory, and what an epoch exchanges with the disk.

A run makes the same choices by the same numbers (`ooc.sampling.upcoming_buckets`, `ooc.training.table_memory`), so nothing is
measured, and seconds are not predicted.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from ooc.planning.over_ranks import RanksPlan
from ooc.runtime.memory_plan import MemoryPlan
from ooc.sampling.bucket_order import bucket_visits
from ooc.sampling.upcoming_buckets import UpcomingBuckets
from ooc.stores.sizes import format_bytes


@dataclass(frozen=True)
class Exchanged:
    """Parts of a table that an epoch reads and writes, without its checkpoints and scores."""

    read: int
    written: int


@dataclass(frozen=True, repr=False)
class TablePlan:
    """A run of tables; frozen, printed by `ooc plan`, JSON by `asdict`.

    unit: what the table is divided into, "rows" where each is read by itself; parts, part_bytes: how many, and of one;
    in_memory: of them at most; trained: at a time; first, later: what the first epoch exchanges and one behind it, at most
    where it is rows; link_bytes_read: of training links, or of the neighbors that they make, an epoch; facts: more of the run,
    name -> number.
    """

    budget: MemoryPlan
    unit: str
    rows: int
    width: int
    row_bytes: int
    """with the state of the optimizer"""
    parts: int
    part_bytes: int
    in_memory: int
    trained: int
    steps_per_epoch: int
    first: Exchanged
    later: Exchanged
    link_bytes_read: int
    spare: int
    """bytes of the memory that the run does not need"""
    facts: dict[str, int] = field(default_factory=dict)
    ranks: RanksPlan | None = None
    needs_more: ClassVar[int] = 0
    """see `ooc.planning.run_plan.Plan`: a plan of tables fits, or there is none"""

    @property
    def resident_rows(self) -> int:
        """Rows in memory at most; blocks of columns are of all rows."""
        of_rows = min(self.rows, -(-self.rows // self.parts) * self.in_memory)
        return self.rows if self.unit == "blocks of columns" else of_rows

    @property
    def table_bytes_read(self) -> int:
        """Of the table, an epoch behind the first."""
        return self.later.read * self.part_bytes

    @property
    def table_bytes_written(self) -> int:
        """Of the table, an epoch behind the first."""
        return self.later.written * self.part_bytes

    @property
    def disk_bytes(self) -> int:
        """Of the table on disk, at least; checkpoints and the best rows take up to four times as much."""
        return self.parts * self.part_bytes

    @property
    def peak_bytes(self) -> int:
        """Memory of the process, at most."""
        return self.budget.memory - self.spare

    @property
    def advice(self) -> str:
        """One sentence on what to change."""
        if self.in_memory >= self.parts:
            return "The whole table is in memory: an epoch reads and writes nothing of it."
        need = (self.parts - self.in_memory) * self.part_bytes
        return f"With {format_bytes(need)} more memory the whole table would stay there."

    def __str__(self) -> str:
        """The prediction in one line."""
        moved = f"{format_bytes(self.table_bytes_read)} read and {format_bytes(self.table_bytes_written)} written an epoch"
        parts = "" if self.unit == "rows" else f" in {self.parts:,} {self.unit}"
        table = f"{self.rows:,} rows{parts}, {self.in_memory:,} in memory"
        return f"{table}; {moved}, memory at most {format_bytes(self.peak_bytes)}; {self.advice}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def asdict(self) -> dict[str, Any]:
        """All figures by name."""
        names = ("resident_rows", "table_bytes_read", "table_bytes_written", "disk_bytes", "peak_bytes", "advice")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def exchanges(buckets: int, resident: int, room: int, seed: int, epochs: int) -> list[Exchanged]:
    """Return what each epoch reads and writes of the buckets of a table that begins anew.

    It follows `BucketTable`: the next bucket that is not in memory is read while a visit is trained, in a free place or that of
    the bucket that is used last from then on; a bucket that was never written is not read.

    Args:
        buckets: Number of buckets.
        resident: Buckets that a visit trains.
        room: Buckets that memory holds, one more than a visit has at least, or all.
        seed: Of the order.
        epochs: How many.

    >>> exchanges(4, 4, 4, seed=0, epochs=2)
    [Exchanged(read=0, written=0), Exchanged(read=0, written=0)]
    """
    memory, found = _Memory(room), []
    for epoch in range(epochs):
        visits = bucket_visits(buckets, resident, seed, epoch)
        memory.settle()
        memory.ahead = UpcomingBuckets(visits, bucket_visits(buckets, resident, seed, epoch + 1))
        before = memory.read, memory.written
        for number, visit in enumerate(visits):
            memory.visit(number, visit.resident)
        found.append(Exchanged(memory.read - before[0], memory.written - before[1]))
    return found


class _Memory:
    """Which buckets are in memory, on their way there, changed, and on disk."""

    def __init__(self, room: int) -> None:
        self.room, self.ahead = room, UpcomingBuckets()
        self.here, self.changed, self.on_disk = set[int](), set[int](), set[int]()
        self.coming: int | None = None
        self.read = self.written = 0

    def visit(self, number: int, resident: tuple[int, ...]) -> None:
        self.ahead.at = number
        for bucket in resident:
            if bucket not in self.here:
                if self.coming != bucket:
                    self.settle()
                    self._start(bucket, None)
                self.settle()
        following = self.ahead.next_missing(self.here) if self.coming is None else None
        if following is not None:
            self._start(following[1], following[0])
        self.changed |= set(resident)

    def settle(self) -> None:
        if self.coming is not None:
            self.here.add(self.coming)
            self.coming = None

    def _start(self, bucket: int, before: int | None) -> None:
        if len(self.here) >= self.room:
            leaves = self.ahead.leaving(self.here, before)
            if leaves is None:
                return
            self.here.remove(leaves)
            if leaves in self.changed:
                self.changed.remove(leaves)
                self.on_disk.add(leaves)
                self.written += 1
        self.read += bucket in self.on_disk
        self.coming = bucket
