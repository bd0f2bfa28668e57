"""Products of rows and weights, in pieces that threads take in turn, by the library that is fastest."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ooc.runtime import onednn
from ooc.runtime.crew import single_threaded
from ooc.runtime.shared_products import BLOCKS_BY_ONEDNN, BY_MKL, SUMS_BY_ONEDNN, SharedProduct, share

LEAST_PRODUCT, LEAST_SHARED = 2**24, 2**22
"""multiplications from which on a product is worth another thread of torch's, a third of a millisecond, and one that shares it
in a kernel (`ooc.runtime.shared_products`)"""
ROWS_AT_ONCE, FEWEST_COLUMNS = 512, 128
"""of a piece: half a megabyte of output, and columns that MKL multiplies at 0.9 of its speed, more at all of it"""
MOST_THREADS = 4
"""that find pieces enough: gradients of 256 columns have four. More threads divide each product evenly, by OpenMP"""
LEAST_BY_ONEDNN = 2**22
"""multiplications from which on oneDNN takes less than MKL in one thread, a call included"""
MOST_SUMS, SUM_BYTES = 16, 2**24
"""sums of gradients of weights that threads make at once, which are added at last; bytes of them, if there are several"""
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
    if _shared(rows, columns) and _share_rows(out, pairs, bias, add, torch.get_num_threads(), BY_MKL):
        return
    with single_threaded() if columns == 1 else alone(max(each.numel() for each in rows) * columns):
        _multiply_rows(out, pairs, bias, add)


def weight_gradients(grad: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """grad.T @ each of the rows, and the sum of grad over its rows. The bits do not depend on the number of threads."""
    width = grad.size(1)
    if rows and plain(grad) and _by_onednn(rows, width):
        made = _added_gradients(grad, rows)
        if made is not None:
            return made
    sums = grad.new_empty(width)
    of_bias = partial(torch.sum, grad, 0, out=sums)
    if rows and plain(grad) and _shared(rows, width):
        found = [grad.new_empty(width, each.size(1)) for each in rows]
        if _share_columns(found, grad, rows, of_bias):
            return [*found, sums]
    narrow = 1 in (width, *(each.size(1) for each in rows))  # bits of such sums depend on threads
    with single_threaded() if narrow else alone(max((each.numel() for each in rows), default=1) * width):
        return [*(grad.t() @ each for each in rows), grad.sum(0)]


def _shared(rows: Sequence[Tensor], columns: int) -> bool:
    """Whether products by MKL of these rows, to or from so many columns, are worth sharing."""
    return _large(rows, columns, LEAST_SHARED) and torch.get_num_threads() <= MOST_THREADS


def _share_rows(out: Tensor, pairs: Sequence[Pair], bias: Tensor | None, add: bool, threads: int, way: int) -> bool:
    """`multiply` in ranges of the rows, if it can be. Of one to three rows MKL adds up the products in another order."""
    (rows, weight), *others = pairs
    first = SharedProduct(out, rows, weight.t(), bias, add)
    products = [first, *(SharedProduct(out, rows, weight.t(), add=True) for rows, weight in others)]
    return share(products, threads, -(-len(out) // ROWS_AT_ONCE), way=way)


def _share_columns(found: Sequence[Tensor], grad: Tensor, rows: Sequence[Tensor], beside: Callable[[], object]) -> bool:
    """Set `found` to grad.T @ each of the rows, in ranges of grad's columns, if it can be: each number is one sum over all
    rows."""
    threads, width = torch.get_num_threads(), grad.size(1)
    ranges = max(1, min(-(-threads // len(rows)), width // FEWEST_COLUMNS))
    bounds = [width * number // ranges for number in range(ranges + 1)]
    parts = [*map(slice, bounds, bounds[1:])]
    products = [
        SharedProduct(out[part], grad[:, part].t(), each) for part in parts for out, each in zip(found, rows, strict=True)
    ]
    return share(products, threads, beside=beside)


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
    fits = len(rows[0]) >= onednn.ROWS and _large(rows, columns, LEAST_BY_ONEDNN)
    return fits and bool(torch.backends.mkldnn.enabled) and _onednn_is_faster()


def _threads(rows: Sequence[Tensor], columns: int) -> int:
    """That share oneDNN's products of these rows."""
    return torch.get_num_threads() if _large(rows, columns, LEAST_SHARED) else 1


def _added_gradients(grad: Tensor, rows: Sequence[Tensor]) -> list[Tensor] | None:
    """`weight_gradients` by oneDNN: sums of ranges of the rows, added at last. None where it cannot be done so."""
    size, width = grad.shape
    ranges = max(1, min(MOST_SUMS, -(-size // onednn.ROWS), SUM_BYTES // (4 * width * sum(each.size(1) for each in rows))))
    sums = [*(grad.new_empty(ranges, width, each.size(1)) for each in rows), grad.new_empty(ranges, width)]
    products = [SharedProduct(out[0], grad.t(), each) for out, each in zip(sums, rows, strict=False)]
    products[0] = products[0]._replace(bias=sums[-1][0])
    if not share(products, _threads(rows, width), ranges, way=SUMS_BY_ONEDNN):
        return None
    with single_threaded():
        return [each.sum(0) for each in sums]
