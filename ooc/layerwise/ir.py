"""PURE: the values and ops of a model's layers over all nodes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

ValueRole = Literal[
    "features", "edges", "rows", "self", "sums", "initial", "pre_norm", "out", "saved_map", "saved", "saved_norm"
]
OpKind = Literal["map", "sum", "gather", "norm", "add"]
_NAMES: dict[ValueRole, str] = {
    "features": "x",
    "edges": "edges",
    "rows": "rows{}",
    "self": "root{}",
    "sums": "near{}",
    "initial": "initial",
    "pre_norm": "z{}",
    "out": "out",
    "saved_map": "saved-map",
    "saved": "saved{}",
    "saved_norm": "saved-norm{}",
}
"""As they stand in plans, in step logs and as files: they stay as they are"""


class ValueRef(NamedTuple):
    """A value by its role.

    role: "features" (the store's own), "edges", "rows" (that a layer sums or gathers), "self" (what its destinations add
    beside, where it maps before it sums), "sums" (over neighbors), "initial" (the first rows, which later layers return to),
    "pre_norm" (rows before a norm over all nodes), "out" (the model's), "saved..." (what autograd keeps of a map, a layer, a
    norm). layer: that reads it, or of "sums", "pre_norm" and "saved" that makes it; gradient: whether it is that one's
    gradient.
    """

    role: ValueRole
    layer: int = 0
    gradient: bool = False

    @property
    def name(self) -> str:
        """The text that stands for it in plans and files."""
        return "g" * self.gradient + _NAMES[self.role].format(self.layer)


FEATURES = ValueRef("features")


def names_of(refs: Iterable[ValueRef]) -> tuple[str, ...]:
    """The names of some values."""
    return tuple(ref.name for ref in refs)


@dataclass(frozen=True)
class Op:
    """A scan over all destinations, chunk by chunk. Values go by their names.

    kind: "map" (row by row), "sum" (the sums of a range of destinations, then row by row), "gather" (from the rows of a range's
    sources), "norm" (row by row, with statistics over all nodes that the op before it gathered), "add" (only the sums: of a
    block of columns, or of gradients for a "gather", whose ranges are others). summed: value whose rows are added along the
    edges, in the backward pass along the transposed ones: it is read whole once a range of destinations, the edges once in all.
    Of a "gather" it is the value whose rows are gathered, in the backward pass again where they are needed. reads, writes:
    values read and written once, in order; sums that are RECOMPUTED are not written. scatters: gradient whose rows a "gather"
    adds to in any order. repeats: in the backward pass the op whose row-wise part is run again where its "saved" is RECOMPUTED.
    turns: whether it is the last op of the forward pass, which computes the loss and its gradients at once.

    In the backward pass `summed` is the gradient of the sums of the layer above, and the sums go into this op's row-wise part
    as gradients of what it wrote.
    """

    name: str
    kind: OpKind
    layer: int
    backward: bool = False
    summed: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    scatters: str = ""
    repeats: str = ""
    turns: bool = False
