"""Draws of one edge type by random numbers of the sources; see `Labor`."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ooc.graph.mapped_topology import request_in_edges
from ooc.sampling import kernels
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.importance import (
    BYTES_A_DESTINATION,
    BYTES_A_SLOT,
    BYTES_A_SOURCE,
    BYTES_A_WEIGHT,
    InEdges,
    collect,
    draw_by_importance,
    importance_of,
)
from ooc.sampling.kernels import Factors
from ooc.sampling.labor import MANY, KeptDraws, Key, Labor, Rule, Scratch, draw_by_source
from ooc.sampling.left_out import NOTHING, LeftOut
from ooc.sampling.node_table import Table, table_bytes
from ooc.stores.arrays.rows import AnyArray, Ids

_NO_WEIGHT = _NO_FACTORS = np.empty(0, np.float32)
NO_LEFT_OUT = LeftOut(np.empty(0, np.int64), np.empty(0, np.int64))
Out = tuple[Ids, Ids, np.uint64, float, NDArray[np.uint64]]
"""what is left out and held out, as kernels take it"""
_table = Table()
"""of the sources of a hop, for their importance"""


_PLACES = 2**16
"""draws that a thread keeps for each fan-out: 3.7 MB at 10, and 5.2 more for their sources where edges stay on disk"""
NO_DRAWS = KeptDraws.empty(0, 0)


def num_places(labor: Labor, fanout: int, num_slots: int) -> int:
    """Draws that a thread keeps for a fan-out, without weights: no more than there are nodes of enough in-edges."""
    if labor.batch_dependency == 1 or labor.iterations != 0 or fanout <= 0:
        return 0
    most = num_slots // (MANY * fanout)
    return min(_PLACES, 1 << most.bit_length()) if most else 0


def kept_bytes(labor: Labor, fanout: Sequence[int], num_slots: int, weighted: bool, sources: bool = False) -> int:
    """Bytes of the draws that a thread keeps for batches that draw alike, of an edge type.

    fanout: of its hops; num_slots: its edges; weighted: whether it is drawn by weight; sources: whether sources are kept too.
    """
    if weighted:
        return 0
    tables = {(k, 0 if labor.layer_dependency else hop) for hop, k in enumerate(fanout)}
    return sum(KeptDraws.nbytes_for(num_places(labor, k, num_slots), k, sources) for k, _ in tables)


class RepeatedDraws(threading.local):
    """The draws that a thread keeps for batches that draw alike, of each fan-out (and hop, where layers do not)."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, bool], tuple[bytes, KeptDraws]] = {}

    def of(self, places: int, fanout: int, hop: int, keys: NDArray[np.uint64], sources: bool) -> KeptDraws:
        """Those made by these keys: empty when the keys have changed."""
        made_by, kept = self._found.get((fanout, hop, sources), (b"", None))
        if kept is None:
            kept = KeptDraws.empty(places, fanout, sources)
        elif made_by != keys.tobytes():
            kept.clear()
        self._found[fanout, hop, sources] = keys.tobytes(), kept
        return kept


