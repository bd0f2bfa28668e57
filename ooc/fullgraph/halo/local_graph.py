"""The part of a graph that a rank computes on: the in-edges of its range of nodes, and the halo, the sources outside of it.

The nodes of the part are numbered anew: those of the range first, then the halo by ascending id, so that what one rank computes
stands together.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """A part of a graph; see `Graph`. The halo has no in-edges here. degrees: int64[n], of its nodes in the whole graph."""

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
    """What exact training reads of a data set, of the nodes first:stop alone and their halo.

    `num_nodes` and `num_edges` are those of the range, `graph` has the halo's nodes too. folder: for edges that do not fit the
    memory. Raises StoreError where the disk fails.
    """

    def __init__(self, whole: Dataset, first: int, stop: int, folder: Path | None) -> None:
        self.whole, self.first, self.stop = whole, first, stop
        self.path, self.memory, self.engine = whole.path, whole.memory, whole.engine
        self.manifest = whole.manifest.model_copy(update={"undirected": False})
        self._nodes, self._edges = whole._nodes, whole._edges
        begin, end = int(whole.graph.indptr[first]), int(whole.graph.indptr[stop])
        source = self._slots("indices", begin, end, folder)
        self.halo = _halo(source, first, stop)
        for low in range(0, len(source), _SLOTS_AT_ONCE):
            part = source[low : low + _SLOTS_AT_ONCE]
            part[:] = self._local(np.asarray(part, np.int64))
        self.node = node = np.concatenate([np.arange(first, stop), self.halo])
        weighted = "weight" in whole.graph.columns
        columns = {"weight": self._slots("weight", begin, end, folder)} if weighted else {}
        self._graph = _part_of(whole.graph, node, stop - first, source, columns)
        self.numbering = Numbering(node, begin, whole.graph.num_edges)

    def _slots(self, name: str, begin: int, end: int, folder: Path | None) -> NDArray[Any]:
        """A column of the slots begin:end, checked, in memory or mapped from a file."""
        graph = self.whole.graph
        column = graph.indices if name == "indices" else graph.columns[name]
        rows, buffers = rows_over(column, lambda: self.whole.edge_rows(name)), Buffers(kept=1, direct=True)
        dtype = index_dtype(graph.num_nodes) if name == "indices" else np.dtype(np.float32)
        found = self._empty(end - begin, dtype, None if folder is None else folder / f"{name}-{EDGES}")
        for low in range(begin, end, _SLOTS_AT_ONCE):
            high = min(low + _SLOTS_AT_ONCE, end)
            values, _ = read_range(rows, low, high, buffers)
            if name == "indices":
                check_nodes("graph/indices", low, values, graph.num_nodes)
            found[low - begin : high - begin] = values
        return found

    def _empty(self, count: int, dtype: np.dtype[Any], path: Path | None) -> NDArray[Any]:
        nbytes = count * dtype.itemsize
        if path is None or not count or self.memory is None or nbytes * RANK_EDGES_SHARE <= self.memory:
            return np.empty(count, dtype)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return np.memmap(path, dtype, "w+", shape=(count,))

    def _local(self, node: Ints) -> Ints:
        """Numbers in the part."""
        inside = (node >= self.first) & (node < self.stop)
        return np.where(inside, node - self.first, np.searchsorted(self.halo, node) + self.stop - self.first)

    @property
    def num_nodes(self) -> int:
        """Of the range."""
        return self.stop - self.first

    @property
    def num_edges(self) -> int:
        """In-edges of the range."""
        return self._graph.num_edges

    @property
    def graph(self) -> Graph:
        """The in-edges of the range; the halo's nodes stand behind those of the range."""
        return self._graph

    @property
    def nbytes(self) -> int:
        """Of memory for the part's topology."""
        arrays = (self._graph.indptr, self._graph.degrees, self.node, self.halo, self._graph.weight_sum)
        slots = [each for each in (self._graph.indices, *self._graph.columns.values()) if not isinstance(each, np.memmap)]
        return sum(each.nbytes for each in (*arrays, *slots) if each is not None)

    def stored(self, name: str) -> Rows:
        """See `Dataset.stored`; of the part's nodes, those of the halo among them."""
        return LocalRows(self.whole.stored(name), self.node)

    @cached_property
    def fingerprint(self) -> str:
        """See `Dataset.fingerprint`; with the range."""
        return f"{self.whole.fingerprint} {self.first}:{self.stop}"


def halo_counts(dataset: Dataset, starts: Ints) -> Ints:
    """int64[K, K]: rows of each rank's halo (first index) that each other rank computes. starts: int64[K + 1], the ranges."""
    indices = rows_over(dataset.graph.indices, lambda: dataset.edge_rows("indices"))
    buffers, found = Buffers(kept=1, direct=True), []
    for first, stop in pairwise(starts.tolist()):
        begin, end, halo = int(dataset.graph.indptr[first]), int(dataset.graph.indptr[stop]), np.empty(0, np.int64)
        for low in range(begin, end, _SLOTS_AT_ONCE):
            values, _ = read_range(indices, low, min(low + _SLOTS_AT_ONCE, end), buffers)
            halo = np.union1d(halo, _halo(values, first, stop))
        found.append(np.diff(np.searchsorted(halo, starts)))
    return np.stack(found)


def _halo(source: NDArray[Any], first: int, stop: int) -> Ints:
    """Sources outside of first:stop, each once, ascending."""
    found = np.empty(0, np.int64)
    for low in range(0, len(source), _SLOTS_AT_ONCE):
        part = np.asarray(source[low : low + _SLOTS_AT_ONCE], np.int64)
        found = np.union1d(found, part[(part < first) | (part >= stop)])
    return found


def _part_of(whole: Graph, node: Ints, count: int, source: NDArray[Any], columns: dict[str, NDArray[Any]]) -> LocalGraph:
    """The part of a graph with the nodes `node`, of which the first `count` have their in-edges `source`."""
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
