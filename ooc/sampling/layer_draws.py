"""Draws of one edge type for all nodes of a hop together; see `LayerWise`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.mapped_topology import request_in_edges
from ooc.runtime.keyed_random import numbered
from ooc.sampling import kernels, learned
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.importance import BYTES_A_SLOT, BYTES_A_SOURCE, Floats, InEdges
from ooc.sampling.kernels import Factors
from ooc.sampling.labor import Key
from ooc.sampling.layer_wise import (
    BYTES_A_DRAWN,
    LayerWise,
    NodeImportance,
    draw_sources,
    importance_of_nodes,
    keep_drawn,
    ladies_importance,
)
from ooc.sampling.learned import Policy
from ooc.sampling.left_out import NOTHING, LeftOut
from ooc.sampling.node_table import table_bytes
from ooc.sampling.source_draws import NO_LEFT_OUT, in_edges_of
from ooc.stores.arrays.rows import AnyArray, Ids

_MASK = (1 << 64) - 1


class LayerDrawn(NamedTuple):
    """What a hop's draw leaves beside its edges."""

    in_edges: Ids
    """int64[n]: of each node, those that might have been drawn"""
    score: Floats | None
    """see `Policy.score`; None where nothing learns"""


@dataclass(frozen=True)
class LayerDraws:
    """Draws sources of all in-edges of the nodes that a hop expands, but of those that are left out."""

    how: LayerWise
    indptr: Ids
    indices: AnyArray
    held_out: HeldOut | None
    num_sources: int
    cold: bool
    """whether edges are mapped from the disk and were not read ahead"""
    by_node: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    """the importance of every node; None: it depends on the batch"""

    @classmethod
    def of(
        cls, how: LayerWise, indptr: Ids, indices: AnyArray, held_out: HeldOut | None, num_sources: int, cold: bool
    ) -> "LayerDraws":
        """With the importance of all nodes. Raises IndexError with a damaged slot."""
        by_node = how.importance.values if isinstance(how.importance, NodeImportance) else None
        if isinstance(how.importance, str) and how.importance != "ladies":
            by_node = importance_of_nodes(how.importance, indptr, indices, num_sources)
        return cls(how, indptr, indices, held_out, num_sources, cold, by_node)

    def draw(
        self,
        node: Ids,
        bounds: tuple[int, int],
        budget: int,
        hop: int,
        key: Key,
        left_out: LeftOut | None,
        slot: Ids,
        indptr: Ids,
        stands_for: Factors | None,
    ) -> int | LayerDrawn:
        """Draw for node[start:stop] as `kernels.draw_weighted` does, `budget` sources in all (-1: all of them).

        Returns the in-edges of each node that might be drawn, and the score of a policy; or a slot that is damaged.
        """
        assert stands_for is not None
        assert isinstance(key, int)
        (start, stop), out = bounds, (*(left_out or NO_LEFT_OUT), *(self.held_out or NOTHING))
        if self.cold:
            request_in_edges(self.indices, self.indptr, node, start, stop)
        found = in_edges_of(self.indptr, self.indices, node[start:stop], self.num_sources, out)
        if not isinstance(found, InEdges):
            return found
        factor, score = np.full(len(found.node), float(budget != 0)), None
        policy = self.how.importance if isinstance(self.how.importance, Policy) else None
        if 0 < budget < len(found.node):
            seen = (
                None
                if policy is None
                else policy.look(found, node[start:stop], self.indptr[found.node + 1] - self.indptr[found.node], hop)
            )
            importance = self.importance(found) if seen is None else seen.importance
            stream = np.uint64(numbered(key, hop) & _MASK)
            room = np.empty(budget, np.float64), np.empty(budget, np.int64)
            limits = draw_sources(found.node, importance, stream, budget, *room, factor)
            score = None if policy is None or seen is None else policy.score(seen, factor > 0, *limits)
        into = slot, indptr[start : stop + 1], stands_for
        keep_drawn(found.indptr, found.slot, found.source, factor, self.how.normalize, *into)
        return LayerDrawn(np.diff(found.indptr), score)

    def importance(self, found: InEdges) -> Floats:
        """Of the sources of these in-edges, float64[u], all above 0."""
        if self.by_node is not None:
            return self.by_node[found.node].astype(np.float64)
        importance = np.empty(len(found.node))
        ladies_importance(found.indptr, found.source, importance)
        return importance

    def scratch_bytes(self, node: Ids, budget: int) -> int:
        """Bytes that drawing for these nodes takes beside the edges drawn: all of their in-edges."""
        slots = int(kernels.count_edges(self.indptr, node, 0, len(node), -1, False)[0])
        sources = min(slots, self.num_sources)
        most = sources if budget < 0 else min(budget, sources)
        a_source = BYTES_A_SOURCE + (learned.BYTES_A_SOURCE if isinstance(self.how.importance, Policy) else 0)
        return BYTES_A_SLOT * slots + a_source * sources + table_bytes(sources) + BYTES_A_DRAWN * most + 8 * len(node)

    def kept_bytes(self, fanout: Sequence[int]) -> int:
        """Nothing is kept from batch to batch."""
        return 0
