"""Measures how far histories have drifted from what the model would compute from the features now.

For a keyed sample of nodes each layer is computed anew, from the features where the nodes' neighborhood is small enough
(`FIELD_EDGES`), else from histories as many layers below, and compared with its history.

With dropout two computations differ even with one model. Pushed rows were drawn with dropout, so the layer is computed anew
with dropout too, a few times. With h = m + d the history and a = n + e, b = n + f two draws, where m and n are the models'
means, E|h - a|^2 = |m - n|^2 + Var d + Var e, of which |m - n|^2 is due to the model's change. Var e is half of E|a - b|^2;
dropout multiplies rows, so Var d is taken to be the same share of |h|^2 as Var e is of |a|^2. The sample has a few hundred
nodes; what chance contributes is estimated with each draw in the history's place. Without dropout nothing is subtracted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ooc.graph.blocks import Block, Subgraph, blocks_of
from ooc.history.history import History
from ooc.history.int8_rows import numbers_of
from ooc.loading.collate import block_of, edge_index_of
from ooc.models.layers import as_input, autocast, run_layers
from ooc.runtime.keyed_random import KeyedPermutation, mix
from ooc.runtime.transfer import HostCopy, placed
from ooc.sampling import NeighborSampler
from ooc.stores.arrays.rows import Ids, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph

DRIFT_NODES = 256
"""most nodes that the drift is measured on"""
TOGETHER = 32
"""of them in memory at once with their neighbors, or half as many if those do not fit"""
FIELD_EDGES = 2**12, 2**14
"""least and most edges over which a layer is computed anew, an eighth of the graph's within that; at least one hop is taken. It
depends on the graph alone, because a refresh may depend on the drift"""
DRIFT_TOLERANCE = 0.1
"""relative error at which `--refresh auto` refreshes, by default"""
_DRAWS = 3
_CHANCE = 2.5
"""standard errors that chance is allowed: a model has a dozen layers, and runs for hundreds of epochs"""


@dataclass(frozen=True)
class LayerDrift:
    """What was measured of each inner layer, relative to the norm of the rows computed anew."""

    error: list[float]
    """of the histories: the root of E|h - a|^2"""
    noise: list[float]
    """of what dropout draws, within that: the root of Var d + Var e; 0 without dropout"""
    chance: list[float]
    """drift that may be measured where there is none; 0 without dropout"""

    @property
    def drift(self) -> list[float]:
        """The error that noise does not explain."""
        return [max(0.0, error**2 - noise**2) ** 0.5 for error, noise in zip(self.error, self.noise, strict=True)]

    def passes(self, tolerance: float | None) -> bool:
        """Whether a layer has drifted further than allowed (by default DRIFT_TOLERANCE), and not by chance alone."""
        allowed = DRIFT_TOLERANCE if tolerance is None else tolerance
        return any(drift**2 > allowed**2 + chance**2 for drift, chance in zip(self.drift, self.chance, strict=True))

    def asdict(self) -> dict[str, list[float]]:
        return {"drift": self.drift, "drift_error": self.error, "drift_noise": self.noise, "drift_chance": self.chance}


class SquaredNorms(NamedTuple):
    """Sums over nodes, averages over draws a, b, ...: of squared norms, and what chance is estimated from.

    A node's drift with draw c for its history is share * (|c|^2 + (|a|^2 + |b|^2) / 2) - y, where y = c(a + b). That is
    share * z - (1 - share) * y, where z = (|c - a|^2 + |c - b|^2) / 2, which is exactly 0 without dropout.
    """

    error: float
    """|h - a|^2"""
    apart: float
    """|a - b|^2"""
    size: float
    """|a|^2"""
    stored: float
    """|h|^2"""
    zz: float
    zy: float
    yy: float

    @classmethod
    def of(cls, history: Tensor, draws: Sequence[Tensor]) -> "SquaredNorms":
        """history, draws: float64[nodes, width]."""
        a, b, c = draws
        own = torch.stack([draw.square().sum(1) for draw in draws])
        both = torch.stack([(b * c).sum(1), (a * c).sum(1), (a * b).sum(1)])
        apart = torch.stack([(b - c).square().sum(1), (a - c).square().sum(1), (a - b).square().sum(1)])
        y, z = both.sum(0) - both, (apart.sum(0) - apart) / 2
        error = torch.stack([(draw - history).square().sum(1) for draw in draws])
        means = (error.sum() / 3, apart.sum() / 3, own.sum() / 3, history.square().sum())
        return cls(*map(float, (*means, *((each / 3).sum() for each in (z * z, z * y, y * y)))))

    def squares(self) -> tuple[float, float, float]:
        """Of error, noise and chance, relative to the rows."""
        size = max(self.size, 1e-24)
        drawn = min(1.0, self.apart / (2 * size))  # Var e / |a|^2
        share = 1 - drawn  # |n|^2 / |a|^2
        variance = max(0.0, share**2 * self.zz - 2 * share * drawn * self.zy + drawn**2 * self.yy)
        return self.error / size, self.apart * (1 + self.stored / size) / (2 * size), _CHANCE * variance**0.5 / size


@dataclass(frozen=True)
class Drift:
    """Measures the drift of histories; `precision` is that of autocast, as in training."""

    model: nn.Module
    ds: Dataset
    history: History
    device: torch.device
    precision: str

    def measure(self, key: int, max_bytes: int) -> LayerDrift:
        """The error of each inner layer over a sample of nodes, and dropout's part of it (see above).

        `key` determines the sample and the draws, which are others if the memory is so small that fewer nodes are computed
        together. Raises BudgetError if the neighbors of one sampled node do not fit `max_bytes`.
        """
        layers = len(self.history.rows)
        sums = np.zeros((layers, len(SquaredNorms._fields)))
        row_bytes = drift_row_bytes(self.ds.num_features, [rows.shape[1] for rows in self.history.rows])
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _drawing(self.model), autocast(self.device, self.precision):
            for field in drift_sample(self.ds.graph, key, layers, max_bytes, row_bytes):
                sums += self._sums(field, key)
        squares = np.array([SquaredNorms(*layer).squares() for layer in sums.tolist()])
        return LayerDrift(*np.sqrt(np.maximum(squares, 0.0)).T.tolist())

    def _sums(self, field: Subgraph, key: int) -> NDArray[np.float64]:
        """The `SquaredNorms` of the field's seeds, float64[layers, 7]."""
        seeds = field.node[: field.num_nodes[0]]
        first = placed(block_of(self.ds.graph, field, torch.from_numpy(edge_index_of(field))), self.device)
        blocks = blocks_of(first, field.num_nodes, field.num_edges)
        x = placed(self._read(self.ds.rows("x"), field.node), self.device)
        found: list[SquaredNorms] = []
        for start in range(len(self.history.rows) - len(blocks) + 1):
            below = placed(self._read(self.history.rows[start - 1], field.node), self.device).float() if start else None
            draws = []
            for number in range(_DRAWS):
                torch.manual_seed(mix(key ^ mix(mix(int(seeds[0])) ^ (_DRAWS * start + number))) >> 1)
                draws.append(self._anew(blocks, x, start, below))
            for layer in range(len(found), start + len(blocks)):
                drawn = [draw[layer - start] for draw in draws]
                found.append(SquaredNorms.of(self._read(self.history.rows[layer], seeds).double(), drawn))
        return np.array(found)

    def _anew(self, blocks: list[Block], x: Tensor, start: int, below: Tensor | None) -> list[Tensor]:
        """The seeds' rows of the layers from `start` on, float64[seeds, width] for each block, from the features or from the
        history `below` of the layer before."""
        layers: Any = self.model.layers
        encoder: Any = getattr(self.model, "encoder", None)
        initial = as_input(x, layers[0]) if encoder is None else encoder(as_input(x, encoder))
        made: list[Tensor] = []

        def keep(_: int, out: Tensor) -> Tensor:
            made.append(out[: blocks[-1].num_dst].double())
            return out

        rows = initial if below is None else below
        keep(0, run_layers(layers[start : start + len(blocks)], rows, blocks, between=keep, initial=initial))
        return HostCopy(made).tensors()

    def _read(self, rows: Rows, ids: Ids) -> Tensor:
        stored = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
        self.history.counts.bytes_read += rows.read(ids, stored)
        return torch.from_numpy(numbers_of(stored) if rows in self.history.rows else stored)


