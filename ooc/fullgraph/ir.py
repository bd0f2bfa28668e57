"""PURE: what an exact training step makes, what needs it, and where each of it stands until then.

A step runs a program: its forward ops, layer by layer, then its backward ops in the opposite order. Most values are made in
the forward pass and needed again in the backward pass. In between a value is in memory, on disk, or recomputed. (The four
placements of FlexGNN.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from ooc.layerwise.ir import Op, ValueRef


class TensorPlacement(StrEnum):
    """Where a value is from its last use in the forward pass to its use in the backward pass."""

    RETAINED = "retained"
    """in the memory of the device that computes; RAM on a machine without a GPU"""
    HOST = "host"
    """in RAM beside a device; absent where the device is the CPU"""
    DISK = "disk"
    RECOMPUTED = "recomputed"
    """gone, and made again by its op from what that reads"""


ValueKind = Literal["features", "edges", "rows", "sums", "saved", "gradient"]


@dataclass(frozen=True)
class Value:
    """Something with a row for every node that an op writes and others read.

    kind: "features" (the store's own: on disk already, never written), "edges" (in the two orders that sums need; made once),
    "rows" (what a layer reads), "sums" (over neighbors), "saved" (what autograd keeps of an op's row-wise part beside its
    inputs; nbytes is an estimate until it is measured), "gradient" (of rows or sums; only within the backward pass). columns:
    of a row, 0 for "saved" and "edges". nbytes: of all rows. made_by: op, "" for features and edges. last_forward: the last op
    in the forward pass that reads it, "" for gradients and saved. backward: ops in the backward pass that read it, in order;
    without any it is gone after `last_forward`. constant: the same in every epoch, so it is made once. placements: allowed.
    """

    name: str
    kind: ValueKind
    columns: int
    nbytes: int
    made_by: str
    last_forward: str
    backward: tuple[str, ...]
    placements: tuple[TensorPlacement, ...]
    constant: bool = False


@dataclass(frozen=True)
class Program:
    """A training step. itemsize: bytes of a number; cell_rows: ranges of destinations are multiples of it, but the last."""

    num_nodes: int
    num_edges: int
    itemsize: int
    cell_rows: int
    values: tuple[Value, ...]
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]

    def value(self, name: str) -> Value:
        """The value of that name. Raises KeyError."""
        return {value.name: value for value in self.values}[name]

    def op(self, name: str) -> Op:
        """The op of that name. Raises KeyError."""
        return {op.name: op for op in (*self.forward, *self.backward)}[name]

    def inputs(self, name: str) -> tuple[str, ...]:
        """The values that one is made of, by its op."""
        value = self.value(name)
        if not value.made_by:
            return ()
        op = self.op(value.made_by)
        if value.kind == "sums":
            return (op.summed, "edges")
        own = (ValueRef("sums", op.layer).name,) if op.kind == "sum" else (op.summed,) if op.kind == "gather" else ()
        return (*own, *op.reads)

    def uses(self, placement: "Placement") -> dict[str, tuple[str, ...]]:
        """By value the ops in the backward pass that need it, in order: that read it, or something that is RECOMPUTED of it."""
        order = {op.name: number for number, op in enumerate(self.ops)}
        found = {value.name: set(value.backward) for value in self.values}
        for value in reversed(self.values):  # each after those that it is made of
            if placement.of(value.name) is TensorPlacement.RECOMPUTED and value.kind in ("rows", "sums"):
                for name in self.inputs(value.name):
                    found[name] |= found[value.name]
        return {name: tuple(sorted(ops, key=order.__getitem__)) for name, ops in found.items()}

    @property
    def added_to(self) -> frozenset[str]:
        """Gradients that an op adds to after another made them: on disk they take their place twice, what was added last and
        what was there before, so that an op that was killed can add once more."""
        made_by = {value.name: value.made_by for value in self.values}
        return frozenset(name for op in self.ops for name in op.writes if made_by[name] != op.name)

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of a step, in order."""
        return (*self.forward, *self.backward)


@dataclass(frozen=True)
class Placement:
    """A placement for every value that has a choice. passing: where a RECOMPUTED value is while it is used, RETAINED or DISK
    (DISK where it is not named). ranges: bytes for the two ranges of a "gather" op that are in memory at a time, without what
    autograd keeps of them, by op; where an op is not named, see `gathered_share`."""

    placements: Mapping[str, TensorPlacement]
    passing: Mapping[str, TensorPlacement] = field(default_factory=dict)
    ranges: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str) -> TensorPlacement:
        """Of a value; RETAINED where none is given."""
        return self.placements.get(name, TensorPlacement.RETAINED)

    def standing(self, name: str) -> TensorPlacement:
        """The tier that a value is in while it is used: RETAINED, HOST or DISK."""
        where = self.of(name)
        return self.passing.get(name, TensorPlacement.DISK) if where is TensorPlacement.RECOMPUTED else where
