"""Scores of a split: the model over every seed of it, batch by batch, in the memory of one batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ooc.loaders import NeighborLoader
from ooc.metrics import Scores
from ooc.user_models import forward_batch


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Mixed precision by torch's rules: "bf16" or "fp16"; nothing for "fp32"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode without gradients; afterwards in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


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
    """Scores of the loader's seeds (see `ooc.metrics.metric_names`), None where one is undefined.

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
