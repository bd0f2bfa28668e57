"""What a step was measured by: seconds and bytes of each op, and how fast the tiers are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.program import TensorPlacement, Value

TIERS = (TensorPlacement.RETAINED, TensorPlacement.DEVICE, TensorPlacement.DISK)
"""Where bytes can stand; in this order in all tuples of bytes by tier"""
MOVED = (TensorPlacement.RETAINED, TensorPlacement.DISK)
"""Where bytes are moved to and from: RAM by a GPU, and the disk"""
Bytes = tuple[int, int, int]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RangeBytes(NamedTuple):
    """Bytes of a range of destinations. source: a source, each counted once; own: a destination, with its edges on average."""

    source: float = 0.0
    own: float = 0.0


NOTHING = RangeBytes()


@dataclass(frozen=True)
class OpCost:
    """Seconds of an op, all nodes once, and bytes.

    rows_s: of the row-wise part (in the backward pass, of its gradients alone); sums_s: to add rows along the edges, and
    pass_s: to go through all rows for that, once a range of destinations; 0 of "gather". Of "gather", gathered: what the ranges
    in memory at a time take; kept: what autograd keeps of one range; hub: bytes of the node with the most edges.
    """

    rows_s: float = 0.0
    sums_s: float = 0.0
    pass_s: float = 0.0
    gathered: RangeBytes = NOTHING
    kept: RangeBytes = NOTHING
    hub: int = 0

    def kept_bytes(self, nodes: int, meetings: float = 1.0) -> int:
        """Bytes that autograd keeps for all nodes; meetings: see `Ranges`, of an op that gathers."""
        return round(nodes * (self.kept.own + self.kept.source * meetings))


class PackCost(NamedTuple):
    """Of a value that autograd keeps, COMPRESSED: its bytes, as a share of the others, and seconds to do so and to undo it."""

    share: float = 1.0
    pack_s: float = 0.0
    unpack_s: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Bytes a second, to and from a tier."""

    read: float
    written: float


@dataclass(frozen=True)
class StepProfile:
    """What ops cost and how fast tiers are. tiers: of the disk, where values may stand there, and of RAM, where a GPU moves
    there and back what autograd keeps; nbytes: of values, where that was measured; hidden: share of the shorter of computing
    and moving that goes on behind the longer, 0 to 1; packed: by value that may be COMPRESSED."""

    ops: Mapping[str, OpCost]
    tiers: Mapping[TensorPlacement, Speed]
    hidden: float
    nbytes: Mapping[str, int] = field(default_factory=dict)
    packed: Mapping[str, PackCost] = field(default_factory=dict)

    def op(self, name: str) -> OpCost:
        """Of an op; nothing where it was not measured."""
        return self.ops.get(name, OpCost())

    @property
    def places(self) -> tuple[TensorPlacement, ...]:
        """Where values can stand."""
        memory, device, disk = TIERS
        return (memory, *([device] if memory in self.tiers else []), *([disk] if disk in self.tiers else []))

    def size(self, value: Value) -> int:
        """Bytes of a value."""
        return self.nbytes.get(value.name, value.nbytes)
