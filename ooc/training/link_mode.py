"""The mode "sampled" of the task "link": batches of links, whose ends' embeddings a decoder scores."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.config.links import LinkConfig
from ooc.graph.hetero import EdgeKey
from ooc.loading.base import BatchLoader
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.loading.link_type import edge_type_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.ranks import WHOLE
from ooc.loading.stored_edge_split import StoredEdgeSplit
from ooc.metrics.link_losses import LinkLoss
from ooc.metrics.links import LinkScores
from ooc.metrics.tasks import LabelTask
from ooc.models.edge_decoders import scores_of_own
from ooc.models.layers import autocast, evaluating
from ooc.models.user_models import check_columns, forward_batch
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.pipeline import Stage
from ooc.sampling.edge_split import EdgeSplit
from ooc.sampling.hetero_neighbor import edge_name
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.node_set import NodeSet
from ooc.training.batch_modes import SampledMode
from ooc.training.build import make_hetero_model
from ooc.training.link_ranking import LinkRankings
from ooc.training.mode import Scores

RANKING_FOLDER = "ranking"
"""of embeddings while they are ranked, in the run's directory"""


@dataclass(frozen=True)
class LinkTask(LabelTask):
    """What is learned of links: embeddings of `num_classes` columns, and scores of pairs."""

    several: bool = False
    """whether a link has several negatives in evaluation"""

    @classmethod
    def of_links(cls, config: LinkConfig) -> Self:
        return cls("link", config.embedding, several=config.eval_ratio > 1)  # type: ignore[arg-type]

    @property
    def channels(self) -> int:
        return self.num_classes

    @property
    def monitor(self) -> str:
        return "mrr" if self.several else "auroc"

    def loss(self, config: Any = None, labels: Iterable[Tensor] = (), device: torch.device | str = "cpu") -> Any:
        """Return the training loss; see `LinkLoss`."""
        return LinkLoss("bce" if config is None else config.loss)


