"""Temporal neighbor sampling: edges strictly before the time at which a node is asked about.

A query is a node and a time. A hop draws among a node's in-edges of earlier times, the latest or any, and every edge drawn
leads to a query of its own: its source, at the edge's time. So nothing on a path is later than what came before it, down to
the query, and two queries share nothing: the subgraph is a forest, as PyG's `disjoint` sampling with times gives it. (TGAT,
Xu et al., ICLR 2020, and TGN, Rossi et al., 2020, sample so.)

Slots of a node stand in the order of their times, so the edges before a time are a prefix, found by bisection, and whatever
happens later changes neither the prefix nor the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import mix64
from ooc.runtime.memory_plan import words_for
from ooc.sampling import kernels
from ooc.sampling.neighbor import damaged_slot
from ooc.sampling.temporal_index import TemporalIndex
from stores.errors import BudgetError, ConfigError, InputError
from stores.graph import Graph
from stores.jit import kernel

Ids = NDArray[np.int64]
Strategy = Literal["last", "uniform"]
QUERY_BYTES, EDGE_BYTES = 8 + 8 + 8 + 8, 2 * 8
"""of a query (node, time, where its edges begin, where its past ends), and of an edge (source, slot)"""


@dataclass(frozen=True)
class TemporalSubgraph(Subgraph):
    """A `Subgraph` whose nodes have times: entry i is node[i] asked about at time[i], for query number query[i]."""

    time: NDArray[Any] = None  # type: ignore[assignment]
    """int64|float64[n]"""
    query: Ids = None  # type: ignore[assignment]
    """int64[n]"""


class TemporalSampler:
    """Samples the past of queries, hop by hop. Stateless: any number of threads may share one.

    graph: with the column `time` (a store ingested with --time). fanout: edges drawn at a query, per hop; -1 takes all of its
    past. temporal_strategy: "last" takes the latest; "uniform" any, each set equally likely. max_bytes, row_bytes: limit on
    the bytes of a batch (its arrays, and `row_bytes` a node). slots: the graph's, where they are not to be met in its arrays.
    Raises ConfigError for a graph without times or a fan-out that does not fit.

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
            raise ConfigError(f"fan-out {list(fanout)}: give one number a hop, each 0 or more, or -1 for all of the past")
        if "time" not in graph.columns:
            raise ConfigError("the graph's edges have no times: ingest the store with --time COLUMN")
        if temporal_strategy not in ("last", "uniform"):
            raise ConfigError(f"temporal_strategy {temporal_strategy!r} is unknown: last takes the latest edges, uniform any")
        self.fanout, self.temporal_strategy = tuple(int(k) for k in fanout), temporal_strategy
        self.max_bytes, self.row_bytes = max_bytes, row_bytes
        self._slots = TemporalIndex(graph) if slots is None else slots
        self._dtype = self._slots.dtype("time")

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph."""
        return self._slots.num_nodes

    def edge_ids(self, slots: Ids) -> Ids:
        """int64[e]: the events that stand in these slots."""
        return self._slots.edge_ids(slots)

    def sample(self, nodes: Ids, times: NDArray[Any], key: int) -> TemporalSubgraph:
        """The sampled past of queries nodes[i] at times[i] (int64[b], [b]); a draw depends on (key, node, time).

        Raises InputError for a node that is none, BudgetError where the batch does not fit (before it is allocated),
        StoreError where the topology is damaged.
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
            drawn, ends = np.empty(count, np.int64), np.empty(stop - start, np.int64)
            last = self.temporal_strategy == "last"
            draw_past(first, node, time, start, past, fanout, last, np.uint64(key & (2**64 - 1)), drawn, ends)
            neighbor = self._slots.values("indices", drawn).astype(np.int64)
            if (wrong := (neighbor < 0) | (neighbor >= self.num_nodes)).any():
                raise damaged_slot(int(drawn[wrong][0]))
            owner = np.repeat(query[start:stop], np.diff(ends, prepend=0))
            indptr = np.concatenate([indptr, len(source) + ends])
            source = np.concatenate([source, np.arange(stop, stop + count)])
            slot = np.concatenate([slot, drawn])
            node, query = np.concatenate([node, neighbor]), np.concatenate([query, owner])
            time = np.concatenate([time, self._slots.values("time", drawn)])
            num_nodes.append(count)
            num_edges.append(count)
            start = stop
        return TemporalSubgraph(node, indptr, source, slot, tuple(num_nodes), tuple(num_edges), time=time, query=query)

    def _check(self, nodes: Ids, times: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
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
            times = np.ceil(times)  # the whole times before 2.5 are those before 3
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
    first: Ids,
    node: Ids,
    time: NDArray[Any],
    start: int,
    past: Ids,
    fanout: int,
    last: bool,
    key: np.uint64,
    slot: Ids,
    ends: Ids,
) -> None:
    """Draw slots of first[i], ..., first[i] + past[i] - 1, the last of them or any, into `slot`; ends[i]: where they end there.

    The draw is that of (key, node[start + i], time[start + i]).
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
