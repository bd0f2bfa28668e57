"""Training on a batch of parts and its one-hop halo, whose inner rows come from histories (GNNAutoScale, Fey et al., 2021).

Every layer runs on the same block, all in-edges of the batch's own nodes. Between two layers the own rows are pushed to the
history and the halo's are pulled from it, so a step costs a layer's halo, however deep the model is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.history.grown import Growth, open_history
from ooc.history.history import History
from ooc.history.rows import HistoryCounts, PrefetchedRows
from ooc.layerwise.shape import probe_widths
from ooc.loading.part_loader import PartLoader
from ooc.models.contexts import evaluating
from ooc.models.layers import run_model
from ooc.models.user_models import kind_of
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.pipeline import CONSUMER, Pipeline, Stage
from stores.arrays.rows import Ids
from stores.errors import ConfigError, StoreError

FOLDER = "history"
AHEAD = 2
"""Batches whose halo is read before the model asks for them, the one it is at included"""


def widths_of(model: nn.Module, in_channels: int, weighted: bool) -> list[int]:
    """Widths of the rows between two layers.

    Raises ConfigError for a model whose forward is its own: nothing can act between its layers.

    >>> widths_of(build_model("sage", 128, 256, 32, num_layers=3), 128, weighted=False)
    [256, 256]
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or (kind_of(model) != "layers" and not hasattr(model, "encoder")):
        raise ConfigError(
            f"histories act between layers, and {type(model).__name__} has its own forward: "
            "give it a ModuleList `layers` and no forward, or take another --mode"
        )
    parts = getattr(model, "encoder", None), list(layers), getattr(model, "decoder", None)
    with evaluating(model):
        return probe_widths(parts, in_channels, weighted)[1:-1]


class HaloLoader(PartLoader):
    """`PartLoader` with the halo, whose histories are read ahead: `batch.halo` is what `History.pull` takes.

    history: set before the first batch; None gives zeros in place of histories.
    """

    history: History | None = None

    @property
    def kept_bytes(self) -> int:
        """Room for hot rows, and as much for pushes that wait."""
        return self.budget.history

    def _pipeline(self, cursors: Iterator[Cursor], clocks: dict[str, Clock]) -> Pipeline:
        inner = {name: clock for name, clock in clocks.items() if name not in (CONSUMER, "pull")}
        batches = super()._pipeline(cursors, inner)
        clocks |= {name: clock for name, clock in inner.items() if name != CONSUMER}
        own = {name: clocks.setdefault(name, Clock()) for name in ("pull", CONSUMER)}
        pull = partial(_fetched, self.history, self._cursor.epoch * len(self))
        return Pipeline(batches, [Stage("pull", pull)], max_bytes=1, max_items=AHEAD, clocks=own, before=batches)


def _fetched(history: History | None, first: int, item: tuple[int, Any]) -> tuple[int, Any]:
    """The batch with its halo's histories; first: the number of the epoch's first step."""
    done, batch = item
    step = first + done - 1
    batch.step = step
    batch.halo = None if history is None else history.fetch(step, batch.n_id[batch.batch_size :].numpy())
    return item


@dataclass
class Halo:
    """What the mode adds to a run: histories, or zeros in their place, and what is known of them."""

    widths: Sequence[int]
    history: History | None
    parts: Ids
    met: int = 0
    """rows that the layers after the first met, a node's of all layers counting once"""
    drift_reported: bool = False
    """whether it was reported that the drift is not measured"""

    def forward(self, model: nn.Module, batch: Any, checkpoint: bool) -> Tensor:
        """The model's rows for the batch's own nodes; what they passed between the layers is pushed."""
        pulled = self._pulled(batch)
        own: list[Tensor] = []

        def between(layer: int, out: Tensor) -> Tensor:
            own.append(out.detach())
            return torch.cat([out, pulled[layer].to(out.device, out.dtype)])

        blocks: list[Block] = batch.blocks
        logits: Tensor = run_model(model, batch.x, blocks, checkpoint, between)
        self.met += len(batch.n_id)
        if self.history is not None:
            ids = batch.n_id[: batch.batch_size].cpu().numpy()
            self.history.push(batch.step, ids, [rows.float().cpu().numpy() for rows in own])
        return logits

    def _pulled(self, batch: Any) -> list[Tensor]:
        if self.history is None:
            outside = len(batch.n_id) - batch.batch_size
            return [torch.zeros(1, 1).expand(outside, width) for width in self.widths]
        fetched: PrefetchedRows = batch.halo
        return [torch.from_numpy(rows) for rows in self.history.pull(fetched)]

    def begin_epoch(self) -> None:
        """Before its first batch."""
        if self.history is not None:
            self.history.begin_epoch()

    def make_room(self) -> None:
        """Before a layer-wise pass: see `History.make_room`."""
        if self.history is not None:
            self.history.make_room()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {} if self.history is None else self.history.state()

    def commit(self) -> None:
        """The checkpoint is saved."""
        if self.history is not None:
            self.history.commit()

    def spent(self) -> dict[str, int]:
        """Rows and bytes for the run's account (see `ooc.training.summary`)."""
        counts = asdict(
            HistoryCounts() if self.history is None else replace(self.history.counts, bytes_logged=self.history.log.total)
        )
        return {"history_met": self.met, **{f"history_{name}": value for name, value in counts.items()}}

    def close(self) -> None:
        """End what is written in the background."""
        if self.history is not None:
            self.history.close()


def open_halo(
    out: Path,
    loader: HaloLoader,
    widths: Sequence[int],
    state: dict[str, Any] | None,
    growth: Growth | None,
    *,
    dtype: str,
    lag: int,
    engine: str,
    zero: bool,
) -> Halo:
    """The histories of the run in `out`, anew or as they were at the checkpoint `state`; `loader` reads them ahead.

    growth: of the store since the checkpoint, if any.
    """
    if not zero and widths:
        settings: dict[str, Any] = {"lag": lag, "max_bytes": loader.kept_bytes, "engine": engine}
        if state is None:
            loader.history = History.create(out / FOLDER, loader.data.num_nodes, widths, dtype, **settings)
        elif growth is not None:
            found = open_history(out / FOLDER, loader.data.num_nodes, widths, dtype, state, len(loader), growth, **settings)
            loader.history = found
        else:
            if not (out / FOLDER).is_dir():
                raise StoreError(
                    f"{out / FOLDER} is missing: without its histories the run cannot go on; put the folder back, or start "
                    "another run with another --out"
                )
            loader.history = History.open(out / FOLDER, len(widths), state, **settings)
    return Halo(widths, loader.history, loader.parts)
