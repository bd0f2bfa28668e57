"""Losses of steps as numbers, on a GPU without a step that waits for its own."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ooc.runtime.transfer import HostCopy

AHEAD = 2
"""steps that the host may be ahead of a GPU. A mode that takes up rows of its last step waits for these alone; then the loss of
the step before is there"""


class StepLoss(NamedTuple):
    """The loss of a step, and where the run was."""

    epoch: int
    step: int
    total_steps: int
    value: float


class StepLosses:
    """Reads losses in order: on the CPU at once, on a GPU when they are there, so that the host is up to two steps ahead.

    >>> losses = StepLosses(torch.device("cuda"))
    >>> [each for step in range(4) for each in losses.put((0, step, step), train(step))]
    [StepLoss(0, 0, 0, 1.09), StepLoss(0, 1, 1, 1.02)]
    >>> [*losses.rest()]
    [StepLoss(0, 2, 2, 0.97), StepLoss(0, 3, 3, 0.95)]
    """

    def __init__(self, device: torch.device) -> None:
        self._ahead = AHEAD if device.type == "cuda" else 0
        self._waiting: list[tuple[tuple[int, int, int], HostCopy]] = []

    def put(self, place: tuple[int, int, int], loss: Tensor) -> Iterator[StepLoss]:
        """Take a step's loss, a scalar; place: (epoch, step, total_steps). Yields what is to be read now."""
        self._waiting.append((place, HostCopy([loss])))
        while self._waiting and (len(self._waiting) > self._ahead or self._waiting[0][1].done):
            yield self._read()

    def rest(self) -> Iterator[StepLoss]:
        """What has not been read."""
        while self._waiting:
            yield self._read()

    def _read(self) -> StepLoss:
        place, copy = self._waiting.pop(0)
        return StepLoss(*place, float(copy.arrays()[0]))
