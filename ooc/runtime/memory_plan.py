"""PURE: one number for the process's memory -> a `MemoryPlan`, how many bytes each part may take.

What stays (the process, the topology's index, the labels, the model) is taken off first; the rest is divided among the
batches alive at once. So a batch's largest size is known before anything is sampled, and the sampler refuses a larger one.
A plan is made once, by `plan_memory`, when a run or a loader is opened, for its model and the columns it meets, and passed
on. Every share of the memory that some part of `ooc` takes stands here, with its reason.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from stores.arrays.members import Members
from stores.arrays.zarr_rows import BLOCK_BYTES, ForeignRows
from stores.dataset import Dataset
from stores.errors import BudgetError
from stores.sizes import format_bytes

LEAST_BATCH = 2**20
"""bytes: a budget that leaves less than this for a batch is refused"""
RUNTIME_BYTES = 150_000_000
"""allowed for what libraries allocate at first use (kernels they compile, threads' stacks and arenas), after `baseline`"""
SCRATCH_BYTES = 64 * 2**20
"""allowed for the buffers of the reads under way, of arrays that others wrote for two copies of a block of 16 MiB"""
SHARES = 5
"""the largest batches that memory must hold at once: one at the model, one sampled ahead, two in flight between them, and
the model's activations, reckoned as large as a batch: hidden rows are about as wide as features, for fewer nodes each layer"""
TOPOLOGY_SHARE = 3
"""Of the memory, a third at most for the topology's slots; where those to draw from fit, they are read in beforehand: edges on
the disk cost more than the batches their memory would hold (measured: twice the seconds a batch)"""
COLUMNS_SHARE = 32
"""Of the memory, where the slots do not fit and edges stay on disk, 1/32 for columns that are met in the map even so"""
FRONTIER_SHARE = 4
"""Of the batches' memory, 1/4 for the batches that are drawn together while edges stay on disk"""
DRAWN_SHARE = 2
"""Of the batches' memory, half for a batch drawn for a shared scan, which holds two batches' aggregates at least"""
SECOND_SHARE = 4
"""A second pipeline over the same rows at the same time has 1/4 of the batches' memory, on top of the first one's"""
PIECE_SHARE = 32
"""Of a scan's memory, 1/32 for a piece of the file: three are in memory at once"""
FREED_BYTES, FREED_SHARE = 80 * 10**6, 10
"""Of the batches' memory, for freed blocks that the C library keeps (measured: up to as much); where that is a tenth at most"""
HISTORY_SHARE = 4
"""Of the batches' memory, 1/4 for rows of histories or of the node memory: half of it in RAM, half waiting to be written"""
WINDOW_SHARE, ACTIVATION_SHARE = 10, 2
"""Of the batches' memory, tenths: one for a window of events being read, three for those on their way, one for what nodes
carry; and a half for the activations of the window at the model"""
PAIRS_SHARE = 2
"""Of the batches' memory, half for the pairs that EdgeBank remembers, before there are batches of a model"""
TRIAL_SHARE, TRIAL_BYTES, TRIAL_ROWS_SHARE = 2, 2**29, 4
"""Of the batches' memory, free before training: half, or so many bytes, for the batches of a trial, 1/4 for rows it reads"""


class BatchRoom(int):
    """Bytes that one batch may take: a part of what all have, so that a refusal can say what would do.

    parts: how many such parts there are; budget: the division that has them.

    >>> words_for(3 * 10**8, BatchRoom(budget.batches // 2, 2, budget))
    '300 MB of 217 MB (half of what 2 GB of memory leaves for batches; about 2.21 GB would do)'
    """

    parts: int
    budget: "MemoryPlan"

    def __new__(cls, nbytes: int, parts: int, budget: "MemoryPlan") -> "BatchRoom":
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
class MemoryPlan:
    """Bytes of memory by purpose; `print` shows the division as a table.

    >>> plan_memory(ds, model=12_000_000).max_batch
    217200000
    """

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
        """For all batches alive at once and the activations; superbatches and scans take what those leave."""
        return self.in_flight + 3 * self.max_batch

    @property
    def batch(self) -> BatchRoom:
        """`max_batch`, for who refuses larger ones."""
        return BatchRoom(self.max_batch, SHARES, self)

    @property
    def drawn(self) -> BatchRoom:
        """Of a batch drawn for a shared scan."""
        return BatchRoom(self.batches // DRAWN_SHARE, DRAWN_SHARE, self)

    @property
    def window(self) -> BatchRoom:
        """Of a window of events, on its way from the disk to the model."""
        return BatchRoom(self.batches // WINDOW_SHARE, WINDOW_SHARE, self)

    @property
    def window_activations(self) -> BatchRoom:
        """Of the activations of a window."""
        return BatchRoom(self.batches // ACTIVATION_SHARE, ACTIVATION_SHARE, self)

    @property
    def topology_in_ram(self) -> int:
        """Slots that take more stay on disk."""
        return self.memory // TOPOLOGY_SHARE

    @property
    def frontier(self) -> int:
        """For the batches drawn together while edges stay on disk."""
        return self.batches // FRONTIER_SHARE

    @property
    def freed(self) -> int:
        """For freed blocks that the C library keeps during shared scans; 0 where that would be too large a part."""
        return FREED_BYTES if self.batches >= FREED_SHARE * FREED_BYTES else 0

    @property
    def history(self) -> int:
        """For rows of histories in RAM, and as much again for those that wait to be written."""
        return self.batches // HISTORY_SHARE // 2

    @property
    def window_state(self) -> int:
        """The same for what nodes carry from window to window."""
        return self.batches // WINDOW_SHARE // 2

    @property
    def pairs(self) -> int:
        """For the pairs that EdgeBank remembers."""
        return self.batches // PAIRS_SHARE

    @property
    def trial_rows(self) -> int:
        """For rows that are read to time it, before training."""
        return self.batches // TRIAL_ROWS_SHARE

    def trial_batches(self, spare: int = 0) -> int:
        """For batches sampled before training. spare: bytes that scans have beside the batches' memory."""
        return min(TRIAL_BYTES, (self.batches + spare) // TRIAL_SHARE)

    def beside_history(self) -> Self:
        """The plan of batches beside histories."""
        left = HISTORY_SHARE - 1
        in_flight, max_batch = self.in_flight * left // HISTORY_SHARE, self.max_batch * left // HISTORY_SHARE
        return replace(self, in_flight=in_flight, max_batch=max_batch)

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
) -> MemoryPlan:
    """Divide `memory` bytes; all arguments are bytes, as `MemoryPlan` names them.

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
    return MemoryPlan(memory, baseline, topology, labels, model, RUNTIME_BYTES, scratch, in_flight, share, origin)


def plan_memory(dataset: Dataset, model: int = 0, columns: Collection[str] | None = None) -> MemoryPlan:
    """The plan for a run or a loader over a data set.

    All plans of a data set divide the same `Dataset.process_memory`: with `memory=None` half of what the machine had available.

    Args:
        model: Bytes that training adds to a model that is there already: gradients, optimizer state, what it keeps a node.
        columns: Of the graph, that batches will look up; None: all it has.

    Raises:
        BudgetError: Nothing is left for batches.

    >>> NeighborLoader(ds, [10, 10], budget=plan_memory(ds, columns=()))
    """
    process, graph = dataset.process_memory, dataset.graph
    share = TOPOLOGY_SHARE if graph.sampled_bytes() <= process.limit // TOPOLOGY_SHARE else COLUMNS_SHARE
    labels = 0 if dataset.labels is None else dataset.labels.nbytes
    return divide(
        process.limit,
        baseline=process.baseline,
        topology=graph.indptr.nbytes + min(graph.mapped_bytes(columns), process.limit // share),
        labels=labels + len(dataset.splits) * Members.nbytes_for(dataset.num_nodes),
        model=model,
        scratch=SCRATCH_BYTES + _large_chunks(dataset),
        origin=process.origin,
    )


def _large_chunks(dataset: Dataset) -> int:
    """Bytes that decoding features takes beyond `SCRATCH_BYTES`: chunks that somebody else made large come whole, and twice."""
    x = dataset.stored("x") if dataset.num_features else None
    return 2 * max(0, x.block_bytes - BLOCK_BYTES) if isinstance(x, ForeignRows) else 0
