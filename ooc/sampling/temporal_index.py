"""`TemporalIndex`: the slots of a temporal graph, memory-mapped or, if too large, read by the engines.

A query touches three pages of a large graph per node, each a page fault that waits for the disk by itself; planned reads of a
whole batch are in flight together and do not pollute the page cache.
"""

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from ooc.runtime.memory_plan import TOPOLOGY_SHARE, MemoryPlan
from stores.arrays.rows import AnyArray, Ids, Rows
from stores.dataset import Dataset
from stores.errors import StoreError
from stores.graph import Graph
from stores.io.segments import mapping_of, warm
from stores.jit import kernel

LEAF = 256
"""slots read at once instead of bisecting further: half a page of times"""


class TemporalIndex:
    """The columns of a graph's slots: "indices" and those of `graph.columns`. Any number of threads may share one.

    Columns in `rows` are read through them, the others from the graph's arrays. indptr stays memory-mapped.
    """

    def __init__(self, graph: Graph, rows: Mapping[str, Rows] | None = None) -> None:
        # Plain ndarrays over the same memory: numba dispatches np.memmap more slowly.
        self.indptr: Ids = np.asarray(graph.indptr)
        self.num_nodes = len(self.indptr) - 1
        self._graph = graph
        self._mapped = {"indices": np.asarray(graph.indices), **{name: np.asarray(c) for name, c in graph.columns.items()}}
        self._rows = dict(rows or {})
        self.mapped = not self._rows
        """whether no column is read by plan"""
        self._cold = True
        self._lock = threading.Lock()

    @classmethod
    def of(cls, data: Dataset, max_warm: int) -> "TemporalIndex":
        """Return the index shared by a data set's loaders; columns of more than `max_warm` bytes are read by plan."""
        columns = _query_columns(data.graph)
        stay = mapping_of(data.graph.indices) is None or sum(each.nbytes for each in columns.values()) <= max_warm
        with _shared_lock:
            indexes = _shared.setdefault(data, {})
            if stay not in indexes:  # loaders with different budgets use different indexes
                indexes[stay] = cls(data.graph, None if stay else {name: data.edge_rows(name) for name in columns})
            return indexes[stay]

    def dtype(self, name: str) -> np.dtype[Any]:
        """dtype of a column."""
        return self._mapped[name].dtype

    def values(self, name: str, slot: Ids) -> AnyArray:
        """Return a column's values [k] in these slots (int64[k], any order)."""
        if name in self._rows:
            out = np.empty(len(slot), self.dtype(name))
            self._rows[name].read(slot, out)
            return out
        result: AnyArray = self._mapped[name][slot]
        return result

    def edge_ids(self, slot: Ids) -> Ids:
        """Return the edge ids in these slots, int64[k]; the slots themselves if the graph has no edge ids."""
        return self.values("edge_id", slot).astype(np.int64) if "edge_id" in self._mapped else slot

    def before(self, name: str, node: Ids, bound: AnyArray) -> tuple[Ids, Ids]:
        """Return the first slot of each node (int64[k]) and how many of its slots have a value below bound[i], int64[k] each.

        The column must be ascending within each node's slots. Raises StoreError if the topology is damaged.
        """
        self._warm()
        first, stop = self.indptr[node], self.indptr[node + 1]
        if ((first < 0) | (stop < first) | (stop > len(self._mapped["indices"]))).any():
            raise StoreError("indptr is not ascending: the store is damaged; run `ooc verify` on it")
        past = np.empty(len(node), np.int64)
        if name in self._rows:
            _bisect(self._rows[name], self.dtype(name), first, stop, bound, past)
        else:
            _before(self._mapped[name], first, stop, bound, past)
        return first, past

    def _warm(self) -> None:
        """Read the mapped columns sequentially on first use, which avoids as many page faults."""
        with self._lock:
            if self._cold:
                self._cold = False
                for array in (self._graph.indptr, *(() if self._rows else _query_columns(self._graph).values())):
                    warm(array)


_shared: "weakref.WeakKeyDictionary[Dataset, dict[bool, TemporalIndex]]" = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def _query_columns(graph: Graph) -> dict[str, AnyArray]:
    """The columns that queries read."""
    return {"indices": graph.indices, **{name: graph.columns[name] for name in ("time", "edge_id") if name in graph.columns}}


def _bisect(rows: Rows, dtype: np.dtype[Any], first: Ids, stop: Ids, bound: AnyArray, past: Ids) -> None:
    """`_before` for Rows: bisects all nodes together until a range is short, then reads it whole."""
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
    """past[i] = how many of the ascending column[first[i]:stop[i]] are below bound[i]."""
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
    """Return the index of a temporal graph, memory-mapped if a third of the memory holds it."""
    memory = data.process_memory.limit if budget is None else budget.memory
    return TemporalIndex.of(data, memory // TOPOLOGY_SHARE)
