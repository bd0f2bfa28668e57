"""Layers that keep little for their backward pass: what a hidden row's memory is spent on, written by hand.

Autograd keeps every input of every product. A GraphSAGE layer needs less: of its input only the destinations' rows and the
neighbors' means, both an order smaller than the rows of all sources; and ReLU only which numbers were positive. So the widest
hidden rows, those of the first layer, are gone before the backward pass begins. (What GNNAutoScale and RevGNN save by
other means; the products are the same, so are the results.)
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.utils import index_sort

from ooc.graph.spmm import bag_sum, pointers
from stores.jit import kernel


class _TwoProducts(torch.autograd.Function):
    """near @ weight_near.T + bias + root @ weight_root.T, in one output and without temporaries."""

    @staticmethod
    def forward(
        ctx: Any, neighbor: Tensor, self_row: Tensor, weight_neighbor: Tensor, bias: Tensor, weight_self: Tensor
    ) -> Tensor:
        ctx.save_for_backward(neighbor, self_row, weight_neighbor, weight_self)
        return torch.addmm(bias, neighbor, weight_neighbor.t()).addmm_(self_row, weight_self.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        neighbor, self_row, weight_neighbor, weight_self = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            grad @ weight_neighbor if wanted[0] else None,
            grad @ weight_self if wanted[1] else None,
            grad.t() @ neighbor,
            grad.sum(0),
            grad.t() @ self_row,
        )


def two_products(neighbor: Tensor, self_row: Tensor, weight_neighbor: Tensor, bias: Tensor, weight_self: Tensor) -> Tensor:
    """near [d, f] and root [d, f] through a linear map each (weights [g, f], one bias [g]), added: [d, g]."""
    out: Tensor = _TwoProducts.apply(neighbor, self_row, weight_neighbor, bias, weight_self)  # type: ignore[no-untyped-call]
    return out


class _SageLayer(torch.autograd.Function):
    """The weighted sum of the neighbors and the two products in one; keeps no source's row but the destinations'."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        edges: tuple[Tensor, Tensor],
        weight_neighbor: Tensor,
        bias: Tensor,
        weight_self: Tensor,
    ) -> Tensor:
        edge_index, indptr = edges
        neighbor, self_row = bag_sum(edge_index[0], x, indptr, value), x[: len(indptr) - 1].clone()
        ctx.num_src = len(x)
        ctx.save_for_backward(neighbor, self_row, value, edge_index, weight_neighbor, weight_self)
        return torch.addmm(bias, neighbor, weight_neighbor.t()).addmm_(self_row, weight_self.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        neighbor, self_row, value, edge_index, weight_neighbor, weight_self = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            source, order = index_sort(edge_index[0], max_value=ctx.num_src, stable=True)
            to_neighbor = grad @ weight_neighbor
            grad_x = bag_sum(edge_index[1][order], to_neighbor, pointers(source, ctx.num_src), value[order])
            grad_x[: len(self_row)].addmm_(grad, weight_self)
        return grad_x, None, None, grad.t() @ neighbor, grad.sum(0), grad.t() @ self_row


def sage_layer(
    x: Tensor, value: Tensor, edges: tuple[Tensor, Tensor], weight_neighbor: Tensor, bias: Tensor, weight_self: Tensor
) -> Tensor:
    """GraphSAGE's sum over neighbors and its two linear maps: x [num_src, f] -> [num_dst, g].

    value: float32[e]; edges: edge_index int64[2, e] and indptr int64[num_dst + 1], as in `Block`.
    """
    out: Tensor = _SageLayer.apply(x, value, edges, weight_neighbor, bias, weight_self)  # type: ignore[no-untyped-call]
    return out


def _plain(x: Tensor) -> bool:
    """Whether a kernel of ours may go over it."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()


def _flat(x: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = x.detach().view(-1).numpy()
    return found


@kernel
def _cut_below(x: NDArray[np.float32], cut: NDArray[np.bool_]) -> None:
    """cut = x <= 0, and zeros there: one pass over memory for torch's three."""
    for i in range(len(x)):
        below = x[i] <= 0
        cut[i] = below
        x[i] = np.float32(0) if below else x[i]


@kernel
def _take_uncut(grad: NDArray[np.float32], cut: NDArray[np.bool_], out: NDArray[np.float32]) -> None:
    """out = 0 where cut, else grad. Measured, torch's masked_fill takes four times as long with two threads."""
    for i in range(len(grad)):
        out[i] = np.float32(0) if cut[i] else grad[i]


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        if not _plain(x):
            ctx.save_for_backward(x <= 0)
            return x.clamp_(min=0)
        cut = torch.empty(x.shape, dtype=torch.bool)
        _cut_below(_flat(x), _flat(cut))
        ctx.save_for_backward(cut)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cut,) = ctx.saved_tensors
        if not _plain(grad):
            return grad.masked_fill(cut, 0)  # a product would make NaN of infinity times zero, and first numbers of the bytes
        out = torch.empty_like(grad)
        _take_uncut(_flat(grad), _flat(cut), _flat(out))
        return out


class Relu(nn.Module):
    """ReLU in place that keeps a byte for each number, not the number.

    >>> Relu()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
            return x.relu_()
        out: Tensor = _Relu.apply(x)  # type: ignore[no-untyped-call]
        return out


def memory_efficient_here(x: Tensor) -> bool:
    """Whether these may be used: outside of autocast, which chooses dtypes product by product, and of torch.compile."""
    return not (torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling())
