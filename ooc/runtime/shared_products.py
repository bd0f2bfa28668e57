"""Products of float32 matrices that several threads share, without the interpreter in between (`ooc.runtime.shared_work`)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ooc.runtime import onednn
from ooc.runtime.onednn import ROWS as ROWS_OF_BLOCK
from ooc.runtime.product_kernels import (
    BLOCKS_BY_ONEDNN,
    BY_MKL,
    COLUMN_MAJOR,
    ROW_MAJOR,
    N,
    here,
)
from ooc.runtime.row_kernels import RANGES, ROWS, WAY
from ooc.runtime.shared_work import Work, share_work

Call = list[int]
"""the numbers of a call, see `ooc.runtime.product_kernels`"""
_MOST = 2**31 - 1


class SharedProduct(NamedTuple):
    """out [n, m] = left [n, k] @ right [k, m], plus bias [m] or, with `add`, what is there."""

    out: Tensor
    left: Tensor
    right: Tensor
    bias: Tensor | None = None
    add: bool = False

    def call(self, in_ranges: bool) -> Call | None:
        """The numbers of its call; None where torch has to multiply. in_ranges: whether rows are divided."""
        matrices = self.out, self.left, self.right
        if not all(map(_plain, matrices)) or not all(each.dim() == 2 for each in matrices):
            return None
        (rows, columns), inner = self.out.shape, self.left.size(1)
        if self.left.size(0) != rows or self.right.shape != (inner, columns) or 1 in (rows, columns):
            return None  # torch's product of one row or column has other bits
        bias = self.bias
        if bias is not None and not (_plain(bias) and bias.is_contiguous() and bias.shape == (columns,)):
            return None
        layouts = [_layout(each) for each in matrices]
        if None in layouts:
            return None
        (of_out, ldc), (of_left, ldb), (of_right, lda) = (each for each in layouts if each is not None)
        if of_out != ROW_MAJOR or (in_ranges and of_left != ROW_MAJOR) or max(rows, columns, inner, lda, ldb, ldc) > _MOST:
            return None
        places = self.right.data_ptr(), lda, self.left.data_ptr(), ldb, self.out.data_ptr(), ldc
        return [of_right, of_left, columns, rows, inner, *places, self.add, 0 if bias is None else bias.data_ptr()]


def _plain(x: Tensor) -> bool:
    """Whether the numbers of a tensor are float32 in memory that it has the address of."""
    return type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype is torch.float32 and not x.is_neg()


def _layout(matrix: Tensor) -> tuple[int, int] | None:
    """(layout, leading dimension) of a matrix without gaps between the numbers of a row, or of a column; None for others.

    Strides of dimensions of one or no number mean nothing.
    """
    (rows, columns), (by_row, by_column) = matrix.shape, matrix.stride()
    if (by_column == 1 or columns <= 1) and (rows <= 1 or by_row >= max(1, columns)):
        return ROW_MAJOR, max(1, columns, by_row if rows > 1 else 0)
    if (by_row == 1 or rows <= 1) and (columns <= 1 or by_column >= max(1, rows)):
        return COLUMN_MAJOR, max(1, rows, by_column if columns > 1 else 0)
    return None


def _calls(products: Sequence[SharedProduct], in_ranges: bool, way: int) -> list[Call] | None:
    """The calls of all products; None where torch has to make one of them."""
    try:
        found = [each.call(in_ranges) for each in products]
    except RuntimeError:  # tensors of torch.func have no address
        return None
    if None in found or (in_ranges and len({each.out.size(0) for each in products}) > 1):
        return None
    calls = [each for each in found if each is not None]
    if way == BLOCKS_BY_ONEDNN and not (onednn.here() and all(call[N] >= ROWS_OF_BLOCK for call in calls)):
        return None
    return calls


def share(products: Sequence[SharedProduct], threads: int, ranges: int = 0, way: int = BY_MKL) -> bool:
    """Make products in pieces that several threads take in turn, this one among them.

    Gradients are not recorded.

    Args:
        products: None reads what another one writes, unless both have the same rows and `ranges` is given.
        threads: This one and helpers.
        ranges: Even ranges of the rows of `out` and `left`, each of which is a piece: all products, in order. 0: each product
            is a piece.
        way: `BY_MKL`, or `BLOCKS_BY_ONEDNN`, whose ranges are blocks of `onednn.ROWS` rows, however many `ranges` says.

    Returns:
        Whether they were made. False, and nothing is done, where kernels cannot make one of them: not `here`, or matrices that
        are not float32 on the CPU, not row-major or column-major, of one row or column, or whose shapes do not fit.

    Raises:
        MemoryError: If oneDNN cannot multiply for want of memory.

    >>> share([SharedProduct(out, rows, weight.t())], threads=2, ranges=4)
    True
    """
    calls = _calls(products, ranges > 0, way) if here() else None
    if calls is None:
        return False
    rows = products[0].out.size(0)
    if way == BLOCKS_BY_ONEDNN:
        ranges = -(-rows // ROWS_OF_BLOCK)
    work = Work(ranges or len(calls), {RANGES: ranges, ROWS: rows, WAY: way}, calls)
    share_work([[work]], threads)
    torch.autograd.graph.increment_version([each.out for each in products if not each.out.is_inference()])
    return True
