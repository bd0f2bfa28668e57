"""The row-wise parts of a step: what an op makes of a chunk's inputs, as a function that autograd can go back through.

Inputs and outputs go by the names of `ooc.fullgraph.program`, inputs without the layer's number. What a layer reads leaves the
layer before as that one wants it: dropped out, and narrowed where it maps before it sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.fullgraph.program import FullShape
from ooc.fullgraph.shape import norm_of
from ooc.graph.aggregation import FirstLayerAggregates
from ooc.graph.blocks import Block
from ooc.graph.range_blocks import own_block
from ooc.layerwise.ir import ValueRef
from ooc.models.dropout import DropoutKeys, Of, dropout
from stores.graph import Graph

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RangeOfNodes:
    """Destinations first:stop. at: int64[n], where sources' rows and edges' stand in those of all (see
    `ooc.models.dropout.DropoutKeys`)."""

    first: int
    stop: int
    at: dict[Of, NDArray[np.int64]]
    block: Block | None = None


def own_place(graph: Graph, first: int, stop: int, device: torch.device, *, edges: bool) -> RangeOfNodes:
    """Of a chunk that needs no other rows; edges: whether its layer asks for what the graph says of its nodes."""
    block = own_block(graph, first, stop, device) if edges else None
    return RangeOfNodes(first, stop, {"sources": np.arange(first, stop)}, block)


@dataclass
class Statistics:
    """Mean and variance of a norm's rows, [f] each, and what the loss says of them once they have gradients."""

    mean: Tensor
    var: Tensor


class StepModules:
    """A model's parts, in the order of a step. draws: the step's dropout.

    >>> modules.layer(0, {"sums": sums, "self": own}, place)["rows1"]
    """

    def __init__(
        self, parts: tuple[nn.Module | None, list[Any], nn.Module | None], shape: FullShape, draws: DropoutKeys
    ) -> None:
        self.encoder, self.layers, self.decoder = parts
        self.shape, self.draws = shape, draws
        self.statistics: dict[int, Statistics] = {}

    def map(self, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "x". What stands before the first layer."""
        h = given["x"]
        if self.encoder is not None:
            with self.draws.part("encoder", place.at):
                h = self.encoder(h)
        made = self._read(0, h, place)
        return {**made, "initial": h} if self.shape.model.initial_apart else made

    def layer(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "sums" and "self", or "rows" of all sources; perhaps "initial"."""
        layer, block = self.layers[index], place.block
        assert block is not None
        extra = (given["initial"],) if "initial" in given else ()
        split = bool(self.shape.layers[index].norm)
        before = ValueRef("pre_norm", index).name
        if "sums" not in given:
            with self.draws.part(f"layer{index}", place.at):
                if not split:
                    return self._after(index, layer(given["rows"], block, *extra), place)
                x = dropout(given["rows"], layer.dropout, layer.training)
                return {before: layer.convolved(x, block, *extra)}
        if self.shape.model.narrows(index):
            own = layer.conv_joined if split else layer.joined
            h = own(given["sums"], given["self"], block)
        else:
            own = layer.convolved if split else layer
            h = own(FirstLayerAggregates(given["sums"], given["self"]), block, *extra)
        return {before: h} if split else self._after(index, h, place)

    def norm(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "pre_norm", and "self" with a residual."""
        layer, found = self.layers[index], self.statistics[index]
        own = given.get("self", given["pre_norm"])
        if "self" in given and not self.shape.sums(index):
            with self.draws.part(f"layer{index}", place.at):
                own = dropout(own, layer.dropout, layer.training)
        h = layer.finished(given["pre_norm"], own, normaliser(layer, found))
        return self._after(index, h, place)

    def _after(self, index: int, h: Tensor, place: RangeOfNodes) -> Tensors:
        """Rows of a layer as the next one reads them, or as the loss does."""
        if index + 1 < len(self.layers):
            return self._read(index + 1, h, place)
        if self.decoder is None:
            return {"out": h}
        with self.draws.part("decoder", self._own(place)):
            return {"out": self.decoder(h)}

    def _read(self, index: int, h: Tensor, place: RangeOfNodes) -> Tensors:
        layer, model = self.layers[index], self.shape.model
        if not self.shape.sums(index):
            return {model.rows(index).name: h}
        with self.draws.part(f"layer{index}", self._own(place)):
            h = dropout(h, layer.dropout, layer.training)
        if not model.narrows(index):
            return {model.rows(index).name: h}
        neighbor, own = layer.conv.narrowed(h)
        made = {model.rows(index).name: neighbor}
        return made if own is neighbor else {**made, model.self_rows(index).name: own}

    @staticmethod
    def _own(place: RangeOfNodes) -> dict[Of, NDArray[np.int64]]:
        return {"sources": place.at["sources"][: place.stop - place.first]}


def normaliser(layer: nn.Module, found: Statistics) -> Callable[[Tensor], Tensor]:
    """The layer's norm over all nodes with statistics that are given."""
    norm: Any = norm_of(layer)

    def normalise(z: Tensor) -> Tensor:
        scale = torch.rsqrt(found.var + norm.eps)
        if norm.affine:
            return (z - found.mean) * (scale * norm.weight) + norm.bias
        return (z - found.mean) * scale

    return normalise


class Moments:
    """Mean and variance of rows that go by in chunks, each [f] in float64 (Chan et al., 1979).

    >>> moments.add(z); moments.statistics(torch.float32).var
    """

    def __init__(self, state: list[Any] | None = None) -> None:
        first: list[Any] = [0, torch.zeros(()), torch.zeros(())]
        self.count, self._mean, self._squares = first if state is None else state

    @property
    def state(self) -> list[Any]:
        """To go on with."""
        return [self.count, self._mean, self._squares]

    def add(self, z: Tensor) -> None:
        """z: [n, f]."""
        rows = z.detach().double()
        mean = rows.mean(0)
        squares = (rows - mean).square_().sum(0)
        total, gap = self.count + len(rows), mean - self._mean
        self._squares = self._squares + squares + gap.square() * (self.count * len(rows) / total)
        self._mean = self._mean + gap * (len(rows) / total)
        self.count = total

    def statistics(self, dtype: torch.dtype) -> Statistics:
        """The mean and the variance over all rows, as leaves that take a gradient."""
        mean, var = self._mean.to(dtype), (self._squares / self.count).to(dtype)
        return Statistics(mean.requires_grad_(), var.requires_grad_())

    def record(self, norm: Any) -> None:
        """Move a norm's running statistics on, as torch does for a batch of all rows."""
        if norm.running_mean is None:
            return
        norm.num_batches_tracked += 1
        share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(self._mean.to(norm.running_mean.dtype), share)
        unbiased = self._squares / max(1, self.count - 1)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
