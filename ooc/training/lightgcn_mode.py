"""The mode "lightgcn": rows of nodes behind LightGCN's propagation, over the whole graph or over sampled links in every step.

Scores, lists and embeddings are of the rows behind the exact propagation, however they were trained.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.lightgcn import LightGCNConfig
from ooc.history.history import Growth
from ooc.history.propagated_rows import write_propagated
from ooc.history.propagated_table import PropagatedRows
from ooc.layerwise.filtered_ranks import TableInOrder
from ooc.layerwise.propagation import SymmetricAdjacency
from ooc.loading.relation_links import RelationLinks, RelationSplit
from ooc.metrics.link_losses import LinkLoss
from ooc.models.edge_decoders import DotDecoder
from ooc.models.link_scores import DotScorer
from ooc.planning.over_ranks import RanksPlan
from ooc.planning.table_plan import TablePlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import remove_tree
from ooc.training import checkpoint
from ooc.training.lightgcn_batches import LinkBatch, LinkBatches
from ooc.training.link_mode import link_type
from ooc.training.mode import Mode, RunContext, RunState, Scores
from ooc.training.propagation_steps import PropagationSteps
from ooc.training.run import MODEL
from ooc.training.sampled_steps import SampledSteps
from ooc.training.table_lists import ranked_scores
from ooc.training.table_memory import lists_bytes
from ooc.training.trained_table import TrainedTable, check_numbering
from ooc.training.whole_graph_steps import WholeGraphSteps

EMBEDDINGS = "embeddings"
"""of what the rows become behind the propagation, by node, once the run has ended"""
NOW = f"{EMBEDDINGS}-now"
"""of the same while they are scored"""


class LightGCNMode(Mode):
    """Rows are changed by the gradient of a batch of links behind the propagation; see `Mode` and `PropagationSteps`."""

    config: LightGCNConfig
    auto_device = "cpu"
    typed = True
    has_table = True
    plans_unopened = True
    saves_device = "a smaller `hidden`"

    def __init__(self, config: LightGCNConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.key = link_type(config.edge_type, dataset)
        self.links = RelationLinks(dataset, config.edge_type, relations=False)
        edges = dataset.edges(self.key)
        stored = config.takes_split(bool(edges.splits))
        self.split = RelationSplit(self.links, None if stored else config.shares, config.train_split, config.seed)
        self.train: Members = self.split.members(config.train_split)[0]
        if not len(self.train):
            raise ConfigError(f"{config.store} has no edges left to train on: give a smaller val and test")
        names = self.split.names
        config.check_parts(names)
        if config.needs_scores and not (config.val_split in names and self.split.count(config.val_split)):
            raise ConfigError(f"{config.needs_scores} needs edges to validate on, and there are none: leave it out")
        self.model, self.monitor = DotDecoder(), config.monitored
        self.loss_of = LinkLoss(config.loss)
        self.batches_of_links = LinkBatches(config, self.links, self.train)
        made = SampledSteps if config.hops else WholeGraphSteps
        self.steps: PropagationSteps = made(config, dataset, self.links, self.batches_of_links)
        self.budget = self.steps.budget

    @classmethod
    @contextmanager
    def trained_table(cls, run: Path, config: LightGCNConfig, dataset: Dataset, ended: Any) -> Iterator[TrainedTable]:
        """See `Mode`: the rows behind the propagation."""
        links = RelationLinks(dataset, config.edge_type, relations=False)
        with closing(DiskRows.open(run / ended[EMBEDDINGS])) as rows:
            check_numbering(run, links, {"rows": rows.shape[0], **ended})
            yield TrainedTable(dataset, links, DotScorer(config.hidden), TableInOrder(rows))

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        return config

    def predict(self, seconds: float, variants: bool) -> TablePlan:
        return self.steps.predict()

    def predict_ranks(self, nproc: int, bandwidth: int) -> RanksPlan:
        raise ConfigError("nproc does not apply to mode lightgcn, which trains in one process: leave it out")

    @property
    def steps_per_epoch(self) -> int:
        return self.batches_of_links.steps_per_epoch

    @property
    def seeds_per_step(self) -> int:
        return self.config.batch_size

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Of no parameter: the rows' is their table's."""
        return torch.optim.SGD([torch.zeros(())], self.config.lr)

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        self.run = run
        self.steps.open(saved, growth, self.opened, self.engine)

    def prepare(self) -> None:
        """Put the links that carry messages in order."""
        members = [self.train]

        def pieces() -> Iterator[tuple[Ids, Ids]]:
            return ((head, tail) for head, _, tail in self.links.pieces(members))

        made = self.config.out / "neighbors"
        room = max(2**24, self.steps.adjacency_room)
        self.steps.prepare(SymmetricAdjacency.of(pieces, self.links.num_nodes, room, made))

    def notes(self) -> list[str]:
        parts = ", ".join(f"{self.split.count(name):,} of {name}" for name in self.split.names)
        return [*super().notes(), f"links: {parts}; {self.links.num_nodes:,} rows, {self.steps.described}"]

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        return self.steps.of(epoch, step, stop)

    def links_of(self, epoch: int, step: int) -> LinkBatch:
        """The links of a step."""
        return self.batches_of_links.of(epoch, step)

    def loss(self, batch: Any) -> Tensor:
        return self._loss(*self.steps.rows(batch))

    def _loss(self, links: LinkBatch, found: PropagatedRows) -> Tensor:
        config, rows = self.config, found.propagated
        if config.similarity == "cosine":
            rows = F.normalize(rows, dim=-1)
        source, target, negative = rows[links.source], rows[links.target], rows[links.negative]
        positive = (source * target).sum(-1) / config.temperature
        if config.loss == "softmax":
            known = links.negative[None] == links.target[:, None]
            loss = self.loss_of(positive, source @ negative.t() / config.temperature, known)
        else:
            loss = self.loss_of(positive, (source.unsqueeze(1) * negative).sum(-1))
        if not config.l2:
            return loss
        places = links.source, links.target, links.negative.flatten()
        return loss + config.l2 / 2 * sum(found.own[place].square().sum() / len(place) for place in places)

    def step(self, batch: Any, share: float, last: bool = True) -> Tensor:
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Change the rows of the table; there is no other parameter."""
        self.steps.update(self.lr, last=self.run.state.total_steps + 1 >= (self.config.max_steps or 1 << 62))

    def evaluate(self) -> dict[str, Any]:
        """See `Mode`: Recall@k and NDCG@k of validation, where there are links of it."""
        if self.config.val_split not in self.split.names or not self.split.count(self.config.val_split):
            return {}
        scores = self._ranked(self.config.val_split)
        best = self.run.judge(scores)
        if best:
            self.steps.keep_best(self.run.state.epoch)
        return {"val": scores, "best": best}

    def ended(self) -> dict[str, Any]:
        """See `Mode`: the best rows behind the propagation are written by node, beside those of an earlier end."""
        before = checkpoint.load(self.config.out, MODEL) or {}
        self._ended = EMBEDDINGS if before.get(EMBEDDINGS) != EMBEDDINGS else f"{EMBEDDINGS}-again"
        with closing(self._write(self._ended, self.run.state.best_epoch)) as rows:
            rows.sync()
        return {EMBEDDINGS: self._ended, **self.steps.numbering}

    def final_scores(self) -> dict[str, Scores]:
        wanted = [name for name in self.split.names if name in self.config.eval_splits and self.split.count(name)]
        if not wanted:
            return {}
        booked = self.run.measure("ranking"), self.run.booked("evaluate_seconds")
        with booked[0], booked[1], closing(DiskRows.open(self.config.out / self._ended)) as rows:
            return self._scores(wanted, rows)

    def _ranked(self, split: str) -> Scores:
        """The scores of a split by the rows as they are now."""
        try:
            with closing(self._write(NOW, None)) as rows, self.run.stoppable():
                return self._scores([split], rows)[split]
        finally:
            remove_tree(self.config.out / NOW)

    def _scores(self, wanted: list[str], rows: DiskRows) -> dict[str, Scores]:
        trained = TrainedTable(self.dataset, self.links, DotScorer(self.config.hidden), TableInOrder(rows))
        return ranked_scores(trained, self.split, wanted, self.config, lists_bytes(self.steps.spare))

    def _write(self, name: str, best: int | None) -> DiskRows:
        """The rows behind the exact propagation, or those of the epoch `best`, by node, with norms as lists have them."""
        steps, config = self.steps, self.config
        where = config.out / name, steps.columns, lambda block: steps.load(block, best)
        return write_propagated(*where, steps.adjacency, config.layers, config.norm_power, self.run.stoppable)

    def state(self, cursor: RunState) -> dict[str, Any]:
        return self.steps.state()

    def commit(self) -> None:
        self.steps.commit(self.run.state.best_epoch)

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: from the next epoch on, with the rows and moments as they are; the best are chosen anew."""
        state = RunState.next_epoch_unchosen(saved)
        return saved | {"state": asdict(state), "best_model": None}, Growth(touched, state.epoch)

    def counts(self) -> dict[str, Any]:
        found = self.steps.counts()
        return {**found, **{f"table_{what}": found[f"history_{what}"] for what in ("bytes_read", "bytes_written")}}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        (self.config.out / "neighbors").unlink(missing_ok=True)
        for path in self.config.out.glob(self.steps.folders):
            if path.name != self.steps.folder:
                remove_tree(path)  # as it was before the store has grown
        for path in self.config.out.glob(f"{EMBEDDINGS}*"):
            if path.name != self._ended:
                remove_tree(path)  # of an earlier end
        return {"columns": self.steps.columns}
