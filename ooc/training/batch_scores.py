"""Scores of the modes that train on batches of nodes: by sampled batches, full neighborhoods or layer-wise passes."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ooc.layerwise.full_neighbor_pass import full_hops
from ooc.layerwise.scores import ExactScores
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.models.layers import autocast, evaluating
from ooc.models.user_models import forward_batch
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.errors import BudgetError
from ooc.training.batch_planning import BatchPlanning
from ooc.training.build import fan_outs_of
from ooc.training.full_neighborhoods import CLOSE, full_neighborhoods, pass_fits, share_of_batch
from ooc.training.mode import Scores
from ooc.training.node_mode import EXACT_FOLDER


class BatchScoring(BatchPlanning):
    """The part of `ooc.training.batch_mode.BatchMode` that scores the model."""

    budget: MemoryPlan
    by_layers: bool
    """whether layer-wise passes know the model and the graph"""
    whole_subgraphs: ClassVar[bool] = False
    """whether every layer computes every node of a batch"""
    neighborhoods_too_large = False
    """whether full neighborhoods do not fit the memory, so that scores come from layer-wise passes"""
    out: Path
    """the run's directory, of several ranks rank 0's; from `open` on, of several ranks from `prepare` on"""

    @abstractmethod
    def _sampling(self) -> dict[str, Any]:
        """Options of the loaders of sampled neighborhoods, of training and scores."""

    @property
    def scores_by_layers(self) -> bool:
        """Whether scores come from layer-wise passes; exact ones of other models, and of graphs of several types, come from
        full neighborhoods."""
        return self.by_layers and (self.config.evaluate == "layerwise" or self.neighborhoods_too_large)

    @property
    def _scores_full_neighborhoods(self) -> bool:
        """Whether batches that are scored have all in-edges over all hops, though those of training may not."""
        whole = self.whole_subgraphs or self.config.evaluate == "layerwise"
        return whole and not self.dataset.is_hetero and all(full_neighborhoods(each) for each in self.evaluators.values())

    @property
    def scores_could_be_by_layers(self) -> bool:
        """See `BatchPlanning`."""
        return bool(self.evaluators) and self._scores_full_neighborhoods and self._has_room_for_passes()

    def _check_scored(self) -> None:
        """Choose layer-wise passes for scores, where that is open and full neighborhoods do not or hardly fit the memory.

        Raises BudgetError where it is not open, and that of a single node does not fit.
        """
        indptr = np.asarray(self.dataset.graph.indptr)
        found = [share_of_batch(each, indptr) for each in self.evaluators.values()]
        error = next((error for _, error in found if error is not None), None)
        tight = max((share for share, _ in found), default=0.0) > CLOSE
        if tight and self.config.evaluate == "auto" and self.ranks.alone and self._has_room_for_passes():
            self.neighborhoods_too_large, self.evaluators = True, {}
        elif error is not None:
            raise self._unscored(error)

    def _has_room_for_passes(self) -> bool:
        """Whether scores may come from layer-wise passes, and these fit the memory."""
        folder, settings = self.config.out / EXACT_FOLDER, {"beside": self.pending_bytes, "budget": self.budget}
        return self.by_layers and self.config.task == "node" and pass_fits(self.model, self.dataset, folder, **settings)

    def _unscored(self, error: BudgetError) -> BudgetError:
        """What to do where a batch that is scored does not fit the memory."""
        ways = "`evaluate=layerwise` or `eval_fanout`" if self._has_room_for_passes() else "`eval_fanout`"
        return BudgetError(f"evaluation on full neighborhoods does not fit the memory: {error}, or give {ways}")

    def chosen(self) -> dict[str, Any]:
        """See `Mode`."""
        if self.config.evaluate != "auto":
            return super().chosen()
        return {**super().chosen(), "evaluate": "layerwise" if self.scores_by_layers else "sampled"}

    @cached_property
    def hops(self) -> int:
        """Hops of the full neighborhoods that outputs depend on, where they do not come from layer-wise passes."""
        return full_hops(self.model, self.dataset, self.config.layers)

    def _make_evaluators(self) -> dict[str, NeighborLoader]:
        """A loader for each split to score that the store has."""
        config = self.config
        fanout = [-1] * self.hops if config.evaluate == "layerwise" else self._neighbors(config.eval_fanout)
        return {
            split: NeighborLoader(
                self.dataset,
                fanout,
                input_nodes=self._input(split),
                batch_size=config.eval_batch_size or config.batch_size,
                seed=key(config.seed, Purpose.EVALUATE) >> 1,
                split_seeds=True,
                **self._sampling(),
            )
            for split in dict.fromkeys([config.val_split, *config.eval_splits])
            if split in self.nodes.splits and len(self.nodes.members(split))
        }

    def _neighbors(self, fanout: list[int] | dict[str, list[int]]) -> Any:
        """See `fan_outs_of`."""
        return fan_outs_of(fanout, self.dataset)

    def _input(self, split: str) -> str | tuple[str, str]:
        """A split as input nodes of a loader."""
        return (self.nodes.name, split) if self.dataset.is_hetero else split

    @property
    def pending_bytes(self) -> int:
        """That the mode keeps in memory while the model is scored."""
        return 0

    def _open_exact(self, out: Path) -> None:
        """Have exact scores, where they come from layer-wise passes. out: the run's directory, rank 0's of several ranks."""
        self.out = out
        if self.scores_by_layers:
            settings: dict[str, Any] = {"task": self.task, "ranks": self.ranks}
            beside, folder = self.pending_bytes, out / EXACT_FOLDER
            exact = ExactScores(self.model, self.dataset, folder, self.engine, beside, self.budget, **settings)
            self.exact = self.opened.enter_context(closing(exact))

    def outputs(self, model: torch.nn.Module, batch: Any) -> Tensor:
        """What a model predicts for the labelled of a batch, where it is scored."""
        return forward_batch(model, batch)

    def labels_in(self, batch: Any) -> Tensor:
        """The labels of a batch, one for each of its outputs."""
        seeds = self._seeds(batch)
        labels: Tensor = seeds.y[: seeds.batch_size]
        return labels

    def score(self, split: str, epoch: int) -> Scores | None:
        if self.exact is not None:
            return super().score(split, epoch)
        loader = self.evaluators.get(split)
        if loader is None:
            return None
        scores = self.task.scores(loader.num_seeds, self.device)
        loader.set_epoch(epoch)
        loader.stop_before(loader.own_steps)
        with evaluating(self.model), self._advising():
            for batch in loader:
                batch = batch.to(self.device, non_blocking=True)
                with autocast(self.device, self.config.precision):
                    self.tables.pull(batch)
                    logits = self.outputs(self.model, batch)
                scores.update(logits, self.labels_in(batch))
        scores.merge(self.ranks)
        return scores.compute()

    @contextmanager
    def _advising(self) -> Iterator[None]:
        try:
            yield
        except BudgetError as error:
            raise (self._unscored(error) if self._scores_full_neighborhoods else error) from None

    def _seeds(self, batch: Any) -> Any:
        """What of a batch has the labels and the number of its seeds."""
        return batch[self.nodes.name] if self.dataset.is_hetero else batch
