"""Refreshing histories by an exact pass over all nodes, layer by layer.

The pass (`ooc.layerwise.layerwise_pass`) computes layer l of every node from the exact rows of layer l - 1, and the histories
get these rows too. A checkpoint is taken before the pass notes its progress, so a killed refresh continues there. A pass that
goes on to the model's outputs gives the scores of the same parameters too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.history.history import History

STAMP_ROWS = 2**20


@dataclass
class Refresh:
    """What a checkpoint stores of a refresh, until its epoch has ended; the pass's folder knows where the pass stands."""

    notes: int = 0
    """of progress so far"""
    done: bool = False
    line: dict[str, Any] = field(default_factory=dict)
    """what was measured before it"""


@dataclass
class Refresher:
    """Overwrites the histories with the rows of a pass (an `ooc.layerwise.ops.LayerObserver`).

    `commit` takes a checkpoint before the pass notes its progress, so what it will not compute again is not rolled back.
    """

    history: History
    at: Refresh
    commit: Callable[[], None]

    def rows(self, layer: int, first: int, values: NDArray[np.float32]) -> None:
        """Overwrite rows first, first + 1, ... of a layer; the last layer has no history."""
        if layer < len(self.history.rows):
            self.history.overwrite(layer, np.arange(first, first + len(values)), values)

    def note(self) -> None:
        """Make what was overwritten final."""
        self.at.notes += 1
        self.commit()


def refresh(run: Callable[..., Any], refresher: Refresher) -> None:
    """Overwrite all histories with exact rows, continuing a killed refresh of the same parameters, and take a checkpoint.

    `run` is that of `ooc.layerwise.layerwise_pass.LayerwisePass` or `ooc.layerwise.scores.ExactScores`. Raises as it does.
    """
    history, at = refresher.history, refresher.at
    history.begin_refresh()
    run(observer=refresher, anew=not at.notes)  # another pass by these parameters may have come far, without this observer
    for first in range(*history.own, STAMP_ROWS):
        history.stamp(np.arange(first, min(first + STAMP_ROWS, history.own[1])))
    at.done = True
    refresher.note()
