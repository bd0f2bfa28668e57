"""Optimizers of rows that few batches touch: a step changes the rows of the batch, and the state that lies behind each of them.

A row and its state are one packed row float32 [packed width]: Adagrad's sum of squares for each column, row-wise Adagrad's mean
of them for the whole row (as in FBGEMM), or SparseAdam's two moments. Gradients of equal rows are added up in order of their
positions, so neither the number of threads nor where a row lies changes a bit.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.crew import in_pieces
from ooc.stores.errors import ConfigError
from ooc.stores.ingest.key_sort import key_order
from ooc.stores.jit import kernel

RowOptimizerName = Literal["adagrad", "rowwise_adagrad", "adam"]
ADAGRAD_EPS, ADAM_EPS, BETAS = 1e-10, 1e-8, (0.9, 0.999)
"""as of `torch.optim.Adagrad` and `torch.optim.SparseAdam`"""
_PIECE = 2048
"""rows that a thread takes at a time"""
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class RowOptimizer:
    """Changes packed rows by their gradients.

    Args:
        name: "adagrad", "rowwise_adagrad" or "adam".
        width: Columns of a row without its state.
        updates: Steps that were made before; a checkpoint stores `updates`.

    Raises:
        ConfigError: The name is unknown.

    >>> optimizer = RowOptimizer("adagrad", width=2)
    >>> packed = np.zeros((10, optimizer.packed_width), np.float32)
    >>> optimizer.step(packed, np.array([3, 3]), np.ones((2, 2), np.float32), lr=0.1)
    """

    def __init__(self, name: str, width: int, updates: int = 0) -> None:
        if name not in get_args(RowOptimizerName):
            raise ConfigError(f"optimizer {name!r} is unknown for rows: use one of {', '.join(get_args(RowOptimizerName))}")
        self.name, self.width, self.updates = name, width, updates

    @property
    def packed_width(self) -> int:
        """Columns of a row with its state."""
        return packed_width(self.name, self.width)

    def step(self, packed: Floats, at: Ints, gradient: Floats, lr: float) -> None:
        """Change the rows `at` of `packed`.

        Args:
            packed: Rows with their state, float32 [n, packed_width].
            at: Rows that have a gradient, int64[k]; the gradients of a row that comes several times are added up.
            gradient: float32 [k, width].
            lr: Learning rate.
        """
        self.updates += 1
        order = key_order(at, 0)
        first = _groups(at, order)
        in_pieces([partial(self._piece(lr), packed, at, order, first[i:][: _PIECE + 1], gradient)
                   for i in range(0, len(first) - 1, _PIECE)])  # fmt: skip

    def _piece(self, lr: float) -> Callable[..., None]:
        """The kernel, with its numbers at the end."""
        if self.name == "adam":
            first, second = (1 - beta**self.updates for beta in BETAS)
            numbers: tuple[float, ...] = (1 - BETAS[0], 1 - BETAS[1], -(lr * math.sqrt(second) / first), ADAM_EPS)
            function: Any = _adam
        else:
            numbers, function = (-lr, ADAGRAD_EPS), _adagrad if self.name == "adagrad" else _rowwise_adagrad
        own = tuple(map(np.float32, numbers))
        return lambda *arrays: function(*arrays, *own)


def packed_width(name: str, width: int) -> int:
    """Return the columns of a row with the state of an optimizer.

    >>> packed_width("rowwise_adagrad", 100)
    101
    """
    return width + {"adagrad": width, "rowwise_adagrad": 1, "adam": 2 * width}[name]


def gather_rows(packed: Floats, at: Ints, rows: Floats) -> None:
    """Fill `rows` (float32 [k, width]) with the beginnings of the rows `at` (int64[k]) of float32 [n, packed width]."""
    in_pieces([partial(_gather, packed, at[i : i + _PIECE], rows[i : i + _PIECE]) for i in range(0, len(at), _PIECE)])


def _groups(at: Ints, order: Ints) -> Ints:
    """int64[u + 1]: where the places of each different row begin in `order`, which sorts `at`, and the end."""
    first = np.empty(len(order) + 1, np.int64)
    return first[: _find_groups(at, order, first) + 1]


@kernel
def _find_groups(at: Ints, order: Ints, first: Ints) -> int:
    found = 0
    for i in range(len(order)):
        if i == 0 or at[order[i]] != at[order[i - 1]]:
            first[found] = i
            found += 1
    first[found] = len(order)
    return found


@kernel
def _gather(packed: Floats, at: Ints, rows: Floats) -> None:
    for i in range(len(at)):
        row = packed[at[i]]
        for j in range(rows.shape[1]):
            rows[i, j] = row[j]


@kernel
def _add_up(order: Ints, begin: int, end: int, gradient: Floats, total: Floats) -> None:
    """total [width] = the gradients of one row."""
    for j in range(len(total)):
        total[j] = gradient[order[begin], j]
    for i in range(begin + 1, end):
        own = gradient[order[i]]
        for j in range(len(total)):
            total[j] += own[j]


@kernel
def _adagrad(packed: Floats, at: Ints, order: Ints, first: Ints, gradient: Floats, step: np.float32, eps: np.float32) -> None:
    width = gradient.shape[1]
    total = np.empty(width, np.float32)
    for g in range(len(first) - 1):
        _add_up(order, first[g], first[g + 1], gradient, total)
        row = packed[at[order[first[g]]]]
        for j in range(width):
            found = total[j]
            square = row[width + j] + found * found
            row[width + j] = square
            row[j] += step * (found / (np.sqrt(square) + eps))


@kernel
def _rowwise_adagrad(
    packed: Floats, at: Ints, order: Ints, first: Ints, gradient: Floats, step: np.float32, eps: np.float32
) -> None:
    width = gradient.shape[1]
    total = np.empty(width, np.float32)
    for g in range(len(first) - 1):
        _add_up(order, first[g], first[g + 1], gradient, total)
        row = packed[at[order[first[g]]]]
        squares = np.float32(0)
        for j in range(width):
            squares += total[j] * total[j]
        square = row[width] + squares / np.float32(width)
        row[width] = square
        own = step / (np.sqrt(square) + eps)
        for j in range(width):
            row[j] += own * total[j]


@kernel
def _adam(
    packed: Floats,
    at: Ints,
    order: Ints,
    first: Ints,
    gradient: Floats,
    one: np.float32,
    two: np.float32,
    step: np.float32,
    eps: np.float32,
) -> None:
    width = gradient.shape[1]
    total = np.empty(width, np.float32)
    for g in range(len(first) - 1):
        _add_up(order, first[g], first[g + 1], gradient, total)
        row = packed[at[order[first[g]]]]
        for j in range(width):
            found, average, square = total[j], row[width + j], row[2 * width + j]
            average += (found - average) * one
            square += (found * found - square) * two
            row[width + j], row[2 * width + j] = average, square
            row[j] += step * (average / (np.sqrt(square) + eps))
