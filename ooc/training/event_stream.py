"""The mode "events": a stream of events, whose destinations are to be told from others; see
`ooc.training.temporal_run.Mode`."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ooc.config.base import changed
from ooc.config.events import MODELS, EventsConfig
from ooc.history.grown import GROWN, extend_history
from ooc.loading.event_loader import EventLoader
from ooc.metrics.edgebank import EdgeBank
from ooc.metrics.links import PAIR_BYTES, LinkScores
from ooc.runtime.clock import Span
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.pace import Pace
from ooc.sampling.negatives import GivenNegatives, Negatives, fallback_counts, negatives_of
from ooc.sampling.time_splits import chronological, prefix
from ooc.sampling.time_windows import NANOSECONDS
from ooc.temporal.event_models import LinkModel, ModelName, OwnModel, Sizes, build_event_model
from ooc.temporal.node_memory import MemoryLoader, NodeMemory, check_undirected
from ooc.training.open_run import model_bytes
from stores.dataset import Dataset
from stores.errors import ConfigError

Scores = dict[str, float | None]
FOLDER = "memory"
KEPT_A_NODE = 6
"""bytes in memory for every node: when its row was written, and how often it was asked for"""


class EventStream:
    """Batches of events, a model that scores links, its memory, and EdgeBank beside it."""

    def __init__(self, config: EventsConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        events = dataset.events
        self.columns = tuple(events.columns if config.columns is None else config.columns)
        self.memory: NodeMemory | None = None
        self._has_memory = config.model == "tgn"
        check_undirected(dataset)
        torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
        self.model: nn.Module = self._make().to(device)
        kept = dataset.num_nodes * (KEPT_A_NODE * self._has_memory + 16 * ("birth" in dataset.names)) + PAIR_BYTES
        self.budget = plan_memory(dataset, model_bytes(config, self.model) + kept)
        self.splits = chronological(events, config.val, config.test)
        self._negatives = {split: self._drawing(split) for split in ("train", "val")}
        self._negatives["test"] = self._negatives["val"]
        self.loaders = {split: self._loader(split) for split in self.splits}
        self.steps_per_epoch = len(self.loaders["train"])
        self.rate = ("events", self.loaders["train"].num_events / max(self.steps_per_epoch, 1))
        self.parts = ("events", {split: last - first for split, (first, last) in self.splits.items()})
        several = self._negatives["val"].ratio > 1
        if several and config.monitor not in (None, "mrr"):
            raise ConfigError(f"monitor = {config.monitor!r} is a score of one negative an event; with several use mrr")
        self.monitor: str = config.monitor or ("mrr" if several or config.negatives_file is not None else "ap")
        self.baselines: dict[str, dict[str, Scores]] = {}
        self._resume: dict[str, Any] | None = None

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
        return LinkModel(OwnModel(config.model, offered, config.model_args, asked), config.hidden)

    def _drawing(self, split: str) -> Negatives:
        config = self.config
        if split != "train" and config.negatives_file is not None:
            first, last = self.splits["val"][0], self.splits["test"][1]
            return GivenNegatives(config.negatives_file, first, self.dataset.num_nodes, last)
        how, ratio = (config.negatives, config.ratio) if split == "train" else (config.eval_negatives, config.eval_ratio)
        return negatives_of(self.dataset, how, ratio, config.destinations)

    def _loader(self, split: str, bare: bool = False) -> EventLoader:
        """Of a split's events, with its negatives; those of scores are the same in every epoch. bare: without the past."""
        config = self.config
        options: dict[str, Any] = {
            "events": self.splits[split],
            "negatives": self._negatives[split],
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

    def open(self, out: Path, state: dict[str, Any] | None, tell: Pace) -> None:
        """See `Mode`; EdgeBank's scores depend on the events alone, so they come first."""
        self._tell, self._out = tell, out
        has_grown = state is not None and GROWN in state
        self._resume = None if state is None else state["loader"]
        if state is not None and has_grown:  # the same place, but the training's time ends later
            self._resume = self.loaders["train"].state_dict() | {name: state["loader"][name] for name in ("epoch", "event")}
        self.baselines = edgebank(self, tell) if state is None or has_grown else state["baselines"]
        if self._has_memory:
            if has_grown:
                extend_history(out / FOLDER, 1, self.dataset.num_nodes)
            self.memory = NodeMemory.create(
                out / FOLDER,
                self.dataset,
                self.config.memory_dim,
                columns=self.columns,
                max_bytes=self.budget.history,
                state=None if state is None else state["memory"],
                engine="auto" if self.config.engine == "gds" else self.config.engine,
            )
            for loader in self.loaders.values():
                loader.memory = self.memory  # type: ignore[attr-defined]

    def begin(self) -> None:
        """An empty memory."""
        if self.memory is not None:
            self.memory.reset()

    def batches(self, epoch: int, step: int) -> Iterator[Any]:
        """Training's; a step within an epoch is where the checkpoint was taken."""
        loader = self.loaders["train"]
        loader.set_epoch(epoch)
        if step:
            assert self._resume is not None
            loader.load_state_dict(self._resume)
        return iter(loader)

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy of the events, and of their negatives, each kind a mean (as in PyG's example)."""
        positive, negative = self._scored(batch)
        true = binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
        return true + binary_cross_entropy_with_logits(negative, torch.zeros_like(negative))

    def _scored(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(scores [k], [k, r]) of a batch; the memory takes up what came before it."""
        held = None if self.memory is None else self.memory.pull(batch, self.device)
        positive, negative, updated = self.model(batch, held)
        if self.memory is not None:
            self.memory.push(batch, *updated)
        return positive, negative

    def score(self, split: str) -> Scores | None:
        """Scores of a split's events, the memory going on through them."""
        self._end_pass()
        loader, found = self.loaders[split], LinkScores(folder=self._out)
        loader.set_epoch(0)
        for batch in loader:
            found.update(*self._scored(batch))
            self._tell(f"scores of {split}", int(batch.e_id[-1]) + 1 - self.splits[split][0], loader.num_events, "events")
        return dict(found.compute()) or None

    def _end_pass(self) -> None:
        if self.memory is not None:
            self.memory.end_pass()

    def state(self) -> dict[str, Any]:
        """Of the memory and the loader, and EdgeBank's scores."""
        kept = None if self.memory is None else self.memory.history.state()
        return {"memory": kept, "loader": self.loaders["train"].state_dict(), "baselines": self.baselines}

    def seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """See `Mode`."""
        return prefix(self.dataset.events, int(state["loader"]["event"]))

    def commit(self) -> None:
        """See `Mode`."""
        if self.memory is not None:
            self.memory.history.commit()

    def read(self) -> dict[str, Any]:
        """See `Mode`; rows of the memory count as history."""
        moved = [loader.moved for loader in self.loaders.values()]
        rows = sum(each.rows for each in moved)
        found: dict[str, Any] = {"bytes_read": sum(each.events + each.gathered for each in moved)}
        found |= fallback_counts(self._negatives.values())
        found |= {"rows_read": rows, "rows_asked": rows, "stages": self.loaders["train"].times()}
        if self.memory is not None:
            counts = replace(self.memory.history.counts, bytes_logged=self.memory.history.log.total)
            found |= {f"history_{name}": value for name, value in asdict(counts).items()}
        return found

    def spans(self) -> dict[str, list[Span]]:
        """Of training."""
        return self.loaders["train"].spans()

    def close(self) -> None:
        """End the memory's writer."""
        if self.memory is not None:
            self.memory.history.close()


def edgebank(stream: EventStream, tell: Pace) -> dict[str, dict[str, Scores]]:
    """{"EdgeBank": split -> scores}, with unlimited memory of pairs and the negatives that the model meets; none of a split
    without events, and none at all where the pairs do not fit the memory."""
    events, most = stream.dataset.events, stream.budget.pairs
    bank, found = EdgeBank(stream.dataset.num_nodes), dict[str, Scores]()
    first, last = stream.splits["train"]
    for start in range(first, last, 2**16):
        block = events.read(start, min(start + 2**16, last), [])
        bank.update(block.src, block.dst, block.time)
        tell("EdgeBank", block.last, len(events), "events")
        if bank.nbytes > most:
            return {"EdgeBank": {}}
    for split in ("val", "test"):
        scores = LinkScores(folder=stream._out)
        for batch in stream._loader(split, bare=True):
            source, time = batch.src.numpy(), batch.t.numpy()
            negative = batch.neg_dst.numpy().reshape(len(source), -1)
            wrong = [torch.from_numpy(bank.score(source, column, time)) for column in negative.T]
            scores.update(torch.from_numpy(bank.score(source, batch.dst.numpy(), time)), torch.stack(wrong, dim=1))
            bank.update(source, batch.dst.numpy(), time)
            tell("EdgeBank", int(batch.e_id[-1]) + 1, len(events), "events")
        found[split] = dict(scores.compute())
    return {"EdgeBank": {split: scores for split, scores in found.items() if scores}}
