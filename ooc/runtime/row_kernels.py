"""What threads do with the rows of a layer besides multiplying them: sums over neighbors before, activation and masks after.

Kernels on rows first:stop of what a work's numbers say (`ooc.runtime.shared_work`). A row is computed by one thread, so the
bits do not depend on the number of threads, and are those of the layers one by one (`ooc.models.memory_efficient`).
"""

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ooc.runtime.keyed_dropout import LEVELS, drop_positive_rows
from ooc.runtime.pointers import bytes_at, floats_at, integers_at
from ooc.stores.jit import kernel
from ooc.stores.prefetch import prefetch

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
"""int64[WORK_NUMBERS]: the numbers of a work"""
WORK_NUMBERS = 19
FIRST_CALL, CALLS, RANGES, WAY, ROWS = range(5)
"""Calls of products FIRST_CALL:FIRST_CALL + CALLS, made in RANGES ranges of ROWS rows, by WAY."""
INDEX, POINTERS, VALUES, GIVEN, WIDTH, SUMS, OWN = range(5, 12)
"""Before: row i of SUMS [*, WIDTH] is set to the sum of the rows INDEX[k] of GIVEN [*, WIDTH] times VALUES[k], k from
POINTERS[i] to POINTERS[i + 1], and row i of OWN [*, WIDTH] to that of GIVEN. Addresses; 0 for none."""
AFTER, OUT, OUT_WIDTH, CUT, KEY, DROPPED, NODES = range(12, 19)
"""Behind: what AFTER says of OUT [*, OUT_WIDTH] and CUT bool[*, OUT_WIDTH]; of dropout KEY, DROPPED and NODES are the key, the
level, and the address of the positions of rows."""
NOTHING, RELU, RELU_DROPOUT, MASK, MASK_SCALE, ADD_UP = range(6)
"""RELU: of OUT in place, and CUT, where there is one, is set where it is not positive. RELU_DROPOUT: with dropout in the same
pass. MASK: zeros in OUT where CUT is. MASK_SCALE: and scales others as dropout does. ADD_UP: OUT [OUT_WIDTH] is set to the sum
of the ROWS rows of GIVEN."""
_AHEAD, _LINE = 6, 16
"""edges between prefetching a row and adding it; float32 per cache line"""


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once, as torch's embedding_bag adds a row times its value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@kernel
def before_products(work: Numbers, first: int, stop: int) -> None:
    """Set rows first:stop of the sums over neighbors, and of the own rows."""
    width, pointers = work[WIDTH], carray(integers_at(work[POINTERS]), (stop + 1,))
    edges = pointers[stop]
    index, values = carray(integers_at(work[INDEX]), (edges,)), carray(floats_at(work[VALUES]), (edges,))
    given = carray(floats_at(work[GIVEN]), (1,))  # for prefetching, which has no bounds
    for i in range(first, stop):
        out = carray(floats_at(work[SUMS] + 4 * i * width), (width,))
        if work[OWN] != 0:
            _copy(
                carray(floats_at(work[GIVEN] + 4 * i * width), (width,)), carray(floats_at(work[OWN] + 4 * i * width), (width,))
            )
        out[:] = 0
        for k in range(pointers[i], pointers[i + 1]):
            if k + _AHEAD < edges:
                for column in range(0, width, _LINE):
                    prefetch(given, index[k + _AHEAD] * width + column)
            _add_scaled(values[k], carray(floats_at(work[GIVEN] + 4 * index[k] * width), (width,)), out)


@kernel
def _copy(given: Floats, out: Floats) -> None:
    for j in range(len(out)):
        out[j] = given[j]


@kernel
def _add_scaled(value: np.float32, row: Floats, out: Floats) -> None:
    for j in range(len(out)):
        out[j] = fused(value, row[j], out[j])


@kernel
def after_products(work: Numbers, first: int, stop: int) -> None:
    """Do what a work's AFTER says with rows first:stop."""
    what, width = work[AFTER], work[OUT_WIDTH]
    if what == ADD_UP:
        _add_up(carray(floats_at(work[GIVEN]), (work[ROWS], width)), carray(floats_at(work[OUT]), (width,)))
        return
    count = (stop - first) * width
    out = carray(floats_at(work[OUT] + 4 * first * width), (count,))
    cut = carray(bytes_at(work[CUT] + first * width), (count,))
    scale = np.float32(LEVELS / (LEVELS - work[DROPPED]))
    if what == RELU and work[CUT] == 0:
        _set_below(out)
    elif what == RELU:
        cut_below(out, cut)
    elif what == RELU_DROPOUT:
        nodes = carray(integers_at(work[NODES] + 8 * first), (stop - first,))
        rows, gone = out.reshape(stop - first, width), cut.reshape(stop - first, width)
        drop_positive_rows(np.uint64(work[KEY]), work[DROPPED], scale, nodes, rows, gone)
    elif what == MASK:
        _set_zeros(out, cut, np.float32(1))
    elif what == MASK_SCALE:
        _set_zeros(out, cut, scale)


@kernel
def _add_up(sums: Floats, out: Floats) -> None:
    """Set `out` to the sum of the rows of `sums`, in order."""
    out[:] = sums[0]
    for i in range(1, len(sums)):
        for j in range(len(out)):
            out[j] += sums[i, j]


@kernel
def cut_below(x: Floats, cut: NDArray[Any]) -> None:
    """Set cut = x <= 0 and x = 0 there; one pass over memory instead of torch's three."""
    for i in range(len(x)):
        given = x[i]  # read once: LLVM does not vectorize a second read behind the write to `cut`
        cut[i] = given <= 0
        x[i] = np.float32(0) if given <= 0 else given


@kernel
def _set_below(x: Floats) -> None:
    """Set x = 0 where x <= 0."""
    for i in range(len(x)):
        given = x[i]
        x[i] = np.float32(0) if given <= 0 else given


@kernel
def _set_zeros(x: Floats, cut: NDArray[Any], scale: np.float32) -> None:
    """Set x to 0 where cut, else to x * scale. (LLVM does nothing in vectors where `scale_uncut` is given one matrix twice.)"""
    for i in range(len(x)):
        given = x[i] * scale
        x[i] = np.float32(0) if cut[i] else given


@kernel
def take_uncut(grad: Floats, cut: NDArray[Any], out: Floats) -> None:
    """out = 0 where cut, else grad; four times as fast as torch's masked_fill with two threads."""
    for i in range(len(grad)):
        out[i] = np.float32(0) if cut[i] else grad[i]


@kernel
def scale_uncut(grad: Floats, cut: NDArray[Any], scale: np.float32, out: Floats) -> None:
    """out = 0 where cut, else grad * scale."""
    for i in range(len(grad)):
        out[i] = np.float32(0) if cut[i] else grad[i] * scale
