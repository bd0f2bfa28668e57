"""What a step adds to the row-wise parts of a forward pass (`ooc.layerwise.ops`): norms over all nodes, which inputs get a
gradient, and which gradients arrive at the outputs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.layerwise.ops import LayerModules, RangeOfNodes, Tensors
from ooc.layerwise.pass_plan import ModelShape, Op, ValueRef
from ooc.layerwise.shape import Parts, norm_of
from ooc.models.dropout import DropoutKeys, dropout
from ooc.runtime.ranks import Ranks
from ooc.runtime.transfer import to_device

SUMMED_GRADIENT = "gsum"
"""name of the sums that arrive at a chunk by the transposed edges; they are no value"""


def wanted_of(shape: ModelShape, op: Op) -> list[str]:
    """The inputs of an op that need a gradient."""
    below, index = shape.trained(op.layer), op.layer
    if op.kind == "map":
        return []
    if op.kind == "norm":
        wanted = ["pre_norm"] if below or shape.layers[index].trains else []
        return [*wanted, *(["self"] if below and shape.layers[index].residual else [])]
    wanted = [] if not below else ["rows"] if op.kind == "gather" else ["sums", "self"]
    first = shape.layers[index].needs_initial and shape.trained(0)
    return [*wanted, *(["initial"] if first else [])]


def before_norm(shape: ModelShape, op: Op) -> bool:
    """Whether what an op gives goes through a norm over all rows."""
    return op.kind in ("sum", "gather") and bool(shape.layers[op.layer].norm)


@dataclass
class Statistics:
    """Mean and variance of a norm's rows, [f] each; after the norm's backward, with the gradients of the loss by them."""

    mean: Tensor
    var: Tensor

    def share(self, ranks: Ranks) -> None:
        """Add up the gradients that the ranks have of them."""
        for each in (self.mean, self.var):
            each.grad = ranks.sum(torch.zeros_like(each) if each.grad is None else each.grad)


class StepModules(LayerModules):
    """A model's parts in training, in the order of a step. statistics: of norms over all nodes, by layer; nodes: how many these
    are, where other ranks compute some."""

    def __init__(self, parts: Parts, shape: ModelShape, draws: DropoutKeys, nodes: int | None = None) -> None:
        super().__init__(parts, shape, draws)
        self._nodes = shape.num_nodes if nodes is None else nodes
        self.statistics: dict[int, Statistics] = {}

    def norm(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "pre_norm", and "self" with a residual."""
        layer, found = self.layers[index], self.statistics[index]
        own = given.get("self", given["pre_norm"])
        if "self" in given and not self.shape.sums(index):
            with self.draws.part(f"layer{index}", place.at):
                own = dropout(own, layer.dropout, layer.training)
        h = layer.finished(given["pre_norm"], own, partial(_normalised, norm_of(layer), found))
        return self._after(index, h, place)

    def undone(self, index: int, given: Tensors, place: RangeOfNodes) -> Tensors:
        """given: "rows", those that a reversible layer made. The rows that it made them of, and what gradients come from."""
        layer: Any = self.layers[index]
        with self.draws.part(self._part(index), place.at):
            before, again = layer.undone(given["rows"], place.block)
        return {self.shape.rows(index).name: before, self.shape.rows(index + 1).name: again}

    def arriving(self, op: Op, place: RangeOfNodes, read: dict[str, NDArray[Any] | Tensor]) -> Tensors:
        """Gradients of what the op's forward gives, for a chunk; read: what later ops left of it."""
        shape = self.shape
        if before_norm(shape, op):
            return {ValueRef("pre_norm", op.layer).name: self._through_norm(op.layer, place, read)}
        index = 0 if op.kind == "map" else op.layer + 1
        gradient = shape.own_gradient(index)
        if gradient is None:
            return {}
        (own,) = self._arrived(read, gradient.name)
        rows, self_rows, found = shape.rows(index).name, shape.self_rows(index).name, {}
        summed = read.get(SUMMED_GRADIENT)
        (found[rows],) = self._arrived(read, ValueRef("rows", index, gradient=True).name if summed is None else SUMMED_GRADIENT)
        if shape.sums(index):
            if self_rows == rows:
                found[rows] = found[rows] + own if summed is None else found[rows].add_(own)
            else:
                found[self_rows] = own
        initial = shape.initial_gradient
        if index == 0 and initial is not None and initial.name in read:
            (first,) = self._arrived(read, initial.name)
            found[shape.initial.name] = first if shape.initial_apart else found[rows] + first
        return found

    def _arrived(self, read: dict[str, NDArray[Any] | Tensor], *names: str) -> list[Tensor]:
        """Rows that were read, where the model is; a tensor is there."""
        rows = [read[name] for name in names]
        copied = iter(to_device([torch.from_numpy(each) for each in rows if isinstance(each, np.ndarray)], self.device))
        return [next(copied) if isinstance(each, np.ndarray) else each for each in rows]

    def _through_norm(self, index: int, place: RangeOfNodes, read: dict[str, NDArray[Any] | Tensor]) -> Tensor:
        """The gradient before a norm: directly, by the mean and by the variance of all rows, in which each node's row is that
        of the rank that the node is of."""
        found, nodes, before = self.statistics[index], self._nodes, ValueRef("pre_norm", index)
        direct, rows = self._arrived(read, before._replace(gradient=True).name, before.name)
        if found.mean.grad is None or found.var.grad is None:
            return direct
        through = found.mean.grad / nodes + (rows - found.mean.detach()) * (found.var.grad * (2 / nodes))
        through[max(0, self.shape.num_nodes - place.first) :] = 0
        return direct + through


