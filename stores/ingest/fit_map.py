"""Fitting a `FeatureMap` to rows that are read front to back, and the rows that it makes of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import ConfigError, InputError
from ooc.stores.feature_map import FeatureMap
from ooc.stores.ingest.duck import Progress
from ooc.stores.ingest.nodes import Block, Rows
from ooc.stores.ingest.principal import check_room, leading, moments_of, workers
from ooc.stores.ingest.reductions import Reduction
from ooc.stores.io.threads import ahead
from ooc.stores.manifest import Reduced

Labels = Callable[[int, int], NDArray[np.int64]]
"""labels of rows first..last-1 from 0 on; -1 for those that are not for training, or have none"""
SAMPLE_BYTES = 2**27
"""values of training rows that the mutual information is estimated from, as float64"""
_PIECE_BYTES = 2**23
_LABELS = 2**20


class Fit(NamedTuple):
    """What a map is fitted by.

    Attributes:
        asked: The method and the number of columns.
        seed: Of what is drawn: `random`, the start of PCA and SVD of wide rows, the sample of `mutual`.
        room: Bytes for the matrices.
        labels: Of `mutual`, else None.
    """

    asked: Reduction
    seed: int
    room: int
    labels: Labels | None = None


def fit_map(rows: Rows, fit: Fit, progress: Progress) -> FeatureMap:
    """Fit a map to all rows; of `mutual` to the training rows alone, as no label of another one may decide.

    Results are the same to the bit for any number of threads and any memory.

    Raises:
        InputError: If rows have no more columns than asked for, too few rows, or a value is NaN or infinite.
        ConfigError: If `mutual` has no labels of training rows.
        BudgetError: If the matrices do not fit in the memory.

    >>> fit_map(rows, Fit(Reduction("pca", 64), 0, 2 * 10**9), silent).components.shape
    (64, 500)
    """
    method, width = fit.asked
    columns = rows.width or 1
    if width >= columns:
        raise InputError(f"{fit.asked} asks for {width} columns, and {rows.shown} has {columns}: give fewer than {columns}")
    reduced = Reduced(method=method, columns=columns, width=width, seed=fit.seed)
    pieces = partial(finite_pieces, rows, progress, method)
    if method == "random":
        check_room(width, columns, 2 * 8 * width * columns, fit.room, "ask for fewer")
        drawn = np.random.default_rng(fit.seed).standard_normal((width, columns)) / np.sqrt(width)
        return FeatureMap(reduced, components=drawn)
    if method in ("pca", "svd"):
        if width > rows.count:
            raise InputError(f"{rows.shown} has {rows.count} rows, which have no {width} components: ask for fewer")
        found = leading(pieces, columns, rows.count, width, method == "pca", fit.seed, fit.room)
        if not (np.isfinite(found.vectors).all() and np.isfinite(found.total)):
            raise InputError(f"{rows.shown} holds numbers whose squares are beyond float64: scale them first")
        kept = reduced.model_copy(update={"explained": _share(found.values.sum(), found.total)})
        return FeatureMap(kept, None, found.vectors, found.mean if method == "pca" else None, found.values)
    if method == "variance":
        scores = moments_of(pieces, columns).squares / rows.count
        chosen = _best(scores, width)
        kept = reduced.model_copy(update={"explained": _share(scores[chosen].sum(), scores.sum())})
        return FeatureMap(kept, chosen, scores=scores)
    scores = _mutual(rows, pieces, fit)
    return FeatureMap(reduced, _best(scores, width), scores=scores)


def _share(kept: float, total: float) -> float:
    return float(min(1.0, kept / total)) if total > 0 else 1.0


def _best(scores: NDArray[np.float64], width: int) -> NDArray[np.int64]:
    """The columns of the largest scores, ascending; of equal ones the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:width]).astype(np.int64)


