"""Node labels derived from events, at the end of a window."""

import numpy as np
from numpy.typing import NDArray

from stores.arrays.rows import AnyArray
from stores.errors import InputError


def last_labels(count: int, node: NDArray[np.int64], label: AnyArray) -> NDArray[np.int64]:
    """Return the label of each node's last event, int64[count, ...]; -1 for nodes without one or with a NaN label.

    `node` is int64[k] below `count`, `label` [k], [k, 1] or [k, C], in time order. Raises InputError if one is no integer.

    >>> last_labels(3, np.array([0, 1, 0]), np.array([2.0, 5.0, 3.0]))
    array([ 3,  5, -1])
    """
    label = label[:, 0] if label.shape[1:] == (1,) else label
    if label.dtype.kind == "f":
        label = np.where(np.isnan(label), -1, label)
        if (wrong := label != np.floor(label)).any():
            raise InputError(f"an event has label {label[wrong][0]}: labels must be whole numbers; choose another column")
    labels = np.full((count, *label.shape[1:]), -1, np.int64)
    labels[node] = label  # the last assignment to a node wins
    return labels
