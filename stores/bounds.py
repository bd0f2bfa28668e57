"""Bounds of what a store's arrays hold, checked as they are read: kernels index memory with these numbers."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.whole import Look
from ooc.stores.errors import StoreError

_ADVICE = "run `ooc verify` on the store, then restore it or ingest it again"


def ascending(path: Path, low: int, high: int) -> Look:
    """Return a check that an integer array at `path` ascends within low..high (equal values may follow each other).

    >>> whole(rows, ascending(path, 0, num_edges))  # indptr
    """
    last = low

    def look(first: int, part: AnyArray) -> None:
        nonlocal last
        if part[0] < last or (part[1:] < part[:-1]).any() or part[-1] > high:
            raise StoreError(
                f"{path} is damaged: rows {first} to {first + len(part) - 1} must ascend within {low}..{high}; {_ADVICE}"
            )
        last = int(part[-1])

    return look


def within(path: Path | str, low: int, high: int) -> Look:
    """Return a check that an integer array at `path` holds numbers within low..high.

    >>> whole(rows, within(path, -1, num_classes - 1))  # labels
    """

    def look(first: int, part: AnyArray) -> None:
        if part.size and (int(part.min()) < low or int(part.max()) > high):
            wrong = (part < low) | (part > high)
            row = int(np.argmax(wrong.reshape(len(part), -1).any(axis=1)))
            raise StoreError(
                f"{path} is damaged: row {first + row} holds {part[wrong][0]}, which is not within {low}..{high}; {_ADVICE}"
            )

    return look


def check_nodes(path: Path | str, first: int, nodes: NDArray[np.integer], num_nodes: int) -> None:
    """Raise StoreError if rows first, first + 1, ... of the array at `path` hold anything but node ids."""
    within(path, 0, num_nodes - 1)(first, nodes)
