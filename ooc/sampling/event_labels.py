"""Labels that events carry, at the end of a window."""

import numpy as np
from numpy.typing import NDArray

from stores.arrays.rows import AnyArray
from stores.errors import InputError


def last_labels(count: int, node: NDArray[np.int64], label: AnyArray) -> NDArray[np.int64]:
    """int64[count, ...]: of each node the label of its last event; -1 for one that has none, or whose label is NaN.

    node: int64[k] below `count`; label: [k], [k, 1] or [k, C], in time order. InputError for one that is no whole number.

    >>> last_labels(3, np.array([0, 1, 0]), np.array([2.0, 5.0, 3.0]))
    array([ 3,  5, -1])
    """
    label = label[:, 0] if label.shape[1:] == (1,) else label
    if label.dtype.kind == "f":
        label = np.where(np.isnan(label), -1, label)
        if (wrong := label != np.floor(label)).any():
            raise InputError(f"an event's label is {label[wrong][0]}: labels are classes, whole numbers; choose another column")
    found = np.full((count, *label.shape[1:]), -1, np.int64)
    found[node] = label  # of equal nodes the last counts
    return found
