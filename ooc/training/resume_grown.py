"""A run that goes on with a store that has grown: what is as it was, and what counts as never written.

Data that only moved from the appends into the arrays are the same, and the run goes on to the bit. Where there are more of
them, it goes on only with `--grown`. On nodes: with the next epoch, as batches are others now, and with all histories but those
of nodes that were touched: something about them, an in-edge or a feature, is another. On events and windows: within the epoch,
where all that it has looked at is as it was, with the state of the nodes as it is: so it is, to the bit, the run that began
on what is there now, but for new nodes, which change what negatives are drawn from. Else (late events, or an epoch that only
wants its scores) with the next epoch, which begins with no state. Either way the splits are those of all events that are there
now, and the best model is chosen anew: scores of other events say nothing beside theirs.
"""

from typing import Any

from ooc.history.history import Growth
from ooc.training.mode import Mode
from stores.errors import ConfigError


def take_up(mode: Mode, saved: dict[str, Any], grown: bool) -> tuple[dict[str, Any], Growth | None]:
    """The checkpoint that a resumed run goes on from.

    Args:
        mode: The run's mode, on the store as it is now.
        saved: The checkpoint as it was taken.
        grown: Whether to go on with a store that has grown since.

    Returns:
        (the checkpoint to go on from, what growth means for the run). The checkpoint is `saved` itself where the store is the
        one it was taken with, or another one altogether; then there is no growth.

    Raises:
        ConfigError: The store has grown, and `grown` is not set or the mode cannot go on.
    """
    out, dataset = mode.config.out, mode.dataset
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
    return mode.adapt(same, touched)
