"""LightGCN's propagation over sampled links, with its gradient: an unbiased estimate of that over the whole graph."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ooc.graph.bag_sum import bag_sum
from ooc.sampling.propagation_sampler import LayerLinks, SampledLayers


class SampledPropagation(torch.autograd.Function):
    """(rows of the table float32[r, c], their sampled links) -> (own, propagated): those of the batch's nodes, [s, c] each.

    With all links drawn the propagated rows are those of `propagate`, to the bit.

    >>> own, propagated = SampledPropagation.apply(rows, sampler.sample(nodes, key))
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sampled: SampledLayers) -> tuple[Tensor, Tensor]:
        ctx.sampled, ctx.num_rows = sampled, len(rows)
        own = rows[torch.from_numpy(sampled.seed)]
        total, current = own.clone(), rows
        for links in sampled.layers:
            current = _sums(links, current)
            total += current[: len(own)]
        return own, total.div_(len(sampled.layers) + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own: Tensor, propagated: Tensor) -> tuple[Tensor, None]:
        sampled: SampledLayers = ctx.sampled
        each = propagated / (len(sampled.layers) + 1)
        current, seeds = each, torch.from_numpy(sampled.seed)
        for number, links in reversed([*enumerate(sampled.layers)]):
            current = _gradients(links, current)
            if number:
                current[: len(each)] += each
        current[seeds] += each + own
        return current, None


def _sums(links: LayerLinks, rows: Tensor) -> Tensor:
    """The next layer of rows [m, c]: [n, c]."""
    index, indptr = torch.from_numpy(links.neighbor), torch.from_numpy(links.indptr)
    return bag_sum(index, rows * torch.from_numpy(links.weight), indptr, None).mul_(torch.from_numpy(links.factor))


def _gradients(links: LayerLinks, gradient: Tensor) -> Tensor:
    """The gradient of a layer's rows [m, c] by that of the next one's [n, c]."""
    index, indptr = torch.from_numpy(links.back), torch.from_numpy(links.back_indptr)
    return bag_sum(index, gradient * torch.from_numpy(links.factor), indptr, None).mul_(torch.from_numpy(links.weight))
