"""State of nodes between windows: read before a window and written after it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from ooc.history.rows import PrefetchedRows
from ooc.temporal.forecast_loader import Forecast
from ooc.temporal.window_net import WindowNet, WindowOutput
from stores.arrays.rows import AnyArray, Ids


class NodeState(Protocol):
    """Stores the rows; implemented by `ooc.history.history.History`."""

    def fetch(self, step: int, ids: Ids) -> PrefetchedRows:
        """Prefetch rows of nodes."""

    def pull(self, fetched: PrefetchedRows) -> tuple[AnyArray, ...]:
        """Return the rows as they are at the step's turn."""

    def push(self, step: int, ids: Ids, rows: Any) -> None:
        """Store a step's new rows."""


def carried(carrier: NodeState | None, forecast: Forecast) -> list[Tensor]:
    """Return the state of the forecast's nodes, [n, width] each, on the device of x; call once per step, in order."""
    if carrier is None or forecast.fetched is None:
        return []
    rows = carrier.pull(forecast.fetched)
    return [torch.from_numpy(each).float().to(forecast.x.device)[forecast.order] for each in rows]


def hand_on(carrier: NodeState | None, base: int, net: WindowNet, forecast: Forecast, outcome: WindowOutput) -> None:
    """Store the new state of the window's nodes and the model's weights, detached."""
    net.model.keep(outcome.weights)
    if carrier is not None:
        rows = [each.detach().float().cpu().numpy() for each in outcome.carried]
        carrier.push(base + forecast.step, forecast.node[: forecast.present].cpu().numpy(), rows)
