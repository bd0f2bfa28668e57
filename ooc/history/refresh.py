"""Refreshing histories by an exact pass over all nodes, layer by layer.

The pass (`ooc.layerwise.layerwise_pass`) computes layer l of every node from the exact rows of layer l - 1; what it computes
goes into the histories too. Before it notes how far it came a checkpoint is taken, so a killed refresh goes on there. A pass
that goes on to the model's outputs serves the scores of the same parameters too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.history.history import History
from ooc.layerwise.ops import LayerObserver

STAMP_ROWS = 2**20


@dataclass
class Refresh:
    """A refresh under way, or behind which the epoch has not ended yet: what a checkpoint keeps of it; where its pass stands,
    the pass's folder knows."""

    notes: int = 0
    """of progress so far"""
    done: bool = False
    line: dict[str, Any] = field(default_factory=dict)
    """what was measured before it"""


@dataclass
class Refresher:
    """Shown what a pass computes (see `ooc.layerwise.ops.LayerObserver`), overwrites the histories by it.

    commit: takes a checkpoint; before the pass notes its progress, so that what it will not compute again is not undone.
    """

    history: History
    at: Refresh
    commit: Callable[[], None]

    def rows(self, layer: int, first: int, values: NDArray[np.float32]) -> None:
        """Overwrite rows first, first + 1, ... of a layer; the last one's have no history."""
        if layer < len(self.history.rows):
            self.history.overwrite(layer, np.arange(first, first + len(values)), values)

    def note(self) -> None:
        """Make what was overwritten final."""
        self.at.notes += 1
        self.commit()


class LayerwiseRunner(Protocol):
    """What computes every inner layer: `ooc.layerwise.layerwise_pass.LayerwisePass`, `ooc.layerwise.scores.ExactScores`."""

    def run(self, *, observer: LayerObserver | None, anew: bool) -> Any:
        """Run, shown to `observer`; anew: whatever the pass's folder holds, else from where it was interrupted on."""


def refresh(runner: LayerwiseRunner, refresher: Refresher) -> None:
    """Overwrite all histories by exact rows, beginning where a killed refresh by the same parameters came to.

    A checkpoint is taken when it is through. Raises as the pass does.
    """
    history, at = refresher.history, refresher.at
    history.begin_refresh()
    runner.run(
        observer=refresher, anew=not at.notes
    )  # by the same parameters another pass may have come far, not shown to this one
    for first in range(0, history.steps.shape[0], STAMP_ROWS):
        history.stamp(np.arange(first, min(first + STAMP_ROWS, history.steps.shape[0])))
    at.done = True
    refresher.note()
