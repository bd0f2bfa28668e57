"""Sums over all in-edges of a range of destinations, made in a GPU's memory, where the edges and the rows are.

A destination's sources ascend, and a row with a factor is rounded before it is added, as the host's kernels do
(`ooc.layerwise.aggregator`): sums have the same bits wherever they are made.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.graph.aggregation import Kind, gcn_factors
from ooc.graph.bag_sum import bag_sum
from ooc.layerwise.aggregator import mean_factors
from ooc.layerwise.device_rows import DeviceRows
from ooc.layerwise.edge_tiles import Ints
from ooc.layerwise.pass_plan import ModelShape
from ooc.runtime.transfer import HostCopy, to_device
from ooc.stores.graph import Graph

_EDGES_AT_ONCE = 1 << 22
"""put in order and copied at a time"""
_GATHERED = 1 << 24
"""numbers of rows that are gathered for their factors at a time"""
_SORT_BYTES = 40
"""of an edge while edges are turned round: the sort's numbers and places, its own memory, and what is made of them"""
Slots = Callable[[int, int], tuple[Ints, NDArray[np.float32] | None]]
"""slots(first, stop) -> (sources, weights) of the in-edges of destinations first:stop"""


class DeviceEdges(NamedTuple):
    """Edges in one direction. source: int32[e], by destination, ascending for each; indptr: int64[n + 1]; factor: [e] of GCN's
    sum, by which a row is multiplied, None where no layer has one; bounds: edges before destinations 0, step, 2 * step, ..."""

    source: Tensor
    indptr: Tensor
    factor: Tensor | None
    bounds: list[int]


def device_edge_bytes(shape: ModelShape) -> tuple[int, int]:
    """PURE: (bytes that the edges of a graph take on a device in both directions, bytes that making them takes beside)."""
    gcn = any(layer.kind == "gcn" for layer in shape.layers)
    kept = shape.num_edges * (4 + shape.itemsize * gcn) + 8 * (shape.num_nodes + 1)
    return 2 * kept + shape.num_nodes * shape.itemsize * gcn, shape.num_edges * _SORT_BYTES


def device_sum_bytes(shape: ModelShape) -> int:
    """PURE: bytes that rows take which are gathered for their factors."""
    return 3 * shape.itemsize * max(shape.num_edges, min(_GATHERED, shape.num_edges * shape.widest))


