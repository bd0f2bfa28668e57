"""The mode "snapshots": windows of the events, each predicting the next one's links, or classes of its own nodes.

A window is trained on when the next one is over, as ROLAND's live update has it (You et al., KDD 2022): the model that has seen
the windows before looks at this one, is scored on the next one's events or learns from them, and goes on.

Several ranks take a share of the next window's events, or of the labelled nodes, each: windows follow each other, so every rank
computes all of them, and what their nodes carry is the same everywhere.
"""

from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ooc.config.base import changed
from ooc.config.snapshots import MODELS, SnapshotsConfig
from ooc.history.history import Growth, open_history
from ooc.history.shares import HistoryShare
from ooc.layerwise.node_ranges import even_ranges
from ooc.loading.collate import Gather
from ooc.metrics.links import LinkScores
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.ranks import ALONE, Ranks
from ooc.runtime.transfer import to_device
from ooc.sampling.time_windows import chronological, prefix, windows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.pages import PAGE_BYTES
from ooc.temporal.forecast_loader import Forecast, ForecastLoader, ForecastWork, Inputs
from ooc.temporal.window_models import Family, WindowModel, own_window_model, window_model
from ooc.temporal.window_task import (
    WindowNet,
    WindowOutput,
    carried,
    edgebank,
    hand_on,
    labels_of_events,
    parts,
    split_steps,
    task_of,
)
from ooc.training.build import make_optimizer
from ooc.training.mode import Scores, clear_gradients
from ooc.training.node_mode import labels_of
from ooc.training.temporal_mode import TimeMode, link_loss

FOLDER = "carried"
WINDOWS_OF_DEGREES = 16
"""windows whose in-degrees PNA scales by"""
PAIRS_AT_ONCE = 2**16
"""scored together where nothing is learned from them"""
_LAYER_ROWS, _PAIR_ROWS = 14, 10
"""rows of the hidden width that a step keeps of a node, a layer, and of a pair"""


