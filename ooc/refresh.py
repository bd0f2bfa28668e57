"""Refreshing histories by an exact sweep of all nodes, layer by layer, and how far they have drifted.

The sweep (`ooc.layerwise`) computes layer l of every node from the exact rows of layer l - 1; what it computes goes into the
histories too. Before it notes how far it came a checkpoint is taken, so a killed refresh goes on there. The drift is measured,
not bounded: for a keyed sample of nodes each layer is computed anew, from the features as far as their field is small enough
(`FIELD_EDGES`), else from histories as many layers below, and compared with the history they have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.batch import Subgraph, blocks_of
from ooc.collate import block_of, edge_index_of
from ooc.device import moved
from ooc.evaluate import autocast, evaluating
from ooc.history import History
from ooc.layers import as_input, run_layers
from ooc.layerwise import LayerSweep
from ooc.order import KeyedPermutation
from ooc.sampling import NeighborSampler
from stores.dataset import Dataset
from stores.graph import Graph
from stores.rows import Ids, Rows

DRIFT_NODES = 256
"""nodes that the drift is measured on, at most"""
_TOGETHER = 32
"""of them whose neighbors are in memory at once"""
FIELD_EDGES = 2**12, 2**14
"""Edges around those that a layer is computed anew over: an eighth of the graph's, but no fewer and no more than these. One hop
is taken in any case. It depends on the graph alone, for a refresh may depend on the drift"""
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


@dataclass(frozen=True)
class Drift:
    """Measures how far histories are from what the model would make of the features now.

    precision: of autocast, as in training.

    >>> Drift(model, ds, history, torch.device("cpu"), "fp32").measure(key, max_bytes=2**30)
    [0.0213, 0.0388]
    """

    model: nn.Module
    ds: Dataset
    history: History
    device: torch.device
    precision: str

    def measure(self, key: int, max_bytes: int) -> list[float]:
        """For each inner layer, |history - the layer computed anew| / |the layer computed anew| over a sample of nodes.

        key: of the sample. Dropout counts too: a push is what training computed. Raises BudgetError where the neighbors of a
        few nodes of it do not fit `max_bytes`.
        """
        layers = len(self.history.rows)
        squares = np.zeros((layers, 2))
        row_bytes = 4 * (self.ds.num_features + max(rows.shape[1] for rows in self.history.rows))
        with evaluating(self.model), autocast(self.device, self.precision):
            for field in drift_sample(self.ds.graph, key, layers, max_bytes, row_bytes):
                squares += self._squares(field)
        distance, size = np.sqrt(squares).T
        return (distance / np.maximum(size, 1e-12)).tolist()

    def _squares(self, field: Subgraph) -> NDArray[np.float64]:
        """float64[layers, 2]: the squared norms of the error, and of the rows computed anew, over the field's seeds."""
        seeds = field.node[: field.num_nodes[0]]
        found = np.empty((len(self.history.rows), 2))
        for layer, (rows, anew) in enumerate(zip(self.history.rows, self._anew(field), strict=True)):
            difference = anew - self._read(rows, seeds).double()
            found[layer] = float(difference.square().sum()), float(anew.square().sum())
        return found

    def _anew(self, field: Subgraph) -> list[Tensor]:
        """float64[seeds, width] of each layer: from the features up to the field's depth, beyond it from the histories of as
        many layers below."""
        graph, model = self.ds.graph, self.model
        layers: Any = model.layers
        encoder: Any = getattr(model, "encoder", None)
        first = moved(block_of(graph, field, torch.from_numpy(edge_index_of(field))), self.device)
        blocks = blocks_of(first, field.num_nodes, field.num_edges)
        x = self._read(self.ds.rows("x"), field.node).to(self.device)
        initial = as_input(x, layers[0]) if encoder is None else encoder(as_input(x, encoder))
        anew: list[Tensor] = []
        for start in range(len(self.history.rows) - len(blocks) + 1):
            rows = initial if start == 0 else self._read(self.history.rows[start - 1], field.node).to(self.device).float()
            made: list[Tensor] = []

            def keep(_: int, out: Tensor, made: list[Tensor] = made) -> Tensor:
                made.append(out)
                return out

            made.append(run_layers(layers[start : start + len(blocks)], rows, blocks, between=keep, initial=initial))
            anew += made[len(anew) - start :]
        return [out[: field.num_nodes[0]].cpu().double() for out in anew]

    def _read(self, rows: Rows, ids: Ids) -> Tensor:
        held = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
        self.history.counts.bytes_read += rows.read(ids, held)
        return torch.from_numpy(held)


def drift_sample(graph: Graph, key: int, layers: int, max_bytes: int, row_bytes: int) -> Iterator[Subgraph]:
    """The nodes that the drift is measured on, a few at a time, with all in-edges of all hops: of as many as there are layers
    to compute anew, or as deep as FIELD_EDGES allow for each, which the graph alone decides. Raises as `Drift.measure`."""
    seeds = np.sort(KeyedPermutation(graph.num_nodes, key)[: min(DRIFT_NODES, graph.num_nodes)])
    groups = [seeds[first : first + _TOGETHER] for first in range(0, len(seeds), _TOGETHER)]
    samplers = [NeighborSampler(graph, [-1] * hops, max_bytes=max_bytes, row_bytes=row_bytes) for hops in range(1, layers + 1)]
    depth = min(_depth(graph, samplers, group, key) for group in groups)
    for group in groups:
        yield samplers[depth - 1].sample(group, key)


def _depth(graph: Graph, samplers: Sequence[NeighborSampler], seeds: Ids, key: int) -> int:
    """Hops that the field of `seeds` may have; samplers: of one hop, of two, ..."""
    least, most = FIELD_EDGES
    for depth, sampler in enumerate(samplers[:-1], 1):
        field = sampler.sample(seeds, key)
        outermost = field.node[len(field.node) - field.num_nodes[-1] :]
        if len(field.source) + int(graph.degree(outermost).sum()) > min(most, max(least, graph.num_edges // 8)):
            return depth
    return len(samplers)


def passes(found: Sequence[float], tolerance: float | None) -> bool:
    """Whether a layer has drifted further than allowed (by default DRIFT_TOLERANCE)."""
    return max(found, default=0.0) > (DRIFT_TOLERANCE if tolerance is None else tolerance)
