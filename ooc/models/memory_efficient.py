"""Memory-efficient layers: autograd functions that save less for the backward pass.

Autograd saves the input of every product. A GraphSAGE layer needs only the destinations' rows and the neighbors' means, and
ReLU only which elements were positive, so the wide first-layer rows are freed before the backward pass. Results do not change.
A ReLU that the next layer's dropout follows is computed with it, in one pass.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ooc.graph.bag_sum import bag_sum
from ooc.graph.blocks import edges_by_source
from ooc.models.dropout import Of, drop_positive, drop_positive_rows, dropout, level_of, next_draw, scale_of
from ooc.models.kept_sums import neighbor_sum
from ooc.runtime.crew import in_pieces, knows_threads, single_threaded
from ooc.runtime.parts import in_parts
from ooc.stores.jit import kernel

LEAST_PRODUCT = 2**24
"""multiplications from which on a product is worth another thread: a third of a millisecond"""
SUM_COST = 16
"""multiplications that take as long as adding one number of a neighbor's row (measured)"""
ROWS_AT_ONCE, FEWEST_COLUMNS = 512, 128
"""of a piece: half a megabyte of output, and columns that MKL multiplies at 0.9 of its speed, more at all of it"""
MOST_THREADS = 4
"""that find pieces enough: gradients of 256 columns have four. More threads divide each product evenly, by OpenMP"""


@kernel
def _fill(row: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out[i] = row; torch's own copy would take another thread."""
    for i in range(len(out)):
        for f in range(len(row)):
            out[i, f] = row[f]


def _alone(work: int) -> AbstractContextManager[None]:
    """Of operations with so many multiplications: in one thread, where waking others takes longer than they save."""
    return single_threaded() if work < LEAST_PRODUCT else nullcontext()


def _divided(rows: Sequence[Tensor], columns: int) -> bool:
    """Whether products of these rows, to or from so many columns, are done in pieces; see `ooc.runtime.crew`."""
    large = all(_plain(each) and each.numel() * columns >= LEAST_PRODUCT for each in rows)
    return large and torch.get_num_threads() <= MOST_THREADS and knows_threads()


def _by_rows(multiply: Callable[[slice], object], rows: Sequence[Tensor], columns: int) -> None:
    """multiply(range of the rows) for all of `rows`, in pieces where that pays; the bits are those of one thread."""
    if _divided(rows, columns):
        parts = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, len(rows[0]), ROWS_AT_ONCE)]
        in_pieces([partial(multiply, part) for part in parts])
        return
    with _alone(max(each.numel() for each in rows) * columns):
        multiply(slice(None))


def _added_products(bias: Tensor, pairs: Sequence[Tensor]) -> Tensor:
    """bias + the sum of rows @ weight.T; pairs: rows, weight, rows, weight, ..."""
    rows, weights = pairs[::2], [weight.t() for weight in pairs[1::2]]
    if not _plain(bias):
        out = torch.addmm(bias, rows[0], weights[0])
        for each, weight in zip(rows[1:], weights[1:], strict=True):
            out.addmm_(each, weight)
        return out
    out = bias.new_empty(len(rows[0]), len(bias))
    flat = bias.detach().numpy()

    def add(part: slice) -> None:
        _fill(flat, out[part].numpy())
        for each, weight in zip(rows, weights, strict=True):
            out[part].addmm_(each[part], weight)

    _by_rows(add, rows, len(bias))
    return out


