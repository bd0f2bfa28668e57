"""Principal components and singular vectors of rows on disk: the leading eigenvectors of a matrix that passes add up.

Everything is float64. Covariances are added up from pieces of rows that are centred by their own mean (Chan, Golub and LeVeque,
1979), so a large mean costs no digits. Where rows are wide the matrix itself is not made: a block Krylov method (Musco and
Musco, 2015) multiplies by it, a pass over the rows each time.

BLAS has one thread per piece of work, and how work is divided follows from the shape alone, so results are the same to the bit
for any number of threads.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes

Matrix = NDArray[np.float64]
Pieces = Callable[[str], Iterator[Matrix]]
"""all rows once, in pieces [n, F] that may be overwritten; takes what the pass is for, of a progress bar"""
WIDE = 4096
"""columns beyond which the matrix of covariances is not made"""
PANEL = 128
"""columns of the matrix that one thread adds to at a time"""
BASIS_BYTES = 2**27
MOST_PASSES = 24
CLOSE = 1e-9
"""residual of an eigenvector, relative to its eigenvalue, at which it is done"""
_ROUNDING = 1e-13
"""residual, relative to the largest eigenvalue, at which it is done, too: matrix products are not more accurate than that"""
_PARTS = 8


@dataclass(frozen=True)
class Leading:
    """The leading vectors of rows [N, F].

    Attributes:
        vectors: float64[k, F], orthonormal; the entry of largest magnitude of each is positive.
        values: float64[k], descending: variances, of an SVD squared singular values.
        total: The sum of all of them.
        mean: float64[F]; zeros of an SVD.
    """

    vectors: Matrix
    values: Matrix
    total: float
    mean: Matrix


def leading(pieces: Pieces, width: int, count: int, wanted: int, centred: bool, seed: int, room: int) -> Leading:
    """Find the `wanted` leading vectors, of deviations from the mean if `centred`.

    Args:
        pieces: The rows.
        width: Columns.
        count: Rows.
        wanted: Vectors, at most `width` and `count`.
        centred: Whether the mean is subtracted (PCA) or not (SVD).
        seed: Of the start of the method for wide rows.
        room: Bytes for the matrices.

    Raises:
        BudgetError: If the matrices do not fit in the memory.

    >>> leading(pieces, 500, 19_717, 32, True, 0, 10**9).vectors.shape
    (32, 500)
    """
    check_room(wanted, width, needed_bytes(width, wanted), room, "use `random`, whose matrix is smaller")
    with workers() as pool:
        if width <= WIDE:
            sums = Covariance(width, centred)
            for piece in pieces("covariances"):
                sums.add(piece, pool)
            values, vectors = _eigen(sums.matrix)
            values, vectors, mean = values[::-1][:wanted], vectors[:, ::-1][:, :wanted].T, sums.mean
            total = float(np.trace(sums.matrix))
        else:
            moments = moments_of(pieces, width)
            mean = moments.mean if centred else np.zeros(width)
            total = float((moments.squares if centred else moments.squares + count * moments.mean**2).sum())
            product = _Product(pieces, mean if centred else None, pool)
            values, vectors = krylov(product, width, min(wanted, width), seed)
    divisor = max(1, count - 1) if centred else 1
    return Leading(_signed(vectors), np.maximum(values, 0) / divisor, total / divisor, mean)


def _eigen(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Eigenvalues, ascending, and eigenvectors; NaN of a matrix that is not finite, of which LAPACK may never end."""
    if not np.isfinite(matrix).all():
        return np.full(len(matrix), np.nan), np.full(matrix.shape, np.nan)
    values, vectors = np.linalg.eigh(matrix)
    return values, vectors


def needed_bytes(width: int, wanted: int) -> int:
    """Bytes of the matrices."""
    if width <= WIDE:
        return 8 * 5 * width**2  # the sums, LAPACK's copy and its workspace of two, and the vectors
    return 2 * max(BASIS_BYTES, 8 * 2 * width * _block(width, wanted)) + 8 * 4 * width * _block(width, wanted)


def check_room(wanted: int, width: int, needed: int, room: int, otherwise: str) -> None:
    """Raise BudgetError where matrices take more than `room` bytes; `otherwise` is what to do without more memory."""
    if needed > room:
        raise BudgetError(
            f"{wanted} components of {width:,} columns need {format_bytes(needed)} of memory beside the rest, and there are "
            f"{format_bytes(room)}: give {format_bytes(needed - room)} more as `memory`, or {otherwise}"
        )


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, in each of which BLAS has one thread."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, "blas"), ThreadPoolExecutor(len(os.sched_getaffinity(0)), "ooc-linear") as pool:
        yield pool


