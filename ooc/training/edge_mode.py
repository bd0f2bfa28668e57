"""The mode "sampled" of the task "edge": labels of edges, predicted from the sampled neighborhoods of their ends."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ooc.config.edges import EdgeConfig
from ooc.loading.base import BatchLoader
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.metrics.losses import LabelLoss
from ooc.metrics.tasks import LabelTask
from ooc.models.builders import pre_aggregation_of
from ooc.models.edge_decoders import MLPDecoder
from ooc.models.user_models import edge_features_for, forward_batch
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError
from ooc.training.batch_modes import SampledMode
from ooc.training.label_mode import task_of_labels
from ooc.training.node_mode import LABELS_AT_ONCE, NodeMode


class EdgeModel(nn.Module):
    """Embeddings of nodes, and the outputs of edges from those of both ends.

    encoder: gives rows of a batch's nodes, as models of nodes do; decoder: of rows [b, d] of sources and destinations.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, batch: Any, checkpoint: bool = False) -> Tensor:
        """The outputs of the edges of a batch of `LinkNeighborLoader`, [b, channels]."""
        rows = forward_batch(self.encoder, batch, checkpoint)
        src, dst = (rows.index_select(0, end) for end in batch.edge_label_index)
        out: Tensor = self.decoder(src, dst)
        return out


class EdgeMode(SampledMode):
    """Training on the edges of a split; see `Mode`. Edges of a batch carry no messages in it."""

    typed = False
    config: EdgeConfig
    model: EdgeModel

    @cached_property
    def edges(self) -> EdgeSet:
        """The store's edges."""
        return self.dataset.edges()

    def check(self) -> LabelTask:
        """See `LabelMode`."""
        if self.edges.task is None:
            raise ConfigError(f"{self.config.store} holds no labels of edges to train on: ingest it with `edge_label`")
        if not self.dataset.num_features:
            raise ConfigError(f"{self.config.store} holds no features to train on: ingest it with `features` or `x_cols`")
        return task_of_labels(self.config, self.edges)

    def _make_model(self) -> nn.Module:
        decoder = MLPDecoder(self.config.hidden, dropout=self.config.dropout, out_channels=self.task.channels)
        return EdgeModel(self._make_encoder(self.config.hidden), decoder).to(self.device)

    def notes(self) -> list[str]:
        """See `Mode`."""
        return NodeMode.notes(self)

    @cached_property
    def edge_features(self) -> tuple[str, ...]:
        return edge_features_for(self.model.encoder, self.dataset)

    def _sampling(self) -> dict[str, Any]:
        return {**super()._sampling(), "pre_aggregation": pre_aggregation_of(self.model.encoder), "edge_label": "y"}

    def _make_loader(self) -> BatchLoader:
        config = self.config
        shuffled: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True, "seed": config.seed}
        return LinkNeighborLoader(
            self.dataset, self._neighbors(config.fanout), config.train_split, **shuffled, **self._sampling()
        )

    def _make_evaluators(self) -> dict[str, Any]:
        """See `BatchMode`."""
        config, edges = self.config, self.edges
        common = {"batch_size": config.eval_batch_size or config.batch_size, "seed": key(config.seed, Purpose.EVALUATE) >> 1}
        given: dict[str, Any] = {**common, **self._sampling()}
        return {
            split: LinkNeighborLoader(self.dataset, self._neighbors(config.eval_fanout), split, **given)
            for split in dict.fromkeys([config.val_split, *config.eval_splits])
            if split in edges.splits and len(edges.members(split))
        }

    def _make_loss(self) -> LabelLoss:
        return self.task.loss(self.config, self._training_labels(), self.device)

    def _training_labels(self) -> Iterator[Tensor]:
        """Labels of the training split, a piece at a time."""
        labels, members = self.edges.labels, self.edges.members(self.config.train_split)
        assert labels is not None
        for start in range(0, len(members), LABELS_AT_ONCE):
            slot = members[np.arange(start, min(start + LABELS_AT_ONCE, len(members)))]
            yield torch.from_numpy(np.asarray(labels[self.dataset.graph.edge_ids(slot)]))

    def forward(self, batch: Any) -> Tensor:
        """The outputs of the batch's edges."""
        return self.model(batch, self.config.activation_checkpointing)

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return cast(Tensor, model(batch))

    def labels_in(self, batch: Any) -> Tensor:
        return cast(Tensor, batch.edge_label)

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        return {**super().finish(result), "class_names": self.edges.class_names}
