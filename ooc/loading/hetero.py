"""Batches of several node and edge types: their rows, and the PyG `HeteroData` that the user sees.

They go through the stages, read strategies and pipelines of all batches. Each type has its own features, labels and splits;
rows on disk are read as one array, each type's behind those of the type before (`JoinedRows`), so that one superbatch and one
cache of rows serve all types.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import HeteroData

from ooc.graph.aggregation import RowDecoder, TypedAggregates, gather_neighbors
from ooc.graph.blocks import EDGE_ID, narrow
from ooc.graph.hetero import (
    EdgeKey,
    EdgeSample,
    HeteroBlock,
    HeteroSubgraph,
    hetero_block_of,
    hetero_blocks_of,
    summed_block,
)
from ooc.loading.collate import EdgeFeature, Gather, LoadedBatch, SampledBatch, check_edge_ids, column_of, edge_ids_of
from ooc.loading.hetero_rows import TypedPreAggregation, TypeRows
from ooc.loading.load_stage import InMemoryRows, LoadStage, ScanEntries, on_disk
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.graph import Graph


@dataclass(frozen=True)
class HeteroLoadStage(LoadStage):
    """Reads or takes the rows of each type: `types` say which. `x` are those on disk, of all types; None where all are in
    memory."""

    types: Mapping[str, TypeRows] = field(default_factory=dict)
    graphs: Mapping[EdgeKey, Graph] = field(default_factory=dict)
    features: Mapping[EdgeKey, tuple[EdgeFeature, ...]] = field(default_factory=dict)
    """of each edge type; read batch by batch, by edge id"""
    typed: TypedPreAggregation | None = None
    """what a batch holds in place of the rows of its nodes"""

    def _features(self, subgraph: HeteroSubgraph) -> Iterator[tuple[str, Gather, Rows, Ids]]:
        """(type, how its rows become x, the rows, the nodes) of each type with features."""
        for name, own in self.types.items():
            if own.x is not None and own.gather is not None:
                yield name, own.gather, own.x, subgraph.node[name]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The array of all types' rows, where they are on disk."""
        return () if self.x is None else (TypedRows(self),)

    def wanted(self, drawn: SampledBatch) -> Ids:
        """int64[r]: the rows of `x` that the batch has, type by type."""
        assert isinstance(self.x, JoinedRows)
        return np.concatenate([self.x.begin[name] + node for name, _, _, node in self._features(drawn.subgraph)])

    def load(self, drawn: SampledBatch) -> LoadedBatch:
        return self.take(drawn, {})

    @property
    def decoders(self) -> tuple[RowDecoder, ...]:
        """See `LoadStage.decoders`: of each type with features."""
        return tuple(RowDecoder.of(own.gather.encoding) for own in self.types.values() if own.gather is not None)

    @property
    def width(self) -> int:
        """See `LoadStage.width`."""
        assert self.typed is not None
        return self.typed.width

    def take(self, drawn: SampledBatch, there: Mapping[int, InMemoryRows]) -> LoadedBatch:
        if self.typed is not None:
            return self._gathered(drawn, self.typed, there)
        x, begin = {}, 0
        for name, gather, rows, node in self._features(drawn.subgraph):
            if there:
                pool, at = there[0]
                own, begin = at[begin : begin + len(node)], begin + len(node)
                x[name] = self._taken(name, gather, pool, own)
            else:
                x[name], nbytes = gather.read(rows, node, self.buffers)
                self.counts.add(len(node), nbytes)
        return LoadedBatch(drawn, x, self._labels(drawn), self._edge_features(drawn.subgraph))

    def _gathered(self, drawn: SampledBatch, typed: TypedPreAggregation, there: Mapping[int, InMemoryRows]) -> LoadedBatch:
        """The batch with its aggregates, out of rows in memory."""
        subgraph, (sums, own) = drawn.subgraph, typed.sizes(drawn.subgraph)
        both = self.buffers.empty((sums + own, typed.width), np.dtype(np.float32))
        loaded = self.aggregated(typed.rest(drawn), both[:sums], both[sums:])
        places, decoders = self._in_memory(drawn, there), dict(zip(typed.types, self.decoders, strict=True))
        for name, out in loaded.x.self_rows.items():
            gather, (rows, at) = self.types[name].gather, places[name]
            assert gather is not None
            gather.encoding.gather(rows, at[: len(out)], out)
        for key, out in loaded.x.neighbor.items():
            edges, (rows, at) = subgraph.edges[key], places[key[0]]
            rows = rows.view(np.uint16) if rows.dtype == np.float16 else rows
            of_edges = edges.indptr, edges.source, typed.scale(edges)
            gather_neighbors(rows, *decoders[key[0]], at, subgraph.node[key[0]], *of_edges, out)
        return loaded

    def _in_memory(self, drawn: SampledBatch, there: Mapping[int, InMemoryRows]) -> dict[str, InMemoryRows]:
        """The rows of each type with features, contiguous, and where a batch's are among them."""
        found, begin = dict[str, InMemoryRows](), 0
        for name, _, rows, node in self._features(drawn.subgraph):
            if there:
                assert isinstance(self.x, JoinedRows)
                pool, at = there[0]
                own, begin = at[begin : begin + len(node)], begin + len(node)
                view = self.x.view(name, pool)
                found[name] = (view, own) if view.flags.c_contiguous else (self.x.take(name, pool, own), np.arange(len(own)))
            else:
                assert isinstance(rows, ArrayRows), "rows on disk are aggregated by a read strategy"
                found[name] = rows.array, node
        return found

    def entries(self, drawn: SampledBatch) -> ScanEntries:
        """See `LoadStage.entries`: rows are numbered as those of all types are, aggregates edge type by edge type."""
        typed, subgraph = self.typed, drawn.subgraph
        assert typed is not None
        assert isinstance(self.x, JoinedRows)
        row, target, begin, count, base = [], [], self.x.begin, typed.destinations(subgraph), 0
        for key in typed.edge_types:
            edges = subgraph.edges[key]
            row.append(subgraph.node[key[0]][edges.source] + begin[key[0]])
            number = np.arange(base, base + count[key[2]], dtype=np.int32)
            target.append(np.repeat(number, np.diff(edges.indptr)))
            base += count[key[2]]
        scale = np.concatenate([typed.scale(subgraph.edges[key]) for key in typed.edge_types])
        own = narrow(np.concatenate([subgraph.node[name][: count[name]] + begin[name] for name in typed.types]))
        none = np.empty(0, np.float32)
        return ScanEntries(typed.rest(drawn), np.concatenate(row), np.concatenate(target), none, scale, own, base)

    def aggregated(self, rest: SampledBatch, neighbor: AnyArray, self_row: AnyArray) -> LoadedBatch:
        """See `LoadStage.aggregated`: the rows of each type and edge type are parts of these."""
        assert self.typed is not None
        count, nodes = self.typed.destinations(rest.subgraph), rest.subgraph.node
        ends = np.cumsum([count[key[2]] for key in self.typed.edge_types])[:-1]
        sums = dict(zip(self.typed.edge_types, np.split(neighbor, ends), strict=True))
        own = np.split(self_row, np.cumsum([len(nodes[name]) for name in self.typed.types])[:-1])
        rows = dict(zip(self.typed.types, own, strict=True))
        return LoadedBatch(rest, TypedAggregates(sums, rows), self._labels(rest))

    def _edge_features(self, subgraph: HeteroSubgraph) -> dict[EdgeKey, tuple[AnyArray, ...]]:
        """The features of a batch's edges. Raises StoreError for edge ids out of range, which only a damaged store has."""
        found = {}
        for key, features in self.features.items():
            if not features:
                continue
            e_id, values = edge_ids_of(self.graphs[key], subgraph.edges[key]), []
            check_edge_ids(e_id, min(each.rows.shape[0] for each in features))
            for each in features:
                own, nbytes = each.gather.read(each.rows, e_id, self.buffers)
                self.counts.add(topology=nbytes)
                values.append(own)
            found[key] = tuple(values)
        return found

    def read_alone(self, drawn: SampledBatch) -> Iterator[tuple[Rows, Ids]]:
        """Those of the edges."""
        for key, features in self.features.items():
            wanted = [each.rows for each in features if on_disk(each.rows)]
            e_id = edge_ids_of(self.graphs[key], drawn.subgraph.edges[key]) if wanted else None
            yield from ((rows, e_id) for rows in wanted if e_id is not None)

    def _taken(self, name: str, gather: Gather, pool: AnyArray, at: NDArray[Any]) -> AnyArray:
        """A type's features out of rows in memory."""
        assert isinstance(self.x, JoinedRows)
        view = self.x.view(name, pool)
        if view.flags.c_contiguous:
            return gather.take(view, at, self.buffers)
        return gather.take(self.x.take(name, pool, at), np.arange(len(at)), self.buffers)  # numpy would copy all of the view

    def _labels(self, drawn: SampledBatch) -> dict[str, AnyArray]:
        node = drawn.subgraph.node
        return {name: own.labels.of_nodes(node[name]) for name, own in self.types.items() if own.labels is not None}


