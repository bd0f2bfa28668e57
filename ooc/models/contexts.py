"""Context managers for running models: autocast and evaluation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return torch's autocast context for precision "bf16" or "fp16", and a null context for "fp32"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode without gradients, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
