"""Products of rows and weights, in pieces that threads take in turn, by the library that is fastest."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime import onednn
from ooc.runtime.crew import single_threaded
from ooc.runtime.product_kernels import BLOCKS_BY_ONEDNN, BY_MKL, SUMS_BY_MKL, SUMS_BY_ONEDNN
from ooc.runtime.shared_products import SharedProduct, share
from ooc.stores.jit import kernel

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
    width = grad.size(1)
    if rows and plain(grad):
        made = _added_gradients(grad, rows, SUMS_BY_ONEDNN) if _by_onednn(rows, width) else None
        if made is None and _large(rows, width, LEAST_SHARED):
            made = _added_gradients(grad, rows, SUMS_BY_MKL)
        if made is not None:
            return made
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


def sums_of_gradients(size: int, width: int, columns: int, way: int) -> int:
    """How many sums of gradients of weights are made, by a way that makes them, of so many rows of a width; columns: of all
    rows that they are multiplied by."""
    wanted = -(-size // onednn.ROWS) if way == SUMS_BY_ONEDNN else size // ROWS_OF_SUM
    return max(1, min(MOST_SUMS, wanted, SUM_BYTES // (4 * width * columns)))


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


def _added_gradients(grad: Tensor, rows: Sequence[Tensor], way: int) -> list[Tensor] | None:
    """`weight_gradients` as sums of ranges of the rows, added at last. None where it cannot be done so. (MKL multiplies all of
    grad's columns faster than parts of them, whose bits may differ, too.)"""
    size, width = grad.shape
    ranges = sums_of_gradients(size, width, sum(each.size(1) for each in rows), way)
    sums = [grad.new_empty(ranges, width, each.size(1)) for each in rows]
    of_bias = grad.new_empty(2 * ranges, width)
    products = [SharedProduct(out[0], grad.t(), each) for out, each in zip(sums, rows, strict=True)]
    products[0] = products[0]._replace(bias=of_bias[0])
    if not share(products, _threads(rows, width), ranges, way=way):
        return None
    return [_added(each) for each in (*sums, of_bias[:ranges])]


def _added(sums: Tensor) -> Tensor:
    """The sum of matrices or rows that lie one behind another."""
    out = sums.new_empty(sums.shape[1:])
    _add_up(sums.numpy().reshape(len(sums), -1), out.numpy().reshape(-1))
    return out


@kernel
def _add_up(sums: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Set `out` to the sum of the rows of `sums`, in order."""
    out[:] = sums[0]
    for i in range(1, len(sums)):
        for j in range(len(out)):
            out[j] += sums[i, j]