def _mutual(rows: Rows, pieces: Callable[[str], Iterator[NDArray[np.float64]]], fit: Fit) -> NDArray[np.float64]:
    """The mutual information of each column with the labels of the training rows, or of a sample of them that fits."""
    labels, columns = fit.labels, rows.width or 1
    if find_spec("sklearn") is None:
        raise ConfigError("`mutual` needs the extra ooc[select]: pip install 'ooc[select]', or use `variance`")
    if labels is None:
        raise ConfigError("`mutual` compares columns with the labels of training nodes: give labels of classes and a split")
    training, known = _training(labels, rows.count, max(1, SAMPLE_BYTES // (8 * columns)), fit.seed)
    if not len(training):
        raise ConfigError("`mutual` compares columns with the labels of training nodes, and no training node has one")
    held, done = np.empty((len(training), columns)), 0
    for piece in pieces("training rows"):
        low, high = np.searchsorted(training, [done, done + len(piece)]).tolist()
        held[low:high] = piece[training[low:high] - done]
        done += len(piece)
    if len(np.unique(known)) == len(known):
        return np.zeros(columns)  # no two rows have the same label
    from sklearn.feature_selection import mutual_info_classif

    return np.asarray(mutual_info_classif(held, known, discrete_features=False, copy=False, random_state=fit.seed))


def _training(labels: Labels, count: int, most: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The training rows, ascending, and their labels; of more than `most` a sample: those of the smallest random numbers."""
    rng = np.random.default_rng(seed)
    drawn, rows, known = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
    for first in range(0, count, _LABELS):
        found = labels(first, min(first + _LABELS, count))
        chosen = np.flatnonzero(found >= 0)
        drawn = np.concatenate([drawn, rng.random(len(chosen))])
        rows, known = np.concatenate([rows, first + chosen]), np.concatenate([known, found[chosen]])
        if len(drawn) > most:
            kept = np.sort(np.argpartition(drawn, most)[:most])
            drawn, rows, known = drawn[kept], rows[kept], known[kept]
    return rows, known


def finite_pieces(rows: Rows, progress: Progress, method: str, step: str) -> Iterator[NDArray[np.float64]]:
    """Yield all rows as float64 [n, F], of equal length whatever blocks they come in. Raises InputError for one not finite."""
    done = 0
    for piece in ahead(_as_doubles(rows)):
        if not np.isfinite(piece.sum()) and not (finite := np.isfinite(piece)).all():
            row, column = np.argwhere(~finite)[0].tolist()
            shown = rows.columns[column] if rows.columns else column
            raise InputError(
                f"{rows.where(done + row)} column {shown} is {piece[row, column]}, and {method} needs finite numbers; "
                "correct it, or leave the features as wide as they are"
            )
        done += len(piece)
        yield piece
        progress(f"{method}: {step}", done, rows.count)


def _as_doubles(rows: Rows) -> Iterator[NDArray[np.float64]]:
    size = max(1, _PIECE_BYTES // (8 * (rows.width or 1)))
    made, filled, done = np.empty((size, rows.width or 1)), 0, 0
    for block in rows.blocks():
        first = 0
        while first < len(block):
            taken = min(len(block) - first, size - filled)
            made[filled : filled + taken] = block[first : first + taken].reshape(taken, -1)
            first, filled = first + taken, filled + taken
            if filled == size:
                yield made
                done, filled = done + size, 0
                made = np.empty((min(size, max(1, rows.count - done)), rows.width or 1))
                size = len(made)
    if filled:
        yield made[:filled]


def narrowed(rows: Rows, found: FeatureMap) -> Rows:
    """The rows that the map makes of `rows`: float32 of a linear map, of a choice of columns as they are."""
    if found.reduced.columns != (rows.width or 1):
        raise InputError(f"{rows.shown} has {rows.width or 1} columns, and the map is one of {found.reduced.columns}")
    if found.columns is None:
        blocks = partial(_mapped, rows, found)
        return replace(rows, width=found.reduced.width, dtype=np.dtype(np.float32), blocks=blocks, columns=(), rounded=_nothing)
    chosen = found.columns

    def of_columns() -> Iterator[Block]:
        return (np.ascontiguousarray(block[:, chosen]) for block in rows.blocks())

    names = tuple(rows.columns[column] for column in chosen.tolist()) if rows.columns else ()
    return replace(rows, width=len(chosen), blocks=of_columns, columns=names)


def _nothing() -> None:
    return None


def _mapped(rows: Rows, found: FeatureMap) -> Iterator[Block]:
    with workers():
        for piece in finite_pieces(rows, lambda *_: None, found.reduced.method, ""):
            yield found.of_finite(piece)
