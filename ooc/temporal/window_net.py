"""A model of windows with what it foretells: links of the next window, or classes of the window's nodes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.models.builders import full_blocks
from ooc.temporal.forecast_loader import Forecast
from ooc.temporal.window_models import WindowModel


class WindowOutput(NamedTuple):
    """Of a window: rows [n, channels] of all its nodes, what the window's own carry now, and the weights it had."""

    rows: Tensor
    carried: list[Tensor]
    weights: list[Tensor]


class PairScores(nn.Module):
    """Logits of pairs, from their rows and the product of these.

    >>> PairScores(64)(rows, src, dst).shape  # int64[k] each
    torch.Size([k])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.src, self.dst, self.both = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, 1)

    def forward(self, rows: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """rows: [n, channels]; src, dst: int64[k] -> [k]."""
        source, target = rows[src], rows[dst]
        hidden = self.src(source) + self.dst(target) + self.both(source * target)
        return self.out(hidden.relu()).squeeze(-1)


class WindowNet(nn.Module):
    """`model` and a head: `links` (`PairScores`), or `classes` logits of nodes.

    >>> outcome = net.outcome(forecast, carried)
    >>> positive, negative = net.links(outcome.rows, forecast)
    """

    def __init__(self, model: WindowModel, channels: int, classes: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head: nn.Module = PairScores(channels) if classes is None else nn.Linear(channels, classes)

    def outcome(self, forecast: Forecast, carried: Sequence[Tensor]) -> WindowOutput:
        """carried: [n, width] each, of the forecast's nodes.

        The window's nodes are computed by themselves: their rows are the same whatever comes next.
        """
        weights, present = self.model.weights(), forecast.present
        rows, now = self.model(forecast.x[:present], forecast.block, [each[:present] for each in carried], weights)
        if present < len(forecast.node):
            alone = _without_edges(len(forecast.node) - present, forecast.x.device)
            others, _ = self.model(forecast.x[present:], alone, [each[present:] for each in carried], weights)
            rows = torch.cat([rows, others])
        return WindowOutput(rows, now, weights)

    def links(self, rows: Tensor, forecast: Forecast) -> tuple[Tensor, Tensor]:
        """([k], [k, ratio]): logits of the events to foresee and of their negatives."""
        ratio = forecast.negative.size(1)
        src = torch.cat([forecast.src, forecast.src.repeat_interleave(ratio)])
        found = self.head(rows, src, torch.cat([forecast.dst, forecast.negative.reshape(-1)]))
        positive, negative = found.split([len(forecast.src), len(found) - len(forecast.src)])
        return positive, negative.view(-1, ratio)

    def classes(self, rows: Tensor, forecast: Forecast) -> Tensor:
        """[present, classes]: logits of the window's nodes."""
        out: Tensor = self.head(rows[: forecast.present])
        return out


def _without_edges(count: int, device: torch.device) -> Block:
    return full_blocks(torch.empty((2, 0), dtype=torch.int64, device=device), count, 1)[0]
