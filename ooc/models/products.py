"""Products of rows and weights, in pieces that threads take in turn, by the library that is fastest."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ooc.runtime import onednn
from ooc.runtime.crew import single_threaded
from ooc.runtime.product_kernels import (
    BLOCKS_BY_ONEDNN,
    BY_MKL,
    COLUMN_MAJOR,
    ROW_MAJOR,
    SUMS_BY_MKL,
    SUMS_BY_ONEDNN,
    here,
)
from ooc.runtime.row_kernels import ADD_UP, AFTER, GIVEN, OUT, OUT_WIDTH, RANGES, ROWS, WAY
from ooc.runtime.shared_products import SharedProduct, share
from ooc.runtime.shared_work import Number, Work, share_work

LEAST_PRODUCT, LEAST_SHARED = 2**24, 2**22
"""multiplications from which on a product is worth another thread of torch's, a third of a millisecond, and one that shares it
in a kernel (`ooc.runtime.shared_products`)"""
ROWS_AT_ONCE = 512
"""of a piece: half a megabyte of output"""
LEAST_BY_ONEDNN = 2**22
"""multiplications from which on oneDNN takes less than MKL in one thread, a call included"""
MOST_SUMS, SUM_BYTES, ROWS_OF_SUM = 16, 2**24, 1024
"""sums of gradients of weights that threads make at once, which are added at last; bytes of them, if there are several; rows of
one by MKL, at least"""
Pair = tuple[Tensor, Tensor]


def plain(x: Tensor) -> bool:
    """Whether our kernels support the tensor."""
    return x.is_cpu and x.dtype is torch.float32 and x.is_contiguous()


def alone(work: int) -> AbstractContextManager[None]:
    """Of operations with so many multiplications: in one thread, where waking others takes longer than they save."""
    return single_threaded() if work < LEAST_PRODUCT else nullcontext()


def added_products(bias: Tensor, pairs: Sequence[Tensor]) -> Tensor:
    """bias + the sum of rows @ weight.T; pairs: rows, weight, rows, weight, ..."""
    rows, weights = pairs[::2], pairs[1::2]
    if not plain(bias):
        out = torch.addmm(bias, rows[0], weights[0].t())
        for each, weight in zip(rows[1:], weights[1:], strict=True):
            out.addmm_(each, weight.t())
        return out
    out = bias.new_empty(len(rows[0]), len(bias))
    multiply(out, list(zip(rows, weights, strict=True)), bias)
    return out


def share_all(phases: Sequence[Sequence[Work]]) -> None:
    """`share_work` in torch's threads."""
    share_work(phases, torch.get_num_threads())


def multiply(out: Tensor, pairs: Sequence[Pair], bias: Tensor | None = None, add: bool = False) -> None:
    """Set out [n, g] to bias [g] (None: zeros) + the sum of rows @ weight.T over the pairs of rows [n, f] and weight [g, f].

    add: add it to out instead, without bias. The bits do not depend on the number of threads.

    >>> multiply(out, [(rows, weight)])
    """
    rows, columns = [each for each, _ in pairs], out.size(1)
    if _by_onednn(rows, columns) and _share_rows(out, pairs, bias, add, _threads(rows, columns), BLOCKS_BY_ONEDNN):
        return
    if _large(rows, columns, LEAST_SHARED) and _share_rows(out, pairs, bias, add, torch.get_num_threads(), BY_MKL):
        return
    with _one_order(out, max(each.numel() for each in rows) * columns):
        _multiply_rows(out, pairs, bias, add)


