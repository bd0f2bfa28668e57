"""What labels are, and how they are stored."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Task = Literal["multiclass", "binary", "multilabel", "regression"]
"""what labels are: one of several classes, of two, several classes at once, or numbers"""


def label_dtype(task: Task, num_classes: int) -> np.dtype[Any]:
    """Return the most compact dtype of labels on disk; -1, or NaN in a regression, means unlabeled.

    multiclass [N]: the smallest of int8, int16, int32, int64 for the classes; binary [N] and multilabel [N, C]: int8;
    regression [N] or [N, T]: float32.
    """
    if task == "regression":
        return np.dtype(np.float32)
    return np.min_scalar_type(-max(num_classes, 1)) if task == "multiclass" else np.dtype(np.int8)


def label_attributes(task: Task) -> dict[str, str]:
    """Return the attributes of the array of labels, where its description is not that of classes."""
    return {"description": "targets of a regression; NaN for unknown ones"} if task == "regression" else {}


def as_targets(numbers: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the targets of a regression as on disk, and which of them are infinite or too large for it; NaN is unknown."""
    with np.errstate(over="ignore"):
        targets = np.asarray(numbers).astype(np.float32)
    return targets, np.isinf(targets)
