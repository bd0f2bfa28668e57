"""A run that goes on with a store that has grown: what is as it was, and what counts as never written.

Data that only moved from the appends into the arrays are the same, and the run goes on to the bit. Where there are more of
them, it goes on only when asked. On nodes: with the next epoch, as batches are others now, and with all histories but those of
nodes that were touched: something about them, an in-edge or a feature, is another. On events and windows: within the epoch,
where all that it has looked at is as it was, with the state of the nodes as it is: so it is, to the bit, the run that began
on what is there now, but for new nodes, which change what negatives are drawn from. Else (late events, or an epoch that only
wants its scores) with the next epoch, which begins with no state. Either way the splits are those of all events that are there
now, and the best model is chosen anew: scores of other events say nothing beside theirs.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ooc.config.base import RunConfig
from ooc.history.grown import GROWN, STALE
from ooc.training.state import RunState
from stores.arrays.rows import Ids
from stores.dataset import Dataset
from stores.errors import ConfigError


def _compared(out: Path, dataset: Dataset, saved: dict[str, Any], grown: bool) -> tuple[dict[str, Any], Ids | None]:
    """(the checkpoint with the store's fingerprint as it is, the nodes that were touched since: None where its data are those
    that it was taken with). Itself for another store. Raises ConfigError where it has grown, and that is not asked for."""
    if saved["store_fingerprint"] == dataset.fingerprint:
        return saved, None
    touched = dataset.grown_since(saved["store_fingerprint"])
    if touched is None:
        return saved, None
    same = saved | {"store_fingerprint": dataset.fingerprint}
    if not len(touched):
        return same, None
    if not grown:
        raise ConfigError(
            f"cannot resume {out}: {dataset.path} has grown since: --grown goes on with what is there now, or start another run"
        )
    return same, touched


def take_up(out: Path, dataset: Dataset, saved: dict[str, Any], grown: bool) -> dict[str, Any]:
    """The checkpoint `saved` as it is to go on with `dataset`; itself where that is the store it was taken with, or another.

    grown: go on with a store that has grown since. Raises ConfigError where it has grown, and that is not asked for.
    """
    same, touched = _compared(out, dataset, saved, grown)
    if touched is None:
        return same
    state = RunState(**same["state"])
    state.epoch, state.step, state.loss_sum = state.epoch + (state.step > 0), 0, 0.0
    halo = same.get("halo") and same["halo"] | {STALE: touched, "epoch": state.epoch}
    return same | {"state": asdict(state), "refresh": None, "halo": halo}


def take_up_in_time(
    config: RunConfig,
    dataset: Dataset,
    saved: dict[str, Any],
    grown: bool,
    seen: Callable[[int, dict[str, Any]], dict[str, Any]],
) -> tuple[dict[str, Any], str | None]:
    """The same for a run on events or windows, and what is to be said of it. seen: see `Mode`, on the store as it is now.

    Raises ConfigError also where no epoch is left that could go on with what is new.
    """
    same, touched = _compared(config.out, dataset, saved, grown)
    if touched is None:
        return same, None
    if (given := getattr(config, "negatives_file", None)) is not None:
        raise ConfigError(
            f"{config.out}: the rows of {given} are of events from validation's first on, which is another one now that "
            f"{dataset.path} has grown: begin another run, with negatives made for what is there now"
        )
    state = RunState(**same["state"])
    was = same.get("seen")
    goes_on = was is not None and seen(state.step, same["mode"]) == was
    if goes_on:
        why = f"epoch {state.epoch + 1} goes on: what it has seen is as it was"
    else:
        late = ", as there are late events among those that this one has seen" if was is not None else ""
        state.epoch, state.step, state.loss_sum = state.epoch + (state.step > 0), 0, 0.0
        why = f"the run goes on with epoch {state.epoch + 1}{late}"
    if state.epoch >= config.epochs:
        raise ConfigError(
            f"{config.out} is through its {config.epochs} epochs, and {dataset.path} has grown since: to go on with what is "
            "there now give more --epochs"
        )
    state.best_score, state.best_epoch, state.stale = None, None, 0
    mode = same["mode"] | {GROWN: True}
    taken = same | {"state": asdict(state), "best_model": None, "scores": {}, "mode": mode}
    return taken, f"{dataset.path} has grown since this run last saw it: {why}"
