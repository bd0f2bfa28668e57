"""Which nodes a rank computes on: its range, the sources that this needs from outside, the halo, and which rows of the halo it
computes too instead of having them sent.

What a layer reads of a halo's node is sent by the rank that computes it, or made here once more: of the first layer from the
node's features, of a later one by the layer before it, which needs the node's own in-neighbors. A row that is made twice is the
same function of the parameters in both places, so each copy's gradient is propagated where that copy was used, and the sum over
ranks of the parameters' gradients has every use of the row once: the step is exact whichever rows are recomputed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.layerwise.edge_tiles import rows_over
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import read_range
from ooc.stores.bounds import check_nodes
from ooc.stores.dataset import Dataset

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_SLOTS_AT_ONCE = 1 << 20


class HaloEdges:
    """The in-edges of any nodes of a data set, read a bounded number at a time."""

    def __init__(self, dataset: Dataset) -> None:
        self.graph = dataset.graph
        self._rows = rows_over(self.graph.indices, lambda: dataset.edge_rows("indices"))
        self._buffers = Buffers(kept=1, direct=True)

    def degree(self, node: Ints) -> Ints:
        """In-edges of some nodes."""
        return np.asarray(self.graph.indptr[node + 1]) - np.asarray(self.graph.indptr[node])

    def outside(self, first: int, stop: int) -> Ints:
        """Sources of nodes first:stop outside of these, each once, ascending."""
        begin, end, found = int(self.graph.indptr[first]), int(self.graph.indptr[stop]), np.empty(0, np.int64)
        for low in range(begin, end, _SLOTS_AT_ONCE):
            values, _ = read_range(self._rows, low, min(low + _SLOTS_AT_ONCE, end), self._buffers)
            check_nodes("graph/indices", low, values, self.graph.num_nodes)
            source = np.asarray(values, np.int64)
            found = np.union1d(found, source[(source < first) | (source >= stop)])
        return found

    def parts(self, node: Ints) -> Iterator[tuple[Ints, Ints]]:
        """(places in `node` int64[k], sources int64[k]) of the in-edges of some nodes, in the order of these."""
        for at, slot in slots_of(self.graph.indptr, node):
            values = np.empty(len(slot), self._rows.dtype)
            self._rows.read(slot, values)
            check_nodes("graph/indices", int(slot[0]), values, self.graph.num_nodes)
            yield at, values.astype(np.int64)


def slots_of(indptr: Any, node: Ints) -> Iterator[tuple[Ints, Ints]]:
    """(places in `node` int64[k], slots int64[k]) of the in-edges of some nodes, in the order of these, a bounded number at a
    time. indptr: int64[N + 1]."""
    begin = np.asarray(indptr[node], np.int64)
    end = np.cumsum(np.asarray(indptr[node + 1], np.int64) - begin)
    for low in range(0, int(end[-1]) if len(end) else 0, _SLOTS_AT_ONCE):
        number = np.arange(low, min(low + _SLOTS_AT_ONCE, int(end[-1])))
        at = np.searchsorted(end, number, side="right")
        before = np.where(at > 0, end[at - 1], 0)
        yield at, begin[at] + number - before


@dataclass(frozen=True)
class HaloCandidates:
    """Rows of the halo, of which it is asked whether they are recomputed.

    level: the layer that reads them; node: int64[n], ids, ascending; degree: int64[n], in-edges.
    """

    level: int
    node: Ints
    degree: Ints
    edges: HaloEdges
    here: Callable[[Ints], Mask]
    """whether nodes are in the range, or in the halo anyway"""

    def missing(self, asked: Mask) -> Ints:
        """int64[n]: of those asked for, in-edges from nodes that are not here yet; 0 of others."""
        found, at = np.zeros(len(self.node), np.int64), np.flatnonzero(asked)
        for place, source in self.edges.parts(self.node[at]):
            np.add.at(found, at[place], ~self.here(source))
        return found


Choose = Callable[[HaloCandidates], Mask]
"""which of some rows are recomputed: bool[n]. Deterministic; a later layer is asked about before an earlier one"""


def recompute_none(rows: HaloCandidates) -> Mask:
    """All rows are sent."""
    return np.zeros(len(rows.node), np.bool_)


def recompute_first(rows: HaloCandidates) -> Mask:
    """What the first layer reads follows from features alone; all else is sent."""
    return np.full(len(rows.node), rows.level == 0)


def recompute_all(rows: HaloCandidates) -> Mask:
    """Nothing is sent."""
    return np.ones(len(rows.node), np.bool_)


@dataclass(frozen=True)
class Reach:
    """The nodes that a rank computes on.

    first, stop: its range. node: int64[n], ids: of the range, then of the halo, those before others that are recomputed for a
    later layer. recomputed: by layer, how many of the halo are computed here for it to read, which stand first behind the
    range. received: by layer int64[h], places in `node` of the rows that come from other ranks, ascending. edges: in-edges of
    all nodes whose rows a layer makes here.
    """

    first: int
    stop: int
    node: Ints
    recomputed: tuple[int, ...]
    received: tuple[Ints, ...]
    edges: int

    @property
    def count(self) -> int:
        """Nodes of the range."""
        return self.stop - self.first

    @property
    def with_edges(self) -> Ints:
        """Ids of those of the halo whose in-edges are needed here, as a layer makes rows of them."""
        count = self.recomputed[1] if len(self.recomputed) > 1 else 0
        return self.node[self.count : self.count + count]


def reach_of(edges: HaloEdges, first: int, stop: int, halo: Ints, layers: int, mapped: bool, choose: Choose) -> Reach:
    """The nodes that a rank computes on.

    Args:
        edges: Of the whole graph.
        first: Of the rank's range first:stop.
        stop: See `first`.
        halo: `edges.outside(first, stop)`.
        layers: Of the model.
        mapped: Whether features pass a map before the first layer reads them; else it reads them from the store.
        choose: Which rows of the halo are recomputed. Of a node whose row a layer reads, recomputed, all earlier layers' rows
            are recomputed too.
    """
    chosen = np.empty(0, np.int64)
    order, recomputed, sent = list[Ints](), [0] * layers, list[Ints]()
    for level in range(layers - 1, -1, -1):
        rest = np.setdiff1d(halo, chosen, assume_unique=True)
        more = rest[:0]
        if level > 0 or mapped:
            here = _Within(first, stop, halo)
            more = rest[choose(HaloCandidates(level, rest, edges.degree(rest), edges, here))]
        order.append(more)
        chosen = np.union1d(chosen, more)
        recomputed[level] = len(chosen)
        sent.append(np.setdiff1d(rest, more, assume_unique=True) if level > 0 or mapped else rest[:0])
        if level > 0:
            for _, source in edges.parts(more):
                halo = np.union1d(halo, source[(source < first) | (source >= stop)])
    node = np.concatenate([np.arange(first, stop), *order, np.setdiff1d(halo, chosen, assume_unique=True)])
    place = Places(first, stop, node)
    received = tuple(np.sort(place(each)) for each in reversed(sent))
    count = int(edges.graph.indptr[stop] - edges.graph.indptr[first])
    count += int(edges.degree(node[stop - first :][: recomputed[1] if layers > 1 else 0]).sum())
    return Reach(first, stop, node, tuple(recomputed), received, count)


class _Within:
    """Whether nodes are in a range, or among others (ascending)."""

    def __init__(self, first: int, stop: int, others: Ints) -> None:
        self._first, self._stop, self._others = first, stop, others

    def __call__(self, node: Ints) -> Mask:
        inside: Mask = (node >= self._first) & (node < self._stop)
        if len(self._others):
            at = np.minimum(np.searchsorted(self._others, node), len(self._others) - 1)
            inside |= self._others[at] == node
        return inside


class Places:
    """Where nodes stand among those that a rank computes on: those of its range first, then others in any order."""

    def __init__(self, first: int, stop: int, node: Ints) -> None:
        self._first, self._stop = first, stop
        others = node[stop - first :]
        self._order = np.argsort(others)
        self._sorted = others[self._order]

    def __call__(self, node: Ints) -> Ints:
        """Places of some nodes, int64[n]."""
        found, outside = node - self._first, (node < self._first) | (node >= self._stop)
        at = np.searchsorted(self._sorted, node[outside])
        found[outside] = self._stop - self._first + self._order[at]
        return found
