"""Memory-efficient layers: autograd functions that save less for the backward pass.

Autograd saves the input of every product. A GraphSAGE layer needs only the destinations' rows and the neighbors' means, and
ReLU only which elements were positive, so the wide first-layer rows are freed before the backward pass. Results do not change.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.utils import index_sort

from ooc.graph.bag_sum import bag_sum
from ooc.graph.blocks import pointers
from ooc.stores.jit import kernel


class _Products(torch.autograd.Function):
    """bias + the sum of rows @ weight.T, in one output and without temporaries. pairs: rows, weight, rows, weight, ..."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        out = torch.addmm(bias, pairs[0], pairs[1].t())
        for rows, weight in zip(pairs[2::2], pairs[3::2], strict=True):
            out.addmm_(rows, weight.t())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs, needed = ctx.saved_tensors, ctx.needs_input_grad
        found: list[Tensor | None] = [grad.sum(0)]
        for i in range(0, len(pairs), 2):
            found.append(grad @ pairs[i + 1] if needed[1 + i] else None)
            found.append(grad.t() @ pairs[i] if needed[2 + i] else None)
        return tuple(found)


def sum_of_products(bias: Tensor, *pairs: Tensor) -> Tensor:
    """Add linear maps of several rows: bias [g], then rows [d, f] and weight [g, f] in turn, widths f may differ: [d, g]."""
    if not memory_efficient_here(pairs[0]):
        return sum(map(F.linear, pairs[2::2], pairs[3::2]), start=F.linear(pairs[0], pairs[1], bias))
    out: Tensor = _Products.apply(bias, *pairs)  # type: ignore[no-untyped-call]
    return out


class _SageLayer(torch.autograd.Function):
    """The weighted neighbor sum and both products; saves no source rows but the destinations'."""

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
    """GraphSAGE's neighbor sum and its two linear maps: x [num_src, f] -> [num_dst, g].

    `value` is float32[e]; `edges` are edge_index int64[2, e] and indptr int64[num_dst + 1], as in `Block`.
    """
    out: Tensor = _SageLayer.apply(x, value, edges, weight_neighbor, bias, weight_self)  # type: ignore[no-untyped-call]
    return out


def _plain(x: Tensor) -> bool:
    """Whether our kernels support the tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()


def _flat(x: Tensor) -> NDArray[Any]:
    flat: NDArray[Any] = x.detach().view(-1).numpy()
    return flat


@kernel
def _cut_below(x: NDArray[np.float32], cut: NDArray[np.bool_]) -> None:
    """Set cut = x <= 0 and x = 0 there; one pass over memory instead of torch's three."""
    for i in range(len(x)):
        below = x[i] <= 0
        cut[i] = below
        x[i] = np.float32(0) if below else x[i]


@kernel
def _take_uncut(grad: NDArray[np.float32], cut: NDArray[np.bool_], out: NDArray[np.float32]) -> None:
    """out = 0 where cut, else grad; four times as fast as torch's masked_fill with two threads."""
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
            return grad.masked_fill(cut, 0)  # a product would turn inf * 0 into NaN
        out = torch.empty_like(grad)
        _take_uncut(_flat(grad), _flat(cut), _flat(out))
        return out


class Relu(nn.Module):
    """In-place ReLU that saves one byte per element."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
            return x.relu_()
        out: Tensor = _Relu.apply(x)  # type: ignore[no-untyped-call]
        return out


def memory_efficient_here(x: Tensor) -> bool:
    """Whether these functions apply: not under autocast, which selects dtypes per product, nor torch.compile."""
    return not (torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling())
