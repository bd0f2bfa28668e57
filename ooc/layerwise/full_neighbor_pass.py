"""Exact outputs of models with their own forward, and of all models of heterogeneous graphs: batches of seeds with all in-edges
over as many hops as outputs depend on.

Nothing can act between the layers of such a model, so neighbors are computed again for every batch that has them: a pass costs
more than one layer by layer, and grows with the neighborhoods. (Full-neighbor inference as with PyG's NeighborLoader.)
"""

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.layerwise_pass import Progress, digest
from ooc.layerwise.node_ranges import even_ranges
from ooc.layerwise.pass_notes import start_of
from ooc.layerwise.row_files import Files, Kept
from ooc.layerwise.shape import device_of, has_layers, own_way, parts_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.ranks import WHOLE
from ooc.models.layers import evaluating
from ooc.models.receptive_field import hops_on
from ooc.models.user_models import edge_features_for, forward_batch, forward_layer
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.pipeline import Stage
from ooc.runtime.range_io import write_range
from ooc.runtime.ranks import ALONE, Ranks
from ooc.runtime.transfer import on_host
from ooc.stores.arrays.rows import Ids, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import removed_path
from ooc.stores.node_set import NodeSet

SEEDS = 4096
"""per batch; one that does not fit in memory is halved, and again"""
TABLE_COPIES = 3
"""of a batch's rows of a table: as read, one a node, and where the model computes"""
_PIECE_BYTES = 2**24
"""of a table that are in memory at once for its digest"""
_TRIED, _TOLERANCE = 64, 1e-4
"""nodes whose outputs are compared with those of one hop more; float32 in another order differs less than that"""
NOTE_SECONDS = 10.0
"""between notes of how far the pass has come, each of which waits for the disk"""


def full_hops(model: nn.Module, dataset: Dataset, num_layers: int | None) -> int:
    """Return over how many hops of full neighborhoods outputs depend on nodes.

    Args:
        model, dataset, num_layers: As of `FullNeighborPass`.

    Raises:
        ConfigError: If that is unknown.
    """
    if not dataset.is_hetero:
        return hops_on(model, dataset, num_layers)
    if has_layers(model):
        return len(parts_of(model)[1])
    if num_layers is None:
        raise ConfigError(f"{type(model).__name__} has its own forward: give num_layers, as many as it has layers")
    return num_layers


def with_table_rows(tables: Mapping[str, Rows], item: tuple[int, Any]) -> tuple[int, Any]:
    """Give a batch the rows of its nodes that have no features; a stage of a loader's pipeline.

    tables: as of `FullNeighborPass`; item: (steps done with the batch, the batch).
    """
    for name, rows in tables.items():
        ids, place = np.unique(item[1][name].n_id.numpy(), return_inverse=True)
        found = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
        rows.read(ids, found)
        item[1][name].x = torch.from_numpy(found[place])
    return item