class Covariance:
    """The sums of products of deviations, [F, F], and the mean; merged piece by piece."""

    def __init__(self, width: int, centred: bool) -> None:
        self.count, self.mean, self._centred = 0, np.zeros(width), centred
        self._upper = np.zeros((width, width))

    def add(self, piece: Matrix, pool: ThreadPoolExecutor) -> None:
        """Add rows [n, F], which are overwritten."""
        step, weight, total = np.zeros(0), 0.0, self.count + len(piece)
        if self._centred:
            own = piece.mean(axis=0)
            piece -= own
            step, weight = own - self.mean, self.count * len(piece) / total
            self.mean = self.mean + step * (len(piece) / total)
        self.count = total

        def panel(first: int) -> None:
            stop = min(first + PANEL, piece.shape[1])
            part = self._upper[:stop, first:stop]
            with np.errstate(over="ignore", invalid="ignore"):  # `_eigen` looks
                part += piece[:, :stop].T @ piece[:, first:stop]
            if weight:
                part += np.multiply.outer(step[:stop], weight * step[first:stop])

        list(pool.map(panel, range(0, piece.shape[1], PANEL)))

    @property
    def matrix(self) -> Matrix:
        """The sums; symmetric."""
        lower = np.tril_indices(PANEL, -1)
        for first in range(0, len(self._upper), PANEL):
            square = self._upper[first : first + PANEL, first : first + PANEL]
            own = tuple(each[(lower[0] < len(square)) & (lower[1] < len(square))] for each in lower)
            square[own] = square.T[own]
            self._upper[first + PANEL :, first : first + PANEL] = self._upper[first : first + PANEL, first + PANEL :].T
        return self._upper


@dataclass(frozen=True)
class Moments:
    """Mean and sum of squared deviations of each column, float64[F]."""

    mean: Matrix
    squares: Matrix


def moments_of(pieces: Pieces, width: int) -> Moments:
    """Compute the moments in one pass."""
    count, mean, squares = 0, np.zeros(width), np.zeros(width)
    for piece in pieces("statistics"):
        own = piece.mean(axis=0)
        piece -= own
        total, step = count + len(piece), own - mean
        squares += np.einsum("ij,ij->j", piece, piece) + step**2 * (count * len(piece) / total)
        mean, count = mean + step * (len(piece) / total), total
    return Moments(mean, squares)


class _Product:
    """Multiplies [F, l] by the matrix [F, F] of the rows, in one pass over them."""

    def __init__(self, pieces: Pieces, mean: Matrix | None, pool: ThreadPoolExecutor) -> None:
        self._pieces, self._mean, self._pool, self._passes = pieces, mean, pool, 0

    def __call__(self, vectors: Matrix) -> Matrix:
        out = np.zeros(vectors.shape)
        self._passes += 1
        for piece in self._pieces(f"components, pass {self._passes}"):
            if self._mean is not None:
                piece -= self._mean
            self._add(piece, vectors, out)
        return out

    def _add(self, piece: Matrix, vectors: Matrix, out: Matrix) -> None:
        near = np.concatenate(list(self._pool.map(lambda rows: rows @ vectors, np.array_split(piece, _PARTS))))

        def columns(first: int, stop: int) -> None:
            out[first:stop] += piece[:, first:stop].T @ near

        bounds = np.linspace(0, len(out), _PARTS + 1).astype(np.int64).tolist()
        list(self._pool.map(columns, bounds, bounds[1:]))


def krylov(product: Callable[[Matrix], Matrix], width: int, wanted: int, seed: int) -> tuple[Matrix, Matrix]:
    """Find leading eigenvalues [k], descending, and eigenvectors [k, F] of a symmetric matrix by its products with blocks.

    The basis begins anew with the best vectors so far when it is large. Ends when the residuals are small, after MOST_PASSES at
    the latest: then vectors of close eigenvalues may be mixed, which loses hardly any of the variance.
    """
    size = _block(width, wanted)
    most = max(2, BASIS_BYTES // (8 * width * size))
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((width, size)))[0]
    images, fresh = np.empty((width, 0)), basis
    for _ in range(MOST_PASSES):
        images = np.concatenate([images, product(fresh)], axis=1)
        inner = basis.T @ images
        values, mixed = _eigen((inner + inner.T) / 2)
        values, mixed = values[::-1], mixed[:, ::-1]
        vectors = basis @ mixed[:, :wanted]
        residual = np.linalg.norm(images @ mixed[:, :wanted] - vectors * values[:wanted], axis=0)
        enough = np.maximum(CLOSE * values[:wanted], _ROUNDING * values[0])
        if not (residual > enough).any() or basis.shape[1] >= width:  # NaN ends it, too
            break
        newest = images[:, -fresh.shape[1] :]
        if basis.shape[1] >= most * size:
            basis, images = basis @ mixed[:, :size], images @ mixed[:, :size]
            newest = images
        fresh = _orthogonal_to(basis, newest)[:, : width - basis.shape[1]]
        basis = np.concatenate([basis, fresh], axis=1)
    return values[:wanted], vectors.T


def _orthogonal_to(basis: Matrix, vectors: Matrix) -> Matrix:
    """An orthonormal basis of what `vectors` have beside `basis`."""
    for _ in range(2):  # twice is enough (Kahan)
        vectors = np.linalg.qr(vectors - basis @ (basis.T @ vectors))[0]
    return vectors


def _block(width: int, wanted: int) -> int:
    return min(width, wanted + max(8, wanted // 4))


def _signed(vectors: Matrix) -> Matrix:
    largest = np.abs(vectors).argmax(axis=1)
    signs = np.sign(vectors[np.arange(len(vectors)), largest])
    return np.ascontiguousarray(vectors * np.where(signs < 0, -1.0, 1.0)[:, None])
