"""The part of a graph that a rank computes on: the in-edges of its range of nodes, and the halo, the sources outside of it.

The nodes of the part are numbered anew: those of the range first, then the halo (see `ooc.fullgraph.halo.reach`).
"""

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.halo.reach import Places, Reach, slots_of
from ooc.layerwise.edge_tiles import rows_over
from ooc.layerwise.numbering import Numbering
from ooc.runtime.buffers import Buffers
from ooc.runtime.memory_plan import RANK_EDGES_SHARE
from ooc.runtime.range_io import read_range
from ooc.stores.arrays.rows import AnyArray, Rows, check_request
from ooc.stores.bounds import check_nodes
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph, index_dtype
from ooc.stores.io.atomic import disk_errors

Ints = NDArray[np.int64]
_SLOTS_AT_ONCE = 1 << 20
EDGES = "edges.bin"


@dataclass(frozen=True, eq=False)
class LocalGraph(Graph):
    """A part of a graph; see `Graph`. The halo has in-edges here where its rows are computed here. degrees: int64[n], of its
    nodes in the whole graph."""

    degrees: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def degree(self, ids: Ints) -> Ints:
        """See `Graph.degree`; of the whole graph."""
        return np.asarray(self.degrees[ids])


class LocalRows:
    """Rows of a part's nodes, among those of all nodes; see `Rows`. node: int64[n], where each is."""

    def __init__(self, rows: Rows, node: Ints) -> None:
        self._rows, self._node = rows, node
        self.shape, self.dtype = (len(node), *rows.shape[1:]), rows.dtype

    @property
    def row_bytes(self) -> int:
        return self._rows.row_bytes

    def read(self, ids: Ints, out: AnyArray, at: Ints | None = None) -> int:
        """See `Rows.read`."""
        check_request(self, ids, out, at)
        return self._rows.read(self._node[ids], out, at)

    def submit(self, ids: Ints, out: AnyArray) -> Future[int]:
        """See `Rows.submit`."""
        check_request(self, ids, out)
        return self._rows.submit(self._node[ids], out)

    def close(self) -> None:
        """Does nothing: the rows are the data set's."""


class LocalDataset(Dataset):
    """What exact training reads of a data set, of the nodes that a rank computes on alone.

    `num_nodes` is that of the range; `num_edges` and `graph` have the in-edges of those of the halo too whose rows are computed
    here. folder: for edges that do not fit the memory. Raises StoreError where the disk fails.
    """

    def __init__(self, whole: Dataset, reach: Reach, folder: Path | None) -> None:
        self.whole, self.reach = whole, reach
        self.path, self.memory, self.engine = whole.path, whole.memory, whole.engine
        self.manifest = whole.manifest.model_copy(update={"undirected": False})
        self._nodes, self._edges = whole._nodes, whole._edges
        source = self._slots("indices", folder)
        place = Places(reach.first, reach.stop, reach.node)
        for low in range(0, len(source), _SLOTS_AT_ONCE):
            part = source[low : low + _SLOTS_AT_ONCE]
            part[:] = place(np.asarray(part, np.int64))
        self.node = node = reach.node
        weighted = "weight" in whole.graph.columns
        columns = {"weight": self._slots("weight", folder)} if weighted else {}
        count = reach.count + len(reach.with_edges)
        self._graph = _part_of(whole.graph, node, count, source, columns)
        begin = np.asarray(whole.graph.indptr[node[:count]], np.int64)
        self.numbering = Numbering(node, begin, whole.graph.num_edges)

    def _slots(self, name: str, folder: Path | None) -> NDArray[Any]:
        """A column of the slots of the nodes with in-edges here, checked, in memory or mapped from a file."""
        graph, reach = self.whole.graph, self.reach
        column = graph.indices if name == "indices" else graph.columns[name]
        rows, buffers = rows_over(column, lambda: self.whole.edge_rows(name)), Buffers(kept=1, direct=True)
        dtype = index_dtype(graph.num_nodes) if name == "indices" else np.dtype(np.float32)
        found = self._empty(reach.edges, dtype, None if folder is None else folder / f"{name}-{EDGES}")
        begin, end = int(graph.indptr[reach.first]), int(graph.indptr[reach.stop])
        at = 0

        def put(values: AnyArray, slot: int) -> None:
            nonlocal at
            if name == "indices":
                check_nodes("graph/indices", slot, values, graph.num_nodes)
            found[at : at + len(values)] = values
            at += len(values)

        for low in range(begin, end, _SLOTS_AT_ONCE):
            put(read_range(rows, low, min(low + _SLOTS_AT_ONCE, end), buffers)[0], low)
        for _, slot in slots_of(graph.indptr, reach.with_edges):
            values = np.empty(len(slot), rows.dtype)
            rows.read(slot, values)
            put(values, int(slot[0]))
        return found

    def _empty(self, count: int, dtype: np.dtype[Any], path: Path | None) -> NDArray[Any]:
        nbytes = count * dtype.itemsize
        if path is None or not count or self.memory is None or nbytes * RANK_EDGES_SHARE <= self.memory:
            return np.empty(count, dtype)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return np.memmap(path, dtype, "w+", shape=(count,))

    @property
    def num_nodes(self) -> int:
        """Of the range."""
        return self.reach.count

    @property
    def num_edges(self) -> int:
        """In-edges of the nodes whose rows are computed here."""
        return self._graph.num_edges

    @property
    def graph(self) -> Graph:
        """The in-edges of the nodes whose rows are computed here; the halo's nodes stand behind those of the range."""
        return self._graph

    @property
    def nbytes(self) -> int:
        """Of memory for the part's topology."""
        arrays = (self._graph.indptr, self._graph.degrees, self.node, *self.reach.received, self._graph.weight_sum)
        slots = [each for each in (self._graph.indices, *self._graph.columns.values()) if not isinstance(each, np.memmap)]
        return sum(each.nbytes for each in (*arrays, *slots) if each is not None)

    def stored(self, name: str) -> Rows:
        """See `Dataset.stored`; of the part's nodes, those of the halo among them."""
        return LocalRows(self.whole.stored(name), self.node)

    @cached_property
    def fingerprint(self) -> str:
        """See `Dataset.fingerprint`; with the range."""
        reach = self.reach
        recomputed = hashlib.blake2b(reach.node[reach.count :].tobytes(), digest_size=8).hexdigest()
        return f"{self.whole.fingerprint} {reach.first}:{reach.stop} {reach.recomputed} {recomputed}"


def _part_of(whole: Graph, node: Ints, count: int, source: NDArray[Any], columns: dict[str, NDArray[Any]]) -> LocalGraph:
    """The part of a graph with the nodes `node`, of which the first `count` have in-edges here, `source`."""
    degrees = whole.degree(node)
    indptr = np.zeros(len(node) + 1, np.int64)
    np.cumsum(degrees[:count], out=indptr[1 : count + 1])
    indptr[count + 1 :] = indptr[count]
    loops = whole.loops(node) if len(whole.self_loops) else np.zeros(len(node), np.int64)
    begin = np.searchsorted(whole.self_loops, node)
    at = np.repeat(begin - (np.cumsum(loops) - loops), loops) + np.arange(int(loops.sum()))
    return LocalGraph(
        indptr=indptr,
        indices=source,
        columns=columns,
        self_loops=np.repeat(np.arange(len(node)), loops),
        weight_sum=None if whole.weight_sum is None else np.asarray(whole.weight_sum[node], np.float32),
        loop_weight=None if whole.loop_weight is None else np.asarray(whole.loop_weight[at], np.float32),
        degrees=degrees,
    )
