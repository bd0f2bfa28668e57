"""The mode "graphs": batches of whole graphs, of a store of many, and an output for each graph."""

from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.config.graphs import GraphConfig
from ooc.history.history import Growth
from ooc.loading.graph_loader import GraphLoader
from ooc.loading.graph_units import fields_of
from ooc.metrics.tasks import LabelTask
from ooc.models.graph_models import fields_taken, forward_graphs
from ooc.models.layers import autocast, evaluating
from ooc.models.user_models import edge_dim_of
from ooc.planning.graph_profile import CHANGES, profile_graphs
from ooc.planning.run_plan import Plan, RunFacts, plan
from ooc.runtime.clock import write_trace
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_graph_memory
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.build import make_model, make_optimizer, model_bytes
from ooc.training.callbacks import Rate
from ooc.training.data_parallel import shared_batches
from ooc.training.label_mode import LabelMode, task_of_labels, training_loss
from ooc.training.learned import summary_of
from ooc.training.mode import RunContext, RunState, Scores
from ooc.training.node_mode import labels_of


class GraphMode(LabelMode):
    """Training on the graphs of a split; see `Mode`."""

    ranked = True
    saves_device = "a smaller `batch_size` or `hidden`"
    config: GraphConfig

    def __init__(self, config: GraphConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.model = graph_model(config, dataset, self.task).to(self.device)
        self.budget = plan_graph_memory(dataset, model_bytes(config, self.model))
        self.accumulate = config.accumulate
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        labels = partial(labels_of, dataset.graphs, config.train_split)
        self.loss_of = training_loss(config, self.task, labels, self.device)
        self.loader = self._loader(config.train_split, config.batch_size, shuffle=True)
        self.evaluators = {
            split: self._loader(split, config.eval_batch_size or config.batch_size)
            for split in dict.fromkeys([config.val_split, *config.eval_splits])
            if split in dataset.graphs.splits and len(dataset.graphs.members(split))
        }
        self.rate: Rate = ("graphs", len(self.loader.graphs) / len(self.loader))

    def check(self) -> LabelTask:
        """See `LabelMode`."""
        if self.dataset.manifest.graphs is None:
            raise ConfigError(f"{self.config.store} holds one graph, and task = 'graph' is of many: ingest it with `graph_id`")
        if self.dataset.graphs.task is None:
            raise ConfigError(f"the graphs of {self.config.store} have no labels to train on: ingest it with `graph_label`")
        return task_of_labels(self.config, self.dataset.graphs)

    def _loader(self, split: str, batch_size: int, shuffle: bool = False) -> GraphLoader:
        config = self.config
        return GraphLoader(
            self.dataset,
            batch_size,
            shuffle,
            split,
            exclude_keys=unread(self.model, self.dataset, labels=True),
            shuffle_block=config.shuffle_block,
            seed=config.seed if shuffle else key(config.seed, Purpose.EVALUATE) >> 1,
            as_one=True,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            device=self.device,
            budget=self.budget,
        )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    @property
    def seeds_per_step(self) -> int:
        return self.config.batch_size * self.ranks.world_size

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """See `Mode`."""
        return config

    def predict(self, seconds: float, variants: bool) -> Plan:
        """See `Mode`."""
        config, each = self.config, self.steps_per_epoch
        steps = min(config.max_steps or 1 << 62, config.epochs * each)
        scored = self.times_scored(self.evaluators, -(-steps // each))
        with torch.random.fork_rng(devices=[]):
            trial = self._twin()
            optimizer = make_optimizer(config, trial.model)
            found = profile_graphs(
                self._trial_loader,
                list(self.evaluators),
                partial(trial._train, optimizer),
                trial._forward,
                min(steps, each),
                seconds,
            )
        return replace(plan(found, self.budget, RunFacts(each, steps, 0, scored, changes=CHANGES)), reading=self._reading)

    def _trial_loader(self, split: str | None) -> GraphLoader:
        """A loader of its own for a profile, of a split to score or of the training graphs."""
        config = self.config
        if split is None:
            return self._loader(config.train_split, config.batch_size, shuffle=True)
        return self._loader(split, config.eval_batch_size or config.batch_size)

    def _twin(self) -> Self:
        """The mode with another model of the same shape."""
        other = copy(self)
        other.ranks = ALONE
        other.model = graph_model(self.config, self.dataset, self.task).to(self.device)
        other.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.precision == "fp16")
        return other

    def _train(self, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.model.train()
        self.step(batch.to(self.device), 1)
        self.update(optimizer)

    def _forward(self, batch: Any) -> None:
        with evaluating(self.model), autocast(self.device, self.config.precision):
            forward_graphs(self.model, batch.to(self.device))

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        self.run = run
        if saved:
            self.scaler.load_state_dict(saved["scaler"])

    def notes(self) -> list[str]:
        """The memory, and how graphs are read."""
        memory = [] if self.config.memory is None else [str(self.budget)]
        return [*memory, f"graphs are read: {self._reading}"]

    @property
    def _reading(self) -> str:
        return self.dataset.reading("x") if self.dataset.num_features else "without features"

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        return shared_batches(self.loader, self.loader.own_steps, epoch, step, stop)

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's labelled graphs."""
        with autocast(self.device, self.config.precision):
            outputs = forward_graphs(self.model, batch)
        return self.loss_of(self.checked(outputs, batch.y), batch.y)

    def weight(self, batch: Any) -> Tensor:
        return self.loss_of.weighed(batch.y)

    def score(self, split: str, epoch: int) -> Scores | None:
        """See `LabelMode`."""
        loader = self.evaluators.get(split)
        if loader is None:
            return None
        scores = self.task.scores(len(loader.graphs), self.device)
        loader.set_epoch(epoch)
        loader.stop_before(loader.own_steps)
        with evaluating(self.model):
            for batch in loader:
                with autocast(self.device, self.config.precision):
                    outputs = forward_graphs(self.model, batch)
                scores.update(outputs, batch.y)
        scores.merge(self.ranks)
        return scores.compute()

    def state(self, cursor: RunState) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()}

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        raise ConfigError(f"cannot resume {self.config.out}: a store of many graphs does not grow")

    def counts(self) -> dict[str, Any]:
        rows = self.loader.rows_read
        read = {"bytes_read": self.loader.bytes_read, "edge_bytes_read": 0, "rows_read": rows, "rows_asked": rows}
        return {**read, "stages": self.loader.times()}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        write_trace(self.config.out, self.loader.spans())
        about = {"reading": self._reading, **summary_of(self.task, self.dataset.graphs)}
        return {"budget": asdict(self.budget), "num_graphs": len(self.dataset.graphs), **about}


def graph_model(config: GraphConfig, dataset: Dataset, task: LabelTask) -> nn.Module:
    """The configured model, its parameters drawn from the seed alone. Raises ConfigError if a store has no features for it."""
    if ":" not in config.model and not dataset.num_features:
        raise ConfigError(f"{config.store} holds no features to train on: ingest it with `features` or `x_cols`")
    return make_model(config, dataset.num_features, task.channels, edge_dim=edge_dim_of(dataset))


def unread(model: nn.Module, dataset: Dataset, labels: bool) -> list[str]:
    """Fields of batches that a model does not take, and that need not be read; labels: whether labels are."""
    taken = fields_taken(model)
    names = [each.name for each in fields_of(dataset, (), None)]
    return [name for name in names if not (name == "y" and labels) and taken is not None and name not in taken]
