"""Norms of the loss's gradient by the rows of nodes, as they were last met: kept on disk, and in memory as importance.

An epoch draws by the norms that it began with, so its batches are a function of the cursor and of these. What its steps find
is written to rows on disk as they go, by an undo log: a checkpoint commits them, and a run that goes on has those of the
checkpoint.
"""

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import Ids
from ooc.stores.arrays.undo_log import UndoLog
from ooc.stores.io.atomic import remove_tree

KEPT = 0.7
"""of a node's norm when it is met again"""
EVEN = 0.2
"""share of the importance that all nodes have alike, so that what a drawn one stands for is bounded"""
_AT_ONCE = 2**22
"""rows that are read and written at once as an epoch begins"""


class GradientNorms:
    """The norms, and the importance by them.

    Args:
        importance: float32[N], which epochs draw by; it is filled here.
        latest: Rows float32[N], norms as they were last met; 0 of a node that was not.
        used: Rows float32[N], `importance` as it is in this epoch.
        log: Of both.

    >>> norms = GradientNorms.open(run / "importance", np.ones(num_nodes, np.float32), None)
    >>> norms.put(ids, found)
    >>> norms.begin_epoch()
    """

    def __init__(self, importance: NDArray[np.float32], latest: DiskRows, used: DiskRows, log: UndoLog) -> None:
        self.importance, self._latest, self._used, self._log = importance, latest, used, log

    @classmethod
    def open(cls, path: Path, importance: NDArray[np.float32], state: dict[str, Any] | None) -> Self:
        """Make the rows in the directory `path`, or take them up as they were at the checkpoint that has `state`.

        Raises StoreError where they are damaged, or the disk refuses.
        """
        names, count = ("latest", "used"), len(importance)
        if state is None:
            remove_tree(path)
            path.mkdir(parents=True)
            importance[:] = 1
            for name in names:
                DiskRows.create(path / name, (count,), "float32").close()
        else:
            for name in names:
                DiskRows.extend(path / name, count)  # of a store that has grown
        rows = [DiskRows.open(path / name) for name in names]
        found = cls(
            importance, rows[0], rows[1], UndoLog.open(path / "undo.log", rows, None if state is None else state["log"])
        )
        if state is not None:
            for ids in found._pieces():
                found._used.read(ids, importance[ids[0] : ids[-1] + 1])
            importance[importance == 0] = 1
        else:
            found._write_used()
        return found

    def put(self, ids: Ids, norms: NDArray[np.float32]) -> None:
        """What a step found of nodes: ids int64[n], no id twice, norms float32[n]."""
        before = np.empty(len(ids), np.float32)
        self._latest.read(ids, before)
        met = np.where(before > 0, KEPT * before + (1 - KEPT) * norms, norms)
        self._latest.write(ids, np.where(np.isfinite(met), met, before).astype(np.float32))

    def begin_epoch(self) -> None:
        """Draw by what was found so far: nodes that were not met are as important as the others on average."""
        total, count = 0.0, 0
        for ids in self._pieces():
            part = self.importance[ids[0] : ids[-1] + 1]
            self._latest.read(ids, part)
            total, count = total + float(part.sum(dtype=np.float64)), count + int((part > 0).sum())
        mean = total / count if total else 1.0
        own = np.where(self.importance > 0, self.importance / np.float32(mean), np.float32(1))
        self.importance[:] = np.float32(EVEN) + np.float32(1 - EVEN) * own
        self._write_used()

    def state(self) -> dict[str, Any]:
        """For a checkpoint, which `commit` follows."""
        self._log.sync()
        return {"log": self._log.generation + 1}

    def commit(self) -> None:
        """The checkpoint is saved: the rows as they are belong to it."""
        self._log.commit()

    def close(self) -> None:
        """Close the rows and their log; idempotent."""
        self._log.close()
        self._latest.close()
        self._used.close()

    def _write_used(self) -> None:
        for ids in self._pieces():
            self._used.write(ids, self.importance[ids[0] : ids[-1] + 1])

    def _pieces(self) -> list[Ids]:
        count = len(self.importance)
        return [np.arange(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE)]