@contextmanager
def _drawing(model: nn.Module) -> Iterator[None]:
    """The model in training mode, without gradients, except for its batch norms, whose running means are of batches, not of a
    few sampled rows. Restores the modes afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    for module, _ in before:
        if isinstance(module, _NormBase):
            module.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in before:
            module.training = training


def drift_row_bytes(features: int, widths: Sequence[int]) -> int:
    """Bytes of a node of a field: its features, its history in one layer, and the rows computed for it."""
    return 4 * (features + 2 * max(widths))


def drift_sample(graph: Graph, key: int, layers: int, max_bytes: int, row_bytes: int) -> Iterator[Subgraph]:
    """Yield fields of the nodes that the drift is measured on, a few at a time, with all in-edges of as many hops as there are
    layers, or as FIELD_EDGES allow for all fields. Raises as `Drift.measure`."""
    seeds = np.sort(KeyedPermutation(graph.num_nodes, key)[: min(DRIFT_NODES, graph.num_nodes)])
    groups = [seeds[first : first + TOGETHER] for first in range(0, len(seeds), TOGETHER)]
    depth = min(_depth(graph, layers, group, key) for group in groups)
    sampler = NeighborSampler(graph, [-1] * depth, max_bytes=max_bytes, row_bytes=row_bytes)
    for group in groups:
        yield from _fields(sampler, group, key)


def _fields(sampler: NeighborSampler, seeds: Ids, key: int) -> Iterator[Subgraph]:
    """Yield the field of `seeds`, or those of their halves if it does not fit the memory."""
    try:
        field = sampler.sample(seeds, key)
    except BudgetError:
        if len(seeds) == 1:
            raise
        half = len(seeds) // 2
        yield from _fields(sampler, seeds[:half], key)
        yield from _fields(sampler, seeds[half:], key)
    else:
        yield field


def _depth(graph: Graph, layers: int, seeds: Ids, key: int) -> int:
    """Hops that the field of `seeds` may have."""
    least, most = FIELD_EDGES
    most = min(most, max(least, graph.num_edges // 8))
    edges, depth = int(graph.degree(seeds).sum()), 1
    while depth < layers and edges <= most:  # so many fit any memory
        field = NeighborSampler(graph, [-1] * depth).sample(seeds, key)
        outermost = field.node[len(field.node) - field.num_nodes[-1] :]
        edges = len(field.source) + int(graph.degree(outermost).sum())
        depth += edges <= most
    return depth
