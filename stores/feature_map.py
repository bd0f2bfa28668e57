"""`FeatureMap`: what made a feature narrower, as a store keeps it and applies it to rows that are appended.

A map is in `reductions/<type>/<name>`: float64 `components` [k, F] with, of a PCA, the `mean` [F] that is subtracted first; or
int64 `columns` [k], ascending, of a choice of columns. `scores` has what was chosen by: the variance of each component [k] (of
an SVD its squared singular value), or the score of each column [F].
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.whole import load
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.errors import InputError, StoreError
from ooc.stores.manifest import Manifest, NodeType, Reduced

COLUMNS, COMPONENTS, MEAN, SCORES = "columns", "components", "mean", "scores"
_CHOICES = ("variance", "mutual")
_PIECE_BYTES = 2**24


@dataclass(frozen=True, eq=False, repr=False)
class FeatureMap:
    """A map of rows of F columns to rows of k.

    Attributes:
        reduced: Method, numbers of columns, seed.
        columns: int64[k] of the columns that stay, ascending; None of a linear map.
        components: float64[k, F]; None of a choice of columns.
        mean: float64[F], subtracted first; None if nothing is.
        scores: float64[k] or [F]; see the module.

    >>> ds.feature_map("x").apply(raw)  # float32[n, 64] of [n, 500]
    """

    reduced: Reduced
    columns: NDArray[np.int64] | None = None
    components: NDArray[np.float64] | None = None
    mean: NDArray[np.float64] | None = None
    scores: NDArray[np.float64] | None = None

    def __repr__(self) -> str:
        return f"FeatureMap({self.reduced.method}, {self.reduced.columns} -> {self.reduced.width} columns)"

    def apply(self, rows: AnyArray) -> AnyArray:
        """Return the narrow rows of wide ones.

        Args:
            rows: [n, F] numbers, an array or a CPU tensor, as wide as the input of the store was.

        Returns:
            float32[n, k]; a choice of columns keeps the dtype.

        Raises:
            InputError: If rows are no array of numbers, have another width, or rows of a linear map are not finite.

        >>> ds.feature_map("x").apply(raw).shape
        (1000, 64)
        """
        rows = np.asarray(rows)
        if rows.dtype.kind in "OSUMm":
            raise InputError(f"rows are an array of {rows.dtype}; {self.reduced} takes numbers, [n, {self.reduced.columns}]")
        if rows.ndim != 2 or rows.shape[1] != self.reduced.columns:
            raise InputError(f"rows have shape {list(rows.shape)}; {self.reduced} takes [n, {self.reduced.columns}]")
        if self.columns is not None:
            return np.ascontiguousarray(rows[:, self.columns])
        out = np.empty((len(rows), self.reduced.width), np.float32)
        step = max(1, _PIECE_BYTES // (8 * rows.shape[1]))
        for first in range(0, len(rows), step):
            piece = rows[first : first + step].astype(np.float64)
            if not np.isfinite(piece).all():
                row, column = np.argwhere(~np.isfinite(piece))[0].tolist()
                raise InputError(
                    f"row {first + row} column {column} is {piece[row, column]}, which {self.reduced.method} would spread "
                    "over all columns; correct it"
                )
            out[first : first + step] = self.of_finite(piece)
        return out

    def of_finite(self, piece: NDArray[np.float64]) -> NDArray[np.float32]:
        """The rows, float32[n, k], of finite ones of a linear map; `piece` [n, F] is overwritten."""
        assert self.components is not None
        if self.mean is not None:
            piece -= self.mean
        with np.errstate(over="ignore"):
            return (piece @ self.components.T).astype(np.float32)

    @property
    def parts(self) -> dict[str, AnyArray]:
        """The arrays by name."""
        held = {COLUMNS: self.columns, COMPONENTS: self.components, MEAN: self.mean, SCORES: self.scores}
        return {name: array for name, array in held.items() if array is not None}


def write_map(store: Path, name: str, found: FeatureMap, node_type: str = names.NODE) -> None:
    """Write the map of the node array `name` into the store."""
    for part, array in found.parts.items():
        write_array(store, names.reduction_array(part, name, node_type), array, {"method": found.reduced.method})


def read_map(root: Path, name: str, node_type: NodeType) -> FeatureMap | None:
    """Return the map of a node array of the store whose arrays are in `root`, None if it is as wide as its input was.

    Raises StoreError if the map is missing or does not fit.
    """
    reduced = node_type.reduced.get(name)
    if reduced is None:
        return None
    parts: dict[str, AnyArray] = {}
    for part, shape in _shapes(reduced).items():
        with closing(open_zarr_rows(root, names.reduction_array(part, name, node_type.name))) as rows:
            if rows.shape != shape or rows.dtype != (np.int64 if part == COLUMNS else np.float64):
                where = root / names.reduction_array(part, name, node_type.name)
                raise StoreError(
                    f"{where} is {rows.dtype}{list(rows.shape)}, where {reduced} needs {list(shape)}: it is damaged"
                )
            parts[part] = load(rows)
    _check(root, name, parts, reduced)
    return FeatureMap(reduced, **parts)


def _check(root: Path, name: str, parts: Mapping[str, AnyArray], reduced: Reduced) -> None:
    for part, array in parts.items():
        if part == COLUMNS:
            sound = array[0] >= 0 and array[-1] < reduced.columns and bool((np.diff(array) > 0).all())
        else:
            sound = bool(np.isfinite(array).all())
        if not sound:
            raise StoreError(f"the map of {name} in {root / names.REDUCTIONS} is damaged: {part} holds invalid numbers")


def _shapes(reduced: Reduced) -> dict[str, tuple[int, ...]]:
    """Shape of each array of a map."""
    wide, narrow = reduced.columns, reduced.width
    if reduced.method in _CHOICES:
        return {COLUMNS: (narrow,), SCORES: (wide,)}
    shapes: dict[str, tuple[int, ...]] = {COMPONENTS: (narrow, wide)}
    if reduced.method != "random":
        shapes[SCORES] = (narrow,)
    return {**shapes, MEAN: (wide,)} if reduced.method == "pca" else shapes


def map_rows(node_type: NodeType) -> dict[str, int]:
    """Array -> rows of all maps of a node type, as its manifest says."""
    return {
        names.reduction_array(part, name, node_type.name): shape[0]
        for name, reduced in node_type.reduced.items()
        for part, shape in _shapes(reduced).items()
    }


def with_reduced(manifest: Manifest, node_type: str, reduced: Mapping[str, Reduced]) -> Manifest:
    """The manifest of a store in which these features of a node type were made narrower, too."""
    types = [
        each.model_copy(update={"reduced": {**each.reduced, **reduced}}) if each.name == node_type else each
        for each in manifest.node_types
    ]
    return manifest.model_copy(update={"node_types": types})
