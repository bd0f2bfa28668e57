"""Exact scores of all splits from one pass over all nodes, in place of sampled batches of each split."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.node_ranges import even_ranges
from ooc.layerwise.ops import LayerObserver
from ooc.layerwise.pass_plan import ram_bytes
from ooc.metrics.tasks import LabelTask
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset

ROWS_AT_ONCE, BYTES_AT_ONCE = 2**17, 2**24
"""of the model's output in memory: the fewer of the two, but a thousand rows"""


class ExactScores:
    """Scores of a model by its outputs over all in-edges of every node; a pass serves all splits until the parameters change.
    The arguments are those of `LayerwisePass`, and the task, by default that of the labels."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        folder: Path,
        engine: str = "auto",
        beside: int = 0,
        budget: MemoryPlan | None = None,
        task: LabelTask | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._task = LabelTask.of(dataset) if task is None else task
        self._dataset, self.beside, self.ranks = dataset, beside, ranks
        self._pass = LayerwisePass(model, dataset, folder, engine=engine, beside=beside, budget=budget, ranks=ranks)
        self._scored: tuple[str, Rows] | None = None

    @property
    def splits(self) -> list[str]:
        """Those that have nodes."""
        return [name for name in self._dataset.splits if len(self._dataset.members(name))]

    def score(self, split: str) -> dict[str, float | None]:
        """Scores of a split by name, None where one is undefined. Of several ranks each reads the outputs of a share."""
        members, labels = self._dataset.members(split), self._dataset.labels
        assert labels is not None, "a run has labels"
        rows = self.run()
        scores = self._task.scores(len(members))
        step = max(1024, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(1, rows.row_bytes)))
        begin, end = even_ranges(len(members), 1, self.ranks.world_size)[self.ranks.rank]
        for first in range(begin, end, step):
            node = members[np.arange(first, min(first + step, end))]
            logits = np.empty((len(node), *rows.shape[1:]), rows.dtype)
            rows.read(node, logits)
            scores.update(torch.from_numpy(logits), torch.from_numpy(np.asarray(labels[node])))
        scores.merge(self.ranks)
        return scores.compute()

    def run(self, *, observer: LayerObserver | None = None, anew: bool = False) -> Rows:
        """The outputs of all nodes: of a new pass (see `LayerwisePass.run`), or without an observer those of the same
        parameters."""
        key = self._pass.fingerprint()
        if observer is not None or self._scored is None or self._scored[0] != key:
            self._scored = None
            self._scored = key, self._pass.run(observer=observer, anew=anew)
        return self._scored[1]

    @property
    def memory_bytes(self) -> int | None:
        """Of a pass whose rows all stay in memory; None where they do not fit."""
        return ram_bytes(self._pass.shape) if self._pass.plan.in_ram else None

    def make_room(self) -> None:
        """Drop what a pass kept in memory, before batches; the next score makes it again."""
        if self._pass.plan.in_ram:
            self._scored = None
            self._pass.make_room()

    @property
    def stats(self) -> IoStats:
        """Of all passes."""
        return self._pass.stats

    def close(self, keep: bool = True) -> None:
        """Close the pass's rows, and with `keep` False remove them; idempotent."""
        if keep:
            self._pass.close()
        else:
            self._pass.discard()
