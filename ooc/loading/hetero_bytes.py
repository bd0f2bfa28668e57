"""PURE: bytes that a sampled batch of several types takes, by itself and as a part of a shared scan."""

from dataclasses import dataclass
from typing import Any

from ooc.loading.batch_bytes import PIECES, ScanBytes, ScanSize
from ooc.loading.collate import SampledBatch
from ooc.loading.hetero import HeteroCollator
from ooc.loading.hetero_rows import TypedPreAggregation
from ooc.loading.read_strategy import AHEAD
from ooc.runtime.memory_plan import SHARES

_ROWS_ALIVE = 4.0
"""Rows of the first layer's width that a step holds at once for each of its destinations: sums over edge types, gradients"""
_ENTRY_BYTES = 6
"""of an entry of a scan, but for its row: its target, and a part of where each row's entries begin"""


@dataclass(frozen=True)
class HeteroBatchBytes:
    """What a batch of several types takes from sampling to the model, and the most it may take; see `BatchBytes`."""

    max_bytes: int
    collator: HeteroCollator
    edges_per_node: float = 1.0
    """see `BatchBytes`: rows of edges are not read"""
    typed: TypedPreAggregation | None = None
    """what batches are pre-aggregated by"""
    activations: float = 1.0
    """see `MemoryPlan.activations`"""

    def need(self, drawn: SampledBatch, drawing: int) -> int:
        """Bytes to compare with `max_bytes`. drawing: bytes of the batches being drawn, which have room of their own."""
        return self.nbytes(drawn) + self.collator.beside(drawn.subgraph) // SHARES

    def rows(self, drawn: SampledBatch) -> int:
        """Feature rows that the batch wants."""
        return sum(len(node) for name, node in drawn.subgraph.node.items() if self.collator.types[name].x is not None)

    def nbytes(self, drawn: SampledBatch) -> int:
        return drawn.subgraph.nbytes + self.collator.nbytes(drawn.subgraph, self.typed) + drawn.link_bytes

    def activation_bytes(self, drawn: SampledBatch) -> int:
        """Bytes that the model needs beside a batch: as much again, as `BatchBytes` says, or what its own widths say; and what
        its nodes have beside their fields."""
        beside, typed = self.collator.beside(drawn.subgraph), self.typed
        if typed is None:
            return int(self.activations * self.nbytes(drawn)) + beside
        destinations = sum(typed.destinations(drawn.subgraph).values())
        rows = (_ROWS_ALIVE + typed.step.more_rows) * destinations
        return beside + int(self.activations * 4 * round(rows * typed.step.channels))


@dataclass(frozen=True)
class HeteroScanBytes(ScanBytes):
    """What a batch of several types takes of a shared scan's memory."""

    batch: Any
    """`HeteroBatchBytes` of its batches, which are pre-aggregated"""

    @property
    def self_row_bytes(self) -> int:
        return 4 * self.batch.typed.width

    def size(self, drawn: SampledBatch, drawing: int) -> ScanSize:
        """See `ScanBytes.size`."""
        subgraph, typed = drawn.subgraph, self.batch.typed
        rows, own = typed.sizes(subgraph)
        wanted = sum(len(subgraph.edges[key].source) for key in typed.edge_types)
        self_rows = self.self_row_bytes * own
        kept = sum(subgraph.edges[key].nbytes for key in subgraph.edges if key not in typed.edge_types)
        first = sum(16 * sum(subgraph.num_edges[key][:-1]) + subgraph.edges[key].indptr.nbytes for key in typed.edge_types)
        others = sum(node.nbytes for name, node in subgraph.node.items() if name not in typed.types)
        sums = self.self_row_bytes * rows
        collated = self.batch.collator.nbytes(subgraph, typed) - self_rows - sums
        return ScanSize(
            sums=sums,
            self_rows=self_rows,
            rests=kept + first + others + 4 * rows + 28 * own + self.finding_bytes(rows) + drawn.link_bytes,
            entries=((4 if typed.num_rows < 2**31 else 8) + _ENTRY_BYTES) * (wanted + own),
            activations=self.batch.activation_bytes(drawn),
            besides=drawing + PIECES * self.piece_bytes + (AHEAD + 1) * collated,
            copied=self_rows,
            largest=sums,
        )
