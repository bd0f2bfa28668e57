"""What a loader has read."""

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReadCounts:
    """What was read so far, for batches not yet delivered too."""

    requested: int = 0
    """feature rows that sampled batches want, each time they do"""
    rows: int = 0
    nbytes: int = 0
    """bytes they took from the disk"""
    topology_nbytes: int = 0
    """bytes that sampling and edge features took from the disk, where they stay there"""
    together: int = 0
    """batches drawn together, whose edges these bytes are, yielded or not"""
    written: int = 0
    """bytes that were written to pack batches"""
    lock: Any = field(default_factory=threading.Lock)

    def add(
        self,
        rows: int = 0,
        nbytes: int = 0,
        *,
        requested: int = 0,
        topology: int = 0,
        together: int = 0,
        written: int = 0,
    ) -> None:
        with self.lock:
            self.rows += rows
            self.nbytes += nbytes
            self.requested += requested
            self.topology_nbytes += topology
            self.together += together
            self.written += written
