"""Histories of a store that has grown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooc.history.history import History
from stores.arrays.mutable_rows import DiskRows
from stores.arrays.rows import Ids


@dataclass(frozen=True)
class Growth:
    """What a resumed run found: a store with more in it than at its checkpoint.

    Args:
        touched: Nodes whose features or in-edges have changed, int64[k].
        epoch: The epoch that the run goes on with.
        note: What a person should know of it, if anything.
    """

    touched: Ids
    epoch: int
    note: str = ""


def extend_history(path: Path, layers: int, num_nodes: int) -> None:
    """Give the histories in `path`, which are not open, rows for `num_nodes` nodes, the new ones never written."""
    for name in (*(f"layer{layer}" for layer in range(layers)), "steps"):
        DiskRows.extend(path / name, num_nodes)


def open_history(
    path: Path,
    num_nodes: int,
    widths: Sequence[int],
    dtype: str,
    state: dict[str, Any],
    batches: int,
    growth: Growth,
    **settings: Any,
) -> History:
    """The histories of a run whose store has grown to `num_nodes`, without those of the nodes that were touched.

    state: of the checkpoint; batches: of an epoch, which number the steps: where the next step's number is less than it was, as
    there are fewer of them, histories begin anew. settings: see `History.create`.
    """
    step = growth.epoch * batches
    if step < int(state["step"]):
        return History.create(path, num_nodes, widths, dtype, **settings)
    extend_history(path, len(widths), num_nodes)
    history = History.open(path, len(widths), {**state, "step": step, "pending": []}, **settings)
    history.forget_rows(growth.touched)
    return history
