"""Scores of a split: the model over every seed of it, batch by batch, in the memory of one batch."""

import torch
from torch import nn

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.metrics.nodes import Scores
from ooc.models.contexts import autocast, evaluating
from ooc.models.user import forward_batch


def evaluate(
    model: nn.Module,
    loader: NeighborLoader,
    task: str,
    num_classes: int,
    count: int,
    *,
    epoch: int = 0,
    device: torch.device | None = None,
    precision: str = "fp32",
) -> dict[str, float | None]:
    """Scores of the loader's seeds (see `ooc.metrics.nodes.metric_names`), None where one is undefined.

    count: seeds that the loader serves.
    epoch: with sampled fan-outs, which draw; the same epoch gives the same scores, also after a resume.

    >>> evaluate(model, loader, "multiclass", num_classes=7, count=1000)["accuracy"]
    0.815
    """
    device = device or torch.device("cpu")
    scores = Scores(task, num_classes, count, device)
    loader.set_epoch(epoch)
    with evaluating(model):
        for batch in loader:
            batch = batch.to(device, non_blocking=True)
            with autocast(device, precision):
                logits = forward_batch(model, batch)
            scores.update(logits, batch.y[: batch.batch_size])
    return scores.compute()
