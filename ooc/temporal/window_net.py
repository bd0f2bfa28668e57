"""A window model with its head (links of the next window, or classes of the window's nodes), and the state it carries."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ooc.history.history import History
from ooc.models.builders import full_blocks
from ooc.temporal.forecast_loader import Forecast
from ooc.temporal.window_models import WindowModel


class WindowOutput(NamedTuple):
    """Rows [n, channels] of all nodes of a window, the new state of its own nodes, and the weights it used."""

    rows: Tensor
    carried: list[Tensor]
    weights: list[Tensor]


class PairScores(nn.Module):
    """Logits of pairs, from their rows and the product of these."""

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
    """`model` and a head: `links` (`PairScores`), or logits of `classes` node classes."""

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
            no_edges = torch.empty((2, 0), dtype=torch.int64, device=forecast.x.device)
            alone = full_blocks(no_edges, len(forecast.node) - present, 1)[0]
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


def carried(history: History | None, forecast: Forecast) -> list[Tensor]:
    """Return the state of the forecast's nodes, [n, width] each, on the device of x; call once per step, in order."""
    if history is None or forecast.fetched is None:
        return []
    rows = history.pull(forecast.fetched)
    return [torch.from_numpy(each).float().to(forecast.x.device)[forecast.order] for each in rows]


def hand_on(history: History | None, base: int, net: WindowNet, forecast: Forecast, outcome: WindowOutput) -> None:
    """Store the new state of the window's nodes and the model's weights, detached; `base` is the history's step of step 0."""
    net.model.keep(outcome.weights)
    if history is not None:
        rows = [each.detach().float().cpu().numpy() for each in outcome.carried]
        history.push(base + forecast.step, forecast.node[: forecast.present].cpu().numpy(), rows)
