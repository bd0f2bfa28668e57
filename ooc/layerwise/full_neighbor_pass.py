"""Exact outputs of models with their own forward: batches of seeds with all in-edges over as many hops as outputs depend on.

Nothing can act between the layers of such a model, so neighbors are computed again for every batch that has them: a pass costs
more than one layer by layer, and grows with the neighborhoods. (Full-neighbor inference as with PyG's NeighborLoader.)
"""

import math
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Data

from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.layerwise_pass import Progress, digest
from ooc.layerwise.row_files import Files
from ooc.layerwise.shape import own_way
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.ranks import WHOLE
from ooc.models.layers import evaluating
from ooc.models.receptive_field import hops_on
from ooc.models.user_models import edge_features_for, forward_batch
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.range_io import write_range
from ooc.stores.arrays.rows import Ids, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import remove_tree, removed_path

SEEDS = 4096
"""per batch; one that does not fit in memory is halved, and again"""
NOTE_SECONDS = 10.0
"""between notes of how far the pass has come, each of which waits for the disk"""


class FullNeighborPass:
    """The outputs of all nodes by a model with its own forward; see `ExactPass`.

    Args:
        model: A module with forward(x, edge_index) or forward(x, blocks), or one that takes edge features; it computes in
            evaluation mode.
        dataset: The graph and its features.
        folder: Where rows and progress are kept. A killed pass goes on there.
        num_layers: Of a forward(x, blocks), as many as it takes blocks.
        engine: How rows are read and written.
        budget: A plan of the memory other than the data set's.

    Raises:
        ConfigError: If the store has no features, or outputs depend on all nodes.

    >>> with closing(FullNeighborPass(model, ds, Path("pass"))) as whole:
    ...     rows = whole.run()  # Rows [N, C]
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        folder: Path,
        *,
        num_layers: int | None = None,
        engine: str = "auto",
        budget: MemoryPlan | None = None,
    ) -> None:
        if not dataset.num_features:
            raise ConfigError(f"{dataset.path} holds no features to compute on")
        self.model, self.dataset, self._folder = model, dataset, folder
        self._hops = hops_on(model, dataset, num_layers)
        self._loader = self._over(None, budget)
        self.columns = self._width()
        self.files = Files(folder, engine)
        shutil.rmtree(removed_path(folder), ignore_errors=True)
        self.stats = IoStats()
        self._key = ""

    @property
    def method(self) -> str:
        """See `ExactPass`."""
        hops = f"{self._hops} hop{'s' * (self._hops != 1)}"
        return f"{type(self.model).__name__} {own_way(self.model)}: computed on batches of full neighborhoods of {hops}"

    def _width(self) -> int:
        """Numbers per row, as the first node's say."""
        first = self._over(np.zeros(1, np.int64), self._loader.budget)
        with evaluating(self.model), closing(iter(first)) as batches:
            return math.prod(self._outputs(next(batches)).shape[1:])

    def _over(self, nodes: Ids | None, budget: MemoryPlan | None) -> NeighborLoader:
        """Batches of nodes (None: all) with their full neighborhoods; those that do not fit in memory are halved."""
        fanout = [-1] * self._hops  # nothing is drawn; the seed spares torch's generator, which is the user's
        features = edge_features_for(self.model, self.dataset)
        given: dict[str, Any] = {"budget": budget, "edge_features": features, **WHOLE}
        return NeighborLoader(self.dataset, fanout, nodes, SEEDS, seed=0, split_seeds=True, **given)

    def _outputs(self, batch: Data) -> torch.Tensor:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return forward_batch(self.model, batch.to(device)).float().cpu()

    def fingerprint(self) -> str:
        """A digest of the parameters, the data and the batches."""
        text = f"{self.dataset.fingerprint} full neighbors {self._hops} {SEEDS} {self.model}"
        return digest(text, sorted(self.model.state_dict().items()))

    def lock(self) -> None:
        """Have the folder for this process; StoreError if another has it."""
        self.files.lock()

    def was_begun(self) -> bool:
        """Whether the folder holds what an earlier process computed of this pass."""
        before = self.files.progress()
        return before is not None and before.get("key") == self.fingerprint()

    def run(self, progress: Progress = lambda what, done, total: None) -> Rows:
        """Run, from where an earlier process was interrupted on; float32 Rows [N, columns], good until `close`."""
        self.files.lock()
        before, key = self.files.progress(), self.fingerprint()
        start = before["next"] if before is not None and before.get("key") == key else 0
        if not start:
            self.files.forget()
        self.stats.restart()
        nodes = self.dataset.num_nodes
        rows = self.files.rows("out", (nodes, self.columns))
        loader = self._loader
        loader.load_state_dict({"epoch": 0, "step": start // SEEDS})
        node, noted = start - start % SEEDS, time.monotonic()
        with evaluating(self.model), closing(iter(loader)) as batches:
            for batch in batches:
                out = self._outputs(batch).reshape(batch.batch_size, -1)
                self.stats.bytes_written += write_range(rows, node, np.ascontiguousarray(out.numpy()))
                node += batch.batch_size
                progress("full neighborhoods", node, nodes)
                if time.monotonic() - noted > NOTE_SECONDS or node == nodes:
                    self.files.note({"key": key, "next": node}, [rows])
                    noted = time.monotonic()
        self.stats.bytes_read = loader.bytes_read
        return rows

    def close(self) -> None:
        """Close the rows; idempotent. What is on disk stays, so that a pass can go on."""
        self.files.close()

    def discard(self) -> None:
        """Close, and remove the folder."""
        self.files.close_rows()
        try:
            remove_tree(self._folder)
        finally:
            self.close()
