"""Refreshing histories by an exact sweep of all nodes, layer by layer, and how far they have drifted.

The sweep (`ooc.layerwise`) computes layer l of every node from the exact rows of layer l - 1; what it computes goes into the
histories too. Before it notes how far it came a checkpoint is taken, so a killed refresh goes on there. The drift is measured,
not bounded: for a keyed sample of nodes each layer is computed anew from the histories of all their neighbors and compared with
the history they have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.batch import Block, Subgraph
from ooc.collate import block_of, edge_index_of
from ooc.device import moved
from ooc.evaluate import autocast, evaluating
from ooc.history import History
from ooc.layers import as_input
from ooc.layerwise import LayerSweep
from ooc.order import KeyedPermutation
from ooc.sampling import NeighborSampler
from stores.dataset import Dataset
from stores.graph import Graph
from stores.rows import Ids

DRIFT_NODES = 256
"""nodes that the drift is measured on, at most"""
_TOGETHER = 32
"""of them whose neighbors are in memory at once"""
DRIFT_TOLERANCE = 0.1
"""relative error at which `--refresh auto` refreshes, by default"""
STAMP_ROWS = 2**20


@dataclass
class Refresh:
    """A refresh under way: what a checkpoint keeps of it; where its sweep stands, the sweep's folder knows."""

    notes: int = 0
    """of progress so far"""
    drift: list[float] | None = None
    """what was measured before it"""


@dataclass
class Refresher:
    """Shown what a sweep computes (see `ooc.sweepstages.Tap`), overwrites the histories by it.

    commit: takes a checkpoint; before the sweep notes its progress, so that what it will not compute again is not undone.
    """

    history: History
    at: Refresh
    commit: Callable[[], None]

    def rows(self, layer: int, first: int, values: NDArray[np.float32]) -> None:
        """Overwrite rows first, first + 1, ... of a layer."""
        self.history.overwrite(layer, np.arange(first, first + len(values)), values)

    def note(self) -> None:
        """Make what was overwritten final."""
        self.at.notes += 1
        self.commit()


def refresh(model: nn.Module, ds: Dataset, folder: Path, refresher: Refresher, engine: str) -> None:
    """Overwrite all histories by exact rows, beginning where a killed refresh by the same parameters came to.

    folder: of the sweep, removed when it is through. Raises as `LayerSweep` does.
    """
    history = refresher.history
    history.begin_refresh()
    sweep = LayerSweep(model, ds, folder, upto=len(history.rows), engine=engine, tap=refresher)
    try:
        sweep.run()
    finally:
        sweep.close()
        history.counts.bytes_read += sweep.spent.read
        history.counts.bytes_written += sweep.spent.written
    sweep.discard()
    for first in range(0, history.steps.shape[0], STAMP_ROWS):
        history.stamp(np.arange(first, min(first + STAMP_ROWS, history.steps.shape[0])))
    history.end_refresh()


class Layerwise:
    """The layers of `model`, one at a time, over rows of `history` (and of the features for the first).

    >>> with evaluating(model):
    ...     out = Layerwise(model, history, device, "fp32").run(1, x, n_id, block)
    """

    def __init__(self, model: nn.Module, history: History, device: torch.device, precision: str) -> None:
        self.layers: Any = model.layers
        self.encoder: Any = getattr(model, "encoder", None)
        self._history, self.device, self._precision = history, device, precision

    def run(self, layer: int, x: Tensor, n_id: Ids, block: Block) -> Tensor:
        """[num_dst, width]: the layer's rows of the block's destinations; x: [num_src, f]."""
        module = self.layers[layer]
        with autocast(self.device, self._precision):
            first = self._encoded(x[: block.num_dst] if layer else x, module)
            if layer == 0:
                rows = first
            else:
                stored = self._history.rows[layer - 1]
                held = np.empty((len(n_id), *stored.shape[1:]), stored.dtype)
                self._history.counts.bytes_read += stored.read(n_id, held)
                rows = as_input(torch.from_numpy(held).to(self.device).float(), module)
            extra = (first[: block.num_dst],) if getattr(module, "needs_initial", False) else ()
            out: Tensor = module(rows, block, *extra)
        return out.float()

    def _encoded(self, x: Tensor, module: nn.Module) -> Tensor:
        parts = [part for part in (self.encoder, module) if part is not None]
        x = as_input(x, *parts)
        return x if self.encoder is None else self.encoder(x)


def drift(model: nn.Module, layerwise: Layerwise, ds: Dataset, history: History, key: int, max_bytes: int) -> list[float]:
    """For each inner layer, |history - the layer computed anew| / |the layer computed anew| over a sample of nodes.

    key: of the sample. Dropout counts too: a push is what training computed. Raises BudgetError where the neighbors of a few
    nodes of it do not fit `max_bytes`.
    """
    squares = np.zeros((len(history.rows), 2))
    row_bytes = 4 * (ds.num_features + max(rows.shape[1] for rows in history.rows))
    with evaluating(model):
        for subgraph in drift_sample(ds.graph, key, max_bytes, row_bytes):
            squares += _squares(layerwise, ds, history, subgraph)
    distance, size = np.sqrt(squares).T
    return (distance / np.maximum(size, 1e-12)).tolist()


def drift_sample(graph: Graph, key: int, max_bytes: int, row_bytes: int) -> Iterator[Subgraph]:
    """The nodes that the drift is measured on, a few at a time, with all their in-edges. Raises as `drift`."""
    seeds = np.sort(KeyedPermutation(graph.num_nodes, key)[: min(DRIFT_NODES, graph.num_nodes)])
    sampler = NeighborSampler(graph, [-1], max_bytes=max_bytes, row_bytes=row_bytes)
    for first in range(0, len(seeds), _TOGETHER):
        yield sampler.sample(seeds[first : first + _TOGETHER], key)


def _squares(layerwise: Layerwise, ds: Dataset, history: History, subgraph: Subgraph) -> NDArray[np.float64]:
    """float64[layers, 2]: the squared norms of the error, and of the rows computed anew, over the subgraph's seeds."""
    seeds = subgraph.node[: subgraph.num_nodes[0]]
    block = moved(block_of(ds.graph, subgraph, torch.from_numpy(edge_index_of(subgraph))), layerwise.device)
    held = np.empty((len(subgraph.node), ds.num_features), ds.rows("x").dtype)
    history.counts.bytes_read += ds.rows("x").read(subgraph.node, held)
    x = torch.from_numpy(held).to(layerwise.device)
    found = np.empty((len(history.rows), 2))
    for layer, rows in enumerate(history.rows):
        anew = layerwise.run(layer, x, subgraph.node, block).cpu().double()
        kept = np.empty((len(seeds), *rows.shape[1:]), rows.dtype)
        history.counts.bytes_read += rows.read(seeds, kept)
        difference = anew - torch.from_numpy(kept).double()
        found[layer] = float(difference.square().sum()), float(anew.square().sum())
    return found


def passes(found: Sequence[float], tolerance: float | None) -> bool:
    """Whether a layer has drifted further than allowed (by default DRIFT_TOLERANCE)."""
    return max(found, default=0.0) > (DRIFT_TOLERANCE if tolerance is None else tolerance)
