"""Parts of a history: pushes that wait to be written, rows read ahead, rows in RAM, counts."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, Ids

_PIECE = 2**20
_TOGETHER = 2**16
"""rows written at once"""
STEP_BYTES = 5
"""of a row in RAM: the step that wrote it, and whether the disk has it"""
NEVER = -1
"""the step of a row that was never written"""


def common(ids: Ids, kept: Ids) -> tuple[Ids, Ids]:
    """(places in `ids`, places in `kept`) of the ids that are in both; each ascending, no id twice.

    >>> common(np.array([1, 4, 6]), np.array([0, 4, 5, 6]))
    (array([1, 2]), array([1, 3]))
    """
    at = np.searchsorted(kept, ids)
    there = at < len(kept)
    there[there] = kept[at[there]] == ids[there]
    return np.flatnonzero(there), at[there]


@dataclass(frozen=True)
class Push:
    """The rows of one step's own nodes, every layer's."""

    step: int
    ids: Ids
    """int64[n], ascending"""
    rows: tuple[AnyArray, ...]
    """[n, width] of each layer, as stored"""

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + sum(rows.nbytes for rows in self.rows)

    def patch(self, ids: Ids, rows: Sequence[AnyArray], steps: Ids | None = None) -> None:
        """Put this push's rows in the places of `rows` ([k, width] a layer) whose nodes `ids` (int64[k], ascending) it has."""
        to, source = common(ids, self.ids)
        for kept, own in zip(rows, self.rows, strict=True):
            kept[to] = own[source]
        if steps is not None:
            steps[to] = self.step


def merged(pushes: Sequence[tuple[Ids, Sequence[AnyArray]]]) -> tuple[Ids, list[AnyArray]]:
    """The rows of several batches' own nodes as those of one: (ids, ascending, every layer's rows in their order). No two of
    them have a node in common.

    >>> merged([(np.array([4, 5]), [np.ones((2, 1))]), (np.array([1]), [np.zeros((1, 1))])])[0]
    array([1, 4, 5])
    """
    if len(pushes) == 1:
        return pushes[0][0], list(pushes[0][1])
    ids = np.concatenate([own for own, _ in pushes])
    order = np.argsort(ids, kind="stable")
    layers = zip(*(rows for _, rows in pushes), strict=True)
    return ids[order], [np.concatenate(own)[order] for own in layers]


@dataclass(frozen=True)
class PrefetchedRows:
    """Rows read ahead for the pull of a step."""

    step: int
    version: int
    """pushes of steps up to this one are in the rows; others may be"""
    ids: Ids
    rows: tuple[AnyArray, ...]
    steps: Ids
    """int64[k]: the step that wrote each row, NEVER before any did"""


class ResidentSubset:
    """Rows in RAM of the nodes that are pulled most often, a copy of those on disk. ids: int64[h], ascending."""

    def __init__(self, ids: Ids, rows: Sequence[AnyArray]) -> None:
        self.ids, self.rows = ids, rows

    def read(self, layer: int, rows: DiskRows, ids: Ids, out: AnyArray) -> int:
        """out[i] = row ids[i] of a layer, from RAM or from disk; returns the bytes read."""
        to, source = common(ids, self.ids)
        out[to] = self.rows[layer][source]
        missing = np.delete(np.arange(len(ids)), to)
        return rows.read(ids[missing], out, missing) if len(missing) else 0


class ResidentRows:
    """All rows in RAM, with the step of each; written to disk at a checkpoint only. empty: nothing was written yet."""

    def __init__(self, rows: Sequence[DiskRows], steps: DiskRows, empty: bool) -> None:
        self._disk = (*rows, steps)
        self._kept = [np.zeros(each.shape, each.dtype) for each in self._disk]
        self._changed = np.zeros(steps.shape[0], np.bool_)
        if not empty:
            for each, out in zip(self._disk, self._kept, strict=True):
                each.read(np.arange(each.shape[0]), out)

    @staticmethod
    def nbytes(rows: Sequence[DiskRows], steps: DiskRows) -> int:
        return steps.shape[0] * (STEP_BYTES + sum(each.row_bytes for each in rows))

    def read(self, ids: Ids) -> tuple[list[AnyArray], AnyArray]:
        """(every layer's rows, the steps as stored) of nodes `ids`."""
        *rows, steps = (kept[ids] for kept in self._kept)
        return rows, steps

    @property
    def all_rows(self) -> tuple[AnyArray, ...]:
        """Every layer's rows of all nodes, which may be changed in place; see `mark`."""
        return tuple(self._kept[:-1])

    def steps_of(self, ids: Ids) -> AnyArray:
        """The steps of nodes `ids` as stored."""
        steps: AnyArray = self._kept[-1][ids]
        return steps

    def mark(self, step: int, ids: Ids) -> None:
        """Rows `ids` have been changed by step `step`."""
        self._kept[-1][ids] = step + 1
        self._changed[ids] = True

    def put(self, push: Push) -> None:
        for kept, rows in zip(self._kept[:-1], push.rows, strict=True):
            kept[push.ids] = rows
        self.mark(push.step, push.ids)

    def writes(self, own: tuple[int, int]) -> Iterator[list[tuple[DiskRows, Ids, AnyArray]]]:
        """Yield what the disk does not have of rows own[0]:own[1], in groups; they count as written, and so do all others."""
        changed = own[0] + np.flatnonzero(self._changed[slice(*own)])
        for first in range(0, len(changed), _TOGETHER):
            ids = changed[first : first + _TOGETHER]
            yield [(each, ids, kept[ids]) for each, kept in zip(self._disk, self._kept, strict=True)]
        self._changed[:] = False


@dataclass
class HistoryCounts:
    """Rows and bytes that histories read and wrote."""

    pulled: int = 0
    """rows pulled, a node's of all layers counting once"""
    written: int = 0
    """of them, rows that had been written"""
    age: int = 0
    """steps since they were, summed over those"""
    bytes_read: int = 0
    bytes_written: int = 0
    """of rows and steps, without the undo log"""
    bytes_logged: int = 0
    """previous contents, which the undo log reads and writes"""

    def asdict(self) -> dict[str, int]:
        """The counts, named as in a run's results."""
        return {f"history_{name}": value for name, value in asdict(self).items()}


def most_asked(asked: NDArray[np.uint16], most: int) -> Ids:
    """Return up to `most` nodes that were asked for most often (asked: uint16[N], how often), int64[k] ascending.

    Of nodes with equal counts the last ones. Memory: 8 bytes per chosen node, and a piece's counts.
    """
    often = np.zeros(int(asked.max(initial=0)) + 1, np.int64)
    for first in range(0, len(asked), _PIECE):
        often += np.bincount(asked[first : first + _PIECE], minlength=len(often))
    above = np.cumsum(often[::-1])[::-1]  # nodes asked for as often or more
    if len(often) < 2 or most < 1:
        return np.empty(0, np.int64)
    if above[1] <= most:
        return np.flatnonzero(asked)
    least = int(np.flatnonzero(above <= most)[0]) if above[-1] <= most else len(often)  # all of these are chosen
    chosen = [np.flatnonzero(asked >= least)] if least < len(often) else []
    left = most - sum(map(len, chosen))
    equal = np.flatnonzero(asked == least - 1)
    return np.sort(np.concatenate([*chosen, equal[len(equal) - left :]]))
