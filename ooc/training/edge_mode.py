"""The mode "sampled" of the task "edge": labels of edges, predicted from the sampled neighborhoods of their ends."""

import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, cast

from torch import Tensor, nn

from ooc.config.edges import EdgeConfig
from ooc.graph.blocks import EDGE_ATTR
from ooc.graph.hetero import EdgeKey
from ooc.loading.base import BatchLoader
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.metrics.losses import LabelLoss
from ooc.metrics.tasks import LabelTask
from ooc.models.edge_decoders import MLPDecoder
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.models.pyg_models import degree_histogram
from ooc.models.recomputation import Given
from ooc.models.user_models import check_columns, edge_dim_of, edge_features_for, forward_batch
from ooc.runtime.keyed_random import Purpose
from ooc.runtime.keyed_random import key as seed_of
from ooc.sampling.hetero_neighbor import edge_name
from ooc.stores.dataset import Dataset
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError
from ooc.stores.node_set import NodeSet
from ooc.training.batch_modes import SampledMode
from ooc.training.build import make_hetero_model, make_model
from ooc.training.label_mode import task_of_labels, training_loss
from ooc.training.learned import summary_of
from ooc.training.link_mode import ends_of, link_type
from ooc.training.node_mode import NodeMode, labels_of


class EdgeModel(nn.Module):
    """Embeddings of nodes, and the outputs of edges from those of both ends.

    encoder: gives rows of a batch's nodes, as models of nodes do; decoder: of rows [b, d] of sources and destinations, and the
    edges' own features where batches have them; edge_type: of a heterogeneous graph, that of the edges.
    """

    def __init__(self, encoder: nn.Module, decoder: MLPDecoder, edge_type: EdgeKey | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder, self.edge_type = encoder, decoder, edge_type

    def forward(self, batch: Any, checkpoint: Given = False) -> Tensor:
        """The outputs of the edges of a batch of `LinkNeighborLoader`, [b, channels]."""
        rows = forward_batch(self.encoder, batch, checkpoint)
        check_columns(self.encoder, rows, self.decoder.src.in_features)
        source, _, target = self.edge_type or ("", "", "")
        of_types = (rows[source], rows[target]) if isinstance(rows, Mapping) else (rows, rows)
        edges = self.edges_of(batch)
        src, dst = (own.index_select(0, end) for own, end in zip(of_types, edges.edge_label_index, strict=True))
        attr = edges.edge_label_attr.flatten(1).to(src.dtype) if "edge_label_attr" in edges else None
        out: Tensor = self.decoder(src, dst, edge_attr=attr)
        return out

    def edges_of(self, batch: Any) -> Any:
        """What of a batch has the fields of the edges."""
        return batch if self.edge_type is None else batch[self.edge_type]


class EdgeMode(SampledMode):
    """Training on the edges of a split; see `Mode`. Edges of a batch carry no messages in it."""

    config: EdgeConfig
    model: EdgeModel

    @cached_property
    def edges(self) -> EdgeSet:
        """Those whose labels are learned."""
        return labelled_edges(self.config, self.dataset)

    @cached_property
    def nodes(self) -> NodeSet:
        """The sources of the edges."""
        return self.dataset.nodes(self.edges.key[0])

    def check(self) -> LabelTask:
        """See `LabelMode`."""
        edges = self.edges
        if not (self.dataset.is_hetero or self.dataset.num_features):
            raise ConfigError(f"{self.config.store} holds no features to train on: ingest it with `features` or `x_cols`")
        return task_of_labels(self.config, edges)

    def _make_model(self) -> nn.Module:
        return edge_model(self.config, self.dataset, self.task, self.edges).to(self.device)

    def notes(self) -> list[str]:
        """See `Mode`."""
        return NodeMode.notes(self)

    @cached_property
    def edge_features(self) -> tuple[str, ...]:
        return edge_features_for(self.model.encoder, self.dataset)

    def _sampling(self) -> dict[str, Any]:
        of_edges = {"edge_label": "y", "edge_label_attr": self.model.decoder.edge is not None}
        return {**super()._sampling(), "pre_aggregation": pre_aggregation_of(self.model.encoder), **of_edges}

    def _make_loader(self) -> BatchLoader:
        config = self.config
        shuffled: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True, "seed": config.seed}
        shuffled["sampler"] = self.sampler
        links = self.edges.key, config.train_split
        return LinkNeighborLoader(self.dataset, self._neighbors(config.fanout), links, **shuffled, **self._sampling())

    def _make_evaluators(self) -> dict[str, Any]:
        """See `BatchMode`."""
        config, edges = self.config, self.edges
        common = {
            "batch_size": config.eval_batch_size or config.batch_size,
            "seed": seed_of(config.seed, Purpose.EVALUATE) >> 1,
        }
        given: dict[str, Any] = {**common, **self._sampling()}
        return {
            split: LinkNeighborLoader(self.dataset, self._neighbors(config.eval_fanout), (edges.key, split), **given)
            for split in dict.fromkeys([config.val_split, *config.eval_splits])
            if split in edges.splits and len(edges.members(split))
        }

    def _make_loss(self) -> LabelLoss:
        edges = self.edges
        labels = partial(labels_of, edges, self.config.train_split, edges.graph.edge_ids)  # members are slots
        return training_loss(self.config, self.task, labels, self.device)

    def computed(self, batch: Any) -> Tensor:
        """The outputs of the batch's edges."""
        return self.model(batch, self.recomputation(batch))

    @property
    def layered(self) -> nn.Module:
        return self.model.encoder

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return cast(Tensor, model(batch))

    def labels_in(self, batch: Any) -> Tensor:
        return cast(Tensor, self.model.edges_of(batch).edge_label)

    def labels_summary(self) -> dict[str, Any]:
        """See `NodeMode`."""
        return summary_of(self.task, self.edges, edge_name(self.edges.key) if self.dataset.is_hetero else None)


