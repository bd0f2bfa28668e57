"""What nodes carry from window to window: taken from disk before a window, handed on behind it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from ooc.history.rows import PrefetchedRows
from ooc.temporal.forecast_loader import Forecast
from ooc.temporal.window_net import WindowNet, WindowOutput
from stores.arrays.rows import AnyArray, Ids


class NodeState(Protocol):
    """Keeps the rows: `ooc.history.history.History` on disk."""

    def fetch(self, step: int, ids: Ids) -> PrefetchedRows:
        """Rows of nodes, read ahead."""

    def pull(self, fetched: PrefetchedRows) -> tuple[AnyArray, ...]:
        """The same as they are when it is the step's turn."""

    def push(self, step: int, ids: Ids, rows: Any) -> None:
        """What a step's nodes carry from now on."""


def carried(carrier: NodeState | None, forecast: Forecast) -> list[Tensor]:
    """[n, width] each: what the forecast's nodes carry, on the device of its rows. Once a step, in order."""
    if carrier is None or forecast.fetched is None:
        return []
    rows = carrier.pull(forecast.fetched)
    return [torch.from_numpy(each).float().to(forecast.x.device)[forecast.order] for each in rows]


def hand_on(carrier: NodeState | None, base: int, net: WindowNet, forecast: Forecast, outcome: WindowOutput) -> None:
    """The window's nodes carry on what it gave, and the model its weights; backward ends here."""
    net.model.keep(outcome.weights)
    if carrier is not None:
        rows = [each.detach().float().cpu().numpy() for each in outcome.carried]
        carrier.push(base + forecast.step, forecast.node[: forecast.present].cpu().numpy(), rows)
