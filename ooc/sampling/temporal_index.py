"""`TemporalIndex`: what stands in the slots of a temporal graph, met in its memory map or, where it is too large, read by the
engines.

A query meets three pages of a large graph for every node, each a page fault that waits for the disk alone; read by plan, those
of a whole batch are under way together, and none takes page cache from anybody.
"""

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.memory_plan import TOPOLOGY_SHARE, MemoryPlan
from stores.arrays.rows import AnyArray, Rows
from stores.dataset import Dataset
from stores.errors import StoreError
from stores.graph import Graph
from stores.io.segments import mapping_of, warm
from stores.jit import kernel

Ids = NDArray[np.int64]
LEAF = 256
"""slots that are read whole rather than halved once more: half a page of times"""


class TemporalIndex:
    """The columns of a graph's slots: "indices" and those of `graph.columns`. Any number of threads may share one.

    rows: columns that are read; those not named are met where they are. indptr stays in the map.

    >>> slots = TemporalIndex.of(ds, max_warm=10**9)
    >>> first, past = slots.before("time", nodes, times)
    >>> slots.values("edge_id", first[past > 0])
    """

    def __init__(self, graph: Graph, rows: Mapping[str, Rows] | None = None) -> None:
        # Plain ndarrays over the same memory: numba dispatches np.memmap more slowly.
        self.indptr: Ids = np.asarray(graph.indptr)
        self._graph = graph
        self._mapped = {"indices": np.asarray(graph.indices), **{name: np.asarray(c) for name, c in graph.columns.items()}}
        self._rows = dict(rows or {})
        self._cold = True
        self._lock = threading.Lock()

    @classmethod
    def of(cls, data: Dataset, max_warm: int) -> "TemporalIndex":
        """Those that all loaders of a data set share. Columns that are larger than `max_warm` bytes together are read."""
        met = _met(data.graph)
        stay = mapping_of(data.graph.indices) is None or sum(each.nbytes for each in met.values()) <= max_warm
        with _shared_lock:
            held = _shared.setdefault(data, {})
            if stay not in held:  # a loader with a budget of its own is not to have what another's allows
                held[stay] = cls(data.graph, None if stay else {name: data.edge_rows(name) for name in met})
            return held[stay]

    def __contains__(self, name: str) -> bool:
        return name in self._mapped

    @property
    def mapped(self) -> bool:
        """Whether all columns are met in the map."""
        return not self._rows

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph."""
        return len(self.indptr) - 1

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of a column."""
        return self._mapped[name].dtype

    def values(self, name: str, slot: Ids) -> AnyArray:
        """[k]: a column's values in these slots (int64[k], any order)."""
        if name in self._rows:
            out = np.empty(len(slot), self.dtype(name))
            self._rows[name].read(slot, out)
            return out
        found: AnyArray = self._mapped[name][slot]
        return found

    def edge_ids(self, slot: Ids) -> Ids:
        """int64[k]: the edges that stand in these slots; of a graph without edge ids the slots."""
        return self.values("edge_id", slot).astype(np.int64) if "edge_id" in self else slot

    def before(self, name: str, node: Ids, bound: AnyArray) -> tuple[Ids, Ids]:
        """(int64[k], int64[k]): the first slot of each node (int64[k], in range), and in how many of its slots a column that
        rises along them is below bound[i].

        Raises StoreError where the topology is damaged.
        """
        self._warm()
        first, stop = self.indptr[node], self.indptr[node + 1]
        if ((first < 0) | (stop < first) | (stop > len(self._mapped["indices"]))).any():
            raise StoreError("indptr does not rise within the edges: the store is damaged; run `ooc verify` on it")
        past = np.empty(len(node), np.int64)
        if name in self._rows:
            _bisect(self._rows[name], self.dtype(name), first, stop, bound, past)
        else:
            _before(self._mapped[name], first, stop, bound, past)
        return first, past

    def _warm(self) -> None:
        """Before the first use of the map: reading in sequence saves as many page faults."""
        with self._lock:
            if self._cold:
                self._cold = False
                for array in (self._graph.indptr, *(() if self._rows else _met(self._graph).values())):
                    warm(array)


_shared: "weakref.WeakKeyDictionary[Dataset, dict[bool, TemporalIndex]]" = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def _met(graph: Graph) -> dict[str, AnyArray]:
    """The columns that queries about the past meet."""
    return {"indices": graph.indices, **{name: graph.columns[name] for name in ("time", "edge_id") if name in graph.columns}}


def _bisect(rows: Rows, dtype: np.dtype[Any], first: Ids, stop: Ids, bound: AnyArray, past: Ids) -> None:
    """`_before` of rows: halved for all nodes together until a node's part is short, which is then read whole."""
    low, high = first.copy(), stop.copy()
    while len(wide := np.flatnonzero(high - low > LEAF)):
        middle = (low[wide] + high[wide]) // 2
        value = np.empty(len(wide), dtype)
        rows.read(middle, value)
        below = value < bound[wide]
        low[wide[below]] = middle[below] + 1
        high[wide[~below]] = middle[~below]
    length = high - low
    begin = np.cumsum(length) - length
    slot = np.repeat(low - begin, length) + np.arange(int(length.sum()))
    value = np.empty(len(slot), dtype)
    if len(slot):
        rows.read(slot, value)
    _before(value, begin, begin + length, bound, past)
    past += low - first


@kernel
def _before(column: AnyArray, first: Ids, stop: Ids, bound: AnyArray, past: Ids) -> None:
    """past[i] = how many of column[first[i]:stop[i]], which rises, are below bound[i]."""
    for i in range(len(past)):
        low, high = first[i], stop[i]
        while low < high:
            middle = (low + high) // 2
            if column[middle] < bound[i]:
                low = middle + 1
            else:
                high = middle
        past[i] = low - first[i]


def slots_of(data: Dataset, budget: MemoryPlan | None = None) -> TemporalIndex:
    """The slots of a temporal graph, in the map where a third of the memory holds them; all loaders of so much share them."""
    memory = data.process_memory.limit if budget is None else budget.memory
    return TemporalIndex.of(data, memory // TOPOLOGY_SHARE)