def _weight_gradients(grad: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """grad.T @ each of the rows, and the sum of grad over its rows. Pieces are ranges of the columns of grad: each number is
    one sum over all rows, so that the bits are those of one thread."""
    width = grad.size(1)
    if not (rows and _plain(grad) and _divided(rows, width)):
        with _alone(max((each.numel() for each in rows), default=1) * width):
            return [*(grad.t() @ each for each in rows), grad.sum(0)]
    found, sums = [grad.new_empty(width, each.size(1)) for each in rows], grad.new_empty(width)
    ranges = -(-torch.get_num_threads() // len(rows))
    columns = max(FEWEST_COLUMNS, -(-width // ranges))

    def add(out: Tensor, each: Tensor, begin: int) -> None:
        end = begin + columns
        torch.mm(grad[:, begin:end].t(), each, out=out[begin:end])

    pairs = list(zip(found, rows, strict=True))
    pieces = [partial(add, out, each, begin) for begin in range(0, width, columns) for out, each in pairs]
    in_pieces([*pieces, partial(torch.sum, grad, 0, out=sums)])
    return [*found, sums]


class _Products(torch.autograd.Function):
    """bias + the sum of rows @ weight.T, in one output and without temporaries. pairs: rows, weight, rows, weight, ..."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        return _added_products(bias, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs, needed = ctx.saved_tensors, ctx.needs_input_grad
        of_weights = [i for i in range(0, len(pairs), 2) if needed[2 + i]]
        *weights, bias = _weight_gradients(grad, [pairs[i] for i in of_weights])
        found: list[Tensor | None] = [bias, *[None] * len(pairs)]
        for i, weight in zip(of_weights, weights, strict=True):
            found[2 + i] = weight
        for i in range(0, len(pairs), 2):
            found[1 + i] = grad @ pairs[i + 1] if needed[1 + i] else None
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
        with _alone(len(value) * SUM_COST * x.size(1)):
            neighbor, self_row = neighbor_sum(edge_index[0], x, indptr, value), x[: len(indptr) - 1].clone()
        ctx.num_src = len(x)
        ctx.save_for_backward(neighbor, self_row, value, edge_index, weight_neighbor, weight_self)
        return _added_products(bias, (neighbor, weight_neighbor, self_row, weight_self))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        neighbor, self_row, value, edge_index, weight_neighbor, weight_self = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            to_neighbor = grad.new_empty(len(grad), weight_neighbor.size(1))
            _by_rows(lambda part: torch.mm(grad[part], weight_neighbor, out=to_neighbor[part]), [grad], weight_neighbor.size(1))
            with _alone(to_neighbor.size(1) * len(value) * SUM_COST):
                order, by_source = edges_by_source(edge_index[0], ctx.num_src)
                grad_x = bag_sum(edge_index[1][order], to_neighbor, by_source, value[order])
            own = grad_x[: len(self_row)]
            _by_rows(lambda part: own[part].addmm_(grad[part], weight_self), [grad], weight_self.size(1))
        of_neighbor, of_self, of_bias = _weight_gradients(grad, (neighbor, self_row))
        return grad_x, None, None, of_neighbor, of_bias, of_self


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


@kernel
def _scale_uncut(grad: NDArray[np.float32], cut: NDArray[np.bool_], scale: np.float32, out: NDArray[np.float32]) -> None:
    """out = 0 where cut, else grad * scale."""
    for i in range(len(grad)):
        out[i] = np.float32(0) if cut[i] else grad[i] * scale


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        if not _plain(x):
            ctx.save_for_backward(x <= 0)
            return x.clamp_(min=0)
        cut = torch.empty(x.shape, dtype=torch.bool)
        flat, below = _flat(x), _flat(cut)
        in_parts(lambda at, end: _cut_below(flat[at:end], below[at:end]), len(flat))
        ctx.save_for_backward(cut)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cut,) = ctx.saved_tensors
        if not _plain(grad):
            return grad.masked_fill(cut, 0)  # a product would turn inf * 0 into NaN
        out = torch.empty_like(grad)
        given, below, found = _flat(grad), _flat(cut), _flat(out)
        in_parts(lambda at, end: _take_uncut(given[at:end], below[at:end], found[at:end]), len(given))
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
        in_parts(lambda at, end: _scale_uncut(given[at:end], gone[at:end], scale, found[at:end]), len(given))
        return out, None, None, None


def relu_dropout(x: Tensor, p: float, of: Of = "sources") -> Tensor:
    """ReLU and then `ooc.models.dropout.dropout` in training: in one pass and in place where it can be, with the same bits."""
    if not _plain(x) or torch.compiler.is_compiling():
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
