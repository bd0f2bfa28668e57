"""The row-wise parts of a forward pass: what an op makes of a chunk's inputs.

Inputs go by their roles, outputs by the names of values (`ooc.layerwise.pass_plan`). What a layer reads leaves the layer before
as that one wants it: dropped out, and narrowed where it maps before it sums.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.graph.aggregation import FirstLayerAggregates, Floats
from ooc.graph.blocks import Block, own_block
from ooc.layerwise.numbering import WHOLE, Numbering
from ooc.layerwise.pass_plan import FEATURES, ModelShape, Op, ValueRef
from ooc.layerwise.shape import device_of
from ooc.models.dropout import DropoutKeys, Of, dropout
from ooc.models.layers import as_input
from ooc.runtime.transfer import HostCopy, to_device
from ooc.stores.graph import Graph

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RangeOfNodes:
    """Destinations first:stop. at: int64[n], where sources' rows and edges' stand in those of the whole graph (see
    `ooc.models.dropout.DropoutKeys`). sources: int64[n], rows of its sources among those that are computed on, where it needs
    others than its own."""

    first: int
    stop: int
    at: dict[Of, NDArray[np.int64]]
    block: Block | None = None
    sources: NDArray[np.int64] | None = None


def own_place(
    graph: Graph, first: int, stop: int, device: torch.device, *, edges: bool, numbering: Numbering = WHOLE
) -> RangeOfNodes:
    """Of a chunk that needs no other rows; edges: whether its layer needs what the graph says of its nodes."""
    block = own_block(graph, first, stop, device) if edges else None
    return RangeOfNodes(first, stop, {"sources": numbering.nodes(first, stop)}, block)


class LayerObserver(Protocol):
    """Is shown what every layer gives, as it is made: each layer's rows in ascending order, chunk by chunk."""

    def rows(self, layer: int, first: int, values: Floats) -> None:
        """Rows first, first + 1, ... of a layer: float32[n, width]."""

    def note(self) -> None:
        """Before a pass notes how far it came: what was shown up to here is not shown again after a crash."""


def inputs_of(shape: ModelShape, op: Op) -> dict[str, str]:
    """The inputs of a forward op's row-wise part: values by role."""
    if op.kind == "map":
        return {"x": FEATURES.name}
    if op.kind == "norm":
        own = {"self": shape.self_rows(op.layer).name} if shape.layers[op.layer].residual else {}
        return {"pre_norm": ValueRef("pre_norm", op.layer).name, **own}
    initial = {"initial": shape.initial.name} if shape.layers[op.layer].needs_initial else {}
    if op.kind == "gather":
        return {"rows": shape.rows(op.layer).name, **initial}
    return {"sums": ValueRef("sums", op.layer).name, "self": shape.self_rows(op.layer).name, **initial}


class LayerModules:
    """A model's parts, in the order of a pass. draws: the dropout of a pass in training."""

    def __init__(
        self,
        parts: tuple[nn.Module | None, list[Any], nn.Module | None],
        shape: ModelShape,
        draws: DropoutKeys,
        observer: LayerObserver | None = None,
    ) -> None:
        self.encoder, self.layers, self.decoder = parts
        self.shape, self.draws, self.observer = shape, draws, observer
        self.present = [part for part in (self.encoder, *self.layers, self.decoder) if part is not None]
        self.device = device_of(*self.present)

    def tensor(self, rows: NDArray[Any] | Tensor) -> Tensor:
        """An input as the modules take it; a tensor is where they are."""
        (found,) = to_device([torch.from_numpy(rows)], self.device) if isinstance(rows, np.ndarray) else [rows]
        return as_input(found, *self.present)

    def map(self, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "x". What stands before the first layer."""
        h = given["x"]
        if self.encoder is not None:
            with self.draws.part("encoder", place.at):
                h = self.encoder(h)
        made = self._read(0, h, place)
        return {**made, self.shape.initial.name: h} if self.shape.initial_apart else made

    def layer(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "sums" and "self", or "rows" of all sources; perhaps "initial". A layer stops before a norm over all nodes."""
        layer, block, stops = self.layers[index], place.block, self.shape.layers[index].norm
        extra = (given["initial"],) if "initial" in given else ()
        if "sums" not in given:
            with self.draws.part(self._part(index), place.at):
                if not stops:
                    return self._after(index, layer(given["rows"], block, *extra), place)
                h = layer.convolved(dropout(given["rows"], layer.dropout, layer.training), block, *extra)
        elif self.shape.narrows(index):
            h = (layer.conv_joined if stops else layer.joined)(given["sums"], given["self"], block)
        else:
            h = (layer.convolved if stops else layer)(FirstLayerAggregates(given["sums"], given["self"]), block, *extra)
        return {ValueRef("pre_norm", index).name: h} if stops else self._after(index, h, place)

    def _after(self, index: int, h: Tensor, place: RangeOfNodes) -> Tensors:
        """Rows of a layer as the next one reads them; of the last one the model's output."""
        if self.observer is not None:
            own = h[:, : getattr(self.layers[index], "own_columns", h.size(1))]
            self.observer.rows(index, place.first, HostCopy([own.float()]).arrays()[0])
        if index + 1 < len(self.layers):
            return self._read(index + 1, h, place)
        if self.decoder is None:
            return {"out": h}
        with self.draws.part("decoder", self._own(place)):
            return {"out": self.decoder(h)}

    def _read(self, index: int, h: Tensor, place: RangeOfNodes) -> Tensors:
        layer, shape = self.layers[index], self.shape
        if not shape.sums(index):
            return {shape.rows(index).name: h}
        with self.draws.part(self._part(index), self._own(place)):
            h = dropout(h, layer.dropout, layer.training)
        if not shape.narrows(index):
            return {shape.rows(index).name: h}
        neighbor, own = layer.conv.narrowed(h)
        made = {shape.rows(index).name: neighbor}
        return made if own is neighbor else {**made, shape.self_rows(index).name: own}

    def _part(self, index: int) -> str:
        """What the dropout of a layer is drawn by."""
        return getattr(self.layers[index], "draws_as", f"layer{index}")

    @staticmethod
    def _own(place: RangeOfNodes) -> dict[Of, NDArray[np.int64]]:
        return {"sources": place.at["sources"][: place.stop - place.first]}
