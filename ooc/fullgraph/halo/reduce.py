"""Sums over ranks at the end of a step: its loss, and the gradients of the parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ooc.runtime.ranks import Ranks


def sum_of(value: float, ranks: Ranks) -> float:
    """Of the ranks' numbers."""
    return value if ranks.alone else float(ranks.sum(torch.tensor([value], dtype=torch.float64, device=ranks.place)))


@contextmanager
def summed_gradients(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """What the body adds to the gradients of a model's parameters is summed over the ranks; a parameter has a gradient if it
    has one on any rank."""
    if ranks.alone:
        yield
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    yield
    if not trained:
        return
    kept = torch.tensor([parameter.grad is not None for parameter in trained], dtype=trained[0].dtype, device=trained[0].device)
    grads = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in trained]
    flat = ranks.sum(torch.cat([kept, *grads]))
    given, parts = flat[: len(trained)], torch.split(flat[len(trained) :], [p.numel() for p in trained])
    for parameter, old, has, part in zip(trained, before, given.tolist(), parts, strict=True):
        made = part.view_as(parameter).clone() if has else None
        parameter.grad = made if old is None else old if made is None else old + made