def in_edges_of(
    indptr: Ids, indices: AnyArray, node: Ids, num_sources: int, out: Out, weight: AnyArray = _NO_WEIGHT
) -> InEdges | int:
    """All in-edges of the nodes (int64[n]) but those left out, held out and of weight 0, or a slot that is damaged or of an
    invalid weight. weight: [E], or empty."""
    most = int(kernels.count_edges(indptr, node, 0, len(node), -1, False)[0])
    own, slots, source = np.zeros(len(node) + 1, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    weights = np.empty(most if len(weight) else 0)
    bad = int(collect(indptr, indices, weight, node, num_sources, *out, own, slots, source, weights))
    if bad >= 0:
        return bad
    distinct = np.empty(min(most, num_sources), np.int64)
    try:
        _table.refill(len(distinct), distinct, 0)
        count = int(kernels.relabel(_table.entries, _table.stamp, source, 0, int(own[-1]), distinct, 0))
    finally:
        _table.trim()
    return InEdges(own, slots, source, distinct[:count], weights)


@dataclass(frozen=True)
class SourceDraws:
    """Draws in-edges at nodes of the target type, among those that are not left out: the sources of all in-edges are read."""

    labor: Labor
    indptr: Ids
    indices: AnyArray
    weight: AnyArray | None
    """[E] to draw in proportion to"""
    held_out: HeldOut | None
    num_sources: int
    type_number: int
    """of the sources' type, each of which has random numbers of its own"""
    cold: bool
    """whether edges are mapped from the disk and were not read ahead"""
    repeated: RepeatedDraws = field(default_factory=RepeatedDraws, repr=False, compare=False)

    def draw(
        self,
        node: Ids,
        bounds: tuple[int, int],
        fanout: int,
        hop: int,
        key: Key,
        left_out: LeftOut | None,
        slot: Ids,
        indptr: Ids,
        stands_for: Factors | None,
    ) -> int:
        """Draw at node[start:stop] as `kernels.draw_weighted` does; returns -1, or a slot that is damaged or of an invalid
        weight."""
        if self.cold:
            for column in (self.indices, self.weight):
                if column is not None:
                    request_in_edges(column, self.indptr, node, *bounds)
        fanout = min(fanout, len(self.indices))  # what is worked in has as many places
        out = (*(left_out or NO_LEFT_OUT), *(self.held_out or NOTHING))
        if self.labor.iterations != 0 and fanout > 0:
            assert stands_for is not None
            start, stop = bounds
            keys, own = self.labor.keys(key, self.type_number, hop), (slot, indptr[start : stop + 1], stands_for)
            return self._draw_by_importance(node[start:stop], fanout, keys, out, *own)
        rule = self.rule(key, fanout, hop)
        weight = _NO_WEIGHT if self.weight is None else self.weight
        factors = _NO_FACTORS if stands_for is None else stands_for
        given, how = (self.indptr, self.indices, weight, node, *bounds, *(left_out or NO_LEFT_OUT)), (rule, Scratch.of(fanout))
        return int(draw_by_source(*given, *how, self.kept(rule, hop), slot, indptr, factors))

    def rule(self, key: Key, fanout: int, hop: int) -> Rule:
        """How a batch of this key draws in a hop."""
        return Rule(fanout, self.labor.keys(key, self.type_number, hop), *(self.held_out or NOTHING))

    def kept(self, rule: Rule, hop: int, sources: bool = False) -> KeptDraws:
        """The draws that this thread keeps for batches that draw alike; sources: whether with their sources."""
        places = 0 if self.weight is not None else num_places(self.labor, rule.fanout, len(self.indices))
        if not places:
            return NO_DRAWS
        return self.repeated.of(places, rule.fanout, 0 if self.labor.layer_dependency else hop, rule.keys, sources)

    def kept_bytes(self, fanout: Sequence[int], sources: bool = False) -> int:
        """See `kept_bytes`."""
        return kept_bytes(self.labor, fanout, len(self.indices), self.weight is not None, sources)

    def _draw_by_importance(
        self, node: Ids, fanout: int, keys: AnyArray, out: Out, slot: Ids, indptr: Ids, stands_for: Factors
    ) -> int:
        """`draw` where some sources are drawn more often."""
        weight = _NO_WEIGHT if self.weight is None else self.weight
        found = in_edges_of(self.indptr, self.indices, node, self.num_sources, out, weight)
        if not isinstance(found, InEdges):
            return found
        importance = importance_of(found, fanout, self.labor.iterations)
        draw_by_importance(*found, importance, keys, fanout, slot, indptr, stands_for)
        return -1

    def scratch_bytes(self, node: Ids, fanout: int) -> int:
        """Bytes that drawing at these nodes takes beside their edges: with importance for all of their in-edges."""
        if self.labor.iterations == 0 or fanout <= 0:
            return 0
        slots = self._num_in_edges(node)
        sources = min(slots, self.num_sources)
        a_slot = BYTES_A_SLOT + BYTES_A_WEIGHT * (self.weight is not None)
        return a_slot * slots + BYTES_A_SOURCE * sources + table_bytes(sources) + BYTES_A_DESTINATION * len(node)

    def _num_in_edges(self, node: Ids) -> int:
        return int(kernels.count_edges(self.indptr, node, 0, len(node), -1, False)[0])
