"""Memory-mapped topology: tracks which parts of a graph's edges are mapped and releases them in time."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.graph.hetero import EdgeKey, HeteroSubgraph
from ooc.stores.graph import MAP_SLOTS, Graph
from ooc.stores.io.segments import mapping_of, warm
from ooc.stores.jit import kernel, load_numba

_NONE = np.empty(0, np.int64)
_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.intp, types.int32))


class MappedRanges:
    """Parts of a graph's slot arrays that this process may have mapped since they were last released.

    A page fault also maps the cached pages around it (the kernel's fault-around, 64 KiB), so parts are that large. The resident
    file pages of /proc cannot be used: they include shared libraries.
    """

    def __init__(self, graph: Graph) -> None:
        self._part = np.zeros(max(1, -(-len(graph.indices) // MAP_SLOTS)), np.bool_)
        self.exceeded = False
        """whether the limit was ever exceeded"""
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """In a child process, in which no thread is left that may have held it."""
        self._lock = threading.Lock()

    def left(self, most: int) -> int:
        """Parts that may still be touched out of `most`; 0 once the limit was exceeded."""
        with self._lock:
            allowed = min(len(self._part), most)
            return 0 if self.exceeded else max(0, allowed - int(np.count_nonzero(self._part)))

    def add(self, slot: NDArray[np.int64], most: int) -> bool:
        """Record slots (int64[k]); returns True and starts over if more than `most` parts are touched."""
        with self._lock:
            if not _touch(self._part, slot, MAP_SLOTS):
                raise IndexError("a slot is not there")  # of a damaged store
            over = int(np.count_nonzero(self._part)) > most
            if over:
                self._part[:] = False
                self.exceeded = True
            return over


@kernel
def _touch(part: NDArray[np.bool_], slot: NDArray[np.int64], size: int) -> bool:
    """Set part[slot // size] of every slot; returns whether each has a part."""
    for s in slot:
        if not 0 <= s < len(part) * size:
            return False
        part[s // size] = True
    return True


_touched: "weakref.WeakKeyDictionary[Graph, MappedRanges]" = weakref.WeakKeyDictionary()
_touched_lock = threading.Lock()


class Topology:
    """Bounds the mapped memory of a memory-mapped graph (per graph, over all its loaders), and reads it ahead if it fits, once
    for each loader.

    `max_mapped` bytes of the slot arrays may be mapped, more by a single batch. Of a topology whose slots take more than
    `max_warm` bytes of page cache only `indptr` is read ahead. `mapped` says whether sampling reads `indices` through the map,
    `weight` (a name or None) and `columns` which other columns it reads so, `all_in_edges` whether it reads those of every
    in-edge of the nodes it expands; by weight it does.
    """

    def __init__(
        self,
        graph: Graph,
        weight: str | None,
        max_mapped: int,
        max_warm: int,
        mapped: bool = True,
        columns: Collection[str] = (),
        all_in_edges: bool = False,
    ) -> None:
        self._graph, self._mapped, self._all_in_edges = graph, mapped, all_in_edges or weight is not None
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
        self._reading: Future[int] | None = None
        _topologies.add(self)

    def begin(self) -> None:
        """Begin to read the topology in a thread, if it is not read yet, so that `warm` waits for less."""
        with self._lock:
            if self._cold:
                self._cold, self._reading = False, _in_thread(self._warm)

    def warm(self) -> None:
        """Read the topology sequentially before the first batch, which avoids minutes of page faults; numba, which the batch
        needs next, takes as long to begin, and does so meanwhile. Where it could not be read, the next call reads it anew."""
        self.begin()
        with self._lock:
            if self._reading is None:
                return
            load_numba()
            error = self._reading.exception()
            self._cold, self._reading = error is not None, None
            if error is not None:
                raise error

    def forget_reading(self) -> None:
        """In a child process, which has neither the thread that reads nor those that wait for it."""
        self._lock = threading.Lock()
        self._cold, self._reading = self._cold or self._reading is not None, None

    def unmapped(self) -> int:
        """Bytes that future batches may still map; 0 if the graph is in RAM or its slots are not read."""
        if not self._mapped or mapping_of(self._graph.indices) is None:
            return 0
        return self._touched.left(self._most) * self._part_bytes

    def trim(self, subgraph: Subgraph) -> None:
        """Release mapped pages after a batch if there are too many; they stay in the page cache."""
        slot = subgraph.slot if self._mapped else _NONE
        self.trim_edges(slot, subgraph.node[: len(subgraph.indptr) - 1] if self._all_in_edges else _NONE)

    def trim_edges(self, slot: NDArray[np.int64], node: NDArray[np.int64]) -> None:
        """`trim` after the edges `slot` were sampled at the nodes `node`."""
        slot = slot if self._mapped else slot[:0]
        if self._all_in_edges:
            slot = np.concatenate([slot, _parts(self._graph.indptr[node], self._graph.indptr[node + 1])])
        if self._touched.add(slot, self._most):
            self._graph.forget()


def _in_thread(work: Callable[[], int]) -> "Future[int]":
    """What `work` returns or raises, in a thread that does not keep the process from ending."""
    result: Future[int] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    try:
        threading.Thread(target=run, name="ooc-warm", daemon=True).start()
    except RuntimeError:  # the system has no thread left
        run()
    return result


_topologies: "weakref.WeakSet[Topology]" = weakref.WeakSet()


def _begin_in_child() -> None:
    _touched_lock.release()
    for ranges in _touched.values():
        ranges.renew_lock()
    for topology in _topologies:
        topology.forget_reading()


os.register_at_fork(before=_touched_lock.acquire, after_in_parent=_touched_lock.release, after_in_child=_begin_in_child)


class HeteroTopology:
    """`Topology` of several edge types, which share its memory in proportion to their slots; weight: sampled by, where a type
    has that column."""

    def __init__(
        self,
        graphs: Mapping[EdgeKey, Graph],
        weight: str | None,
        max_mapped: int,
        max_warm: int,
        columns: Mapping[EdgeKey, Collection[str]],
        all_in_edges: bool = False,
    ) -> None:
        weights = {key: weight if weight in graph.columns else None for key, graph in graphs.items()}
        sampled = {key: graph.sampled_bytes(weights[key]) for key, graph in graphs.items()}
        total = max(1, sum(sampled.values()))
        self._types = {
            key: Topology(
                graph,
                weights[key],
                max_mapped * sampled[key] // total,
                max_warm * sampled[key] // total,
                columns=columns[key],
                all_in_edges=all_in_edges,
            )
            for key, graph in graphs.items()
        }

    def begin(self) -> None:
        """Begin to read all topologies, each in a thread."""
        for topology in self._types.values():
            topology.begin()

    def warm(self) -> None:
        """Read all topologies sequentially before the first batch."""
        for topology in self._types.values():
            topology.warm()

    def unmapped(self) -> int:
        """Bytes that future batches may still map."""
        return sum(topology.unmapped() for topology in self._types.values())

    def trim(self, subgraph: HeteroSubgraph) -> None:
        """Release mapped pages after a batch if there are too many; they stay in the page cache."""
        for key, topology in self._types.items():
            edges = subgraph.edges[key]
            topology.trim_edges(edges.slot, subgraph.node[key[2]][: len(edges.indptr) - 1])


def _parts(first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a slot of each part that the ranges first[i]:stop[i] overlap, int64[k]."""
    first, stop = first[first < stop], stop[first < stop]
    begin = first // MAP_SLOTS
    count = (stop - 1) // MAP_SLOTS - begin + 1
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return (np.repeat(begin, count) + within) * MAP_SLOTS


def request_in_edges(column: NDArray[Any], indptr: NDArray[np.int64], node: NDArray[np.int64], start: int, stop: int) -> None:
    """Advise the kernel to read the pages of a column ([E], by slot) at the in-edges of `node[start:stop]`, many at a time;
    does nothing for a column that is not memory-mapped."""
    if mapping_of(column) is not None:
        _ask_for(indptr, node, start, stop, column.ctypes.data, column.itemsize)


@kernel
def _ask_for(indptr: NDArray[np.int64], node: NDArray[np.int64], start: int, stop: int, address: int, itemsize: int) -> None:
    for i in range(start, stop):
        begin = indptr[node[i]] * itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        end = indptr[node[i] + 1] * itemsize
        if end > begin:
            _madvise(address + begin, end - begin, mmap.MADV_WILLNEED)


def looked_up(column: NDArray[Any], slot: NDArray[np.int64]) -> NDArray[Any]:
    """The entries of a column ([E], by slot) at `slot`, [e]. Of one that is memory-mapped the pages are requested at once: one
    page fault after the other would wait for the disk each."""
    if mapping_of(column) is not None:
        _ask_for_slots(slot, column.ctypes.data, column.itemsize)
    return column[slot]


@kernel
def _ask_for_slots(slot: NDArray[np.int64], address: int, itemsize: int) -> None:
    last = -1
    for i in range(len(slot)):
        page = slot[i] * itemsize // mmap.PAGESIZE
        if page != last:  # slots of a destination are neighbors
            _madvise(address + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.MADV_WILLNEED)
            last = page