def _normalised(norm: Any, found: Statistics, z: Tensor) -> Tensor:
    """Rows behind a norm over all nodes, by statistics that are given."""
    scale = torch.rsqrt(found.var + norm.eps)
    if norm.affine:
        return (z - found.mean) * (scale * norm.weight) + norm.bias
    return (z - found.mean) * scale


class Moments:
    """Mean and variance of rows that come in chunks, each [f] in float64 (Chan et al., 1979)."""

    def __init__(self, state: list[Any] | None = None) -> None:
        self.state: list[Any] = [0, None, None] if state is None else state

    def add(self, z: Tensor) -> None:
        """z: [n, f]."""
        rows = z.detach().double()
        mean = rows.mean(0)
        self._join(len(rows), mean, (rows - mean).square_().sum(0))

    def _join(self, rows: int, mean: Tensor, own: Tensor) -> None:
        """Take in so many rows, by their mean and the squares about it."""
        count, before, squares = self.state
        if not count:
            self.state = [rows, mean, own]
            return
        total, gap = count + rows, mean - before
        squares = squares + own + gap.square() * (count * rows / total)
        self.state = [total, before + gap * (rows / total), squares]

    def share(self, ranks: Ranks) -> None:
        """Take in the rows of all ranks, in their order."""
        if ranks.alone:
            return
        device = self.state[1].device
        parts = ranks.gather([self.state[0], *(each.cpu() for each in self.state[1:])])
        self.state[0] = 0
        for count, mean, squares in parts:
            self._join(count, mean.to(device), squares.to(device))

    def statistics(self, dtype: torch.dtype) -> Statistics:
        """The mean and the variance over all rows, as leaves that take a gradient."""
        count, mean, squares = self.state
        mean, var = mean.to(dtype), (squares / count).to(dtype)
        return Statistics(mean.requires_grad_(), var.requires_grad_())

    def record(self, norm: Any) -> None:
        """Move a norm's running statistics on, as torch does for a batch of all rows."""
        if norm.running_mean is None:
            return
        norm.num_batches_tracked += 1
        share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        count, mean, squares = self.state
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
        unbiased = squares / max(1, count - 1)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
