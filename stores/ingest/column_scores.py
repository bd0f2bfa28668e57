"""Scores of feature columns: mutual information with the labels, by the estimator of scikit-learn's `mutual_info_classif`.

Ross, "Mutual Information between Discrete and Continuous Data Sets", PLoS ONE, 2014, with three neighbors: in one dimension
neighbors of equal label, and all within their distance, are found in the sorted column.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel

NEIGHBORS = 3
_NOISE = 1e-10
_STEP = 4096


def mutual_information(
    values: NDArray[np.float64], labels: NDArray[np.int64], seed: int, pool: ThreadPoolExecutor
) -> NDArray[np.float64]:
    """Return the mutual information of each column with the labels, float64[F], in nats.

    `values` [n, F] are overwritten: columns get unit deviation, and noise of 1e-10 that tells equal values apart, drawn as
    scikit-learn does of `random_state=seed`. Labels [n] count from 0. Rows whose label no other row has are left out.

    >>> mutual_information(x[train], y[train], 0, pool)  # mutual_info_classif(x[train], y[train], random_state=0)
    """
    deviation = values.std(axis=0)
    values /= np.where(deviation > 10 * np.finfo(np.float64).eps * np.abs(values).max(axis=0), deviation, 1.0)
    noise, random = _NOISE * np.maximum(1, np.abs(values).mean(axis=0)), np.random.RandomState(seed)
    for first in range(0, len(values), _STEP):
        part = values[first : first + _STEP]
        part += noise * random.standard_normal(part.shape)
    counts = np.bincount(labels)
    digamma = np.concatenate([[0.0], np.cumsum(np.concatenate([[-np.euler_gamma], 1 / np.arange(1, len(labels) + 1)]))])
    several = counts[labels] > 1
    own = counts[labels[several]]
    fixed = digamma[several.sum()] + digamma[np.minimum(NEIGHBORS, own - 1)].mean() - digamma[own].mean()

    def score(column: int) -> float:
        order = np.argsort(values[several, column], kind="stable")
        ordered, classes = values[several, column][order], labels[several][order]
        near = np.empty(len(ordered), np.int64)
        _count_near(ordered, classes, np.argsort(classes, kind="stable"), near)
        return max(0.0, float(fixed - digamma[near].mean()))

    if not several.any():
        return np.zeros(values.shape[1])
    return np.array(list(pool.map(score, range(values.shape[1]))))


@kernel
def _count_near(
    values: NDArray[np.float64], classes: NDArray[np.int64], by_class: NDArray[np.int64], near: NDArray[np.int64]
) -> None:
    """near[i]: the values closer to values[i] than its NEIGHBORS-th neighbor of equal class, itself counted.

    `values` ascend; `by_class` has the positions of each class one behind the other, ascending.
    """
    count = len(values)
    first = 0
    while first < count:
        stop = first + 1
        while stop < count and classes[by_class[stop]] == classes[by_class[first]]:
            stop += 1
        k = min(NEIGHBORS, stop - first - 1)
        for at in range(first, stop):
            value = values[by_class[at]]
            radius = np.inf
            for begin in range(max(first, at - k), min(at, stop - 1 - k) + 1):
                reach = max(value - values[by_class[begin]], values[by_class[begin + k]] - value)
                radius = min(radius, reach)
            radius = np.nextafter(radius, 0.0)
            near[by_class[at]] = _within(values, by_class[at], radius * radius)
        first = stop


@kernel
def _within(values: NDArray[np.float64], at: int, square: float) -> int:
    """How many of the ascending `values` are at a distance from values[at] whose square is at most `square`."""
    low, high = 0, at
    while low < high:
        middle = (low + high) // 2
        if (values[at] - values[middle]) ** 2 <= square:
            high = middle
        else:
            low = middle + 1
    begin = low
    low, high = at, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if (values[middle] - values[at]) ** 2 <= square:
            low = middle
        else:
            high = middle - 1
    return low - begin + 1
