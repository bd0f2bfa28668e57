"""Temporal neighbor sampling: edges strictly before the query time.

A query is a node and a time. A hop samples a node's earlier in-edges, the latest or uniformly, and each leads to a query for
its source at the edge's time; the subgraph is a forest, as with PyG's temporal `disjoint` sampling (TGAT, Xu et al., ICLR 2020;
TGN, Rossi et al., 2020). A node's slots are in time order, so the edges before a time are a prefix, found by bisection, and
later events change neither it nor the sample.

A query touches three pages of a large graph per node, each a page fault that waits for the disk by itself. So `TemporalIndex`
reads a graph that is too large to be memory-mapped by the engines: planned reads of a whole batch are in flight together and do
not pollute the page cache.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import mix64
from ooc.runtime.memory_plan import TOPOLOGY_SHARE, words_for
from ooc.sampling import kernels
from ooc.sampling.neighbor import damaged_slot
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from ooc.stores.io.segments import mapping_of, warm
from ooc.stores.jit import kernel

Strategy = Literal["last", "uniform"]
QUERY_BYTES, EDGE_BYTES = 8 + 8 + 8 + 8, 2 * 8
"""per query (node, time, start of its edges, end of its past), and per edge (source, slot)"""
LEAF = 256
"""slots read at once instead of bisecting further: half a page of times"""


class TemporalIndex:
    """The columns of a graph's slots: "indices" and those of `graph.columns`. Any number of threads may share one.

    Columns in `rows` are read through them, the others from the graph's arrays. indptr stays memory-mapped. `events` is the
    number of events that edge ids may name, if known.
    """

    def __init__(self, graph: Graph, rows: Mapping[str, Rows] | None = None, events: int | None = None) -> None:
        # Plain ndarrays over the same memory: numba dispatches np.memmap more slowly.
        self.indptr: Ids = np.asarray(graph.indptr)
        self.num_nodes = len(self.indptr) - 1
        self._graph = graph
        self._mapped = {"indices": np.asarray(graph.indices), **{name: np.asarray(c) for name, c in graph.columns.items()}}
        self._rows = dict(rows or {})
        self._count = {"indices": self.num_nodes} | ({} if events is None else {"edge_id": events})
        self.mapped = not self._rows
        """whether no column is read by plan"""
        self._cold = True
        self._lock = threading.Lock()

    @classmethod
    def of(cls, data: Dataset, memory: int | None = None) -> "TemporalIndex":
        """Return the index shared by a data set's loaders, memory-mapped if a third of the memory holds its columns."""
        max_warm = (data.process_memory.limit if memory is None else memory) // TOPOLOGY_SHARE
        columns = _query_columns(data.graph)
        stay = mapping_of(data.graph.indices) is None or sum(each.nbytes for each in columns.values()) <= max_warm
        with _shared_lock:
            indexes = _shared.setdefault(data, {})
            if stay not in indexes:  # loaders with different budgets use different indexes
                rows = None if stay else {name: data.edge_rows(name) for name in columns}
                indexes[stay] = cls(data.graph, rows, None if data.manifest.time is None else data.manifest.time.events)
            return indexes[stay]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._mapped[name].dtype

    def values(self, name: str, slot: Ids) -> AnyArray:
        """Return a column's values [k] in these slots (int64[k], any order). Raises StoreError for invalid nodes and events."""
        if name in self._rows:
            values: AnyArray = np.empty(len(slot), self.dtype(name))
            self._rows[name].read(slot, values)
        else:
            values = self._mapped[name][slot]
        if name in self._count and len(values) and not 0 <= int(values.min()) <= int(values.max()) < self._count[name]:
            wrong = (values < 0) | (values >= self._count[name])
            raise damaged_slot(int(slot[wrong][0]), "node" if name == "indices" else "edge")
        return values

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


@dataclass(frozen=True)
class TemporalSubgraph(Subgraph):
    """A `Subgraph` with times: entry i is node[i] at time[i], for query number query[i]."""

    time: AnyArray = None  # type: ignore[assignment]
    """int64|float64[n]"""
    query: Ids = None  # type: ignore[assignment]
    """int64[n]"""


