"""Sums of messages that depend on a source row and on an edge's features, without a row in memory for every edge.

The messages are made a piece at a time, and again in the backward pass, so a layer keeps what one without edge features does.
Pieces have a fixed size, so results depend neither on threads nor on memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ooc.graph.bag_sum import bag_sum
from ooc.graph.blocks import Block, sorted_by_source

EDGES_AT_ONCE, GPU_EDGES_AT_ONCE = 8192, 2**18
"""edges of a piece, so that its messages stay in the CPU cache; on a GPU, so that few kernels do the work"""


class _ReluMessageSum(torch.autograd.Function):
    """sum over in-edges of value * relu(x[source] + edge_attr @ weight.T + bias); see `relu_message_sum`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge_attr: Tensor,
        weight: Tensor,
        bias: Tensor,
        value: Tensor | None,
        edge_index: Tensor,
        indptr: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, edge_attr, weight, bias, value, edge_index)
        out = x.new_zeros(len(indptr) - 1, x.size(1))
        with torch.autocast(x.device.type, enabled=False):
            for first, stop in _pieces(edge_index):
                message = _before_relu(x, edge_attr[first:stop], weight, bias, edge_index[0, first:stop]).relu_()
                own = None if value is None else value[first:stop]
                _add_up(out, message, own, edge_index[1], indptr, (first, stop))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Edges in the order of their sources, so that each row of x's gradient is one sum."""
        x, edge_attr, weight, bias, value, edge_index = ctx.saved_tensors
        of_x, of_attr, of_weight, of_bias = (
            torch.zeros_like(each) if needed else None
            for each, needed in zip((x, edge_attr, weight, bias), ctx.needs_input_grad, strict=False)
        )
        grad = grad.contiguous()
        order, indptr = sorted_by_source(edge_index[0], len(x))
        source = edge_index[0][order]
        for first, stop in _pieces(edge_index):
            edge = order[first:stop]
            attr = edge_attr[edge]
            before = _before_relu(x, attr, weight, bias, source[first:stop])
            own = grad.index_select(0, edge_index[1, edge]).masked_fill_(before <= 0, 0.0)
            if value is not None:
                own *= value[edge].to(own.dtype).unsqueeze(1)
            if of_x is not None:
                _add_up(of_x, own, None, source, indptr, (first, stop))
            if of_attr is not None:
                of_attr[edge] = (own @ weight.to(own.dtype)).to(attr.dtype)
            if of_weight is not None:
                of_weight += (own.T @ attr.to(own.dtype)).to(weight.dtype)
            if of_bias is not None:
                of_bias += own.sum(0).to(bias.dtype)
        return of_x, of_attr, of_weight, of_bias, None, None, None


def _before_relu(x: Tensor, edge_attr: Tensor, weight: Tensor, bias: Tensor, source: Tensor) -> Tensor:
    """[k, f], in x's dtype."""
    return F.linear(edge_attr.to(x.dtype), weight.to(x.dtype), bias.to(x.dtype)).add_(x.index_select(0, source))


def _add_up(out: Tensor, rows: Tensor, value: Tensor | None, owner: Tensor, indptr: Tensor, piece: tuple[int, int]) -> None:
    """Add the rows of a piece, [k, f], to out[owner]; owner: of all edges, ascending, with its row pointers."""
    first, stop = piece
    low, high = 0, len(out)
    if owner.device.type == "cpu":  # a GPU adds up all rows sooner than the host knows which ones there are
        low, high = int(owner[first]), int(owner[stop - 1]) + 1
    at = torch.arange(stop - first, device=rows.device)
    out[low:high] += bag_sum(at, rows, indptr[low : high + 1].clamp(first, stop) - first, value)


def _pieces(edge_index: Tensor) -> Iterator[tuple[int, int]]:
    edges, most = edge_index.size(1), EDGES_AT_ONCE if edge_index.device.type == "cpu" else GPU_EDGES_AT_ONCE
    for first in range(0, edges, most):
        yield first, min(first + most, edges)


def relu_message_sum(
    x: Tensor, edge_attr: Tensor, weight: Tensor, bias: Tensor, block: Block, value: Tensor | None = None
) -> Tensor:
    """Sum relu(source row + linear map of the edge's features) over each destination's in-edges: [num_dst, f].

    Args:
        x: Source rows [num_src, f].
        edge_attr: Edge features [e, d], floating.
        weight, bias: Of the linear map, [f, d] and [f].
        block: The edges.
        value: What each message is multiplied by, [e], without a gradient; None is 1.

    Returns:
        [num_dst, f]; deterministic, also on CUDA, and differentiable but for `value`.

    >>> relu_message_sum(x, block.edge_attr, lin.weight, lin.bias, block).shape
    torch.Size([num_dst, f])
    """
    if torch.compiler.is_compiling():  # the number of pieces would be compiled in
        message = (x.index_select(0, block.edge_index[0]) + F.linear(edge_attr, weight, bias)).relu()
        message = message if value is None else message * value.to(message.dtype).unsqueeze(1)
        return message.new_zeros(block.num_dst, x.size(1)).index_add_(0, block.edge_index[1], message)
    out: Tensor = _ReluMessageSum.apply(x, edge_attr, weight, bias, value, block.edge_index, block.indptr)  # type: ignore[no-untyped-call]
    return out
