"""Products of float32 matrices in kernels, by what torch multiplies with: MKL's `sgemm` or oneDNN (`ooc.runtime.onednn`).

The bits of MKL's products are those of torch's own in one thread.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import carray, types
from numpy.typing import NDArray

from ooc.runtime import onednn
from ooc.runtime.crew import knows_threads
from ooc.runtime.onednn import ROWS, free, multiply_block, tensor_at, turned_block
from ooc.runtime.pointers import floats_at
from ooc.stores.jit import kernel

Calls = NDArray[np.int64]
"""int64[calls, NUMBERS]"""
NUMBERS = 13
LAYOUT_A, LAYOUT_B, M, N, K, A, LDA, B, LDB, C, LDC, ADD, BIAS = range(NUMBERS)
"""Numbers of a call: the arguments of `sgemm`, whose matrices are column-major, so that its columns are torch's rows. ADD:
whether to add to what is there; BIAS: the address of the bias that every row starts from, 0 for none."""
NO_PRODUCTS, BY_MKL, SUMS_BY_MKL, BLOCKS_BY_ONEDNN, SUMS_BY_ONEDNN = range(5)
"""ways to multiply, see `ooc.runtime.shared_products.share` and, of sums, `ooc.models.products.WeightGradients`"""
ROW_MAJOR, COLUMN_MAJOR = ord("N"), ord("T")
_sgemm = types.ExternalFunction("ooc_sgemm", types.void(*[types.intp] * 13))


@cache
def here() -> bool:
    """Whether torch multiplies with an `sgemm` that kernels can call: on Linux, where it is built with MKL."""
    if sys.platform != "linux" or not knows_threads() or numba.config.DISABLE_JIT:
        return False
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return False
    llvmlite.binding.add_symbol("ooc_sgemm", ctypes.cast(function, ctypes.c_void_p).value)
    onednn.here()  # its names, which the kernels have too
    return True


@kernel
def _set_rows(bias: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
    for i in range(len(rows)):
        for j in range(len(bias)):
            rows[i, j] = bias[j]


@kernel
def _multiply(call: NDArray[np.int64], first: int, rows: int, numbers: NDArray[np.int32], factors: NDArray[np.float32]) -> None:
    """Make one call for rows first:first + rows of `out` and `left`, which is row-major unless these are all rows.

    numbers, factors: memory for the arguments of `sgemm`, which takes their addresses.
    """
    left, out = call[B] + 4 * first * call[LDB], call[C] + 4 * first * call[LDC]
    if call[BIAS] != 0:
        given = carray(floats_at(out), (rows, call[LDC]))
        _set_rows(carray(floats_at(call[BIAS]), (call[M],)), given[:, : call[M]])
    add = call[ADD] != 0 or call[BIAS] != 0
    _call_sgemm(call, (rows, call[K]), (left, call[A], out), add, numbers, factors)


@kernel
def _call_sgemm(
    call: NDArray[np.int64],
    size: tuple[int, int],
    places: tuple[int, int, int],
    add: bool,
    numbers: NDArray[np.int32],
    factors: NDArray[np.float32],
) -> None:
    """Make one call for so many rows and so many numbers in each, with the left and right matrix and `out` at these places."""
    left, right, out = places
    numbers[0], numbers[1], numbers[2], numbers[3] = call[LAYOUT_A], call[LAYOUT_B], call[M], size[0]
    numbers[4], numbers[5], numbers[6], numbers[7] = size[1], call[LDA], call[LDB], call[LDC]
    factors[0], factors[1] = np.float32(1), np.float32(add)
    at, one = numbers.ctypes.data, factors.ctypes.data
    _sgemm(at, at + 4, at + 8, at + 12, at + 16, one, right, at + 20, left, at + 24, one + 4, out, at + 28)


@kernel
def _multiply_rows(call: NDArray[np.int64], piece: int, own: NDArray[np.int64]) -> bool:
    """Make one call for a block of rows by oneDNN. The last block begins with rows that another piece sets."""
    begin = piece * ROWS
    first, stop = min(begin, call[N] - ROWS), min(begin + ROWS, call[N])
    by_row, by_column = (1, call[LDA]) if call[LAYOUT_A] == ROW_MAJOR else (call[LDA], 1)
    left = tensor_at(call[B] + 4 * first * call[LDB], ROWS, call[K], call[LDB], 1, own)
    right = tensor_at(call[A], call[M], call[K], by_row, by_column, own)
    bias = tensor_at(call[BIAS], call[M], 0, 1, 0, own) if call[BIAS] != 0 else 0
    out = carray(floats_at(call[C] + 4 * begin * call[LDC]), (stop - begin, call[LDC]))
    done = multiply_block(left, right, bias, out[:, : call[M]], begin - first, call[ADD] != 0, own)
    free(left)
    free(right)
    free(bias)
    return done and (bias != 0) == (call[BIAS] != 0)


@kernel
def _add_rows(rows: NDArray[np.float32], out: NDArray[np.float32], sums: NDArray[np.float32]) -> None:
    """Add the sum of the rows of a block to `out`: one sum of all blocks' rows in order would lose digits. sums: to work in."""
    sums[:] = 0
    for i in range(len(rows)):
        for j in range(len(out)):
            sums[j] += rows[i, j]
    for j in range(len(out)):
        out[j] += sums[j]


