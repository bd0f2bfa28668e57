"""Matrix products of float32 on the CPU, in pieces that threads take in turn.

Where the processor has AVX-512, a kernel of ours multiplies; it keeps four rows by four vectors of the result in registers.
Each number is one sum in the order of terms, in runs that are added up: its bits depend neither on pieces nor on threads, and
are those of torch where MKL has the same runs, as it has on AMD. Elsewhere torch multiplies the pieces.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.crew import in_pieces, knows_threads, single_threaded
from ooc.stores.jit import kernel

Floats = NDArray[np.float32]
LEAST_PRODUCT = 2**24
"""multiplications from which on a product is worth another thread: a third of a millisecond"""
MULTIPLIES = bool(binding.get_host_cpu_features().get("avx512f"))
"""whether the kernel does; of 16 registers of 8 numbers MKL makes more (measured)"""
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 512, 64 if MULTIPLIES else 128
"""of a piece: half a megabyte of output, and as many columns of a gradient as are still multiplied at full speed"""
MOST_THREADS = 4
"""that find pieces enough: gradients of 256 columns have four. More threads divide each product evenly, by OpenMP"""
RUN = 192
"""products that are added up before their sum is added to the others'"""
ROWS, VECTORS, LANES = 4, 4, 16
"""of the part of the result that registers hold; numbers in a vector"""


def _tile(rows: int, vectors: int) -> Any:
    """A function of kernels that computes `add_product` for so many rows and vectors of columns, in one run."""

    @intrinsic
    def tile(typing: Any, a: Any, b: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(signature.args, arguments, strict=True)
            _generate(builder, rows, vectors, [context.make_array(kind)(context, builder, value) for kind, value in given])
            return context.get_dummy_value()

        return types.void(a, b, out), generate

    return tile


def _generate(builder: Any, rows: int, vectors: int, arrays: Sequence[Any]) -> None:
    """LLVM's code of a tile: sums in registers, a loop over the terms, and then what was in `out` added to them."""
    vector, number, one = ir.VectorType(ir.FloatType(), LANES), ir.FloatType(), ir.IntType(32)
    nothing, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(one, LANES), [0] * LANES)
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")
    starts = [builder.bitcast(each.data, ir.IntType(8).as_pointer()) for each in arrays]
    strides = [cgutils.unpack_tuple(builder, each.strides) for each in arrays]
    (_, a_step), (b_step, _) = strides[:2]

    def place(which: int, row: int, column: int, kind: Any) -> Any:
        offset = builder.mul(strides[which][0], ir.Constant(strides[which][0].type, row))
        offset = builder.add(offset, ir.Constant(offset.type, 4 * column))
        return builder.bitcast(builder.gep(starts[which], [offset]), kind.as_pointer())

    sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(rows)]
    for each in (each for line in sums for each in line):
        builder.store(ir.Constant(vector, [0.0] * LANES), each)
    factors = [place(0, i, 0, ir.IntType(8)) for i in range(rows)]
    with cgutils.for_range(builder, cgutils.unpack_tuple(builder, arrays[1].shape)[0]) as loop:
        line, term = builder.gep(starts[1], [builder.mul(loop.index, b_step)]), builder.mul(loop.index, a_step)
        places = [builder.gep(line, [ir.Constant(term.type, 4 * v * LANES)]) for v in range(vectors)]
        columns = [builder.load(builder.bitcast(each, vector.as_pointer()), align=4) for each in places]
        for i in range(rows):
            value = builder.load(builder.bitcast(builder.gep(factors[i], [term]), number.as_pointer()))
            value = builder.insert_element(nothing, value, ir.Constant(one, 0))
            value = builder.shuffle_vector(value, nothing, first)
            for v in range(vectors):
                builder.store(builder.call(fused, [value, columns[v], builder.load(sums[i][v])]), sums[i][v])
    for i in range(rows):
        for v in range(vectors):
            where = place(2, i, v * LANES, vector)
            builder.store(builder.fadd(builder.load(where, align=4), builder.load(sums[i][v])), where, align=4)


_wide, _narrow, _single = _tile(ROWS, VECTORS), _tile(ROWS, 1), _tile(1, 1)


@kernel
def _add_narrow(a: Floats, b: Floats, out: Floats) -> None:
    """`add_product` for LANES columns and one run."""
    whole = len(a) - len(a) % ROWS
    for i in range(0, whole, ROWS):
        _narrow(a[i : i + ROWS], b, out[i : i + ROWS])
    for i in range(whole, len(a)):
        _single(a[i : i + 1], b, out[i : i + 1])