class LinkMode(SampledMode):
    """Links of the training part of a split of the edges, whose other parts carry no messages; see `Mode`."""

    config: LinkConfig
    loss_of: LinkLoss  # type: ignore[assignment]

    @cached_property
    def edge_type(self) -> EdgeKey:
        """That the links are of."""
        return link_type(self.config.edge_type, self.dataset)

    @cached_property
    def nodes(self) -> NodeSet:
        """The sources of links."""
        return self.dataset.nodes(self.edge_type[0])

    def check(self) -> LinkTask:
        """See `LabelMode`."""
        config, dataset = self.config, self.dataset
        if not (dataset.is_hetero or dataset.num_features):
            raise ConfigError(f"{config.store} holds no features to train on: ingest it with `features` or `x_cols`")
        edges = dataset.edges(self.edge_type)
        if not edges.num_edges:
            raise ConfigError(f"{config.store} holds no edges to predict: ingest it with `edges`")
        if EdgeLookup(edges.graph).are_all():
            raise ConfigError(f"{config.store} has all possible edges, so no pairs of nodes that are none to compare them with")
        self.split = self._split()
        config.check_parts(self.split.names)
        return LinkTask.of_links(config)

    def _split(self) -> EdgeSplit | StoredEdgeSplit:
        """The split that the store has, unless shares are given."""
        config = self.config
        if config.takes_split(bool(self.dataset.edges(self.edge_type).splits)):
            return StoredEdgeSplit(self.dataset, self.edge_type, config.train_split)
        return EdgeSplit(*config.shares, config.seed)

    def _make_model(self) -> nn.Module:
        if not self.dataset.is_hetero:
            return super()._make_model()
        return make_hetero_model(self.config, self.dataset, ends_of(self.edge_type), self.task.channels).to(self.device)

    def _links(self, part: str, batch_size: int, seed: int, **options: Any) -> LinkNeighborLoader:
        fanout = self._neighbors(self.config.fanout if options.get("shuffle") else self.config.eval_fanout)
        sizes: dict[str, Any] = {"edge_split": self.split, "batch_size": batch_size, "seed": seed}
        return LinkNeighborLoader(self.dataset, fanout, (self.edge_type, part), **sizes, **self._sampling(), **options)

    def _make_loader(self) -> BatchLoader:
        config = self.config
        kind = "binary" if config.loss == "bce" else "triplet"
        how = {"neg_sampling": {"mode": kind, "amount": config.ratio}, "exact_negatives": config.exact_negatives}
        shuffled = {"shuffle": True, "sampler": self.sampler}
        loader = self._links(config.train_split, config.batch_size, config.seed, **shuffled, **how)
        if not loader.num_seeds:
            raise ConfigError(f"{config.store} has no edges left to train on: give a smaller val and test")
        return loader

    def _make_evaluators(self) -> dict[str, Any]:
        """A loader for each part to score that has edges; its negatives are the same in every epoch."""
        config = self.config
        how = {"neg_sampling": {"mode": "triplet", "amount": config.eval_ratio}, "exact_negatives": "possible"}
        size, seed = config.eval_batch_size or config.batch_size, key(config.seed, Purpose.EVALUATE) >> 1
        wanted = {config.val_split, *config.eval_splits}
        loaders = {part: self._links(part, size, seed, **how) for part in self.split.names if part in wanted}
        found = {part: loader for part, loader in loaders.items() if loader.num_seeds}
        if config.needs_scores and config.val_split not in found:
            why = f"the split {config.val_split!r} of {config.store} has no edges"
            raise ConfigError(f"{config.needs_scores} needs edges to validate on, and {why}: leave it out")
        return found

    def _make_loss(self) -> LinkLoss:  # type: ignore[override]
        return cast(LinkLoss, self.task.loss(self.config))

    def labels_summary(self) -> dict[str, Any]:
        """See `NodeMode`: no labels of a store."""
        return {"labels": self.task.kind, "class_names": None}

    def notes(self) -> list[str]:
        """See `Mode`."""
        counts = ", ".join(f"{loader.num_seeds:,} of {part}" for part, loader in self.evaluators.items())
        of = f" of {edge_name(self.edge_type)}" if self.dataset.is_hetero else ""
        return [*super().notes(), f"links{of}: {self.loader.num_seeds:,} of {self.config.train_split}, {counts}"]

    def _sides(self, batch: Any, rows: Any) -> tuple[Any, tuple[Any, Tensor], tuple[Any, Tensor]]:
        """What of a batch has the fields of links, of sources and of destinations; the latter two with their nodes' rows."""
        if not self.dataset.is_hetero:
            return batch, (batch, rows), (batch, rows)
        source, _, target = self.edge_type
        of_type: Mapping[str, Tensor] = rows if isinstance(rows, Mapping) else {source: rows}
        return batch[self.edge_type], (batch[source], of_type[source]), (batch[target], of_type[target])

    def loss(self, batch: Any) -> Tensor:
        """See `LinkLoss`."""
        with autocast(self.device, self.config.precision):
            rows, score = self.forward(batch), self.model.link_decoder
            if self.config.decoder != "dot":
                check_columns(self.model, rows, self.config.embedding)
            links, (source, src_rows), (target, dst_rows) = self._sides(batch, rows)
            if "edge_label" in links:
                ends = links.edge_label_index
                pair = src_rows[ends] if dst_rows is src_rows else (src_rows[ends[0]], dst_rows[ends[1]])
                scores = score(*pair)  # type: ignore[operator]
                true = len(links.input_id)  # the first ones; a mask would make the host wait for a GPU
                return self.loss_of(scores[:true], scores[true:])
            positive, negative = self._triplets(batch, rows)
            if self.config.loss != "softmax":
                return self.loss_of(positive, negative)
            shared = target.dst_neg_index.flatten()
            every = score.every(src_rows[source.src_index], dst_rows[shared])  # type: ignore[operator, union-attr]
            return self.loss_of(positive, every, shared[None] == target.dst_pos_index[:, None])

    def weight(self, batch: Any) -> Tensor:
        links, (source, _), (target, _) = self._sides(batch, dict.fromkeys(self.edge_type))
        if "edge_label" in links:
            true, every = len(links.input_id), len(links.edge_label)
        else:
            true = len(source.src_index)
            every = true + target.dst_neg_index.numel()
        return torch.tensor(self.loss_of.weight(true, every - true), device=self.device)

    def _triplets(self, batch: Any, rows: Any) -> tuple[Tensor, Tensor]:
        """Scores of links [b], and of their own negatives [b, m]."""
        _, (source, src_rows), (target, dst_rows) = self._sides(batch, rows)
        score: Any = self.model.link_decoder
        src, negative = src_rows[source.src_index], target.dst_neg_index.view(len(source.src_index), -1)
        return score(src, dst_rows[target.dst_pos_index]), scores_of_own(score, src, dst_rows, negative)

    def score(self, split: str, epoch: int) -> Scores | None:
        """See `LabelMode`: AP and ROC AUC against one negative of each link, ranks among all of its negatives."""
        loader = self.evaluators.get(split)
        if loader is None:
            return None
        pairs, ranks = (LinkScores(folder=self.config.out) for _ in range(2))
        loader.set_epoch(0)
        loader.stop_before(loader.own_steps)
        with evaluating(self.model):
            for batch in loader:
                batch = batch.to(self.device, non_blocking=True)
                with autocast(self.device, self.config.precision):
                    self.tables.pull(batch)
                    positive, negative = self._triplets(batch, forward_batch(self.model, batch))
                pairs.update(positive, negative[:, :1])
                ranks.update(positive, negative)
        for each in (pairs, ranks):
            each.merge(self.ranks)
        return {**pairs.compute(), **ranks.compute()}

    def final_scores(self) -> dict[str, Scores]:
        """See `LabelMode`; with Recall@k and NDCG@k for the k of `eval_k`."""
        found = super().final_scores()
        if not (self.config.eval_k and found):
            return found
        decoder: Any = self.model.link_decoder
        with self.run.measure("ranking"), self.run.booked("evaluate_seconds"):
            ranked = self.ranks.decided(lambda: self._ranked(found, decoder))
        return {part: {**scores, **ranked[part]} for part, scores in found.items()}

    def _ranked(self, wanted: Iterable[str], decoder: nn.Module) -> dict[str, Scores]:
        config, edges = self.config, self.dataset.edges(self.edge_type)
        lookup, parts = EdgeLookup(edges.graph), [name for name in self.split.names if name != config.train_split]
        members = {name: self.split.members(name, lookup.pieces(), edges.num_edges) for name in parts}
        rankings = LinkRankings(self.dataset, self.edge_type, members, config.val_split, config.eval_k)
        with rankings.embedded(wanted, self._embedded, decoder, config.out / RANKING_FOLDER) as lists:
            return rankings.scores(wanted, lists)

    def _embedded(self, node_type: str, ids: Ids | None) -> Iterator[tuple[Ids, AnyArray]]:
        """See `link_ranking.Embedded`: by the neighborhoods of the other scores."""
        config, typed = self.config, self.dataset.is_hetero
        loader = NeighborLoader(
            self.dataset,
            self._neighbors(config.eval_fanout),
            input_nodes=(node_type, ids) if typed else ids,
            batch_size=config.eval_batch_size or config.batch_size,
            seed=key(config.seed, Purpose.RANKING) >> 1,
            edge_split=(self.edge_type, self.split),
            **{**self._sampling(), **WHOLE},
        )
        loader.keeps_blocks = self.loader.keeps_blocks
        if self.tables:
            loader.then = Stage("tables", self.tables.look_up)
        with evaluating(self.model):
            for batch in loader:
                batch = batch.to(self.device, non_blocking=True)
                with autocast(self.device, config.precision):
                    self.tables.pull(batch)
                    rows = forward_batch(self.model, batch)
                seeds = batch[node_type] if typed else batch
                yield seeds.n_id[: seeds.batch_size].cpu().numpy(), rows.float().cpu().numpy()

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """See `Mode`."""
        return config


def ends_of(edge_type: EdgeKey) -> tuple[str, ...]:
    """The node types that links of an edge type are between: two, or one where they are the same."""
    source, _, target = edge_type
    return (source,) if source == target else (source, target)


def link_type(asked: str | None, dataset: Dataset) -> EdgeKey:
    """The edge type of the links of a run. Raises ConfigError where the setting or the store leave that open."""
    if not dataset.is_hetero:
        if asked is not None:
            raise ConfigError(f"edge_type applies to heterogeneous stores, and {dataset.path} has one edge type: leave it out")
        return dataset.edge_types[0]
    there = ", ".join(map(edge_name, dataset.edge_types))
    if asked is None:
        own = [key for key in dataset.edge_types if dataset.edges(key).reverse_of is None]
        if len(own) == 1:
            return own[0]
        example = edge_name(own[0] if own else dataset.edge_types[0])
        raise ConfigError(f"{dataset.path} has the edge types {there}: choose the links' one, as in `edge_type={example!r}`")
    found = edge_type_of(dataset, asked)
    if found is None:
        raise ConfigError(f"edge_type = {asked!r}: {dataset.path} has no such edge type: it has {there}")
    return found
