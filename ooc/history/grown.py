"""Histories of a store that has grown."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ooc.history.history import History
from stores.arrays.mutable_rows import DiskRows

STALE = "stale"
"""key of histories' state, taken up on a store that grew: int64[k], the nodes that were touched; beside it the next epoch"""


GROWN = "grown"
"""key of a temporal mode's state, taken up on a store that grew"""


def extend_history(path: Path, layers: int, num_nodes: int) -> None:
    """Give the histories in `path`, which are not open, rows for `num_nodes` nodes, the new ones never written."""
    for name in (*(f"layer{layer}" for layer in range(layers)), "steps"):
        DiskRows.extend(path / name, num_nodes)


def open_history(
    path: Path, num_nodes: int, widths: Sequence[int], dtype: str, state: dict[str, Any], batches: int, **settings: Any
) -> History:
    """The histories of a run whose store has grown to `num_nodes`, without those of the nodes that were touched.

    state: of the checkpoint, from `take_up`; batches: of an epoch, which number the steps: where the next step's number is less
    than it was, as there are fewer of them, histories begin anew. settings: see `History.create`.
    """
    step = int(state["epoch"]) * batches
    if step < int(state["step"]):
        return History.create(path, num_nodes, widths, dtype, **settings)
    extend_history(path, len(widths), num_nodes)
    history = History.open(path, len(widths), {**state, "step": step, "pending": []}, **settings)
    history.forget_rows(np.asarray(state[STALE], np.int64))
    return history
