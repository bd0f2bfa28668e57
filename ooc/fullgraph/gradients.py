"""What goes into an op's row-wise part, which gradients are asked of it, and which arrive at what it gave."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.fullgraph.ir import Op
from ooc.fullgraph.ops import StepModules, Tensors
from ooc.fullgraph.program import FullShape

Array = NDArray[Any]


def inputs_of(shape: FullShape, op: Op) -> dict[str, str]:
    """The inputs of an op's row-wise part, by value."""
    index = op.layer
    if op.kind == "map":
        return {"x": "x"}
    if op.kind == "norm":
        return {"z": f"z{index}", **({"root": shape.root(index)} if shape.layers[index].residual else {})}
    initial = {"initial": shape.initial()} if shape.sweep.layers[index].needs_initial else {}
    if op.kind == "gather":
        return {"rows": shape.rows(index), **initial}
    return {"near": f"near{index}", "root": shape.root(index), **initial}


def wanted_of(shape: FullShape, op: Op) -> list[str]:
    """The inputs of an op that a gradient is asked of."""
    below, index = shape.trained(op.layer), op.layer
    if op.kind == "map":
        return []
    if op.kind == "norm":
        wanted = ["z"] if below or shape.layers[index].trains else []
        return [*wanted, *(["root"] if below and shape.layers[index].residual else [])]
    wanted = [] if not below else ["rows"] if op.kind == "gather" else ["near", "root"]
    first = shape.sweep.layers[index].needs_initial and shape.trained(0)
    return [*wanted, *(["initial"] if first else [])]


def behind_norm(shape: FullShape, op: Op) -> bool:
    """Whether what an op gives goes through a norm over all rows."""
    return op.kind in ("sum", "gather") and bool(shape.layers[op.layer].norm)


def arriving(shape: FullShape, parts: StepModules, op: Op, read: dict[str, Array]) -> Tensors:
    """Gradients of what the op's forward gives, for a chunk; read: what the ops above left of it."""
    if behind_norm(shape, op):
        return {f"z{op.layer}": _through_norm(shape, parts, op.layer, read)}
    index = 0 if op.kind == "map" else op.layer + 1
    if not shape.trained(index):
        return {}
    own = torch.from_numpy(read[shape.own_gradient(index)])
    rows, root, found = shape.rows(index), shape.root(index), {}
    sums = read.get("gsum", read.get(f"grows{index}"))
    assert sums is not None
    found[rows] = torch.from_numpy(sums)
    if shape.own_gradient(index)[:5] == "groot":
        if root == rows:
            found[rows] = found[rows].add_(own) if "gsum" in read else found[rows] + own
        else:
            found[root] = own
    if "ginitial" in read and index == 0:
        first = torch.from_numpy(read["ginitial"])
        if shape.initial_apart:
            found["initial"] = first
        else:
            found[rows] = found[rows] + first
    return found


def _through_norm(shape: FullShape, parts: StepModules, index: int, read: dict[str, Array]) -> Tensor:
    """The gradient before a norm: directly, by the mean and by the variance of all rows."""
    found, nodes = parts.statistics[index], shape.sweep.num_nodes
    direct, z = torch.from_numpy(read[f"gz{index}"]), torch.from_numpy(read[f"z{index}"])
    if found.mean.grad is None or found.var.grad is None:
        return direct
    return direct + found.mean.grad / nodes + (z - found.mean.detach()) * (found.var.grad * (2 / nodes))
