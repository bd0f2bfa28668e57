"""What several ranks that share histories have in common: whose rows are whose, one push of all of them, and a log each."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ooc.history.rows import Push, merged
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.undo_log import UndoLog

LOG = "undo.log"
_OF_RANKS = "rank*"


class HistoryShare(NamedTuple):
    """Several ranks, and the nodes whose rows this one writes: first, and one past the last. replicated: whether each rank
    computes, and pushes, the rows of all."""

    ranks: Ranks
    own: tuple[int, int]
    replicated: bool = False


def ranks_of(settings: Mapping[str, Any]) -> Ranks:
    """The ranks that settings of `History` are of."""
    share: HistoryShare | None = settings.get("share")
    return ALONE if share is None else share.ranks


def open_log(path: Path, files: Sequence[DiskRows], generation: int, ranks: Ranks) -> UndoLog:
    """This rank's log of the rows that it writes, once all that ranks have written since the checkpoint is undone.

    There may have been another number of ranks. A checkpoint commits the rows of all of them: each log is of the checkpoint's
    generation, and what it has is put back, or of the one before, where a rank ended before it began the next.
    """

    def undo() -> None:
        for log in (path / LOG, *sorted(path.glob(f"{_OF_RANKS}/{LOG}"))):
            if log.exists():
                UndoLog.open(log, files, generation).close()
        for folder in path.glob(_OF_RANKS):
            shutil.rmtree(folder)

    if not ranks.alone or any(path.glob(_OF_RANKS)):
        ranks.decided(undo)
    own = path if ranks.first else path / f"rank{ranks.rank}"  # not one folder: each removes what killed processes left there
    own.mkdir(exist_ok=True)
    return UndoLog.open(own / LOG, files, generation)


def push_of_ranks(ranks: Ranks, push: Push, written: int) -> tuple[Push, int]:
    """Return the push of all ranks' batches, the same on all of them, and the step up to which all have written their rows.

    Args:
        ranks: Two or more.
        push: This rank's rows, maybe none, of nodes that no other rank has.
        written: The step up to which this rank has written.
    """
    head = np.array([written, len(push.ids)])
    packed = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (head, push.ids, *push.rows)]
    pushes, steps = [], []
    for data in ranks.gather_rows(torch.from_numpy(np.concatenate(packed))):
        step, count = data[: head.nbytes].numpy().view(np.int64).tolist()
        widths = [8, *(rows.dtype.itemsize * rows.shape[1] for rows in push.rows)]
        first, *others = torch.split(data[head.nbytes :], [count * width for width in widths])
        rows = [each.numpy().view(own.dtype).reshape(count, own.shape[1]) for each, own in zip(others, push.rows, strict=True)]
        pushes.append((first.numpy().view(np.int64), rows))
        steps.append(step)
    ids, of_layers = merged(pushes)
    return Push(push.step, ids, tuple(of_layers)), min(steps)
