"""The mode "sampled" of the task "link": batches of links, whose ends' embeddings a decoder scores."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.links import LinkConfig
from ooc.loading.base import BatchLoader
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.metrics.link_losses import LinkLoss
from ooc.metrics.links import LinkScores
from ooc.metrics.tasks import LabelTask
from ooc.models.layers import autocast, evaluating
from ooc.models.user_models import forward_batch
from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling.edge_split import PARTS, EdgeSplit
from ooc.stores.errors import ConfigError
from ooc.training.batch_modes import SampledMode
from ooc.training.mode import Scores


@dataclass(frozen=True)
class LinkTask(LabelTask):
    """What is learned of links: embeddings of `num_classes` columns, and scores of pairs."""

    several: bool = False
    """whether a link has several negatives in evaluation"""

    @classmethod
    def of_links(cls, config: LinkConfig) -> Self:
        return cls("link", config.hidden, several=config.eval_ratio > 1)  # type: ignore[arg-type]

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
    """Links of the training part of a random split of the edges, whose other parts carry no messages; see `Mode`."""

    typed = False
    config: LinkConfig
    loss_of: LinkLoss  # type: ignore[assignment]

    def check(self) -> LinkTask:
        """See `LabelMode`."""
        config, dataset = self.config, self.dataset
        if not dataset.num_features:
            raise ConfigError(f"{config.store} holds no features to train on: ingest it with `features` or `x_cols`")
        if not dataset.num_edges:
            raise ConfigError(f"{config.store} holds no edges to predict: ingest it with `edges`")
        self.split = EdgeSplit(config.val, config.test, config.seed)
        return LinkTask.of_links(config)

    def _links(self, part: str, batch_size: int, seed: int, **options: Any) -> LinkNeighborLoader:
        fanout = self._neighbors(self.config.fanout if options.get("shuffle") else self.config.eval_fanout)
        sizes: dict[str, Any] = {"edge_split": self.split, "batch_size": batch_size, "seed": seed}
        return LinkNeighborLoader(self.dataset, fanout, part, **sizes, **self._sampling(), **options)

    def _make_loader(self) -> BatchLoader:
        config = self.config
        kind = "binary" if config.loss == "bce" else "triplet"
        how = {"neg_sampling": {"mode": kind, "amount": config.ratio}, "exact_negatives": config.exact_negatives}
        loader = self._links("train", config.batch_size, config.seed, shuffle=True, **how)
        if not loader.num_seeds:
            raise ConfigError(f"{config.store} has no edges left to train on: give a smaller val and test")
        return loader

    def _make_evaluators(self) -> dict[str, Any]:
        """A loader for each part to score that has edges; its negatives are the same in every epoch."""
        config = self.config
        how = {"neg_sampling": {"mode": "triplet", "amount": config.eval_ratio}, "exact_negatives": True}
        size, seed = config.eval_batch_size or config.batch_size, key(config.seed, Purpose.EVALUATE) >> 1
        wanted = [part for part in PARTS if part in {config.val_split, *config.eval_splits}]
        loaders = {part: self._links(part, size, seed, **how) for part in wanted}
        return {part: loader for part, loader in loaders.items() if loader.num_seeds}

    def notes(self) -> list[str]:
        """See `Mode`."""
        counts = ", ".join(f"{loader.num_seeds:,} of {part}" for part, loader in self.evaluators.items())
        return [*super().notes(), f"links: {self.loader.num_seeds:,} of train, {counts}"]

    def loss(self, batch: Any) -> Tensor:
        """See `LinkLoss`."""
        with autocast(self.device, self.config.precision):
            rows, score = self.forward(batch), self.model.link_decoder
            if "edge_label" in batch:
                scores, true = score(*rows[batch.edge_label_index]), batch.edge_label > 0  # type: ignore[operator]
                return self.loss_of(scores[true], scores[~true])
            positive, negative = self._triplets(rows, batch)
            if self.config.loss != "softmax":
                return self.loss_of(positive, negative)
            shared = batch.dst_neg_index.flatten()
            every = score.every(rows[batch.src_index], rows[shared])  # type: ignore[operator, union-attr]
            return self.loss_of(positive, every, shared[None] == batch.dst_pos_index[:, None])

    def _triplets(self, rows: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Scores of links [b], and of their own negatives [b, m]."""
        score: Any = self.model.link_decoder
        src, negative = rows[batch.src_index], batch.dst_neg_index.view(len(batch.src_index), -1)
        return score(src, rows[batch.dst_pos_index]), score(src[:, None], rows[negative])

    def score(self, split: str, epoch: int) -> Scores | None:
        """See `LabelMode`: AP and ROC AUC against one negative of each link, ranks among all of its negatives."""
        loader = self.evaluators.get(split)
        if loader is None:
            return None
        pairs, ranks = (LinkScores(folder=self.config.out) for _ in range(2))
        loader.set_epoch(0)
        with evaluating(self.model):
            for batch in loader:
                batch = batch.to(self.device, non_blocking=True)
                with autocast(self.device, self.config.precision):
                    positive, negative = self._triplets(forward_batch(self.model, batch), batch)
                pairs.update(positive, negative[:, :1])
                ranks.update(positive, negative)
        return {**pairs.compute(), **ranks.compute()}

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """See `Mode`."""
        return config