class SnapshotMode(TimeMode):
    """Windows, a model that is carried through them, and EdgeBank beside it; see `Mode`."""

    config: SnapshotsConfig
    unit = "windows"
    saves_device = "a shorter `window`, or a smaller `hidden`"
    ranked = True
    model: WindowNet
    loaders: dict[str, ForecastLoader]

    def __init__(self, config: SnapshotsConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        events = dataset.events
        self.task = task_of(dataset, config.task, config.labels)
        self.windows = windows(events, *config.span, config.by)
        self.borders = chronological(events, config.val, config.test)
        self._check_labels()
        inputs = self._inputs()
        torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
        made = self._make(inputs.channels)
        out = None if self.task is None else self.task.channels
        self._set_model(WindowNet(made, config.hidden, out), bool(made.widths))
        self.loaders = {each: self._loader(inputs, learning=each == "train") for each in ("train", "score")}
        self.splits = split_steps(self.loaders["train"].window_pairs(), self.borders["train"][1], self.borders["val"][1])
        self.negatives = self._negatives_by_split() if self.task is None else {}
        self.monitor = self._monitor()
        self._handed_on = 0
        """windows, in all epochs and scores: the history's next step"""
        self._base = 0
        """the history's step of the pass's step 0"""
        self._trained: dict[str, Tensor] | None = None
        self._live: torch.optim.Optimizer | None = None
        self._check_splits(self.borders["train"][1])
        if made.widths:  # the state of a window's nodes as it is read, in the window's order, and the new one
            self._book_states(3 * 4 * sum(made.widths), self.budget.window)

    def _check_labels(self) -> None:
        """Raise ConfigError where training meets no known label."""
        if self.task is None:
            return
        dataset, column, loss = self.dataset, self.config.labels, self.task.loss()
        split = "train" if "train" in dataset.splits else None
        stop = self.borders["train"][1]
        of_events = None if column is None else labels_of_events(dataset.events, column, stop)
        pieces = labels_of(dataset, split) if of_events is None else map(torch.from_numpy, of_events)
        if not any(loss.weight(piece) for piece in pieces):
            whose = f"column {column} of training's events" if column else f"split {split!r}" if split else "the store"
            raise ConfigError(f"{dataset.path}: {whose} has no known label, so there is nothing to train on")

    def _inputs(self) -> Inputs:
        """What a node is given in a window: features, sums of event columns, an identity."""
        config, dataset, events = self.config, self.dataset, self.dataset.events
        given = events.columns if config.columns is None else config.columns
        read = [name for name in given if name not in ("weight", config.labels)]
        widths = {name: int(np.prod(events.width(name), dtype=np.int64)) for name in read}
        x = dataset.stored("x") if dataset.num_features else None
        gather = None if x is None else Gather(dataset.encoding("x"), torch.float32)
        return Inputs(x, gather, widths, config.identity, key(config.seed, Purpose.INIT, 1))

    @property
    def trained_events(self) -> tuple[int, int]:
        return self.borders["train"]

    @property
    def steps_per_epoch(self) -> int:
        """`updates` a window."""
        return self.splits["train"][1] * self.config.updates

    def _make(self, in_channels: int) -> WindowModel:
        """The configured model, its parameters drawn from torch's generator."""
        config = self.config
        if config.model in MODELS:
            own: dict[str, Any] = {"conv": config.conv, "update": config.update, "dropout": config.dropout}
            return window_model(cast(Family, config.model), in_channels, config.hidden, config.layers, **own)
        offered: dict[str, Any] = {"in_channels": in_channels, "hidden_channels": config.hidden, "dropout": config.dropout}
        offered |= {"out_channels": config.hidden, "num_layers": config.layers}
        return own_window_model(
            config.model, offered, config.model_args, changed(config, "dropout"), config.folders, self._degrees
        )

    def _degrees(self) -> Tensor:
        """The histogram of the nodes' in-edges in the first training windows, int64."""
        events, last = self.dataset.events, self.borders["train"][1]
        found = np.zeros(0, np.int64)
        for window in islice(self.windows.of(events), WINDOWS_OF_DEGREES):
            block = events.read(window.first, max(window.first, min(window.last, last)), [])
            met = np.concatenate([block.dst, block.src]) if self.config.both_ways else block.dst
            found = np.concatenate([found, np.unique(met, return_counts=True)[1]])
        return torch.from_numpy(np.bincount(found, minlength=2))

    def _monitor(self) -> str:
        config = self.config
        known = ["ap", "auroc", "mrr"] if self.task is None else self.task.metric_names
        if self.task is None and config.eval_ratio > 1:
            known = ["mrr"]
        found = config.monitor or (known[0] if self.task is None else self.task.monitor)
        if found not in known:
            raise ConfigError(f"monitor = {found!r} is no score of this run: use one of {', '.join(known)}")
        return found

    def _loader(self, inputs: Inputs, learning: bool) -> ForecastLoader:
        config, with_targets = self.config, self.task is None
        weighted = "weight" in (self.dataset.events.columns if config.columns is None else config.columns)
        columns = (*inputs.columns, *(["weight"] if weighted else []), *([] if config.labels is None else [config.labels]))
        work = ForecastWork(
            events=self.dataset.events,
            columns=columns,
            inputs=inputs,
            label=config.labels,
            y=None if self.task is None or config.labels is not None else self.dataset.labels,
            weighted=weighted,
            both_ways=config.both_ways,
            state_bytes=4 * sum(self.model.model.widths),
            activations=partial(_activations, 4 * config.hidden, config.layers, None if learning else PAIRS_AT_ONCE),
            max_bytes=self.budget.window,
            max_activations=self.budget.window_activations,
            num_nodes=self.dataset.num_nodes,
        )
        return ForecastLoader(work, self.windows, None, self.budget.windows_in_flight, self.device, with_targets=with_targets)

    def _score_baselines(self) -> dict[str, dict[str, Scores]]:
        if self.task is not None:
            return {}
        draws, most = key(self.config.seed, Purpose.EVALUATE), self.budget.pairs
        steps, negatives = self.loaders["score"].window_pairs(), self.negatives["val"]
        found = edgebank(self.dataset, steps, self.splits, negatives, draws, most, self.pace, self.config.out)
        return {"EdgeBank": found}

    def _open_state(self, state: dict[str, Any] | None, growth: Growth | None) -> None:
        if state is not None:
            self._handed_on, self._trained = state["handed_on"], state["trained"]
        widths, ranks = self.model.model.widths, self.ranks
        if not widths:
            return
        folder = ranks.broadcast(self.config.out) / FOLDER
        settings: dict[str, Any] = {"lag": 0, "max_bytes": self.budget.window_state, "engine": self.engine, "resident": True}
        if not ranks.alone:
            own = even_ranges(self.dataset.num_nodes, PAGE_BYTES, ranks.world_size)[ranks.rank]
            settings["share"] = HistoryShare(ranks, own, replicated=True)
        rows, grown = None if state is None else state["history"], growth is not None
        history = open_history(folder, self.dataset.num_nodes, widths, "float32", rows, grown, **settings)
        self.history = self.opened.enter_context(closing(history))
        for loader in self.loaders.values():
            loader.history = self.history

    def _begin(self) -> None:
        """Nodes carry nothing, and weights are the first ones."""
        if self._trained is not None:  # what validation and test have taught is not to be known
            self.model.load_state_dict(self._trained)
            self._trained = self._live = None
        self.model.model.begin()
        if self.history is not None:
            self.history.end_epoch()
            self.history.forget()

    def _run(self, loader: ForecastLoader, split: str, first: int, draws: int) -> Any:
        """A split's windows from step `first` on; draws: the key of its negatives."""
        if self.history is not None:
            self.history.end_epoch()
        self._base = self._handed_on - first
        last, negatives = self.splits[split][1], self.negatives.get(split)
        return closing(loader.run(first, last, negatives=negatives, key=draws, base=self._base))

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """See `Mode`; windows, `updates` times each: (forecast, what its nodes carry, whether it is the last time)."""
        if not step:
            self._begin()
        return self._updates(epoch, step)

    def _updates(self, epoch: int, step: int) -> Iterator[tuple[Forecast, list[Tensor], bool]]:
        updates = self.config.updates
        first, again = divmod(step, updates)
        with self._run(self.loaders["train"], "train", first, key(self.config.seed, Purpose.NEGATIVE, epoch)) as forecasts:
            for forecast in forecasts:
                held = carried(self.history, forecast)
                for time in range(again, updates):
                    yield forecast, held, time + 1 == updates
                again = 0

    def loss(self, batch: Any) -> Tensor:
        """Of links: of the next window's events, see `link_loss`; of nodes: the task's."""
        forecast, held, last = batch
        outcome = self.model.outcome(forecast, held)
        if last:
            self._hand_on(forecast, outcome)
        return self._loss(self._own(forecast), outcome, "train")

    def weight(self, batch: Any) -> Tensor:
        """See `Mode`; of events, or of known labels."""
        own = self._own(batch[0])
        if self.task is not None:
            return self.task.loss().weighed(self._labels(own, "train"))
        return torch.tensor(len(own.src), device=self.device)

    def _own(self, forecast: Forecast) -> Forecast:
        """With this rank's share of the events to predict, or of the labels, others being unknown."""
        if self.ranks.alone:
            return forecast
        part, place = slice(*self._part(len(forecast.src))), self._part(forecast.present)
        y = forecast.y
        if y is not None and self.task is not None:
            y = torch.full_like(y, self.task.unknown)
            y[slice(*place)] = cast(Tensor, forecast.y)[slice(*place)]
        return forecast._replace(src=forecast.src[part], dst=forecast.dst[part], negative=forecast.negative[part], y=y)

    def _part(self, count: int) -> tuple[int, int]:
        return even_ranges(count, 1, self.ranks.world_size)[self.ranks.rank]

    def _loss(self, forecast: Forecast, outcome: WindowOutput, split: str) -> Tensor:
        if self.task is not None:
            return self.task.loss()(self.model.classes(outcome.rows, forecast), self._labels(forecast, split))
        if not len(forecast.src):  # of few events some ranks have none
            return outcome.rows.sum() * 0.0
        return link_loss(*self.model.links(outcome.rows, forecast))

    def _labels(self, forecast: Forecast, split: str) -> Tensor:
        """[present, ...]: of the nodes in the store's split of that name, where it has one and labels are theirs; others are
        unknown."""
        assert forecast.y is not None
        assert self.task is not None
        if self.config.labels is not None or split not in self.dataset.splits:
            return forecast.y
        (outside,) = to_device([torch.from_numpy(~self.dataset.members(split).contains(forecast.own))], forecast.y.device)
        return forecast.y.masked_fill(outside.view(-1, *[1] * (forecast.y.dim() - 1)), self.task.unknown)

    def _hand_on(self, forecast: Forecast, outcome: WindowOutput) -> None:
        hand_on(self.history, self._base, self.model, forecast, outcome)
        self._handed_on += 1

    def score(self, split: str) -> Scores | None:
        """Scores of a split's windows, each behind the one that looks at it; with `live` the model then learns from it."""
        first, last = self.splits[split]
        if first == last:
            return None
        if self.config.live and self._live is None:
            self._trained = deepcopy(self.model.state_dict())
            self._live = make_optimizer(self.config, self.model)
        nodes = None
        if self.task is not None:
            steps = (each.window for each in islice(self.loaders["score"].window_pairs(), first, last))
            most = sum(min(2 * (each.last - each.first), self.dataset.num_nodes) for each in steps)
            nodes = self.task.scores(most, self.device)
        links = LinkScores(folder=self.config.out)
        with self._run(self.loaders["score"], split, first, key(self.config.seed, Purpose.EVALUATE)) as forecasts:
            for forecast in forecasts:
                with torch.inference_mode(False):  # the model may learn from it
                    held = carried(self.history, forecast)
                outcome = self.model.outcome(forecast, held)
                if nodes is not None:
                    nodes.update(self.model.classes(outcome.rows, forecast), self._labels(self._own(forecast), split))
                else:
                    for part in parts(self._own(forecast), PAIRS_AT_ONCE):
                        links.update(*self.model.links(outcome.rows, part))
                if self._live is not None:
                    outcome = self._learn(self._live, forecast, held, split)
                self._hand_on(forecast, outcome)
                self.pace(f"scores of {split}", forecast.step + 1 - first, last - first, "windows")
        (links if nodes is None else nodes).merge(self.ranks)
        found: Scores = nodes.compute() if nodes is not None else dict(links.compute())
        return found or None

    def _learn(self, optimizer: torch.optim.Optimizer, forecast: Forecast, held: list[Tensor], split: str) -> WindowOutput:
        """`updates` steps on a window that was scored; what its nodes then carry on is of the last one, as in training."""
        self.model.train()
        with torch.inference_mode(False), torch.enable_grad():
            for time in range(self.config.updates):
                torch.manual_seed(key(self.config.seed, Purpose.TORCH, -1, self._handed_on, time) >> 1)
                outcome = self.model.outcome(forecast, held)
                self._loss(forecast, outcome, split).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                clear_gradients(optimizer)
        self.model.eval()
        return outcome

    def _kept(self) -> dict[str, Any]:
        """`trained`: the model before validation and test taught it more."""
        kept = None if self.history is None else self.history.state()
        return {"history": kept, "handed_on": self._handed_on, "trained": self._trained}

    def seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        last = next(islice(self.loaders["train"].window_pairs(), -(-step // self.config.updates) - 1, None))
        if last is None:
            return {}
        borders = [last.window.first, last.window.last, last.first, last.last]
        return {"borders": borders, **prefix(self.dataset.events, max(last.window.last, last.last))}


def _activations(row: int, layers: int, most: int | None, nodes: int, pairs: int) -> int:
    """Bytes of a step's activations. row: bytes of a row of the hidden width; most: pairs at once, None: all."""
    return row * (_LAYER_ROWS * layers * nodes + _PAIR_ROWS * (pairs if most is None else min(pairs, most)))
