"""Training by several processes: the gradient of the mean over a global batch, of which each rank has a share.

`DistributedDataParallel` adds up gradients while they are computed. A share of few labels counts less than one of many: a
rank's loss is weighted by its labels, so that K ranks with batches of B take the steps of one process with batches of K x B.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ooc.runtime.crew import threads_kept
from ooc.runtime.ranks import Ranks
from ooc.training.compressed_gradients import CompressedGradients


class SharedLoader(Protocol):
    """A loader that gives a rank its share of each step."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def stop_before(self, step: int | None) -> None: ...
    def __iter__(self) -> Any: ...


def shared_batches(loader: SharedLoader, own_steps: int, epoch: int, step: int, stop: int) -> Iterator[Any]:
    """The batches of steps `step` to `stop` of an epoch; None where there is no share. own_steps: steps that have one."""
    loader.load_state_dict({"epoch": epoch, "step": step})
    loader.stop_before(min(stop, own_steps))
    batches: Iterator[Any] = iter(loader)
    return batches if stop <= own_steps else _with_nothing(batches, stop - max(step, own_steps))


def _with_nothing(batches: Any, count: int) -> Iterator[Any]:
    with closing(batches):
        yield from batches
    for _ in range(count):
        yield None


class ShareLoss(Protocol):
    """What a mode says of a rank's share of a batch."""

    model: nn.Module
    device: torch.device

    def loss(self, batch: Any) -> Tensor: ...
    def weight(self, batch: Any) -> Tensor: ...


class _GlobalLoss(nn.Module):
    """The mean loss of a global batch, as far as this rank contributes to it."""

    def __init__(self, mode: ShareLoss, ranks: Ranks) -> None:
        super().__init__()
        self.model, self._mode, self._ranks = mode.model, mode, ranks
        self.unused = nn.Parameter(torch.zeros(1, device=mode.device))  # torch warns where it looks for such and finds none

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(what to call `backward` of, the mean loss of all ranks, without its graph); batch: None for a rank without seeds."""
        if batch is None:
            nothing = [each.sum() for each in self.model.parameters() if each.requires_grad]
            loss, weight = torch.stack(nothing).sum() * 0.0, torch.zeros((), device=self._mode.device)
        else:
            loss, weight = self._mode.loss(batch), self._mode.weight(batch)
        weight = weight.to(torch.float64)
        total, weights = self._ranks.sum(torch.stack([loss.detach().double() * weight, weight]))
        weights = weights.clamp(min=1e-12)  # without a known label all is 0
        return loss * (weight * self._ranks.world_size / weights).to(loss.dtype), (total / weights).float()


class GlobalStep:
    """Gradients of a mode's model by the shares of all ranks.

    Unused parameters are found in every step: those that no rank's share needs keep no gradient, as in one process, and buckets
    are not rebuilt after the first step, so that a resumed run adds up in the same order.
    """

    def __init__(self, mode: ShareLoss, ranks: Ranks, compressed: CompressedGradients) -> None:
        module = _GlobalLoss(mode, ranks)
        self._module = DistributedDataParallel(
            module, process_group=ranks.group, find_unused_parameters=True, gradient_as_bucket_view=True
        )
        compressed.register(self._module)

    def backward(self, batch: Any, scaler: torch.amp.GradScaler, share: float, last: bool) -> Tensor:
        """Add the gradients of a global batch, divided by `share`; its mean loss. last: of a group of accumulated batches,
        which is when ranks exchange them."""
        apart: AbstractContextManager[None] = nullcontext() if last else self._module.no_sync()
        with apart, threads_kept():
            loss, mean = self._module(batch)
            scaler.scale(loss / share).backward()
        return mean
