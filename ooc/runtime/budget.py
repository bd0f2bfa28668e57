"""PURE: one number for the process's memory -> how many bytes each part may take.

What stays (the process, the topology's index, the labels, the model) is taken off first; the rest is divided among the
batches alive at once. So a batch's largest size is known before anything is sampled, and the sampler refuses a larger one.
"""

from dataclasses import dataclass

from stores.errors import BudgetError
from stores.sizes import format_bytes

LEAST_BATCH = 2**20
"""bytes: a budget that leaves less than this for a batch is refused"""
RUNTIME_BYTES = 150_000_000
"""allowed for what libraries allocate at first use (kernels they compile, threads' stacks and arenas), after `baseline`"""
COPIES = 2
"""Batches of a sweep that have their own copy of their destinations' rows: at the model, and ahead of it"""
_ENTRY_COPIES = 3
"""of a sweep's entries: those under way; of the next sweep the batches', or one copy, being put in order into another"""
SHARES = 5
"""the largest batches that memory must hold at once: one at the model, one sampled ahead, two in flight between them, and
the model's activations, reckoned as large as a batch: hidden rows are about as wide as features, for fewer nodes each layer"""


class BatchRoom(int):
    """Bytes that one batch may take: a part of what all have, so that a refusal can say what would do.

    parts: how many such parts there are; budget: the division that has them.

    >>> words_for(3 * 10**8, BatchRoom(budget.batches // 2, 2, budget))
    '300 MB of 217 MB (half of what 2 GB of memory leaves for batches; about 2.21 GB would do)'
    """

    parts: int
    budget: "Budget"

    def __new__(cls, nbytes: int, parts: int, budget: "Budget") -> "BatchRoom":
        room = super().__new__(cls, nbytes)
        room.parts, room.budget = parts, budget
        return room


_ROUND_UP = 1.02
"""so that what is printed with three digits does do"""
_PARTS = {
    1: "all",
    2: "half of what",
    4: "beside another loader of these rows a quarter of what",
    5: "a fifth of what",
    10: "a tenth of what",
}


def words_for(need: int, room: int) -> str:
    """How much is wanted, and how much there is: "300 MB of 217 MB", and where a `BatchRoom` tells it, why and what would
    do."""
    words = f"{format_bytes(need)} of {format_bytes(room)}"
    if not isinstance(room, BatchRoom):
        return words
    memory = room.budget.memory
    enough = format_bytes((memory + room.parts * (need - room)) * _ROUND_UP)
    return f"{words} ({_PARTS[room.parts]} {format_bytes(memory)} of memory leaves for batches; about {enough} would do)"


@dataclass(frozen=True)
class ScanSize:
    """What two sweeps (`ooc.loading.shared_scan_plan`) take, one serving batches while the other is made. Bytes."""

    sums: int
    """of a sweep's batches, the destinations' own rows left out"""
    self_rows: int
    """those rows, each once: batches share them"""
    entries: int
    """of what its batches want of the rows"""
    activations: int
    """of the largest batch"""
    besides: int
    """what is drawn and read meanwhile"""
    copied: int = 0
    """the destinations' own rows of the largest batch"""
    batches: int = 1

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.kept + self.fixed

    @property
    def fixed(self) -> int:
        """What more batches do not add to. The first one of a sweep needs no copy of its destinations' rows."""
        return self.activations + self.besides + min(COPIES, self.batches - 1) * self.copied

    @property
    def kept(self) -> int:
        """Of the batches that wait, in both."""
        return 2 * (self.sums + self.self_rows) + _ENTRY_COPIES * self.entries

    def joined(self, other: "ScanSize", self_rows: int) -> "ScanSize":
        """With more batches; self_rows: of both together."""
        activations, besides = max(self.activations, other.activations), max(self.besides, other.besides)
        copied, batches = max(self.copied, other.copied), self.batches + other.batches
        return ScanSize(self.sums + other.sums, self_rows, self.entries + other.entries, activations, besides, copied, batches)


@dataclass(frozen=True)
class Budget:
    """Bytes of memory by purpose; `print` shows the division as a table."""

    memory: int
    """the whole process"""
    baseline: int
    """interpreter, libraries and what the program holds already"""
    topology: int
    """indptr, and as much of the slots as may be mapped at once"""
    labels: int
    """labels, touched at random by every batch, and the splits"""
    model: int
    """parameters, gradients and optimizer state"""
    runtime: int
    """what libraries allocate at first use"""
    scratch: int
    """buffers of the reads under way"""
    in_flight: int
    """batches being read, collated or waiting: the pipeline's bound"""
    max_batch: int
    """the largest batch; one of these is at the model, one sampled ahead, and one's worth the model's activations"""
    origin: str = ""
    """where `memory` comes from, for people"""

    @property
    def batches(self) -> int:
        """For all batches alive at once and the activations; windows, where rows come from the disk, take what those leave."""
        return self.in_flight + 3 * self.max_batch

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for, as people read them; those indented are within the one above."""
        return {
            f"memory {self.origin}".strip(): self.memory,
            "  process": self.baseline,
            "  topology": self.topology,
            "  labels": self.labels,
            "  model": self.model,
            "  libraries": self.runtime,
            "  read buffers": self.scratch,
            "  batches, windows, activations": self.batches,
            "    of it a batch at most": self.max_batch,
        }

    def __str__(self) -> str:
        rows = self.parts()
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {format_bytes(size):>8}" for name, size in rows.items())


def divide(
    memory: int,
    *,
    baseline: int,
    topology: int = 0,
    labels: int = 0,
    model: int = 0,
    scratch: int = 0,
    origin: str = "",
) -> Budget:
    """Divide `memory` bytes; all arguments are bytes, as `Budget` names them.

    The parts sum up to `memory` but for rounding. Raises BudgetError, naming the least memory that does, where what stays
    leaves no room for batches. Activations beyond a batch's size (many wide layers) are not foreseen.

    >>> divide(2_000_000_000, baseline=700_000_000, topology=64_000_000).in_flight
    434400000
    """
    stays = {
        "the process": baseline,
        "the topology": topology,
        "labels": labels,
        "the model": model,
        "libraries": RUNTIME_BYTES,
    }
    fixed = sum(stays.values()) + scratch
    share = (memory - fixed) // SHARES
    if share < LEAST_BATCH:
        named = ", ".join(f"{name} {format_bytes(size)}" for name, size in stays.items() if size)
        least = fixed + SHARES * LEAST_BATCH
        raise BudgetError(
            f"{format_bytes(memory)} of memory leaves nothing for batches: {named} and read buffers "
            f"{format_bytes(scratch)} stay; give at least {format_bytes(least * 1.05)}"
        )
    in_flight = 2 * share
    return Budget(memory, baseline, topology, labels, model, RUNTIME_BYTES, scratch, in_flight, share, origin)
