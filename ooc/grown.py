"""A run that goes on with a store that has grown: what is as it was, and what counts as never written.

Data that only moved from the appends into the arrays are the same, and the run goes on to the bit. Where there are more of
them, it goes on only when asked: with the next epoch, as batches are others now, and with all histories but those of nodes
that were touched: something about them, an in-edge or a feature, is another.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ooc.baserun import State
from ooc.history import History
from stores.dataset import Dataset
from stores.errors import ConfigError
from stores.mutable_rows import DiskRows

STALE = "stale"
"""key of histories' state, taken up on a store that grew: int64[k], the nodes that were touched; beside it the next epoch"""


def take_up(out: Path, dataset: Dataset, saved: dict[str, Any], grown: bool | None) -> dict[str, Any]:
    """The checkpoint `saved` as it is to go on with `dataset`; itself where that is the store it was taken with, or another.

    grown: go on with a store that has grown since; None: such a run cannot. Raises ConfigError where it has grown, and that is
    not asked for.
    """
    if saved["store_fingerprint"] == dataset.fingerprint:
        return saved
    touched = dataset.grown_since(saved["store_fingerprint"])
    if touched is None:
        return saved
    same = saved | {"store_fingerprint": dataset.fingerprint}
    if not len(touched):
        return same
    if not grown:
        way = "" if grown is None else "--grown goes on with what is there now, from the next epoch, or "
        raise ConfigError(f"cannot resume {out}: {dataset.path} has grown since: {way}start another run")
    state = State(**saved["state"])
    state.epoch, state.step, state.loss_sum = state.epoch + (state.step > 0), 0, 0.0
    halo = saved["halo"] and saved["halo"] | {STALE: touched, "epoch": state.epoch}
    return same | {"state": asdict(state), "refresh": None, "halo": halo}


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
    for name in (*(f"layer{layer}" for layer in range(len(widths))), "steps"):
        DiskRows.extend(path / name, num_nodes)
    history = History.open(path, len(widths), {**state, "step": step, "pending": []}, **settings)
    history.forget_rows(np.asarray(state[STALE], np.int64))
    return history