@kernel
def _add_range(calls: Calls, ranges: int, piece: int, own: NDArray[np.int64]) -> bool:
    """Set the sums of a range of the left matrix's columns, which all calls share: its rows are turned in blocks. The first
    call's bias is set to the sums of these columns."""
    width, size, by_row = calls[0, N], calls[0, K], calls[0, LDB]
    steps, done = (size + ROWS - 1) // ROWS, True
    begin, end = steps * piece // ranges, steps * (piece + 1) // ranges
    of_columns = carray(floats_at(calls[0, BIAS] + 4 * piece * width), (width,))
    of_block = carray(floats_at(calls[0, BIAS] + 4 * (ranges + piece) * width), (width,))
    of_columns[:] = 0
    for i in range(len(calls) if begin == end else 0):
        carray(floats_at(calls[i, C] + 4 * piece * width * calls[i, M]), (width, calls[i, M]))[:] = 0
    for step in range(begin, end):
        first = min(step * ROWS, size - ROWS)
        skip = step * ROWS - first
        given = carray(floats_at(calls[0, B] + 4 * first * by_row), (ROWS, by_row))
        _add_rows(given[skip:, :width], of_columns, of_block)
        left = turned_block(given.ctypes.data, width, by_row, skip, own)
        for i in range(len(calls)):
            right = tensor_at(calls[i, A] + 4 * first * calls[i, LDA], calls[i, M], ROWS, 1, calls[i, LDA], own)
            out = carray(floats_at(calls[i, C] + 4 * piece * width * calls[i, M]), (width, calls[i, M]))
            done = multiply_block(left, right, 0, out, 0, step > begin, own) and done
            free(right)
        free(left)
    return done


@kernel
def _sum_range(calls: Calls, ranges: int, piece: int, numbers: NDArray[np.int32], factors: NDArray[np.float32]) -> None:
    """`_add_range` by MKL, which multiplies all of a range at once."""
    width, size, by_row = calls[0, N], calls[0, K], calls[0, LDB]
    first, stop = size * piece // ranges, size * (piece + 1) // ranges
    of_columns = carray(floats_at(calls[0, BIAS] + 4 * piece * width), (width,))
    of_block = carray(floats_at(calls[0, BIAS] + 4 * (ranges + piece) * width), (width,))
    of_columns[:] = 0
    for begin in range(first, stop, ROWS):
        given = carray(floats_at(calls[0, B] + 4 * begin * by_row), (min(ROWS, stop - begin), by_row))
        _add_rows(given[:, :width], of_columns, of_block)
    for i in range(len(calls)):
        left, right = calls[i, B] + 4 * first * by_row, calls[i, A] + 4 * first * calls[i, LDA]
        out = calls[i, C] + 4 * piece * width * calls[i, M]
        _call_sgemm(calls[i], (width, stop - first), (left, right, out), False, numbers, factors)


@kernel
def multiply_piece(
    calls: Calls,
    ranges: int,
    way: int,
    piece: int,
    numbers: NDArray[np.int32],
    factors: NDArray[np.float32],
    own: NDArray[np.int64],
) -> bool:
    """Do a piece: one of the ranges of all calls or, where `ranges` is 0, one call. Returns whether it could be done."""
    if way == NO_PRODUCTS:
        return True
    if way == SUMS_BY_ONEDNN:
        return _add_range(calls, ranges, piece, own)
    if way == SUMS_BY_MKL:
        _sum_range(calls, ranges, piece, numbers, factors)
        return True
    if ranges == 0:
        _multiply(calls[piece], 0, calls[piece, N], numbers, factors)
        return True
    done = True
    for i in range(len(calls)):
        if way == BLOCKS_BY_ONEDNN:
            done = _multiply_rows(calls[i], piece, own) and done
        else:
            first, stop = calls[i, N] * piece // ranges, calls[i, N] * (piece + 1) // ranges
            _multiply(calls[i], first, stop - first, numbers, factors)
    return done