def edge_model(config: EdgeConfig, dataset: Dataset, task: LabelTask, edges: EdgeSet) -> EdgeModel:
    """The configured model of the labels of these edges, its parameters drawn from the seed alone."""
    key = edges.key if dataset.is_hetero else None
    if key is None:
        degrees = partial(degree_histogram, dataset.graph)
        encoder = make_model(config, dataset.num_features, config.embedding, degrees, edge_dim_of(dataset))
    else:
        encoder = make_hetero_model(config, dataset, ends_of(key), config.embedding)
    edge_dim = math.prod(edges.features(EDGE_ATTR).shape[1:]) if EDGE_ATTR in edges.names else None
    sizes: dict[str, Any] = {"out_channels": task.channels, "edge_dim": edge_dim}
    return EdgeModel(encoder, MLPDecoder(config.embedding, dropout=config.dropout, **sizes), key)  # after the seed is set


def labelled_edges(config: EdgeConfig, dataset: Dataset) -> EdgeSet:
    """The edges whose labels are learned. Raises ConfigError where there are none, or settings and store leave that open."""
    asked, types = config.edge_type, {key: dataset.edges(key) for key in dataset.edge_types}
    labelled = [key for key, edges in types.items() if edges.task is not None and edges.reverse_of is None]
    there = ", ".join(map(edge_name, labelled))
    if not labelled:
        raise ConfigError(f"{config.store} holds no labels of edges to train on: ingest it with `edge_label`")
    if asked is None and len(labelled) > 1:
        raise ConfigError(f"{config.store} has labels of {there}: choose one, as in `edge_type={edge_name(labelled[0])!r}`")
    found = types[labelled[0] if asked is None else link_type(asked, dataset)]
    if found.task is None:
        raise ConfigError(f"edge_type = {asked!r}: {config.store} has no labels of these edges (it has labels of {there})")
    return found
