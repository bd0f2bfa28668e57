"""Products of rows and weights, in pieces that threads take in turn, by the library that is fastest.

torch multiplies float32 by MKL, which uses AVX-512 on Intel's processors alone. oneDNN, which torch has as well, uses it on
AMD's too, and multiplies twice as fast there.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ooc.runtime.crew import in_pieces, knows_threads, single_threaded
from ooc.runtime.shared_products import SharedProduct, share

LEAST_PRODUCT, LEAST_SHARED = 2**24, 2**22
"""multiplications from which on a product is worth another thread: a third of a millisecond, and fewer where Python does not
start the piece (`ooc.runtime.shared_products`)"""
ROWS_AT_ONCE, FEWEST_COLUMNS = 512, 128
"""of a piece: half a megabyte of output, and columns that MKL multiplies at 0.9 of its speed, more at all of it"""
MOST_THREADS = 4
"""that find pieces enough: gradients of 256 columns have four. More threads divide each product evenly, by OpenMP"""
LEAST_BY_ONEDNN = 2**22
"""multiplications from which on oneDNN takes less than MKL in one thread, a call included"""
MOST_SUMS, SUM_BYTES = 16, 2**24
"""sums of gradients of weights that threads make at once, which are added at last; bytes of them, if there are several"""
Pair = tuple[Tensor, Tensor]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


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
    product = _product_of(rows, columns)
    if product is not None:
        pieces = [partial(_multiply_block, product, out, pairs, bias, add, *each) for each in _blocks(len(out))]
        in_pieces(pieces, _threads(rows, columns))
        return
    if _shared(rows, columns) and _share_rows(out, pairs, bias, add):
        return
    with single_threaded() if columns == 1 else alone(max(each.numel() for each in rows) * columns):
        _multiply_rows(out, pairs, bias, add)


def weight_gradients(grad: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """grad.T @ each of the rows, and the sum of grad over its rows. The bits do not depend on the number of threads."""
    width, sums = grad.size(1), grad.new_empty(grad.size(1))
    of_bias = partial(torch.sum, grad, 0, out=sums)
    product = _product_of(rows, width) if rows and plain(grad) else None
    if product is not None:
        return [*_added_gradients(product, grad, rows, of_bias), sums]
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


def _share_rows(out: Tensor, pairs: Sequence[Pair], bias: Tensor | None, add: bool) -> bool:
    """`multiply` in even ranges of the rows, if it can be. Of one to three rows MKL adds up the products in another order."""
    (rows, weight), *others = pairs
    first = SharedProduct(out, rows, weight.t(), bias, add)
    products = [first, *(SharedProduct(out, rows, weight.t(), add=True) for rows, weight in others)]
    return share(products, torch.get_num_threads(), ranges=-(-len(out) // ROWS_AT_ONCE))


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


def _threads(rows: Sequence[Tensor], columns: int) -> int:
    """That share the pieces of such products."""
    return torch.get_num_threads() if _large(rows, columns, LEAST_PRODUCT) else 1


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
def _onednn() -> Product | None:
    """rows, weight, bias -> rows @ weight.T + bias by oneDNN, where it is faster than MKL; as torch's compiler calls it."""
    faster = torch.backends.cpu.get_cpu_capability() == "AVX512" and _made_by_amd()
    call = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if faster else None
    return None if call is None else lambda rows, weight, bias: call(rows, weight, bias, "none", [], "")


def _made_by_amd() -> bool:
    known = Path("/proc/cpuinfo")
    return sys.platform == "linux" and known.exists() and "AuthenticAMD" in known.read_text()


def _product_of(rows: Sequence[Tensor], columns: int) -> Product | None:
    """oneDNN's product, for rows that it multiplies faster than MKL."""
    fits = len(rows[0]) >= ROWS_AT_ONCE and _large(rows, columns, LEAST_BY_ONEDNN)
    return _onednn() if fits and torch.backends.mkldnn.enabled and knows_threads() else None


def _blocks(size: int) -> Iterator[tuple[slice, slice]]:
    """(rows to set, as many rows as any other block has, among which they are): oneDNN prepares each new shape."""
    for begin in range(0, size, ROWS_AT_ONCE):
        first = min(begin, size - ROWS_AT_ONCE)
        yield slice(begin, first + ROWS_AT_ONCE), slice(first, first + ROWS_AT_ONCE)


def _multiply_block(
    product: Product, out: Tensor, pairs: Sequence[Pair], bias: Tensor | None, add: bool, part: slice, block: slice
) -> None:
    """`multiply` of one block by oneDNN."""
    (rows, weight), *others = pairs
    total = product(rows[block], weight, bias)
    for rows, weight in others:
        total += product(rows[block], weight, None)
    own = total[part.start - block.start :]
    if add:
        out[part] += own
    else:
        out[part] = own


def _added_gradients(product: Product, grad: Tensor, rows: Sequence[Tensor], beside: Callable[[], object]) -> list[Tensor]:
    """grad.T @ each of the rows by oneDNN: sums of ranges of the rows, added at last. beside: one more piece."""
    size, width = grad.shape
    steps = -(-size // ROWS_AT_ONCE)
    ranges = max(1, min(MOST_SUMS, steps, SUM_BYTES // (4 * width * sum(each.size(1) for each in rows))))
    with single_threaded():  # zeros are written faster than another thread wakes
        sums = [grad.new_zeros(ranges, width, each.size(1)) for each in rows]

    def add(number: int) -> None:
        for step in range(steps * number // ranges, steps * (number + 1) // ranges):
            first = min(step * ROWS_AT_ONCE, size - ROWS_AT_ONCE)
            part = slice(first, first + ROWS_AT_ONCE)
            turned = grad[part].t().clone(memory_format=torch.contiguous_format)  # of one column too, or grad would change
            turned[:, : step * ROWS_AT_ONCE - first] = 0  # rows of the last but one: each shape is prepared once
            for out, each in zip(sums, rows, strict=True):
                out[number] += product(turned, each[part].t(), None)

    in_pieces([*(partial(add, number) for number in range(ranges)), beside], _threads(rows, width))
    with single_threaded():
        return [each.sum(0) for each in sums]
