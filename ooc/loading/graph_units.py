"""Whole graphs, read as ranges of every array and collated as PyG's DataLoader does.

A unit is what is read at once: graphs in the order of their batches, as many as the memory has. Batches are cut from units by
kernels over all their graphs, without a step of Python a graph.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Batch, Data

from ooc.loading.collate import Gather
from ooc.loading.read_counts import ReadCounts
from ooc.runtime.buffers import Buffers
from ooc.runtime.transfer import pin
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.rows import ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import Empty, RangePlan, Ranges
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.segments import mapping_of
from ooc.stores.jit import kernel

_PAGE_BYTES = 4096
NODE, EDGE, GRAPH, SLOT = "node", "edge", "graph", "slot"
OWN = ("edge_index", "batch", "ptr", "num_nodes", "graph_id", "e_id")
"""fields of every batch, which no array may be called"""
_NOT_FIELDS = ("split", "birth")
_MOST_EDGES = 1.25
"""rows of edge features that are read by range, of the edges that need them"""


class Field(NamedTuple):
    """One array of the store that is a field of a batch."""

    name: str
    """of the field"""
    of: str
    """NODE, EDGE (by edge id), SLOT (by slot) or GRAPH"""
    rows: Rows
    """as stored"""
    gather: Gather
    label: np.dtype[Any] | None = None
    """what labels are in a batch, as torch's losses take them: classes int64, several labels of a row float32"""

    @property
    def width(self) -> int:
        """Items of a row."""
        return int(np.prod(self.rows.shape[1:], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch, while it is made."""
        if self.label is not None:
            return self.rows.row_bytes + self.label.itemsize * self.width
        return self.gather.row_bytes(self.rows.shape[1:]) + (0 if self.gather.kept else self.rows.row_bytes)


def fields_of(data: Dataset, exclude: Iterable[str], dtype: torch.dtype | None) -> list[Field]:
    """All fields of the batches of a store of many graphs, without those of the names `exclude`, sorted by name.

    Raises ConfigError for two arrays that would be one field, or a name in `exclude` that is no field.
    """
    graphs, found = data.graphs, list[Field]()

    def add(name: str, of: str, rows: Rows, encoding: Encoding, task: str | None = None) -> None:
        label = None if task is None or rows.dtype.kind != "i" else np.dtype(np.float32 if task == "multilabel" else np.int64)
        found.append(Field(name, of, rows, Gather(encoding, dtype if name == "x" else None), label))

    for name in (each for each in graphs.names if each != "split" and not each.startswith("split_")):
        add(name, GRAPH, graphs.stored(name), graphs.encoding(name), graphs.task if name == "y" else None)
    for name in (each for each in data.names if each not in _NOT_FIELDS and not each.startswith("split_")):
        own = "node_y" if name == "y" and "y" in graphs.names else name
        add(own, NODE, data.stored(name), data.encoding(name), data.task if name == "y" else None)
    for name in data.manifest.edge_types[0].arrays:
        rows, encoding = data.stored_edge_features(name)
        add(name, EDGE, rows, encoding)
    if "weight" in data.graph.columns:
        add("edge_weight", SLOT, data.edge_rows("weight"), Encoding.raw(data.edge_rows("weight").dtype))
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1 or name in OWN:
            raise ConfigError(f"{data.path} has two arrays that would be {name!r} of a batch: ingest one by another name")
    for name in exclude:
        if name not in names:
            raise ConfigError(f"exclude_keys: batches have no {name!r} to leave out; there are {', '.join(sorted(names))}")
    return sorted((each for each in found if each.name not in set(exclude)), key=lambda each: each.name)


class Unit(NamedTuple):
    """Graphs that were read at once, in the order of their batches; `of` maps a field's name to its ranges."""

    graph: Ids
    """int64[k]: rows of the graphs"""
    indptr: Ranges
    indices: Ranges
    edge_id: Ranges | None
    low: Ids
    """int64[k]: the smallest edge id of each graph; where edge features are read slot by slot, -1"""
    of: dict[str, Ranges]


class UnitPlan(NamedTuple):
    """The reads of a unit but for its edge features, which follow from edge ids."""

    graph: Ids
    plans: dict[str, RangePlan]
    nbytes: int


@dataclass(frozen=True)
class GraphReader:
    """Reads graphs of a store. Any number of threads."""

    data: Dataset
    fields: list[Field]
    edge_ids: bool
    """whether batches have e_id"""
    counts: ReadCounts
    buffers: Buffers
    rows: dict[str, Rows] = field(default_factory=dict)
    """the topology's arrays by name"""

    @classmethod
    def of(cls, data: Dataset, fields: list[Field], edge_ids: bool, buffers: Buffers) -> "GraphReader":
        graph, wanted = data.graph, ["indptr", "indices"]
        wanted += ["edge_id"] if edge_ids or any(each.of == EDGE for each in fields) else []
        in_memory = mapping_of(graph.indices) is None
        held = {"indptr": graph.indptr, "indices": graph.indices, **graph.columns}
        rows: dict[str, Rows] = {name: ArrayRows(held[name]) if in_memory else data.edge_rows(name) for name in wanted}
        return cls(data, fields, edge_ids, ReadCounts(), buffers, rows)

    def nbytes(self, graph: Ids) -> Ids:
        """Bytes that reading takes for each graph, int64[k], if their ranges lay side by side."""
        per = dict.fromkeys((NODE, EDGE, SLOT, GRAPH), 0)
        for each in self.fields:
            per[each.of] += each.rows.row_bytes
        slots = per[EDGE] + per[SLOT] + sum(rows.row_bytes for name, rows in self.rows.items() if name != "indptr")
        nodes, edges = self.sizes(graph)
        return nodes * (per[NODE] + 8) + edges * slots + per[GRAPH] + 8

    def sizes(self, graph: Ids) -> tuple[Ids, Ids]:
        """Nodes and edges of each graph, int64[k] each."""
        graphs = self.data.graphs
        return graphs.ptr[graph + 1] - graphs.ptr[graph], graphs.edge_ptr[graph + 1] - graphs.edge_ptr[graph]

    def plan(self, graph: Ids) -> UnitPlan:
        """Plan the reading of graphs, in the order of their batches."""
        graphs = self.data.graphs
        node, slot = (graphs.ptr[graph], graphs.ptr[graph + 1]), (graphs.edge_ptr[graph], graphs.edge_ptr[graph + 1])
        span = {NODE: node, SLOT: slot, GRAPH: (graph, graph + 1)}
        plans = {each.name: RangePlan.of(each.rows, *span[each.of]) for each in self.fields if each.of != EDGE}
        plans["indptr"] = RangePlan.of(self.rows["indptr"], node[0], node[1] + 1)
        plans |= {name: RangePlan.of(rows, *slot) for name, rows in self.rows.items() if name != "indptr"}
        by_edge = sum(each.rows.row_bytes for each in self.fields if each.of == EDGE)
        features = int(_MOST_EDGES * int((slot[1] - slot[0]).sum()) * by_edge)
        return UnitPlan(graph, plans, sum(_aligned(plan.nbytes) for plan in plans.values()) + features)

    def read(self, plan: UnitPlan) -> Unit:
        """Read a unit's arrays."""
        found = self._read_all(plan.plans)
        low = np.full(len(plan.graph), -1)
        edges = [each for each in self.fields if each.of == EDGE]
        if edges:
            low, features = self._edge_features(plan.graph, found["edge_id"], edges)
            found |= features
        self.counts.add(int(self.sizes(plan.graph)[0].sum()), sum(each.nbytes for each in found.values()))
        indptr, indices, edge_id = found.pop("indptr"), found.pop("indices"), found.pop("edge_id", None)
        return Unit(plan.graph, indptr, indices, edge_id, low, found)

    def _read_all(self, plans: Mapping[str, RangePlan]) -> dict[str, Ranges]:
        """Carry plans out, in one piece of memory."""
        whole, taken = self.buffers.empty((sum(_aligned(plan.nbytes) for plan in plans.values()),), np.dtype(np.uint8)), 0
        found = {}
        for name, plan in plans.items():
            found[name] = plan.read(_taking(whole[taken:]))
            taken += _aligned(plan.nbytes)
        return found

    def _edge_features(self, graph: Ids, ids: Ranges, fields: list[Field]) -> tuple[Ids, dict[str, Ranges]]:
        """(smallest edge id of each graph, its edge features): as ranges where the edges of each graph stood together in the
        input; otherwise -1 and the features of the slots in turn."""
        edges = self.sizes(graph)[1]
        low, high = np.empty(len(graph), np.int64), np.empty(len(graph), np.int64)
        _bounds(ids.items, ids.at, edges, low, high)
        if int((high - low).sum()) <= _MOST_EDGES * int(edges.sum()):
            return low, self._read_all({each.name: RangePlan.of(each.rows, low, high) for each in fields})
        wanted = np.empty(int(edges.sum()), np.int64)
        begin = np.cumsum(edges) - edges
        _copy(ids.items, ids.at, edges, 1, wanted, begin)
        found = {}
        for each in fields:
            out = np.empty((len(wanted), *each.rows.shape[1:]), each.rows.dtype)
            nbytes = each.rows.read(wanted, out)
            found[each.name] = Ranges(out.reshape(-1), begin * each.width, each.width, nbytes)
        return np.full(len(graph), -1), found


def _taking(memory: NDArray[np.uint8]) -> Empty:
    """The beginning of `memory`."""
    return lambda nbytes: memory[:nbytes]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class Piece(NamedTuple):
    """Graphs first..last-1 of a unit, a batch or a part of one."""

    unit: Unit
    first: int
    last: int


class UncollatedBatch(NamedTuple):
    """The graphs of step `step`, in pieces."""

    step: int
    pieces: tuple[Piece, ...]

    @property
    def graph(self) -> Ids:
        """int64[b]"""
        parts = [piece.unit.graph[piece.first : piece.last] for piece in self.pieces]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


@dataclass(frozen=True)
class GraphCollator:
    """Makes batches as PyG's DataLoader does, with edges in the order of the store: by destination, then as in the input.

    follow: fields that get vectors `NAME_batch` and `NAME_ptr`.
    """

    reader: GraphReader
    buffers: Buffers
    follow: tuple[str, ...] = ()
    transform: Callable[[Batch], Any] | None = None
    pin: bool = False

    def nbytes(self, batch: UncollatedBatch) -> int:
        """Bytes of a batch while it is made, and after."""
        nodes, edges = (int(each.sum()) for each in self.reader.sizes(batch.graph))
        return self.nbytes_of(nodes, edges, len(batch.graph))

    def nbytes_of(self, nodes: int, edges: int, graphs: int) -> int:
        """The same of a batch of so many nodes, edges and graphs."""
        per = dict.fromkeys((NODE, EDGE, SLOT, GRAPH), 0)
        for each in self.reader.fields:
            per[each.of] += each.row_bytes
        own = 8 * self.reader.edge_ids + 8 * any(each.of == EDGE for each in self.reader.fields)
        return nodes * (per[NODE] + 8) + edges * (per[EDGE] + per[SLOT] + 16 + own) + graphs * (per[GRAPH] + 48)

    def collate(self, batch: UncollatedBatch) -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        made: Any = self.batch(batch)
        if self.transform is not None:
            made = self.transform(made)
        return batch.step + 1, pin(made) if self.pin else made

    def batch(self, uncollated: UncollatedBatch) -> Batch:
        graph = uncollated.graph
        nodes, edges = self.reader.sizes(graph)
        ptr, edge_ptr = _starts(nodes), _starts(edges)
        bounds = {NODE: ptr, EDGE: edge_ptr, SLOT: edge_ptr, GRAPH: np.arange(len(graph) + 1)}
        made = {"edge_index": torch.from_numpy(self._edge_index(uncollated, ptr, edge_ptr))}
        e_id = self._edge_ids(uncollated, edge_ptr)
        for each in self.reader.fields:
            made[each.name] = self._field(each, uncollated, bounds[each.of], e_id)
        if self.reader.edge_ids:
            assert e_id is not None
            made["e_id"] = torch.from_numpy(e_id)
        ends = {each.name: bounds[each.of] for each in self.reader.fields} | {"edge_index": edge_ptr, "e_id": edge_ptr}
        return self._batch(graph, ptr, made, {name: ends[name] for name in made})

    def _batch(self, graph: Ids, ptr: Ids, made: dict[str, torch.Tensor], ends: Mapping[str, Ids]) -> Batch:
        """The `Batch` of these fields, which can be divided into its graphs again."""
        batch: Any = Batch(_base_cls=Data, **made)
        batch.graph_id, ends = torch.from_numpy(graph), {**ends, "graph_id": np.arange(len(graph) + 1)}
        if not any(each.of == NODE for each in self.reader.fields):
            batch.num_nodes = int(ptr[-1])
            batch._store._num_nodes = np.diff(ptr).tolist()
        for name in self.follow:
            counts = torch.from_numpy(np.diff(ends[name]))
            batch[f"{name}_batch"] = torch.repeat_interleave(torch.arange(len(graph)), counts)
            batch[f"{name}_ptr"] = torch.from_numpy(ends[name].copy())
        batch.batch = torch.from_numpy(np.repeat(np.arange(len(graph)), np.diff(ptr)))
        batch.ptr = torch.from_numpy(ptr)
        batch._num_graphs = len(graph)
        batch._slice_dict = {name: torch.from_numpy(end) for name, end in ends.items()}
        none = torch.zeros(len(graph), dtype=torch.int64)
        batch._inc_dict = {name: batch.ptr[:-1] if name == "edge_index" else none for name in ends}
        return batch

    def _edge_index(self, batch: UncollatedBatch, ptr: Ids, edge_ptr: Ids) -> Ids:
        out = np.empty((2, int(edge_ptr[-1])), np.int64)
        done, graphs = 0, self.reader.data.graphs
        for unit, first, last in batch.pieces:
            stop = done + last - first
            own = graphs.ptr[unit.graph[first:last]]
            at = unit.indptr.at[first:last], unit.indices.at[first:last]
            wrong = _edges(
                unit.indptr.items, at[0], unit.indices.items, at[1], own, ptr[done : stop + 1], edge_ptr[done : stop + 1], out
            )
            if wrong >= 0:
                raise StoreError(
                    f"graph {unit.graph[first + wrong]} of {self.reader.data.path} has an edge to another graph: the topology "
                    "is damaged; run `ooc verify` on the store"
                )
            done = stop
        return out

    def _edge_ids(self, batch: UncollatedBatch, edge_ptr: Ids) -> Ids | None:
        """int64[e]: edge ids of the batch's edges, where a field needs them."""
        if "edge_id" not in self.reader.rows:
            return None
        out = np.empty(int(edge_ptr[-1]), np.int64)
        done = 0
        for unit, first, last in batch.pieces:
            stop = done + last - first
            assert unit.edge_id is not None
            _copy(unit.edge_id.items, unit.edge_id.at[first:last], np.diff(edge_ptr[done : stop + 1]), 1, out, edge_ptr[done:])
            done = stop
        return out

    def _field(self, each: Field, batch: UncollatedBatch, ends: Ids, e_id: Ids | None) -> torch.Tensor:
        raw = self.buffers.empty((int(ends[-1]), *each.rows.shape[1:]), each.rows.dtype)
        flat, width, done = raw.reshape(-1), each.width, 0
        for unit, first, last in batch.pieces:
            stop, ranges, low = done + last - first, unit.of[each.name], unit.low[first:last]
            at, begin = ranges.at[first:last], ends[done : stop + 1]
            if each.of == EDGE and len(low) and low[0] >= 0:
                assert e_id is not None
                _pick(ranges.items, at, low, e_id, begin, width, flat)
            else:
                _copy(ranges.items, at, np.diff(begin), width, flat, begin)
            done = stop
        if each.label is not None:
            return torch.from_numpy(raw.astype(each.label))
        if not each.gather.kept:
            raw = each.gather.take(raw, np.arange(len(raw)), self.buffers)
        return each.gather.tensor(raw)


def _starts(sizes: Ids) -> Ids:
    found = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


@kernel
def _copy(source: NDArray[Any], at: Ids, count: Ids, width: int, out: NDArray[Any], out_at: Ids) -> None:
    """For each range j: copy count[j] rows of `width` items from source[at[j]] to row out_at[j] of `out`."""
    for j in range(len(at)):
        begin, to, size = at[j], out_at[j] * width, count[j] * width
        for i in range(size):
            out[to + i] = source[begin + i]


@kernel
def _pick(source: NDArray[Any], at: Ids, low: Ids, e_id: Ids, bounds: Ids, width: int, out: NDArray[Any]) -> None:
    """For each edge e of graph j (bounds[j] <= e < bounds[j + 1]): copy row e_id[e] - low[j] of the range at[j]."""
    for j in range(len(at)):
        for e in range(bounds[j], bounds[j + 1]):
            begin, to = at[j] + (e_id[e] - low[j]) * width, e * width
            for i in range(width):
                out[to + i] = source[begin + i]


@kernel
def _bounds(edge_id: NDArray[Any], at: Ids, count: Ids, low: Ids, high: Ids) -> None:
    """Smallest edge id of each range, and one more than the largest; 0 and 0 for an empty range."""
    for j in range(len(at)):
        if count[j] == 0:
            low[j] = high[j] = 0
            continue
        least = most = edge_id[at[j]]
        for i in range(at[j], at[j] + count[j]):
            least, most = min(least, edge_id[i]), max(most, edge_id[i])
        low[j], high[j] = least, most + 1


@kernel
def _edges(
    indptr: Ids, indptr_at: Ids, indices: NDArray[Any], indices_at: Ids, first: Ids, ptr: Ids, edge_ptr: Ids, out: Ids
) -> int:
    """Set the edges of graphs with the first nodes `first` in the store, ptr[j] in the batch; returns a graph with an edge to
    another one, or -1."""
    for j in range(len(first)):
        p, o, nodes = indices_at[j], edge_ptr[j], ptr[j + 1] - ptr[j]
        begin = indptr_at[j]
        if indptr[begin + nodes] - indptr[begin] != edge_ptr[j + 1] - edge_ptr[j]:
            return j
        for i in range(nodes):
            for _ in range(indptr[begin + i + 1] - indptr[begin + i]):
                local = indices[p] - first[j]
                if local < 0 or local >= nodes:
                    return j
                out[0, o] = local + ptr[j]
                out[1, o] = i + ptr[j]
                p += 1
                o += 1
    return -1