@kernel
def _add_run(a: Floats, b: Floats, out: Floats) -> None:
    """`add_product` for one run."""
    columns, at, wide = b.shape[1], 0, VECTORS * LANES
    whole = len(a) - len(a) % ROWS
    while at + wide <= columns:
        for i in range(0, whole, ROWS):
            _wide(a[i : i + ROWS], b[:, at : at + wide], out[i : i + ROWS, at : at + wide])
        for j in range(at, at + wide, LANES):
            _add_narrow(a[whole:], b[:, j : j + LANES], out[whole:, j : j + LANES])
        at += wide
    while at + LANES <= columns:
        _add_narrow(a, b[:, at : at + LANES], out[:, at : at + LANES])
        at += LANES
    if at < columns:  # the last ones, in a vector that zeros fill
        padded, sums = np.zeros((len(b), LANES), np.float32), np.zeros((len(a), LANES), np.float32)
        padded[:, : columns - at] = b[:, at:]
        sums[:, : columns - at] = out[:, at:]
        _add_narrow(a, padded[:, :], sums[:, :])
        out[:, at:] = sums[:, : columns - at]


@kernel
def add_product(a: Floats, b: Floats, out: Floats) -> None:
    """out += a @ b, for float32 [n, m], [m, k], [n, k]; numbers of a row of b and of out lie side by side."""
    depth = len(b)
    run = depth // 2 if RUN < depth < 2 * RUN else RUN  # as MKL divides them
    for first in range(0, depth, run):
        _add_run(a[:, first : first + run], b[first : first + run], out)


@kernel
def _fill(row: Floats, out: Floats) -> None:
    """out[i] = row; torch's own copy would take another thread."""
    for i in range(len(out)):
        for f in range(len(row)):
            out[i, f] = row[f]


def plain(x: Tensor) -> bool:
    """Whether our kernels support the tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()


def alone(work: int) -> AbstractContextManager[None]:
    """Of operations with so many multiplications: in one thread, where waking others takes longer than they save."""
    return single_threaded() if work < LEAST_PRODUCT else nullcontext()


def _divided(rows: Sequence[Tensor], columns: int) -> bool:
    """Whether products of these rows, to or from so many columns, are done in pieces; see `ooc.runtime.crew`."""
    large = all(plain(each) and each.numel() * columns >= LEAST_PRODUCT for each in rows)
    return large and torch.get_num_threads() <= MOST_THREADS and knows_threads()


def _add_piece(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b."""
    if MULTIPLIES:
        add_product(*(each.detach().numpy() for each in (a, b, out)))
    else:
        out.addmm_(a, b)


def _by_rows(multiply: Callable[[slice], object], count: int) -> None:
    """multiply(range of the rows) for all of them, in pieces."""
    parts = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, count, ROWS_AT_ONCE)]
    in_pieces([partial(multiply, part) for part in parts])


def added_products(bias: Tensor, pairs: Sequence[Tensor]) -> Tensor:
    """bias [g] + the sum of rows @ weight.T: [n, g]; pairs: rows [n, f], weight [g, f], rows, weight, ..."""
    rows, weights = pairs[::2], [weight.t() for weight in pairs[1::2]]
    if not (plain(bias) and _divided(rows, len(bias))):
        with alone(max(each.numel() for each in rows) * len(bias)):
            out = torch.addmm(bias, rows[0], weights[0])
            for each, weight in zip(rows[1:], weights[1:], strict=True):
                out.addmm_(each, weight)
        return out
    out = bias.new_empty(len(rows[0]), len(bias))
    first, factors = bias.detach().numpy(), [weight.contiguous() for weight in weights]

    def add(part: slice) -> None:
        _fill(first, out[part].numpy())
        for each, factor in zip(rows, factors, strict=True):
            _add_piece(each[part], factor, out[part])

    _by_rows(add, len(out))
    return out


def add_mapped(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """out += rows @ matrix, for [n, g], [g, f], [n, f]."""
    if plain(out) and plain(matrix) and _divided([rows], matrix.size(1)):
        _by_rows(lambda part: _add_piece(rows[part], matrix, out[part]), len(out))
        return
    with alone(rows.numel() * matrix.size(1)):
        out.addmm_(rows, matrix)


def mapped(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix, for [n, g] and [g, f]: [n, f]."""
    if not (plain(matrix) and _divided([rows], matrix.size(1))):
        with alone(rows.numel() * matrix.size(1)):
            return rows @ matrix
    out = rows.new_empty(len(rows), matrix.size(1))
    _by_rows(lambda part: _add_piece(rows[part], matrix, out[part].zero_()), len(out))
    return out


def weight_gradients(grad: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """grad.T @ each of the rows, and the sum of grad over its rows. Pieces are ranges of the columns of grad: each number is
    one sum over all rows, so that the bits are those of one thread."""
    width = grad.size(1)
    if not (rows and plain(grad) and _divided(rows, width)):
        with alone(max((each.numel() for each in rows), default=1) * width):
            return [*(grad.t() @ each for each in rows), grad.sum(0)]
    found, sums = [grad.new_zeros(width, each.size(1)) for each in rows], grad.new_empty(width)

    def add(out: Tensor, each: Tensor, begin: int) -> None:
        end = begin + COLUMNS_AT_ONCE
        _add_piece(grad[:, begin:end].t(), each, out[begin:end])

    pairs = list(zip(found, rows, strict=True))
    pieces = [partial(add, out, each, begin) for begin in range(0, width, COLUMNS_AT_ONCE) for out, each in pairs]
    in_pieces([*pieces, partial(torch.sum, grad, 0, out=sums)])
    return [*found, sums]
