"""Keeps a memory-mapped graph fast and small: which parts of its edges are mapped, counted, and given back in time."""

import threading
import weakref
from collections.abc import Collection
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from stores.graph import MAP_SLOTS, Graph
from stores.io.segments import mapping_of, warm


class MappedRanges:
    """Which parts of a graph's slot arrays this process may have mapped in since they were last given back.

    A page fault maps the cached pages around it too (the kernel's fault-around, 64 KiB), so parts are counted as large. Counted
    by hand, since the process's resident file pages include its libraries'.
    """

    def __init__(self, graph: Graph) -> None:
        self._part = np.zeros(max(1, -(-len(graph.indices) // MAP_SLOTS)), np.bool_)
        self.exceeded = False
        """whether more than allowed were ever touched"""
        self._lock = threading.Lock()

    def left(self, most: int) -> int:
        """Parts that may yet be touched, of `most`; 0 where there were more already."""
        with self._lock:
            allowed = min(len(self._part), most)
            return 0 if self.exceeded else max(0, allowed - int(np.count_nonzero(self._part)))

    def add(self, slot: NDArray[np.int64], most: int) -> bool:
        """Count `slot` (int64[k]); True, beginning anew, where more than `most` parts are touched now."""
        with self._lock:
            self._part[slot // MAP_SLOTS] = True
            over = int(np.count_nonzero(self._part)) > most
            if over:
                self._part[:] = False
                self.exceeded = True
            return over


_touched: "weakref.WeakKeyDictionary[Graph, MappedRanges]" = weakref.WeakKeyDictionary()
_touched_lock = threading.Lock()


class Topology:
    """Keeps a memory-mapped graph fast and small: read in once where it fits, and its slots mapped to `max_mapped` bytes.

    What is mapped is counted per graph, for all its loaders; one batch may go beyond. max_warm: bytes of page cache that the
    slots may take; of a larger topology only `indptr` is read in. mapped: whether draws meet `indices` in the map at all;
    columns: those met there beside it.
    """

    def __init__(
        self,
        graph: Graph,
        weight: str | None,
        max_mapped: int,
        max_warm: int,
        mapped: bool = True,
        columns: Collection[str] = (),
    ) -> None:
        self._graph, self._weight, self._mapped = graph, weight, mapped
        fits = graph.sampled_bytes(weight) <= max_warm
        self._cold = fits or not mapped
        self._warm = partial(graph.warm, weight) if fits else partial(warm, graph.indptr)
        self._part_bytes = graph.part_bytes({*columns, *([] if weight is None else [weight])})
        self._most = max_mapped // self._part_bytes
        with _touched_lock:
            if graph not in _touched:
                _touched[graph] = MappedRanges(graph)
            self._touched = _touched[graph]
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Before the first draw: a few tenths of a second in sequence save minutes of page faults."""
        with self._lock:
            if self._cold:
                self._cold = False
                self._warm()

    def unmapped(self) -> int:
        """Bytes that batches will map in besides the most they have; 0 where the graph is in RAM, or its slots not met."""
        if not self._mapped or mapping_of(self._graph.indices) is None:
            return 0
        return self._touched.left(self._most) * self._part_bytes

    def trim(self, subgraph: Subgraph) -> None:
        """After a draw: give mapped pages back (they stay in the page cache) where they are too many."""
        slot = subgraph.slot if self._mapped else subgraph.slot[:0]
        if self._weight is not None:  # every in-edge of the expanded nodes was weighed
            node = subgraph.node[: len(subgraph.indptr) - 1]
            slot = np.concatenate([slot, _parts(self._graph.indptr[node], self._graph.indptr[node + 1])])
        if self._touched.add(slot, self._most):
            self._graph.forget()


def _parts(first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[k]: a slot of each part that the ranges first[i]:stop[i] touch."""
    first, stop = first[first < stop], stop[first < stop]
    begin = first // MAP_SLOTS
    count = (stop - 1) // MAP_SLOTS - begin + 1
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return (np.repeat(begin, count) + within) * MAP_SLOTS