def weight_gradients(grad: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """grad.T @ each of the rows, and the sum of grad over its rows. The bits do not depend on the number of threads."""
    (size, width), columns = grad.shape, [each.size(1) for each in rows]
    way = sums_way(size, width, columns) if rows and all(map(plain, (grad, *rows))) else None
    if way is not None:
        made = WeightGradients.of(grad, rows, way, grad.new_empty(numbers_of_sums(size, width, columns, way)))
        share_all(made.works)
        return made.found
    with _one_order(grad, max((each.numel() for each in rows), default=1) * width, 1 in (each.size(1) for each in rows)):
        return [*(grad.t() @ each for each in rows), grad.sum(0)]


def _one_order(x: Tensor, work: int, narrow: bool = False) -> AbstractContextManager[None]:
    """Of torch's product, with so many multiplications, of or to x: float32 in one thread, as MKL adds up in an order that
    follows from the number of threads, and every type where a matrix is narrow, of one column. They are few, or of rows with
    gaps: others are shared."""
    return single_threaded() if x.is_cpu and (x.dtype is torch.float32 or narrow or x.size(1) == 1) else alone(work)


def _share_rows(out: Tensor, pairs: Sequence[Pair], bias: Tensor | None, add: bool, threads: int, way: int) -> bool:
    """`multiply` in ranges of the rows, if it can be. Of one to three rows MKL adds up the products in another order."""
    (rows, weight), *others = pairs
    first = SharedProduct(out, rows, weight.t(), bias, add)
    products = [first, *(SharedProduct(out, rows, weight.t(), add=True) for rows, weight in others)]
    return share(products, threads, -(-len(out) // ROWS_AT_ONCE), way=way)


def _large(rows: Sequence[Tensor], columns: int, least: int) -> bool:
    return all(plain(each) and each.numel() * columns >= least for each in rows)


def _multiply_rows(out: Tensor, pairs: Sequence[Pair], bias: Tensor | None, add: bool) -> None:
    """`multiply` by torch's own operations."""
    (rows, weight), *others = pairs
    if add:
        out.addmm_(rows, weight.t())
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    for rows, weight in others:
        out.addmm_(rows, weight.t())


@cache
def _onednn_is_faster() -> bool:
    """Whether oneDNN is faster than MKL here, and kernels can call it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _made_by_amd() and onednn.here()


def _made_by_amd() -> bool:
    known = Path("/proc/cpuinfo")
    return sys.platform == "linux" and known.exists() and "AuthenticAMD" in known.read_text()


def _by_onednn(rows: Sequence[Tensor], columns: int) -> bool:
    """Whether oneDNN multiplies these rows, to or from so many columns."""
    return all(plain(each) and by_onednn(len(each), each.size(1), columns) for each in rows)


def by_onednn(rows: int, width: int, columns: int) -> bool:
    """Whether oneDNN multiplies so many rows of a width, to or from so many columns; else it is MKL."""
    fits = rows >= onednn.ROWS and rows * width * columns >= LEAST_BY_ONEDNN
    return fits and bool(torch.backends.mkldnn.enabled) and _onednn_is_faster()


def _threads(rows: Sequence[Tensor], columns: int) -> int:
    """That share oneDNN's products of these rows."""
    return torch.get_num_threads() if _large(rows, columns, LEAST_SHARED) else 1


class WeightGradients(NamedTuple):
    """Gradients of weights that works of threads make (`ooc.runtime.shared_work`), as sums of ranges of the rows that are added
    at last. (MKL multiplies all of grad's columns faster than parts of them, whose bits may differ, too.)

    found: what `weight_gradients` returns; works: of a first phase, and of a second one.
    """

    found: list[Tensor]
    works: tuple[list[Work], list[Work]]

    @classmethod
    def of(cls, grad: Tensor, rows: Sequence[Tensor], way: int, memory: Tensor) -> Self:
        """Of contiguous matrices. way: `SUMS_BY_MKL` or `SUMS_BY_ONEDNN`; memory: of `numbers_of_sums`, to work in."""
        (size, width), columns = grad.shape, [each.size(1) for each in rows]
        ranges = _ranges_of_sums(size, width, columns, way)
        ends = [0, *accumulate(ranges * width * each for each in (*columns, 2))]
        *sums, of_bias = (memory[first:stop] for first, stop in pairwise(ends))
        calls = list[list[Number]]()
        for each, to in zip(rows, sums, strict=True):
            bias: Number = 0 if calls else of_bias
            calls.append(
                [ROW_MAJOR, COLUMN_MAJOR, each.size(1), width, size, each, each.size(1), grad, width, to, each.size(1), 0, bias]
            )
        found = [*(grad.new_empty(width, each) for each in columns), grad.new_empty(width)]
        add_up = {AFTER: ADD_UP, RANGES: 1, ROWS: ranges}
        adding = [
            Work(1, {**add_up, GIVEN: part, OUT: out, OUT_WIDTH: out.numel()})
            for part, out in zip((*sums, of_bias), found, strict=True)
        ]
        return cls(found, ([Work(ranges, {RANGES: ranges, ROWS: width, WAY: way}, calls)], adding))


def _ranges_of_sums(size: int, width: int, columns: Sequence[int], way: int) -> int:
    wanted = -(-size // onednn.ROWS) if way == SUMS_BY_ONEDNN else size // ROWS_OF_SUM
    return max(1, min(MOST_SUMS, wanted, SUM_BYTES // (4 * width * sum(columns))))


def numbers_of_sums(size: int, width: int, columns: Sequence[int], way: int) -> int:
    """How many numbers of memory `WeightGradients` need of so many rows of a width, times rows of so many columns."""
    return _ranges_of_sums(size, width, columns, way) * width * (sum(columns) + 2)


def sums_way(size: int, width: int, columns: Sequence[int]) -> int | None:
    """By which `WeightGradients` are made of so many rows of a width, times rows of so many columns; None where torch makes
    them: they are few, or it has other bits, as of one row or column."""
    if not here() or min(size, width, *columns) < 2:
        return None
    if all(by_onednn(size, each, width) for each in columns):
        return SUMS_BY_ONEDNN
    return SUMS_BY_MKL if all(size * each * width >= LEAST_SHARED for each in columns) else None
