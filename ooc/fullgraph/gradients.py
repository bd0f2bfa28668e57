"""What goes into an op's row-wise part, which of it gets a gradient, and which gradients arrive at what it gave."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.fullgraph.ops import StepModules
from ooc.fullgraph.program import FullShape
from ooc.layerwise.ir import Op, ValueRef
from ooc.layerwise.ops import Tensors
from ooc.layerwise.ops import inputs_of as forward_inputs

Array = NDArray[Any]
SUMMED_GRADIENT = "gsum"
"""name of the sums that arrive at a chunk by the transposed edges; they are no value"""


def inputs_of(shape: FullShape, op: Op) -> dict[str, str]:
    """The inputs of an op's row-wise part: values by role."""
    if op.kind != "norm":
        return forward_inputs(shape.model, op)
    own = {"self": shape.model.self_rows(op.layer).name} if shape.layers[op.layer].residual else {}
    return {"pre_norm": ValueRef("pre_norm", op.layer).name, **own}


def wanted_of(shape: FullShape, op: Op) -> list[str]:
    """The inputs of an op that need a gradient."""
    below, index = shape.trained(op.layer), op.layer
    if op.kind == "map":
        return []
    if op.kind == "norm":
        wanted = ["pre_norm"] if below or shape.layers[index].trains else []
        return [*wanted, *(["self"] if below and shape.layers[index].residual else [])]
    wanted = [] if not below else ["rows"] if op.kind == "gather" else ["sums", "self"]
    first = shape.model.layers[index].needs_initial and shape.trained(0)
    return [*wanted, *(["initial"] if first else [])]


def before_norm(shape: FullShape, op: Op) -> bool:
    """Whether what an op gives goes through a norm over all rows."""
    return op.kind in ("sum", "gather") and bool(shape.layers[op.layer].norm)


def arriving(shape: FullShape, parts: StepModules, op: Op, read: dict[str, Array]) -> Tensors:
    """Gradients of what the op's forward gives, for a chunk; read: what the ops above left of it."""
    if before_norm(shape, op):
        return {ValueRef("pre_norm", op.layer).name: _through_norm(shape, parts, op.layer, read)}
    index, model = 0 if op.kind == "map" else op.layer + 1, shape.model
    gradient = shape.own_gradient(index)
    if gradient is None:
        return {}
    own = torch.from_numpy(read[gradient.name])
    rows, self_rows, found = model.rows(index).name, model.self_rows(index).name, {}
    summed = read.get(SUMMED_GRADIENT)
    found[rows] = torch.from_numpy(read[ValueRef("rows", index, gradient=True).name] if summed is None else summed)
    if shape.sums(index):
        if self_rows == rows:
            found[rows] = found[rows] + own if summed is None else found[rows].add_(own)
        else:
            found[self_rows] = own
    initial = shape.initial_gradient
    if index == 0 and initial is not None and initial.name in read:
        first = torch.from_numpy(read[initial.name])
        if model.initial_apart:
            found[model.initial.name] = first
        else:
            found[rows] = found[rows] + first
    return found


def _through_norm(shape: FullShape, parts: StepModules, index: int, read: dict[str, Array]) -> Tensor:
    """The gradient before a norm: directly, by the mean and by the variance of all rows."""
    found, nodes, before = parts.statistics[index], shape.model.num_nodes, ValueRef("pre_norm", index)
    direct, rows = (torch.from_numpy(read[ref.name]) for ref in (before._replace(gradient=True), before))
    if found.mean.grad is None or found.var.grad is None:
        return direct
    return direct + found.mean.grad / nodes + (rows - found.mean.detach()) * (found.var.grad * (2 / nodes))
