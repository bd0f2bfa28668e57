"""The mode "events": a stream of events, whose destinations are ranked against negatives."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ooc.config.base import changed
from ooc.config.events import MODELS, EventsConfig
from ooc.history.history import Growth
from ooc.loading.event_loader import EventLoader
from ooc.metrics.links import EdgeBank, LinkScores
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.ranks import ALONE, Ranks
from ooc.sampling.negatives import GivenNegatives, Negatives, TgbNegatives
from ooc.sampling.time_windows import NANOSECONDS, chronological, prefix
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.temporal.event_models import LinkModel, ModelName, OwnModel, Sizes, build_event_model
from ooc.temporal.node_memory import MemoryLoader, NodeMemory, batch_memory_bytes, check_undirected
from ooc.training.mode import Scores
from ooc.training.temporal_mode import TimeMode, link_loss

FOLDER = "memory"


class EventMode(TimeMode):
    """Batches of events, a model that scores links, its memory, and EdgeBank beside it; see `Mode`."""

    config: EventsConfig
    unit = "events"
    saves_device = "a smaller `batch_size`, `num_neighbors` or `hidden`"
    loaders: dict[str, EventLoader]

    def __init__(self, config: EventsConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        events = dataset.events
        self.columns = tuple(events.columns if config.columns is None else config.columns)
        self.memory: NodeMemory | None = None
        self._has_memory = config.model == "tgn"
        check_undirected(dataset)
        self.splits = chronological(events, config.val, config.test)
        self.ranking: TgbNegatives | None = None
        if config.eval_negatives == "tgb":
            self.ranking = TgbNegatives(dataset, config.eval_ratio, self.splits["train"])
        torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
        self._set_model(self._make(), self._has_memory, 0 if self.ranking is None else self.ranking.nbytes)
        self.negatives = self._negatives_by_split()
        self.loaders = {split: self._loader(split) for split in self.splits}
        several = self.negatives["val"].ratio > 1
        if several and config.monitor not in (None, "mrr"):
            raise ConfigError(f"monitor = {config.monitor!r} is a score of one negative an event; with several use mrr")
        self.monitor = config.monitor or ("mrr" if several or config.negatives_file is not None else "ap")
        self._resume: dict[str, Any] | None = None
        self._check_splits(self.loaders["train"].num_events)

        if self._has_memory:
            self._book_states(batch_memory_bytes(dataset, config.memory_dim, self.columns), self.budget.beside_history().batch)

    @property
    def trained_events(self) -> tuple[int, int]:
        return self.splits["train"]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loaders["train"])

    def _make(self) -> LinkModel:
        """The configured model, its parameters drawn from torch's generator."""
        config, events = self.config, self.dataset.events
        msg = sum(int(np.prod(events.width(name), dtype=np.int64)) for name in self.columns)
        common: dict[str, Any] = {"heads": config.heads, "dropout": config.dropout, "seconds": NANOSECONDS[events.unit] / 1e9}
        hops = len(config.num_neighbors)
        if config.model in MODELS:
            sizes = Sizes(self.dataset.num_features, msg, config.hidden, config.time_dim, config.memory_dim)
            common |= {"hops": hops, "latest": config.num_neighbors[0], "ages": config.past == "event", "raw": config.raw}
            return build_event_model(cast(ModelName, config.model), sizes, self.columns, **common)
        offered = common | {"in_channels": self.dataset.num_features, "edge_channels": msg, "columns": self.columns}
        offered |= {"hidden_channels": config.hidden, "out_channels": config.hidden, "num_layers": hops}
        offered |= {"num_neighbors": config.num_neighbors, "time_dim": config.time_dim}
        asked = changed(config, "heads", "dropout", "time_dim")
        return LinkModel(OwnModel(config.model, offered, config.model_args, asked, config.folders), config.hidden)

    def _draw_negatives(self, split: str) -> Negatives:
        config = self.config
        if split != "train" and config.negatives_file is not None:
            first, last = self.splits["val"][0], self.splits["test"][1]
            return GivenNegatives(config.negatives_file, first, self.dataset.num_nodes, last)
        return super()._draw_negatives(split)

    def _loader(self, split: str, bare: bool = False) -> EventLoader:
        """Of a split's events, with its negatives; those of scores are the same in every epoch. bare: without the past."""
        config = self.config
        options: dict[str, Any] = {
            "events": self.splits[split],
            "negatives": self.negatives[split],
            "ranking": None if split == "train" else self.ranking,
            "seed": config.seed if split == "train" else key(config.seed, Purpose.EVALUATE) >> 1,
            "budget": self.budget.beside_history() if self._has_memory else self.budget,
        }
        if bare:
            return EventLoader(self.dataset, config.batch_size, num_neighbors=[], columns=[], features=False, **options)
        options |= {"num_neighbors": config.num_neighbors, "columns": self.columns, "device": self.device}
        options |= {"temporal_strategy": config.strategy}
        if self._has_memory:
            options |= {"width": config.memory_dim, "shared": config.past == "batch"}
            return MemoryLoader(self.dataset, config.batch_size, **options)
        return EventLoader(self.dataset, config.batch_size, **options)

    def _score_baselines(self) -> dict[str, dict[str, Scores]]:
        return edgebank(self)

    def _open_state(self, state: dict[str, Any] | None, growth: Growth | None) -> None:
        if state is not None:
            self._resume = state["loader"]
            if growth is not None:  # the same place, but the training's time ends later
                self._resume = self.loaders["train"].state_dict() | {name: state["loader"][name] for name in ("epoch", "event")}
        if not self._has_memory:
            return
        self.memory = NodeMemory.create(
            self.config.out / FOLDER,
            self.dataset,
            self.config.memory_dim,
            columns=self.columns,
            max_bytes=self.budget.history,
            state=None if state is None else state["memory"],
            grown=growth is not None,
            engine=self.engine,
        )
        self.history = self.opened.enter_context(closing(self.memory.history))
        for loader in self.loaders.values():
            loader.memory = self.memory  # type: ignore[attr-defined]

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """See `Mode`; a step within an epoch is where the checkpoint was taken."""
        loader = self.loaders["train"]
        loader.set_epoch(epoch)
        if step:
            assert self._resume is not None
            loader.load_state_dict(self._resume)
        elif self.memory is not None:
            self.memory.reset()
        return iter(loader)

    def loss(self, batch: Any) -> Tensor:
        """See `link_loss`."""
        return link_loss(*self._scored(batch))

    def _scored(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(scores [k], [k, r]) of a batch; the memory takes up what came before it."""
        rows = None if self.memory is None else self.memory.pull(batch, self.device)
        positive, negative, updated = self.model(batch, rows)
        if self.memory is not None:
            self.memory.push(batch, updated)
        return positive, negative

    def score(self, split: str) -> Scores | None:
        """Scores of a split's events, the memory going on through them."""
        if self.memory is not None:
            self.memory.end_pass()
        loader, found = self.loaders[split], EventScores(self.config.out)
        loader.set_epoch(0)
        for batch in loader:
            found.update(batch, *self._scored(batch))
            self.pace(f"scores of {split}", int(batch.e_id[-1]) + 1 - self.splits[split][0], loader.num_events, "events")
        return found.compute() or None

    def _negatives_said(self) -> str | None:
        said = super()._negatives_said()
        if self.ranking is None:
            return said
        return (
            f"{said}; for tgb_mrr: up to {self.ranking.ratio:,}, half of them training destinations of the source, the others "
            f"any of {self.ranking.num_destinations:,} destinations"
        )

    def _kept(self) -> dict[str, Any]:
        return {"memory": None if self.history is None else self.history.state(), "loader": self.loaders["train"].state_dict()}

    def seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        return prefix(self.dataset.events, int(state["loader"]["event"]))


class EventScores:
    """Scores of a split's events: AP, ROC AUC and ranks, and beside them ranks among TGB's negatives, named tgb_..."""

    def __init__(self, folder: Path) -> None:
        self._scores, self._ranks = LinkScores(folder=folder), LinkScores(folder=folder)

    def update(self, batch: Any, positive: Tensor, negative: Tensor) -> None:
        """Add a batch, or a part of one that is ranked: positive [k], negative [k, r], as `LinkScores`."""
        if "part_of" in batch:
            fills_the_row = batch.neg_dst.view(len(positive), -1) == batch.dst[:, None]
            self._ranks.update(positive, negative.masked_fill(fills_the_row, -torch.inf))
        else:
            self._scores.update(positive, negative)

    def compute(self) -> Scores:
        """Return the scores; empty without events."""
        ranks = {f"tgb_{name}": value for name, value in self._ranks.compute().items() if name not in ("ap", "auroc")}
        return {**self._scores.compute(), **ranks}


def edgebank(mode: EventMode) -> dict[str, dict[str, Scores]]:
    """{"EdgeBank": split -> scores}, with unlimited memory of pairs and the negatives that the model meets; none of a split
    without events, and none at all where the pairs do not fit the memory."""
    events, bank, found = mode.dataset.events, EdgeBank(mode.dataset.num_nodes), dict[str, Scores]()
    if not bank.read(events, *mode.splits["train"], mode.budget.pairs, mode.pace):
        return {"EdgeBank": {}}
    for split in ("val", "test"):
        scores = EventScores(mode.config.out)
        for batch in mode._loader(split, bare=True):
            source, target = batch.src.numpy(), batch.dst.numpy()
            negative = batch.neg_dst.numpy().reshape(len(source), -1)
            scores.update(batch, bank.score(source, target), bank.score(source[:, None], negative))
            if "part_of" not in batch:
                bank.update(source, target)
            mode.pace("EdgeBank", int(batch.e_id[-1]) + 1, len(events), "events")
        found[split] = scores.compute()
    return {"EdgeBank": {split: scores for split, scores in found.items() if scores}}