class FullNeighborPass:
    """The outputs of all nodes, or of all of one type, by a model with its own forward or of several types; see `ExactPass`.

    Args:
        model: A module with forward(x, edge_index) or forward(x, blocks), or one that takes edge features; it computes in
            evaluation mode.
        dataset: The graph and its features.
        folder: Where rows and progress are kept. A killed pass goes on there.
        layer: Number of the layer whose rows are computed, from 1, of a model that is a list of layers; None for the outputs.
        num_layers: Of a forward(x, blocks), as many as it takes blocks. Of a heterogeneous graph and a model with its own
            forward, over how many hops its outputs depend on.
        node_type: Of a heterogeneous graph, the type whose outputs are computed.
        tables: Of a heterogeneous graph, node type without features -> the rows of its embedding table, float32 [N, width].
        engine: How rows are read and written.
        budget: A plan of the memory other than the data set's.
        ranks: Those that make the pass together, each for a range of the nodes, and call its methods together.

    Raises:
        ConfigError: If the store has no features, or outputs depend on all nodes, or on nodes further away than `num_layers`.

    >>> with closing(FullNeighborPass(model, ds, Path("pass"))) as whole:
    ...     rows = whole.run()  # Rows [N, C]
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        folder: Path,
        *,
        layer: int | None = None,
        num_layers: int | None = None,
        node_type: str | None = None,
        tables: Mapping[str, Rows] | None = None,
        engine: str = "auto",
        budget: MemoryPlan | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if not (dataset.is_hetero or dataset.num_features):
            raise ConfigError(f"{dataset.path} holds no features to compute on")
        self.model, self.dataset, self._folder = model, dataset, folder
        self._nodes: NodeSet = dataset.nodes() if node_type is None else dataset.nodes(node_type)
        self._tables, self._layer = dict(tables or {}), layer
        self._hops = full_hops(model, dataset, num_layers) if layer is None else layer
        self._loader = self._over(None, budget)
        if dataset.is_hetero and not has_layers(model):
            self._check_depth()
        self.columns = self._width()
        self._own = even_ranges(self._nodes.num_nodes, SEEDS, ranks.world_size)[ranks.rank]
        self.files = Files(folder, engine, ranks=ranks, own=self._own)
        self._ranks = ranks
        shutil.rmtree(removed_path(folder), ignore_errors=True)
        self.stats = IoStats()
        self._key = ""

    @property
    def method(self) -> str:
        """See `ExactPass`."""
        hops = f"{self._hops} hop{'s' * (self._hops != 1)}"
        how = f"computed on batches of full neighborhoods of {hops}"
        return how if self.dataset.is_hetero else f"{type(self.model).__name__} {own_way(self.model)}: {how}"

    def _width(self) -> int:
        """Numbers per row, as the first node's say."""
        first = self._over(np.zeros(1, np.int64), self._loader.budget)
        with evaluating(self.model), closing(iter(first)) as batches:
            return math.prod(self._outputs(next(batches)).shape[1:])

    def _check_depth(self) -> None:
        """Raise ConfigError if one hop more changes the outputs of some nodes."""
        some, found = np.arange(min(_TRIED, self._nodes.num_nodes)), list[torch.Tensor]()
        for more in range(2):
            with evaluating(self.model), closing(iter(self._over(some, self._loader.budget, more))) as batches:
                found.append(torch.cat([self._outputs(batch) for batch in batches]))
        own, further = found
        if not torch.allclose(own, further, rtol=_TOLERANCE, atol=_TOLERANCE * float(own.abs().max())):
            raise ConfigError(
                f"outputs of {type(self.model).__name__} depend on nodes more than {self._hops} hops away: train it with as "
                "many `layers` as it has, or give `num_layers`"
            )

    def _over(self, nodes: Ids | None, budget: MemoryPlan | None, more: int = 0) -> NeighborLoader:
        """Batches of nodes (None: all) with their full neighborhoods, of some hops more; those that do not fit in memory are
        halved."""
        fanout = [-1] * (self._hops + more)  # nothing is drawn; the seed spares torch's generator, which is the user's
        features = edge_features_for(self.model, self.dataset)
        given: dict[str, Any] = {"budget": budget, "edge_features": features, **WHOLE}
        if self._tables:
            given["beside"] = {name: TABLE_COPIES * rows.row_bytes for name, rows in self._tables.items()}
        wanted = (self._nodes.name, nodes) if self.dataset.is_hetero else nodes
        loader = NeighborLoader(self.dataset, fanout, wanted, SEEDS, seed=0, split_seeds=True, **given)
        if self._tables:
            loader.then = Stage("tables", partial(with_table_rows, self._tables))
        return loader

    def _seeds(self, batch: Any) -> int:
        """Number of a batch's seeds."""
        return int(batch[self._nodes.name].batch_size if self.dataset.is_hetero else batch.batch_size)

    def _outputs(self, batch: Any) -> torch.Tensor:
        batch = batch.to(device_of(self.model))
        out = forward_batch(self.model, batch) if self._layer is None else forward_layer(self.model, batch, self._layer)
        return out.float().cpu()

    def fingerprint(self) -> str:
        """A digest of the parameters, the data and the batches."""
        text = f"{self.dataset.fingerprint} full neighbors {self._hops} {SEEDS} {self.model}"
        if self.dataset.is_hetero:
            text += f" {self._nodes.name}"
        if self._layer is not None:
            text += f" layer {self._layer}"
        return digest(text, chain(on_host(sorted(self.model.state_dict().items())), self._table_rows()))

    def _table_rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All rows of the tables, a piece at a time."""
        for name, rows in self._tables.items():
            piece = max(1, _PIECE_BYTES // rows.row_bytes)
            for first in range(0, rows.shape[0], piece):
                ids = np.arange(first, min(first + piece, rows.shape[0]))
                found = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
                rows.read(ids, found)
                yield name, torch.from_numpy(found)

    def lock(self) -> None:
        """Have the folder for this process; StoreError if another has it."""
        self.files.lock()

    def was_begun(self) -> bool:
        """Whether the folder holds what an earlier process computed of this pass."""
        notes = self.files.progress()
        return bool(notes) and all(note.get("key") == self.fingerprint() for note in notes)

    def run(self, progress: Progress = lambda what, done, total: None) -> Rows:
        """Run, from where an earlier process was interrupted on; float32 Rows [N, columns], good until `close`."""
        self.files.lock()
        notes, key, (first, last) = self.files.progress(), self.fingerprint(), self._own
        start = first
        if notes and all(note.get("key") == key for note in notes):
            begun = start_of(notes, self._own)
            start = last if begun.op else begun.node  # all ranks were at their ends
        else:
            self.files.forget()
        self.stats.restart()
        out = {"out": (self._nodes.num_nodes, self.columns)}
        self.files.make(out)
        rows = self.files.rows("out", out["out"])
        if not self._ranks.alone:
            self.files.note({"key": key, "next": start}, [])
            self.files.take_over()
        noted = time.monotonic()
        for node in self._write_from(rows, start) if start < last else ():
            progress("full neighborhoods", node - first, last - first)
            if time.monotonic() - noted > NOTE_SECONDS or node == last:
                self.files.note({"key": key, "next": node}, [rows])
                noted = time.monotonic()
        self.stats.bytes_read = self._loader.bytes_read
        self._ranks.barrier()
        return rows

    def _write_from(self, rows: Kept, start: int) -> Iterator[int]:
        """Write the rows of this rank's nodes from `start` on, batch by batch; yields up to which node."""
        loader, node = self._loader, start - start % SEEDS
        loader.load_state_dict({"epoch": 0, "step": start // SEEDS})
        loader.stop_before(-(-self._own[1] // SEEDS))
        with evaluating(self.model), closing(iter(loader)) as batches:
            for batch in batches:
                seeds = self._seeds(batch)
                out = self._outputs(batch).reshape(seeds, -1)
                self.stats.bytes_written += write_range(rows, node, np.ascontiguousarray(out.numpy()))
                node += seeds
                yield node

    def close(self) -> None:
        """Close the rows; idempotent. What is on disk stays, so that a pass can go on."""
        self.files.close()

    def discard(self) -> None:
        """Close, and remove the folder."""
        try:
            self.files.discard()
        finally:
            self.close()
