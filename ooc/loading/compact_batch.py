"""Sampled batches that wait for their superbatch: the same in a third of the memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.loading.collate import SampledBatch

_NOTHING = np.empty(0, np.int64)
_WIDE = {"edge_id": np.int64}
"""columns that wait as int32 where they fit, and their dtype"""


@dataclass(frozen=True)
class CompactBatch:
    """A sampled batch in a superbatch, in a third of its size: nodes are rows of the superbatch, and numbers are int32."""

    drawn: SampledBatch
    """its subgraph has no arrays"""
    row: NDArray[np.int32]
    """int32[n]: positions of its nodes among the superbatch's"""
    indptr: NDArray[Any]
    source: NDArray[Any]
    slot: NDArray[Any]
    columns: dict[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes the arrays hold."""
        stands_for = self.drawn.subgraph.stands_for
        arrays = (self.drawn.position, self.row, self.indptr, self.source, self.slot, stands_for, *self.columns.values())
        return sum(array.nbytes for array in arrays if array is not None)

    def unpack(self, node: NDArray[Any]) -> SampledBatch:
        """The batch as it was drawn, but for slots that nobody needs; node: [u], the superbatch's."""
        bare = self.drawn.subgraph
        node, indptr, source, slot = (array.astype(np.int64) for array in (node[self.row], self.indptr, self.source, self.slot))
        columns = {name: array.astype(_WIDE.get(name, array.dtype)) for name, array in self.columns.items()}
        subgraph = Subgraph(node, indptr, source, slot, bare.num_nodes, bare.num_edges, bare.stands_for, columns)
        return SampledBatch(self.drawn.step, self.drawn.last, self.drawn.position, subgraph)

    def renumbered(self, rank: NDArray[np.int32]) -> "CompactBatch":
        """The batch with its nodes numbered anew: row r of the superbatch is now rank[r] (int32[u])."""
        return CompactBatch(self.drawn, rank[self.row], self.indptr, self.source, self.slot, self.columns)


def pack(drawn: SampledBatch, row: NDArray[np.int32], slots: bool) -> CompactBatch:
    """The batch with its nodes at `row` (int32[n]) of the superbatch; slots: whether those it was drawn from are needed."""
    full = drawn.subgraph
    bare = Subgraph(_NOTHING, _NOTHING, _NOTHING, _NOTHING, full.num_nodes, full.num_edges, full.stands_for)
    indptr, source, slot = (narrow(array) for array in (full.indptr, full.source, full.slot if slots else _NOTHING))
    columns = {name: narrow(array) if name in _WIDE else array for name, array in full.columns.items()}
    return CompactBatch(SampledBatch(drawn.step, drawn.last, drawn.position, bare), row, indptr, source, slot, columns)


def narrow(array: NDArray[np.int64]) -> NDArray[Any]:
    """As int32 where all of it fits."""
    fits = len(array) == 0 or int(array.max()) < 2**31
    return array.astype(np.int32) if fits else array
