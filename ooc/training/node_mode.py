"""What modes on nodes share: labels by split and the loss, the model, exact scores."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ooc.config.nodes import NodeConfig
from ooc.history.history import Growth
from ooc.layerwise.scores import ExactScores
from ooc.metrics.losses import LabelLoss
from ooc.metrics.tasks import LabelTask
from ooc.models.pyg_models import degree_histogram
from ooc.models.user_models import edge_dim_of
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError
from ooc.stores.graph_set import GraphSet
from ooc.stores.node_set import NodeSet
from ooc.training.build import make_hetero_model, make_model
from ooc.training.label_mode import LabelMode, task_of_labels, training_loss
from ooc.training.learned import summary_of
from ooc.training.mode import RunState, Scores

EXACT_FOLDER = "sweep"
"""of the rows of exact scores, in the run's directory"""
LABELS_AT_ONCE = 2**18


class NodeMode(LabelMode):
    """Training on the nodes of a split; see `Mode`. exact: exact scores, where they are configured."""

    config: NodeConfig
    exact: ExactScores | None = None

    def __init__(self, config: NodeConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.model = self._make_model()

    def check(self) -> LabelTask:
        """See `LabelMode`."""
        if not self.dataset.is_hetero:
            self._check_features()
        return task_of_labels(self.config, self.nodes)

    def _check_features(self) -> None:
        """Raise ConfigError for a homogeneous store without labels of nodes but of graphs, or without features."""
        graphs = self.dataset.manifest.graphs
        if self.dataset.task is None and graphs is not None and graphs.task is not None:
            raise ConfigError(f"{self.config.store} has labels of graphs, and none of nodes: train with `task='graph'`")
        if self.dataset.task is not None and not self.dataset.num_features:
            raise ConfigError(f"{self.config.store} holds no features to train on: ingest it with `features` or `x_cols`")

    @cached_property
    def nodes(self) -> NodeSet:
        """Those whose labels are learned."""
        return labelled_nodes(self.config, self.dataset)

    def _make_model(self) -> torch.nn.Module:
        if self.dataset.is_hetero:
            return make_hetero_model(self.config, self.dataset, self.nodes.name, self.task.channels).to(self.device)
        return self._make_encoder(self.task.channels).to(self.device)

    def _make_encoder(self, channels: int) -> torch.nn.Module:
        """The configured model with so many outputs a node."""
        degrees = partial(degree_histogram, self.dataset.graph)
        return make_model(self.config, self.dataset.num_features, channels, degrees, edge_dim_of(self.dataset))

    @property
    def batch_budget(self) -> MemoryPlan:
        """What is left for batches, and all else."""
        return self.budget

    def notes(self) -> list[str]:
        """The memory, and how features are read."""
        given = self.config.memory or getattr(self.config, "gpu_memory", None)
        memory = [] if given is None else [str(self.batch_budget)]
        return [*memory, *([f"features are read: {self.reading}"] if self.reading else [])]

    @property
    def reading(self) -> str:
        """How features are read, for people."""
        return feature_reading(self.dataset)

    def score(self, split: str, epoch: int) -> Scores | None:
        """See `LabelMode`; exact ones, by rank 0 alone where a pass is not shared by all ranks."""
        exact = self.exact
        assert exact is not None, "exact scores are configured"
        if split not in exact.splits:
            return None
        return self.ranks.decided(lambda: exact.score(split)) if exact.ranks.alone else exact.score(split)

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: with the next epoch, as batches are others now."""
        state = RunState.next_epoch(saved)
        return saved | {"state": asdict(state), "refresh": None}, Growth(touched, state.epoch)

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        stats = None if self.exact is None else self.exact.stats
        moved = None if stats is None else {"read": stats.bytes_read, "written": stats.bytes_written}
        if self.exact is not None:
            self.exact.close(keep=False)
        return {"sweeps": moved, "budget": asdict(self.batch_budget), "reading": self.reading, **self.labels_summary()}

    def labels_summary(self) -> dict[str, Any]:
        """What the run's summary says of the labels that it learned."""
        return summary_of(self.task, self.nodes, self.nodes.name if self.dataset.is_hetero else None)


def feature_reading(dataset: Dataset) -> str:
    """How features are read, for people; of a heterogeneous store those of every node type, and nothing where none has any."""
    if not dataset.is_hetero:
        return dataset.reading("x")
    of: dict[str, list[str]] = {}
    for name in dataset.node_types:
        if dataset.nodes(name).num_features:
            of.setdefault(dataset.nodes(name).reading("x"), []).append(name)
    return "; ".join(f"{', '.join(names)} by {reading}" if len(of) > 1 else reading for reading, names in of.items())


def labelled_nodes(config: NodeConfig, dataset: Dataset) -> NodeSet:
    """The nodes whose labels are learned. Raises ConfigError where the settings or the store leave that open."""
    asked = config.node_type
    if not dataset.is_hetero:
        if asked is not None:
            raise ConfigError(f"node_type applies to heterogeneous stores, and {config.store} has one node type: leave it out")
        return dataset.nodes()
    labelled = [name for name in dataset.node_types if dataset.nodes(name).task is not None]
    if asked is None and len(labelled) > 1:
        there = " and ".join(labelled)
        raise ConfigError(f"{config.store} has labels of {there}: choose one, as in `node_type={labelled[0]!r}`")
    if asked is not None and asked not in labelled:
        what = "no labels" if asked in dataset.node_types else "no such node type"
        there = ", ".join(labelled) or "none"
        raise ConfigError(f"node_type = {asked!r}: {config.store} has {what} (node types with labels: {there})")
    return dataset.nodes(asked or next(iter(labelled), dataset.node_types[0]))


def labels_of(
    labelled: Dataset | NodeSet | GraphSet | EdgeSet, split: str | None, place: Callable[[Ids], Ids] = lambda member: member
) -> Iterator[torch.Tensor]:
    """Labels of a split's members (None: all), [k] or [k, C], a piece at a time. place: where those of members are."""
    labels, members = labelled.labels, None if split is None else labelled.members(split)
    assert labels is not None
    for start in range(0, count := len(labels if members is None else members), LABELS_AT_ONCE):
        at = np.arange(start, min(start + LABELS_AT_ONCE, count))
        yield torch.from_numpy(np.asarray(labels[at if members is None else place(members[at])]))


def make_loss(config: NodeConfig, dataset: Dataset | NodeSet, task: LabelTask, device: torch.device) -> LabelLoss:
    """The task's loss with class weights from the training split's labels."""
    return training_loss(config, task, partial(labels_of, dataset, config.train_split), device)
