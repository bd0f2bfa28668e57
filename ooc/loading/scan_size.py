"""PURE: what two shared scans take of the memory, one serving batches while the other is made."""

from dataclasses import dataclass

COPIES = 2
"""Batches of a scan that have their own copy of their destinations' rows: at the model, and ahead of it"""
_ENTRY_COPIES = 3
"""of a scan's entries: those under way; of the next scan the batches', or one copy, being put in order into another"""


@dataclass(frozen=True)
class ScanSize:
    """What two scans (`ooc.loading.shared_scan_plan`) take, one serving batches while the other is made. Bytes."""

    sums: int
    """of a scan's batches, the destinations' own rows left out"""
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
        """What more batches do not add to. The first one of a scan needs no copy of its destinations' rows."""
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