@dataclass(frozen=True)
class TypedRows:
    """The rows of all types as one array of batches; see `BatchArray`."""

    load: HeteroLoadStage
    column: str | None = None
    of_edges: bool = False
    on_disk: bool = True

    @property
    def rows(self) -> Rows:
        assert self.load.x is not None
        return self.load.x

    def ids(self, drawn: SampledBatch) -> Ids:
        """int64[n]: the rows that a batch has."""
        return self.load.wanted(drawn)


@dataclass(frozen=True)
class HeteroCollator:
    """Joins a loaded batch to a `HeteroData` with the fields of PyG's NeighborLoader, and `blocks`.

    seeds: the type of the input nodes or links; weight_attr: a further name for the edge weights; edge_ids: whether to give
    `e_id`.
    """

    graphs: Mapping[EdgeKey, Graph]
    types: Mapping[str, TypeRows]
    seeds: str | EdgeKey
    weight_attr: str | None = None
    edge_ids: bool = True
    edge_values: Mapping[str, str] = field(default_factory=dict)
    """name of a field -> the column that it is of, in edge types that have it: times"""
    layers: int | None = None
    """layers that share the block of all nodes and edges; None: each hop has a prefix of it"""
    edge_features: Mapping[EdgeKey, tuple[EdgeFeature, ...]] = field(default_factory=dict)
    """of each edge type; the first of them is its blocks' `edge_attr`"""

    def columns(self, key: EdgeKey) -> tuple[str, ...]:
        """The columns of an edge type of which a batch has its edges' entries."""
        wanted = (EDGE_ID, "weight") if self.edge_ids else ("weight",)
        return tuple(name for name in wanted if name in self.graphs[key].columns)

    def needs_slots(self, there: Collection[str]) -> bool:
        """Whether a batch's slots are met again; there: the columns that come with it."""
        ids = self.edge_ids or any(self.edge_features.values())
        wanted = {*self.edge_values.values(), *([EDGE_ID] if ids else [])}
        return not wanted.union(*(self.columns(key) for key in self.graphs)) <= {*there}

    def __call__(self, loaded: LoadedBatch, input_id: NDArray[np.int64], seed_time: AnyArray | None = None) -> HeteroData:
        subgraph: HeteroSubgraph = loaded.drawn.subgraph
        sums = loaded.x if isinstance(loaded.x, TypedAggregates) else None
        x = loaded.x if sums is None else sums.self_rows
        data = HeteroData()
        for name, node in subgraph.node.items():
            self._add_nodes(data, name, node, x or {}, loaded.y or {})
            data[name].num_sampled_nodes = list(subgraph.num_nodes[name])
            if name in subgraph.tree:
                data[name].batch = torch.from_numpy(subgraph.tree[name])
        data[self.seeds].input_id = torch.from_numpy(input_id)
        if isinstance(self.seeds, str):
            data[self.seeds].batch_size = len(input_id)
        if seed_time is not None:
            data[self.seeds].seed_time = torch.from_numpy(seed_time)
        edge_index = {key: torch.from_numpy(edges.edge_index()) for key, edges in subgraph.edges.items()}
        weight = {key: self._weight(key, edges) for key, edges in subgraph.edges.items() if "weight" in self.columns(key)}
        for key, edges in subgraph.edges.items():
            self._add_edges(data, key, edges, edge_index[key], weight.get(key))
            if self.layers is None:
                data[key].num_sampled_edges = list(subgraph.num_edges[key])
        first = self._add_features(data, hetero_block_of(self.graphs, subgraph, edge_index, weight), loaded)
        if self.layers is None:
            data.blocks = hetero_blocks_of(first, subgraph.num_nodes, subgraph.num_edges)
        else:
            data.blocks = [first._replace(num_dst={name: len(node) for name, node in subgraph.node.items()})] * self.layers
        if sums is not None:
            neighbor = {key: torch.from_numpy(own) for key, own in sums.neighbor.items()}
            data.blocks[0] = summed_block(data.blocks[0], neighbor)
        return data

    def _add_features(self, data: HeteroData, block: HeteroBlock, loaded: LoadedBatch) -> HeteroBlock:
        """Add the features of edges; returns the block with the first of each type."""
        blocks = dict(block.blocks)
        for key, found in dict(loaded.edge_features).items():
            values = [each.gather.tensor(own) for each, own in zip(self.edge_features[key], found, strict=True)]
            for each, own in zip(self.edge_features[key], values, strict=True):
                data[key][each.name] = own
            blocks[key] = blocks[key]._replace(edge_attr=values[0])
        return block._replace(blocks=blocks)

    def _add_nodes(self, data: HeteroData, name: str, node: Ids, x: Mapping[str, AnyArray], y: Mapping[str, AnyArray]) -> None:
        own, store = self.types[name], data[name]
        store.num_nodes = len(node)
        if name in x:
            assert own.gather is not None
            store.x = own.gather.tensor(x[name])
        if name in y:
            store.y = torch.from_numpy(y[name])
        store.n_id = torch.from_numpy(node)
        for field_name, members in own.masks.items():
            store[field_name] = torch.from_numpy(members.contains(node))
        for field_name, values in own.values.items():
            store[field_name] = torch.from_numpy(values[node])

    def _add_edges(
        self, data: HeteroData, key: EdgeKey, edges: EdgeSample, edge_index: Tensor, weight: NDArray[np.float32] | None
    ) -> None:
        store = data[key]
        store.edge_index = edge_index
        if weight is not None:
            store.edge_weight = torch.from_numpy(weight)
            if self.weight_attr is not None:
                store[self.weight_attr] = store.edge_weight
        for name, column in self.edge_values.items():
            if column in self.graphs[key].columns:
                store[name] = torch.from_numpy(np.asarray(column_of(self.graphs[key], edges, column)))
        if self.edge_ids:
            store.e_id = torch.from_numpy(edge_ids_of(self.graphs[key], edges))

    def _weight(self, key: EdgeKey, edges: EdgeSample) -> NDArray[np.float32]:
        return np.asarray(column_of(self.graphs[key], edges, "weight"), np.float32)

    def nbytes(self, subgraph: HeteroSubgraph, typed: TypedPreAggregation | None = None) -> int:
        """Bytes of a batch, but for its subgraph's, from reading to the model; typed: what it is pre-aggregated by."""
        aggregated = () if typed is None else typed.types
        total = 0 if typed is None else 4 * typed.width * typed.sizes(subgraph)[0]
        for name, counts in subgraph.num_nodes.items():
            nodes = sum(counts[:-1] if name in aggregated else counts)
            total += nodes * (self.types[name].row_bytes + len(self.types[name].masks))
        for key, edges in subgraph.edges.items():
            graph, weighted = self.graphs[key], "weight" in self.columns(key)
            of_edges = sum(each.edge_bytes for each in self.edge_features.get(key, ()))
            counts = subgraph.num_edges[key]
            number = sum(counts[:-1] if key[0] in aggregated else counts)
            total += number * (16 + 8 * self.edge_ids + 4 * weighted + of_edges)
            total += (len(edges.indptr) - 1) * (8 + 8 * bool(len(graph.self_loops)) + 8 * weighted)
        return total

    def beside(self, subgraph: HeteroSubgraph) -> int:
        """Bytes that the nodes of the batch at the model take beside their fields; see `TypeRows.beside`."""
        return sum(len(node) * self.types[name].beside for name, node in subgraph.node.items())
