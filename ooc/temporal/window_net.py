"""A window model with its head: links of the next window, or classes of the window's nodes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.models.builders import full_blocks
from ooc.temporal.forecast_loader import Forecast
from ooc.temporal.window_models import WindowModel


class WindowOutput(NamedTuple):
    """Rows [n, channels] of all nodes of a window, the new state of its own nodes, and the weights it used."""

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
        """Map rows [n, channels] and src, dst int64[k] to [k]."""
        source, target = rows[src], rows[dst]
        hidden = self.src(source) + self.dst(target) + self.both(source * target)
        return self.out(hidden.relu()).squeeze(-1)


class WindowNet(nn.Module):
    """`model` and a head: `links` (`PairScores`), or logits of `classes` node classes.

    >>> outcome = net.outcome(forecast, carried)
    >>> positive, negative = net.links(outcome.rows, forecast)
    """

    def __init__(self, model: WindowModel, channels: int, classes: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head: nn.Module = PairScores(channels) if classes is None else nn.Linear(channels, classes)

    def outcome(self, forecast: Forecast, carried: Sequence[Tensor]) -> WindowOutput:
        """Compute a window from the state `carried` ([n, width] each) of the forecast's nodes.

        The window's own nodes are computed separately, so their rows do not depend on the next window.
        """
        weights, present = self.model.weights(), forecast.present
        rows, now = self.model(forecast.x[:present], forecast.block, [each[:present] for each in carried], weights)
        if present < len(forecast.node):
            alone = _without_edges(len(forecast.node) - present, forecast.x.device)
            others, _ = self.model(forecast.x[present:], alone, [each[present:] for each in carried], weights)
            rows = torch.cat([rows, others])
        return WindowOutput(rows, now, weights)

    def links(self, rows: Tensor, forecast: Forecast) -> tuple[Tensor, Tensor]:
        """Return logits of the target events [k] and of their negatives [k, ratio]."""
        ratio = forecast.negative.size(1)
        src = torch.cat([forecast.src, forecast.src.repeat_interleave(ratio)])
        logits = self.head(rows, src, torch.cat([forecast.dst, forecast.negative.reshape(-1)]))
        positive, negative = logits.split([len(forecast.src), len(logits) - len(forecast.src)])
        return positive, negative.view(-1, ratio)

    def classes(self, rows: Tensor, forecast: Forecast) -> Tensor:
        """Return logits of the window's nodes, [present, classes]."""
        out: Tensor = self.head(rows[: forecast.present])
        return out


def _without_edges(count: int, device: torch.device) -> Block:
    return full_blocks(torch.empty((2, 0), dtype=torch.int64, device=device), count, 1)[0]
