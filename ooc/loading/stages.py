"""The stages of a loader's pipeline: Cursor -> SampledBatch -> LoadedBatch -> Data.

Stages know nothing of the loader, so that threads do not keep it alive.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from ooc.graph.blocks import EDGE_ID
from ooc.loading.collate import CollateStage
from ooc.loading.load_stage import BatchArray, LoadStage
from ooc.loading.read_counts import ReadCounts
from ooc.loading.sample_stage import SampleStage
from ooc.runtime.buffers import Buffers
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.arrays.rows import Rows

BUFFERS_KEPT, PINNED_KEPT = 1, 4
"""Memory of batches that the model is done with, for the rows of the next ones; page-locking takes long enough to keep more"""


@dataclass(frozen=True)
class BatchStages:
    """What is done to a batch, whatever its rows are read with."""

    sample: SampleStage
    load: LoadStage
    collate: CollateStage

    def apart(self) -> Self:
        """The same stages with counters and buffers of their own."""
        counts = ReadCounts()
        load = replace(self.load, counts=counts, buffers=Buffers(BUFFERS_KEPT))
        return replace(self, sample=replace(self.sample, counts=counts), load=load)

    def over(self, rows: Rows) -> Self:
        """The same stages with other rows for those of `LoadStage.x`."""
        return replace(self, load=replace(self.load, x=rows))

    @property
    def counts(self) -> ReadCounts:
        return self.load.counts

    @property
    def needs_slots(self) -> bool:
        """Whether a sampled batch's slots are needed for collation, once its edge ids are known where they are wanted."""
        there = () if self.sample.frontier is None else self.sample.frontier.columns
        return self.collate.collator.needs_slots({*there, *([EDGE_ID] if self.load.edge_features else [])})

    @property
    def disk_arrays(self) -> dict[int, BatchArray]:
        """The arrays that are read from disk, by their number in `LoadStage.arrays`."""
        return {number: each for number, each in enumerate(self.load.arrays) if each.on_disk}


def buffers_for(device: torch.device | None, budget: MemoryPlan) -> Buffers:
    """Memory for rows of batches, page-locked where they are copied to a GPU."""
    if device is None or device.type != "cuda":
        return Buffers(BUFFERS_KEPT)
    return Buffers(PINNED_KEPT, max_bytes=budget.batches, pinned=True)
