"""Memory-efficient layers: autograd functions that save less for the backward pass.

Autograd saves the input of every product. A GraphSAGE layer needs only the destinations' rows and the neighbors' means, and
ReLU only which elements were positive, so the wide first-layer rows are freed before the backward pass. Results do not change.
A ReLU that the next layer's dropout follows is computed with it, in one pass.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ooc.graph.bag_sum import bag_sum
from ooc.graph.shared_edges import SharedEdges, edges_by_source
from ooc.models.dropout import Of, dropout, level_of, next_draw
from ooc.models.kept_sums import neighbor_sum
from ooc.models.products import added_products, alone, multiply, plain, weight_gradients
from ooc.runtime.keyed_dropout import drop_positive, drop_positive_rows, scale_of
from ooc.runtime.parts import in_parts
from ooc.runtime.row_kernels import cut_below, scale_uncut, take_uncut

SUM_COST = 16
"""multiplications that take as long as adding one number of a neighbor's row (measured)"""


class _Products(torch.autograd.Function):
    """bias + the sum of rows @ weight.T, in one output and without temporaries. pairs: rows, weight, rows, weight, ..."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        return added_products(bias, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs, needed = ctx.saved_tensors, ctx.needs_input_grad
        of_weights = [i for i in range(0, len(pairs), 2) if needed[2 + i]]
        *weights, bias = weight_gradients(grad, [pairs[i] for i in of_weights])
        found: list[Tensor | None] = [bias, *[None] * len(pairs)]
        for i, weight in zip(of_weights, weights, strict=True):
            found[2 + i] = weight
        for i in range(0, len(pairs), 2):
            if needed[1 + i]:
                found[1 + i] = of_rows = torch.empty_like(pairs[i], dtype=grad.dtype)
                multiply(of_rows, [(grad, pairs[i + 1].t())])
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
        shared: SharedEdges | None,
    ) -> Tensor:
        edge_index, indptr = edges
        with alone(len(value) * SUM_COST * x.size(1)):
            neighbor, self_row = neighbor_sum(edge_index[0], x, indptr, value), x[: len(indptr) - 1].clone()
        ctx.num_src, ctx.shared = len(x), shared
        ctx.save_for_backward(neighbor, self_row, value, edge_index, weight_neighbor, weight_self)
        return added_products(bias, (neighbor, weight_neighbor, self_row, weight_self))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        neighbor, self_row, value, edge_index, weight_neighbor, weight_self = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            to_neighbor = grad.new_empty(len(grad), weight_neighbor.size(1))
            multiply(to_neighbor, [(grad, weight_neighbor.t())])
            with alone(to_neighbor.size(1) * len(value) * SUM_COST):
                pointers, target, value = edges_by_source(edge_index, ctx.num_src, value, ctx.shared)
                grad_x = bag_sum(target, to_neighbor, pointers, value)
            multiply(grad_x[: len(self_row)], [(grad, weight_self.t())], add=True)
        of_neighbor, of_self, of_bias = weight_gradients(grad, (neighbor, self_row))
        return grad_x, None, None, of_neighbor, of_bias, of_self, None


def sage_layer(
    x: Tensor,
    value: Tensor,
    edges: tuple[Tensor, Tensor],
    weight_neighbor: Tensor,
    bias: Tensor,
    weight_self: Tensor,
    shared: SharedEdges | None = None,
) -> Tensor:
    """GraphSAGE's neighbor sum and its two linear maps: x [num_src, f] -> [num_dst, g].

    `value` is float32[e]; `edges` are edge_index int64[2, e] and indptr int64[num_dst + 1], and `shared`, as in
    `Block`.
    """
    out: Tensor = _SageLayer.apply(x, value, edges, weight_neighbor, bias, weight_self, shared)  # type: ignore[no-untyped-call]
    return out


def _flat(x: Tensor) -> NDArray[Any]:
    flat: NDArray[Any] = x.detach().view(-1).numpy()
    return flat


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        if not plain(x):
            ctx.save_for_backward(x <= 0)
            return x.clamp_(min=0)
        cut = torch.empty(x.shape, dtype=torch.bool)
        flat, below = _flat(x), _flat(cut)
        in_parts(lambda at, end: cut_below(flat[at:end], below[at:end]), len(flat))
        ctx.save_for_backward(cut)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cut,) = ctx.saved_tensors
        if not plain(grad):
            return grad.masked_fill(cut, 0)  # a product would turn inf * 0 into NaN
        out = torch.empty_like(grad)
        given, below, found = _flat(grad), _flat(cut), _flat(out)
        in_parts(lambda at, end: take_uncut(given[at:end], below[at:end], found[at:end]), len(given))
        return out


class _ReluDropout(torch.autograd.Function):
    """See `drop_positive`; saves one byte per element, as ReLU alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dropped: int, row: NDArray[np.int64] | None) -> Tensor:
        ctx.mark_dirty(x)
        cut = torch.empty(x.shape, dtype=torch.bool)
        stream, scale = np.uint64(key), scale_of(dropped)
        if row is None:
            flat, gone = _flat(x), _flat(cut)
            in_parts(lambda at, end: drop_positive(stream, at, dropped, scale, flat[at:end], gone[at:end]), len(flat))
        else:
            rows, cuts = x.detach().numpy(), cut.numpy()
            parts = lambda at, end: drop_positive_rows(stream, dropped, scale, row[at:end], rows[at:end], cuts[at:end])  # noqa: E731
            in_parts(parts, len(rows), rows.shape[1])
        ctx.save_for_backward(cut)
        ctx.scale = scale
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (cut,), scale = ctx.saved_tensors, ctx.scale
        out = torch.empty(grad.shape, dtype=grad.dtype)
        given, gone, found = _flat(grad.contiguous()), _flat(cut), _flat(out)
        in_parts(lambda at, end: scale_uncut(given[at:end], gone[at:end], scale, found[at:end]), len(given))
        return out, None, None, None


def relu_dropout(x: Tensor, p: float, of: Of = "sources") -> Tensor:
    """ReLU and then `ooc.models.dropout.dropout` in training: in one pass and in place where it can be, with the same bits."""
    if not plain(x) or torch.compiler.is_compiling():
        return dropout(relu(x), p, training=True, of=of)
    key, row = next_draw(x, of)
    out: Tensor = _ReluDropout.apply(x, key, level_of(p), row)  # type: ignore[no-untyped-call]
    return out


def relu(x: Tensor) -> Tensor:
    """In-place ReLU that saves one byte per element."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x.relu_()
    out: Tensor = _Relu.apply(x)  # type: ignore[no-untyped-call]
    return out


class Relu(nn.Module):
    """`relu` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return relu(x)


def activated(activation: nn.Module, x: Tensor, drop_next: float, of: Of = "sources") -> Tensor:
    """The activation, and after a `Relu` the next layer's dropout with it; see `ooc.models.layers.dropped_ahead`."""
    out: Tensor = relu_dropout(x, drop_next, of) if drop_next else activation(x)
    return out


def memory_efficient_here(x: Tensor) -> bool:
    """Whether these functions apply: not under autocast, which selects dtypes per product, nor torch.compile."""
    return not (torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling())
