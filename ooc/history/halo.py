"""Training on a batch of parts and its one-hop halo, whose inner rows come from histories (GNNAutoScale, Fey et al., 2021).

Every layer runs on the same block, all in-edges of the batch's own nodes. Between two layers the own rows are pushed to the
history and the halo's are pulled from it, so a step costs a layer's halo, however deep the model is.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.history.history import Growth, History, open_history
from ooc.history.rows import HistoryCounts, merged
from ooc.history.shares import ranks_of
from ooc.layerwise.shape import probe_widths
from ooc.loading.subgraph_loaders import PartLoader
from ooc.models.layers import evaluating, run_model
from ooc.models.user_models import kind_of, refuse_edge_attr
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.runtime.ranks import ALONE, Ranks
from ooc.runtime.transfer import HostCopy, to_device
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import ConfigError, StoreError

FOLDER = "history"


def widths_of(model: nn.Module, in_channels: int, weighted: bool) -> list[int]:
    """Widths of the rows between two layers.

    Raises ConfigError for a model whose forward is its own, since nothing can act between its layers, and for one that takes
    edge features.
    """
    refuse_edge_attr(model)
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or (kind_of(model) != "layers" and not hasattr(model, "encoder")):
        raise ConfigError(
            f"histories act between layers, and {type(model).__name__} has its own forward: "
            "give it a ModuleList `self.layers` and no forward, or take another `mode`"
        )
    parts = getattr(model, "encoder", None), list(layers), getattr(model, "decoder", None)
    with evaluating(model):
        return probe_widths(parts, in_channels, weighted)[1:-1]


class HaloLoader(PartLoader):
    """`PartLoader` with the halo, whose histories are read ahead: `batch.halo` is the argument of `History.pull`.

    `history` is set before the first batch; None gives zeros in place of histories. together: batches that see the same
    histories, those of an optimizer step. Of K `ranks` rank r has batches r, r + K, r + 2K, ... of one process.
    """

    history: History | None = None

    def __init__(self, *given: Any, together: int = 1, ranks: Ranks = ALONE, **options: Any) -> None:
        super().__init__(*given, **options)
        self._together, self._ranks, self._every = together, ranks, ranks.world_size

    @property
    def steps(self) -> int:
        """Of an epoch, the same on all ranks: in each one a rank has a batch, or none at the end."""
        return -(-len(self) // self._every)

    @property
    def optimizer_steps(self) -> int:
        """Of an epoch."""
        return -(-len(self) // self._together)

    def shared(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """The batches of steps `step` to `stop` of an epoch; None where this rank has none."""
        if self._ranks.alone:
            self.load_state_dict({"epoch": epoch, "step": step})
            self.stop_before(stop)
            return iter(self)
        own = range(step * self._every + self._ranks.rank, min(stop * self._every, len(self)), self._every)
        return self._own(epoch, own, stop - step - len(own))

    def _own(self, epoch: int, steps: range, without: int) -> Iterator[Any]:
        if steps:
            self.load_state_dict({"epoch": epoch, "step": steps[0]})
            self.stop_before(steps[-1] + 1)
            with closing(iter(self)) as batches:
                yield from batches
        for _ in range(without):
            yield None

    @property
    def kept_bytes(self) -> int:
        """Limit on the bytes of hot rows, and on those of pushes that wait, each."""
        return self.budget.history

    def _pipeline(self, cursors: Iterator[Cursor], clocks: dict[str, Clock]) -> Pipeline:
        first = self._cursor.epoch * self.optimizer_steps
        self.then = Stage("pull", partial(_fetched, self.history, first, self._together))
        return super()._pipeline(cursors, clocks)


def _fetched(history: History | None, first: int, together: int, item: tuple[int, Any]) -> tuple[int, Any]:
    """Add the halo's histories to the batch; first: number of the epoch's first optimizer step, of `together` batches."""
    done, batch = item
    step = first + (done - 1) // together
    batch.step, batch.number = step, done - 1
    if history is not None:
        own, outside = np.split(batch.n_id.numpy(), [batch.batch_size])
        batch.own, batch.halo = own.copy(), history.fetch(step, outside)  # the batch's arrays may be on the device by then
    return item


@dataclass
class Halo:
    """What the mode adds to a run: histories, or zeros in their place (None). together: batches of an optimizer step, those of
    all ranks, whose rows `push` pushes."""

    widths: Sequence[int]
    history: History | None
    together: int = 1
    pending: list[tuple[Ids, Any]] = field(default_factory=list)
    """the rows of this optimizer step's batches: (own nodes, a list of every layer's rows or what gives it)"""
    met: int = 0
    """rows that the layers after the first met, a node's of all layers counting once"""
    drift_reported: bool = False
    """whether it was reported that the drift is not measured"""

    def forward(self, model: nn.Module, batch: Any, checkpoint: bool) -> Tensor:
        """The model's rows for the batch's own nodes; their rows between the layers are pushed."""
        if self.history is None:
            outside = len(batch.n_id) - batch.batch_size
            pulled = [batch.x.new_zeros(1, 1).expand(outside, width) for width in self.widths]
        else:
            pulled = to_device([torch.from_numpy(rows) for rows in self.history.pull(batch.halo)], batch.n_id.device)
        own: list[Tensor] = []

        def between(layer: int, out: Tensor) -> Tensor:
            own.append(out.detach())
            return torch.cat([out, pulled[layer].to(out.dtype)])

        blocks: list[Block] = batch.blocks
        logits: Tensor = run_model(model, batch.x, blocks, checkpoint, between)
        self.met += len(batch.n_id)
        if self.history is not None:
            rows = HostCopy([rows.float() for rows in own]).now_or_later(list)
            if self.together > 1:
                self.pending.append((batch.own, rows))
            else:
                self.history.push(batch.step, batch.own, rows)
        return logits

    def push(self) -> None:
        """Push what the batches of an optimizer step have computed; of several ranks together, maybe nothing."""
        if self.history is None or self.together == 1:
            return
        given, self.pending = [(ids, rows() if callable(rows) else rows) for ids, rows in self.pending], []
        nothing = np.empty(0, np.int64), [np.empty((0, width), np.float32) for width in self.widths]
        self.history.push(self.history.next_step, *merged(given or [nothing]), batches=self.together)

    def spent(self) -> dict[str, int]:
        spent = HistoryCounts().asdict() if self.history is None else self.history.spent()
        return {"history_met": self.met, **spent}


def open_halo(
    path: Path, loader: HaloLoader, widths: Sequence[int], state: dict[str, Any] | None, growth: Growth | None, **settings: Any
) -> History:
    """The histories in `path`, new ones or as they were at the checkpoint `state`; `loader` reads them ahead.

    If the store has grown, touched nodes lose theirs. Steps are numbered by the batches of an epoch, which may then be fewer:
    if the next step's number is less than it was, histories begin anew.
    """
    if state is not None and growth is not None:
        step = growth.epoch * loader.optimizer_steps
        state = None if step < int(state["step"]) else {**state, "step": step, "pending": []}
    if ranks_of(settings).first and state is not None and not path.is_dir():
        raise StoreError(
            f"{path} is missing: without its histories the run cannot go on; put the folder back, or start another run with "
            "another `out`"
        )
    settings["max_bytes"] = loader.kept_bytes
    history = open_history(path, loader.data.num_nodes, widths, state=state, grown=growth is not None, **settings)
    if state is not None and growth is not None:
        history.forget_rows(growth.touched)
    loader.history = history
    return history
