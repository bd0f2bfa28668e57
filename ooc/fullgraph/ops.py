"""What a step adds to the row-wise parts of a forward pass (`ooc.layerwise.ops`): norms over all nodes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ooc.fullgraph.program import FullShape
from ooc.fullgraph.shape import norm_of
from ooc.graph.aggregation import FirstLayerAggregates
from ooc.layerwise.ir import ValueRef
from ooc.layerwise.ops import LayerModules, RangeOfNodes, Tensors
from ooc.layerwise.shape import Parts
from ooc.models.dropout import DropoutKeys, dropout


@dataclass
class Statistics:
    """Mean and variance of a norm's rows, [f] each, and what the loss says of them once they have gradients."""

    mean: Tensor
    var: Tensor


class StepModules(LayerModules):
    """A model's parts in training, in the order of a step."""

    def __init__(self, parts: Parts, shape: FullShape, draws: DropoutKeys) -> None:
        super().__init__(parts, shape.model, draws)
        self.shape = shape
        self.statistics: dict[int, Statistics] = {}

    def layer(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """See `LayerModules.layer`; a layer with a norm over all nodes stops before it."""
        if not self.shape.layers[index].norm:
            return super().layer(index, given, place)
        layer, block = self.layers[index], place.block
        extra = (given["initial"],) if "initial" in given else ()
        if "sums" not in given:
            with self.draws.part(f"layer{index}", place.at):
                h = layer.convolved(dropout(given["rows"], layer.dropout, layer.training), block, *extra)
        elif self.model.narrows(index):
            h = layer.conv_joined(given["sums"], given["self"], block)
        else:
            h = layer.convolved(FirstLayerAggregates(given["sums"], given["self"]), block, *extra)
        return {ValueRef("pre_norm", index).name: h}

    def norm(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "pre_norm", and "self" with a residual."""
        layer, found = self.layers[index], self.statistics[index]
        own = given.get("self", given["pre_norm"])
        if "self" in given and not self.shape.sums(index):
            with self.draws.part(f"layer{index}", place.at):
                own = dropout(own, layer.dropout, layer.training)
        h = layer.finished(given["pre_norm"], own, normaliser(layer, found))
        return self._after(index, h, place)


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