class TemporalSampler:
    """Samples the past of queries, hop by hop. Stateless: any number of threads may share one.

    The graph has the column `time`. Per query and hop `fanout` edges are sampled, -1 for the whole past: the latest ("last") or
    any set with equal probability ("uniform"). `max_bytes` limits a batch's arrays and `row_bytes` per node. `slots` is the
    graph's temporal index, if its arrays should not be read directly. Raises ConfigError for invalid arguments.

    >>> sampler = TemporalSampler(ds.graph, [10, 10])
    >>> found = sampler.sample(np.array([4, 7]), np.array([1000, 1000]), key(seed, Purpose.SAMPLE, epoch, step))
    >>> (found.time[found.source] < 1000).all()
    True
    """

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        temporal_strategy: Strategy = "last",
        max_bytes: int | None = None,
        row_bytes: int = 0,
        slots: TemporalIndex | None = None,
    ) -> None:
        if any(k != int(k) or k < -1 for k in fanout):
            raise ConfigError(f"fan-out {list(fanout)} is invalid: give one number per hop, 0 or more, or -1 for all")
        if "time" not in graph.columns:
            raise ConfigError("the graph's edges have no times: ingest the store with `time`")
        if temporal_strategy not in ("last", "uniform"):
            raise ConfigError(f"temporal_strategy {temporal_strategy!r} is unknown: use last (the latest edges) or uniform")
        self.fanout, self.temporal_strategy = tuple(int(k) for k in fanout), temporal_strategy
        self.max_bytes, self.row_bytes = max_bytes, row_bytes
        self._slots = TemporalIndex(graph) if slots is None else slots
        self._dtype, self.num_nodes = self._slots.dtype("time"), self._slots.num_nodes

    def edge_ids(self, slots: Ids) -> Ids:
        """Return the events in the given slots, int64[e]."""
        return self._slots.edge_ids(slots)

    def sample(self, nodes: Ids, times: AnyArray, key: int) -> TemporalSubgraph:
        """Sample the past of queries nodes[i] at times[i] (int64[b], [b]); a sample depends on (key, node, time).

        Raises InputError for an invalid node, BudgetError before a batch that does not fit is allocated, StoreError if the
        topology is damaged.
        """
        node, time = self._check(nodes, times)
        query = np.arange(len(node))
        indptr, source, slot = np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
        num_nodes, num_edges, start = [len(node)], [], 0
        for hop, fanout in enumerate(self.fanout):
            stop = len(node)
            first, past = self._slots.before("time", node[start:stop], time[start:stop])
            count = int((past if fanout < 0 else np.minimum(past, fanout)).sum())
            self._check_bytes(hop, stop + count, len(source) + count)
            sampled, ends = np.empty(count, np.int64), np.empty(stop - start, np.int64)
            last = self.temporal_strategy == "last"
            draw_past(first, node, time, start, past, fanout, last, np.uint64(key & (2**64 - 1)), sampled, ends)
            neighbor = self._slots.values("indices", sampled).astype(np.int64)
            owner = np.repeat(query[start:stop], np.diff(ends, prepend=0))
            indptr = np.concatenate([indptr, len(source) + ends])
            source = np.concatenate([source, np.arange(stop, stop + count)])
            slot = np.concatenate([slot, sampled])
            node, query = np.concatenate([node, neighbor]), np.concatenate([query, owner])
            time = np.concatenate([time, self._slots.values("time", sampled)])
            num_nodes.append(count)
            num_edges.append(count)
            start = stop
        return TemporalSubgraph(node, indptr, source, slot, tuple(num_nodes), tuple(num_edges), time=time, query=query)

    def _check(self, nodes: Ids, times: AnyArray) -> tuple[Ids, AnyArray]:
        nodes, times = np.asarray(nodes), np.asarray(times)
        if nodes.ndim != 1 or nodes.shape != times.shape or (nodes.dtype.kind not in "iu" and len(nodes)):
            raise InputError(
                f"queries are nodes and a time each, not {nodes.dtype}{list(nodes.shape)} and {times.dtype}{list(times.shape)}"
            )
        wrong = (nodes < 0) | (nodes >= self.num_nodes)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"query {at} asks about node {nodes[at]}: the graph has nodes 0..{self.num_nodes - 1}")
        if self._dtype.kind == "i" and times.dtype.kind == "f":
            times = np.ceil(times)  # integer times before 2.5 are those before 3
        return nodes.astype(np.int64), times.astype(self._dtype)

    def _check_bytes(self, hop: int, nodes: int, edges: int) -> None:
        need = nodes * (QUERY_BYTES + self.row_bytes) + edges * EDGE_BYTES
        if self.max_bytes is not None and need > self.max_bytes:
            raise BudgetError(
                f"hop {hop + 1} of fan-out {list(self.fanout)} makes {nodes:,} queries, which need "
                f"{words_for(need, self.max_bytes)}; take smaller batches, a smaller fan-out or more memory"
            )


@kernel
def draw_past(
    first: Ids, node: Ids, time: AnyArray, start: int, past: Ids, fanout: int, last: bool, key: np.uint64, slot: Ids, ends: Ids
) -> None:
    """Sample slots of first[i], ..., first[i] + past[i] - 1 into `slot`, the last ones or uniformly; ends[i]: end of query i's.

    The sample is keyed by (key, node[start + i], time[start + i]).
    """
    at = 0
    for i in range(len(past)):
        begin, degree = first[i], past[i]
        count = kernels.num_drawn(degree, fanout, False)
        if last or count == degree:
            for j in range(count):
                slot[at + j] = begin + degree - count + j
        else:
            moment = mix64(np.uint64(np.int64(time[start + i])))
            kernels.draw_distinct(kernels.stream_of(key ^ moment, node[start + i]), begin, degree, count, slot, at)
        at += count
        ends[i] = at
