"""Losses of steps as numbers, on a GPU without a step that waits for its own."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SLOTS = 2
"""losses on their way at once: that of the step before, and the current one's"""


class StepLoss(NamedTuple):
    """The loss of a step, and where the run was."""

    epoch: int
    step: int
    total_steps: int
    value: float


class StepLosses:
    """Reads losses in order: on the CPU at once, on a GPU one step late, so that the host can go on to the next step.

    A loss is copied into page-locked memory behind the kernels of its step. By the next step that copy is done, or nearly.

    >>> losses = StepLosses(torch.device("cuda"))
    >>> [each for step in range(3) for each in losses.put((0, step, step), train(step))]
    [StepLoss(0, 0, 0, 1.09), StepLoss(0, 1, 1, 1.02)]
    >>> [*losses.rest()]
    [StepLoss(0, 2, 2, 0.97)]
    """

    def __init__(self, device: torch.device) -> None:
        self._late = device.type == "cuda"
        slots = _SLOTS if self._late else 0
        self._slots = [torch.empty((), pin_memory=True) for _ in range(slots)]
        self._events = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._waiting: list[tuple[tuple[int, int, int], int]] = []
        self._next = 0

    def put(self, place: tuple[int, int, int], loss: Tensor) -> Iterator[StepLoss]:
        """Take a step's loss, a scalar; place: (epoch, step, total_steps). Yields what is to be read now."""
        if not self._late:
            yield StepLoss(*place, loss.item())
            return
        slot = self._next % _SLOTS
        self._slots[slot].copy_(loss.detach(), non_blocking=True)
        self._events[slot].record()
        self._waiting.append((place, slot))
        self._next += 1
        if len(self._waiting) == _SLOTS:
            yield self._read()

    def rest(self) -> Iterator[StepLoss]:
        """What has not been read."""
        while self._waiting:
            yield self._read()

    def _read(self) -> StepLoss:
        place, slot = self._waiting.pop(0)
        self._events[slot].synchronize()
        return StepLoss(*place, self._slots[slot].item())