class DeviceSums:
    """The edges of a graph of less than 2**31 nodes on a device, in both directions, and sums over them.

    slots: reads them; kinds: of the sums; dtype: of rows and sums; step: destinations that are added up together, from a
    multiple of it on; undirected: whether both directions are the same. The host waits once, for where steps begin.
    """

    def __init__(
        self,
        graph: Graph,
        slots: Slots,
        kinds: Collection[Kind],
        dtype: np.dtype[Any],
        device: torch.device,
        step: int,
        *,
        undirected: bool = False,
    ) -> None:
        self._graph, self._device, self._step, self._dtype = graph, device, step, dtype
        self._node_factor: Tensor | None = None
        if "gcn" in kinds:
            (self._node_factor,) = to_device([torch.from_numpy(gcn_factors(graph, np.arange(graph.num_nodes), dtype))], device)
        source, target, weight = self._copied(slots, "gcn" in kinds and "weight" in graph.columns)
        (indptr,) = to_device([torch.from_numpy(np.array(graph.indptr, np.int64))], device)
        bounds = [*np.asarray(graph.indptr[::step]).tolist(), len(source)]
        forth = DeviceEdges(source, indptr, self._factors(source, target, weight), bounds)
        self._edges = forth, forth if undirected else self._turned(source, target, weight)

    def _turned(self, source: Tensor, target: Tensor, weight: Tensor | None) -> DeviceEdges:
        """The edges turned round."""
        found, nodes = source.sort(stable=True), self._graph.num_nodes
        indptr = torch.searchsorted(found.values, torch.arange(nodes + 1, dtype=source.dtype, device=self._device))
        order, back = found.indices, target[found.indices]
        factor = self._factors(back, found.values, None if weight is None else weight[order])
        (bounds,) = HostCopy([indptr[:: self._step]]).tensors()
        return DeviceEdges(back, indptr, factor, [*bounds.tolist(), len(source)])

    def _copied(self, slots: Slots, weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(int32[e] sources, ascending for each destination, int32[e] destinations, float32[e] weights)."""
        graph, count = self._graph, int(self._graph.indptr[-1])
        source, target = (torch.empty(count, dtype=torch.int32, device=self._device) for _ in range(2))
        weight = torch.empty(count, dtype=torch.float32, device=self._device) if weighted else None
        for first, stop in _ranges(graph.indptr):
            own, weights = slots(first, stop)
            to = np.repeat(np.arange(stop - first), np.diff(graph.indptr[first : stop + 1]))
            sources, targets = to_device([torch.from_numpy(own), torch.from_numpy(to)], self._device)
            order = (targets * graph.num_nodes + sources).sort(stable=True).indices
            edges = slice(int(graph.indptr[first]), int(graph.indptr[stop]))
            source[edges], target[edges] = sources[order], targets + first
            if weight is not None:
                assert weights is not None
                weight[edges] = to_device([torch.from_numpy(weights)], self._device)[0][order]
        return source, target, weight

    def _factors(self, source: Tensor, target: Tensor, weight: Tensor | None) -> Tensor | None:
        """Of GCN's sum, [e]: 0 for self-loops, and where the source has none."""
        if self._node_factor is None:
            return None
        factor = self._node_factor[source]
        left_out = (source == target) | (factor == 0)
        if weight is not None:
            factor = factor * weight.to(factor.dtype)
        return factor.masked_fill_(left_out, 0)

    def sum(self, rows: DeviceRows, kind: Kind, back: bool, first: int, stop: int) -> Tensor:
        """The sums of destinations first:stop over `rows` [n, f], of this kind: [stop - first, f]. back: along the edges turned
        round; first: a multiple of the step, and stop the next one or the number of nodes."""
        edges = self._edges[back]
        begin, end = (edges.bounds[-(-at // self._step)] for at in (first, stop))
        indptr = (edges.indptr[first : stop + 1] - begin).to(torch.int32)
        sums = self._added(rows, edges.source[begin:end], indptr, edges.factor[begin:end] if kind == "gcn" else None)  # type: ignore[index]
        if kind == "mean":
            (factor,) = to_device([torch.from_numpy(mean_factors(self._graph, first, stop, self._dtype))], self._device)
            sums *= factor[:, None]
        elif kind == "gcn":
            assert self._node_factor is not None
            factor = self._node_factor[first:stop, None]
            sums = (sums * factor).masked_fill_(factor == 0, 0)  # also where an infinite weight was added
        return sums

    def _added(self, rows: DeviceRows, source: Tensor, indptr: Tensor, factor: Tensor | None) -> Tensor:
        if factor is None and rows.as_read:
            return bag_sum(source, rows.values, indptr, None)
        width, index = rows.shape[1], torch.arange(len(source), dtype=source.dtype, device=self._device)
        columns, parts = max(1, _GATHERED // max(1, len(source))), []
        for at in range(0, width, columns):
            some = slice(at, at + columns)
            gathered = rows.read(rows.values[:, some].index_select(0, source), some)
            parts.append(bag_sum(index, gathered if factor is None else gathered * factor[:, None], indptr, None))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _ranges(indptr: Any) -> Iterator[tuple[int, int]]:
    """Ranges of destinations with few edges each, or of one destination."""
    first, nodes = 0, len(indptr) - 1
    while first < nodes:
        most = int(indptr[first]) + _EDGES_AT_ONCE
        stop = min(nodes, max(first + 1, int(np.searchsorted(indptr, most, side="right")) - 1))
        yield first, stop
        first = stop
