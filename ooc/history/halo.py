"""Training on a batch of parts and its one-hop halo, whose inner rows come from histories (GNNAutoScale, Fey et al., 2021).

Every layer runs on the same block, all in-edges of the batch's own nodes. Between two layers the own rows are pushed to the
history and the halo's are pulled from it, so a step costs a layer's halo, however deep the model is.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from ooc.models.recomputation import Given
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
    parts = getattr(model, "encoder", None), list(layers), None
    with evaluating(model):
        return probe_widths(parts, in_channels, weighted)[1:-1]


class Turns(NamedTuple):
    """The batches of a step of which a rank has several. batches: None where another rank has the last one; total: of all
    ranks."""

    batches: Iterator[Any]
    total: int


class HaloLoader(PartLoader):
    """`PartLoader` with the halo, whose histories are read ahead: `batch.halo` is the argument of `History.pull`.

    `history` is set before the first batch; None gives zeros in place of histories. together: batches that see the same
    histories, those of an optimizer step. a_step: batches of a step, which the ranks have in turn: of K `ranks` rank r has
    batches r, r + K, r + 2K, ... of one process, or none if there are more ranks than batches.
    """

    history: History | None = None

    def __init__(self, *given: Any, together: int = 1, a_step: int = 1, ranks: Ranks = ALONE, **options: Any) -> None:
        super().__init__(*given, **options)
        self._together, self._a_step, self._ranks = together, a_step, ranks
        self._every = min(a_step, ranks.world_size)

    @property
    def steps(self) -> int:
        """Of an epoch, the same on all ranks, and in any number of them."""
        return -(-len(self) // self._a_step)

    @property
    def optimizer_steps(self) -> int:
        """Of an epoch."""
        return -(-len(self) // self._together)

    def shared(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """What this rank has of steps `step` to `stop` of an epoch: a batch or None, or `Turns`."""
        if self._a_step == 1 and self._ranks.alone:
            self.load_state_dict({"epoch": epoch, "step": step})
            self.stop_before(stop)
            return iter(self)
        return self._own(epoch, step, stop)

    def _own(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        rank, every, a_step = self._ranks.rank, self._every, self._a_step
        numbers = range(step * a_step + rank, min(stop * a_step, len(self)), every) if rank < every else range(0)
        if numbers:
            self.load_state_dict({"epoch": epoch, "step": numbers[0]})
            self.stop_before(numbers[-1] + 1)
        with ExitStack() as opened:
            batches = opened.enter_context(closing(iter(self))) if numbers else iter(())
            for each in range(step, stop):
                first, last = each * a_step, min((each + 1) * a_step, len(self))
                own = [turn + rank in numbers and turn + rank < last for turn in range(first, last, every)]
                turns = _taken(batches, own)
                yield next(turns) if every == a_step else Turns(turns, last - first)

    @property
    def kept_bytes(self) -> int:
        """Limit on the bytes of hot rows, and on those of pushes that wait, each."""
        return self.budget.history

    def _pipeline(self, cursors: Iterator[Cursor], clocks: dict[str, Clock]) -> Pipeline:
        first = self._cursor.epoch * self.optimizer_steps
        self.then = Stage("pull", partial(_fetched, self.history, first, self._together))
        return super()._pipeline(cursors, clocks)


def _taken(batches: Iterator[Any], own: Sequence[bool]) -> Iterator[Any]:
    """The next batch for each True, None for each False."""
    for has in own:
        yield next(batches) if has else None


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
    all ranks, whose rows `push` pushes; alone: whether there is one rank."""

    widths: Sequence[int]
    history: History | None
    together: int = 1
    alone: bool = True
    pending: list[tuple[Ids, Any]] = field(default_factory=list)
    """the rows of this optimizer step's batches: (own nodes, a list of every layer's rows or what gives it)"""
    met: int = 0
    """rows that the layers after the first met, a node's of all layers counting once"""
    drift_reported: bool = False
    """whether it was reported that the drift is not measured"""

    def forward(self, model: nn.Module, batch: Any, checkpoint: Given) -> Tensor:
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
            if self._at_the_end:
                self.pending.append((batch.own, rows))
            else:
                self.history.push(batch.step, batch.own, rows)
        return logits

    @property
    def _at_the_end(self) -> bool:
        """Whether rows wait for the end of their optimizer step, as batches that come next must not see them."""
        return self.together > 1 or not self.alone

    def push(self) -> None:
        """Push what the batches of an optimizer step have computed; of several ranks together, maybe nothing."""
        if self.history is None or not self._at_the_end:
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
