"""The mode "snapshots": windows of the events, each foretelling the next one's links, or classes of its own nodes.

A window is trained on when the next one is over, as ROLAND's live update has it (You et al., KDD 2022): the model that has seen
the windows before looks at this one, is scored on the next one's events or learns from them, and goes on. See `Mode` in
`ooc.training.temporal_run`.
"""

from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ooc.config.base import changed
from ooc.config.snapshots import MODELS, SnapshotsConfig
from ooc.history.grown import GROWN, extend_history
from ooc.history.history import History
from ooc.loading.feature_gather import Gather
from ooc.metrics.links import PAIR_BYTES, LinkScores
from ooc.metrics.nodes import DEFAULT_MONITOR, Loss, Scores, metric_names, out_channels
from ooc.runtime.clock import Span
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.pace import Pace
from ooc.sampling.negatives import Negatives, fallback_counts, negatives_of
from ooc.sampling.time_splits import chronological, prefix
from ooc.sampling.time_windows import windows
from ooc.temporal.forecast_loader import Forecast, ForecastLoader, ForecastWork
from ooc.temporal.node_state import carried, hand_on
from ooc.temporal.window_inputs import Inputs
from ooc.temporal.window_models import Family, WindowModel, own_window_model, window_model
from ooc.temporal.window_net import WindowNet, WindowOutput
from ooc.temporal.window_task import Found, edgebank, parts, split_steps, task_of
from ooc.training.open_run import make_optimizer, model_bytes
from stores.dataset import Dataset
from stores.errors import ConfigError

FOLDER = "carried"
KEPT_A_NODE = 6
"""bytes in memory for every node that carries something: when it was written, and how often it was asked for"""
PAIRS_AT_ONCE = 2**16
"""scored together where nothing is learned from them"""
_LAYER_ROWS, _PAIR_ROWS = 14, 10
"""rows of the hidden width that a step keeps of a node, a layer, and of a pair"""


class WindowStream:
    """Windows, a model that is carried through them, and EdgeBank beside it."""

    def __init__(self, config: SnapshotsConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        events = dataset.events
        self.task, classes = task_of(dataset, config.task, config.labels)
        given = events.columns if config.columns is None else config.columns
        read = [name for name in given if name not in ("weight", config.labels)]
        widths = {name: int(np.prod(events.width(name), dtype=np.int64)) for name in read}
        x = dataset.stored("x") if dataset.num_features else None
        gather = None if x is None else Gather(dataset.encoding("x"), torch.float32)
        inputs = Inputs(x, gather, widths, config.identity, key(config.seed, Purpose.INIT, 1))
        torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
        made = self._make(inputs.channels)
        self.net = WindowNet(made, config.hidden, None if self.task is None else out_channels(self.task, classes)).to(device)
        self.model: nn.Module = self.net
        self.history: History | None = None
        self._classes = classes
        kept = dataset.num_nodes * (KEPT_A_NODE * bool(made.widths) + 16 * ("birth" in dataset.names)) + PAIR_BYTES
        self.budget = plan_memory(dataset, model_bytes(config, self.model) + kept)
        self.windows = windows(events, *config.span, config.by)
        self.borders = chronological(events, config.val, config.test)
        self.loaders = {each: self._loader(inputs, learning=each == "train") for each in ("train", "score")}
        self.splits = split_steps(self.loaders["train"].aheads(), self.borders["train"][1], self.borders["val"][1])
        self.steps_per_epoch = self.splits["train"][1] * config.updates
        self.rate = ("events", self.borders["train"][1] / max(self.steps_per_epoch, 1))
        self.parts = ("windows", {split: last - first for split, (first, last) in self.splits.items()})
        self._negatives = {split: self._drawing(split) for split in ("train", "val")}
        self._negatives["test"] = self._negatives["val"]
        self.monitor = self._monitor()
        self.baselines: dict[str, dict[str, Found]] = {}
        self._handed_on = 0
        """windows, in all epochs and scores: the history's next step"""
        self._base = 0
        """the history's step of the pass's step 0"""
        self._trained: dict[str, Tensor] | None = None
        self._live: torch.optim.Optimizer | None = None

    def _make(self, in_channels: int) -> WindowModel:
        """The configured model, its parameters drawn from torch's generator."""
        config = self.config
        if config.model in MODELS:
            own: dict[str, Any] = {"conv": config.conv, "update": config.update, "dropout": config.dropout}
            return window_model(cast(Family, config.model), in_channels, config.hidden, config.layers, **own)
        offered: dict[str, Any] = {"in_channels": in_channels, "hidden_channels": config.hidden, "dropout": config.dropout}
        offered |= {"out_channels": config.hidden, "num_layers": config.layers}
        return own_window_model(config.model, offered, config.model_args, changed(config, "dropout"))

    def _monitor(self) -> str:
        config = self.config
        known = ["ap", "auroc", "mrr"] if self.task is None else metric_names(self.task)
        if self.task is None and config.eval_ratio > 1:
            known = ["mrr"]
        found = config.monitor or ({"links": known[0]} if self.task is None else DEFAULT_MONITOR)[self.task or "links"]
        if found not in known:
            raise ConfigError(f"monitor = {found!r} is no score of this run: use one of {', '.join(known)}")
        return found

    def _loader(self, inputs: Inputs, learning: bool) -> ForecastLoader:
        config = self.config
        widths = self.net.model.widths
        weighted = "weight" in (self.dataset.events.columns if config.columns is None else config.columns)
        columns = [*inputs.columns, *(["weight"] if weighted else [])]
        work = ForecastWork(
            events=self.dataset.events,
            columns=tuple(columns if config.labels is None else [*columns, config.labels]),
            inputs=inputs,
            label=config.labels,
            y=None if self.task is None or config.labels is not None else self.dataset.labels,
            weighted=weighted,
            both_ways=config.both_ways,
            state_bytes=4 * sum(widths),
            activations=partial(_activations, 4 * config.hidden, config.layers, None if learning else PAIRS_AT_ONCE),
            max_bytes=self.budget.window,
            max_activations=self.budget.window_activations,
        )
        foresee = self.task is None
        return ForecastLoader(work, self.windows, None, 3 * self.budget.window, self.device, foresee=foresee)

    def _drawing(self, split: str) -> Negatives | None:
        config = self.config
        if self.task is not None:
            return None
        how, ratio = (config.negatives, config.ratio) if split == "train" else (config.eval_negatives, config.eval_ratio)
        return negatives_of(self.dataset, how, ratio, config.destinations)

    def open(self, out: Path, state: dict[str, Any] | None, tell: Pace) -> None:
        """See `Mode`; EdgeBank's scores depend on the events alone, so they come first."""
        self._tell, self._out = tell, out
        widths = self.net.model.widths
        if state is not None:
            self.baselines = state["baselines"]
            self._handed_on, self._trained = state["handed_on"], state["trained"]
        has_grown = state is not None and GROWN in state
        if (state is None or has_grown) and (negatives := self._negatives["val"]) is not None:
            draws, most = key(self.config.seed, Purpose.EVALUATE), self.budget.pairs
            steps = self.loaders["score"].aheads()
            found = edgebank(self.dataset, steps, self.splits, negatives, draws, most, tell, out)
            self.baselines = {"EdgeBank": found}
        if not widths:
            return
        engine = "auto" if self.config.engine == "gds" else self.config.engine
        settings: dict[str, Any] = {"lag": 0, "max_bytes": self.budget.window_state, "engine": engine}
        settings["resident"] = True
        if has_grown:
            extend_history(out / FOLDER, len(widths), self.dataset.num_nodes)
        if state is None:
            self.history = History.create(out / FOLDER, self.dataset.num_nodes, widths, "float32", **settings)
        else:
            self.history = History.open(out / FOLDER, len(widths), state["history"], **settings)
        for loader in self.loaders.values():
            loader.history = self.history

    def begin(self) -> None:
        """Nodes carry nothing, and weights are the first ones."""
        if self._trained is not None:  # what validation and test have taught is not to be known
            self.net.load_state_dict(self._trained)
            self._trained = self._live = None
        self.net.model.begin()
        if self.history is not None:
            self.history.end_epoch()
            self.history.forget()

    def _run(self, loader: ForecastLoader, split: str, first: int, draws: int) -> Any:
        """A split's windows from step `first` on; draws: the key of its negatives."""
        if self.history is not None:
            self.history.end_epoch()
        self._base = self._handed_on - first
        last, negatives = self.splits[split][1], self._negatives[split]
        return closing(loader.run(first, last, negatives=negatives, key=draws, base=self._base))

    def batches(self, epoch: int, step: int) -> Iterator[Any]:
        """Training's windows, `updates` times each: (forecast, what its nodes carry, whether it is the last time)."""
        updates = self.config.updates
        first, again = divmod(step, updates)
        with self._run(self.loaders["train"], "train", first, key(self.config.seed, Purpose.NEGATIVE, epoch)) as forecasts:
            for forecast in forecasts:
                held = carried(self.history, forecast)
                for time in range(again, updates):
                    yield forecast, held, time + 1 == updates
                again = 0

    def loss(self, batch: Any) -> Tensor:
        """Of links: cross-entropy of the next window's events and of negatives, each kind a mean; of nodes: the task's."""
        forecast, held, last = batch
        outcome = self.net.outcome(forecast, held)
        if last:
            self._hand_on(forecast, outcome)
        return self._loss(forecast, outcome, "train")

    def _loss(self, forecast: Forecast, outcome: WindowOutput, split: str) -> Tensor:
        if self.task is not None:
            return Loss(self.task)(self.net.classes(outcome.rows, forecast), self._labels(forecast, split))
        positive, negative = self.net.links(outcome.rows, forecast)
        true = binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
        return true + binary_cross_entropy_with_logits(negative, torch.zeros_like(negative))

    def _labels(self, forecast: Forecast, split: str) -> Tensor:
        """[present, ...]: of the nodes in the store's split of that name, where it has one and labels are theirs; others -1."""
        assert forecast.y is not None
        if self.config.labels is not None or split not in self.dataset.splits:
            return forecast.y
        inside = self.dataset.members(split).contains(forecast.node[: forecast.present].cpu().numpy())
        outside = torch.from_numpy(~inside).to(forecast.y.device)
        return forecast.y.masked_fill(outside.view(-1, *[1] * (forecast.y.dim() - 1)), -1)

    def _hand_on(self, forecast: Forecast, outcome: WindowOutput) -> None:
        hand_on(self.history, self._base, self.net, forecast, outcome)
        self._handed_on += 1

    def score(self, split: str) -> Found | None:
        """Scores of a split's windows, each behind the one that looks at it; with `live` the model then learns from it."""
        first, last = self.splits[split]
        if first == last:
            return None
        if self.config.live and self._live is None:
            self._trained = deepcopy(self.net.state_dict())
            self._live = make_optimizer(self.config, self.net)
        nodes = None
        if self.task is not None:
            steps = (each.window for each in islice(self.loaders["score"].aheads(), first, last))
            most = sum(min(2 * (each.last - each.first), self.dataset.num_nodes) for each in steps)
            nodes = Scores(self.task, self._classes, most, self.device)
        links = LinkScores(folder=self._out)
        with self._run(self.loaders["score"], split, first, key(self.config.seed, Purpose.EVALUATE)) as forecasts:
            for forecast in forecasts:
                with torch.inference_mode(False):  # the model may learn from it
                    held = carried(self.history, forecast)
                outcome = self.net.outcome(forecast, held)
                if nodes is not None:
                    nodes.update(self.net.classes(outcome.rows, forecast), self._labels(forecast, split))
                else:
                    for part in parts(forecast, PAIRS_AT_ONCE):
                        links.update(*self.net.links(outcome.rows, part))
                if self._live is not None:
                    outcome = self._learn(self._live, forecast, held, split)
                self._hand_on(forecast, outcome)
                self._tell(f"scores of {split}", forecast.step + 1 - first, last - first, "windows")
        found: Found = nodes.compute() if nodes is not None else dict(links.compute())
        return found or None

    def _learn(self, optimizer: torch.optim.Optimizer, forecast: Forecast, held: list[Tensor], split: str) -> WindowOutput:
        """`updates` steps on a window that was scored; what its nodes then carry on is of the last one, as in training."""
        self.net.train()
        with torch.inference_mode(False), torch.enable_grad():
            for time in range(self.config.updates):
                torch.manual_seed(key(self.config.seed, Purpose.TORCH, -1, self._handed_on, time) >> 1)
                outcome = self.net.outcome(forecast, held)
                self._loss(forecast, outcome, split).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        self.net.eval()
        return outcome

    def state(self) -> dict[str, Any]:
        """Of what nodes carry; `trained`: the model before validation and test taught it more."""
        kept = None if self.history is None else self.history.state()
        return {"history": kept, "handed_on": self._handed_on, "trained": self._trained, "baselines": self.baselines}

    def seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """See `Mode`."""
        last = next(islice(self.loaders["train"].aheads(), -(-step // self.config.updates) - 1, None))
        if last is None:
            return {}
        borders = [last.window.first, last.window.last, last.first, last.last]
        return {"borders": borders, **prefix(self.dataset.events, max(last.window.last, last.last))}

    def commit(self) -> None:
        """See `Mode`."""
        if self.history is not None:
            self.history.commit()

    def read(self) -> dict[str, Any]:
        """See `Mode`; what nodes carry counts as history."""
        moved = [loader.work.moved for loader in self.loaders.values()]
        rows = sum(each.rows for each in moved)
        found: dict[str, Any] = {"bytes_read": sum(each.events + each.gathered for each in moved)}
        found |= fallback_counts(self._negatives.values())
        found |= {"rows_read": rows, "rows_asked": rows, "stages": self.loaders["train"].times()}
        if self.history is not None:
            counts = replace(self.history.counts, bytes_logged=self.history.log.total)
            found |= {f"history_{name}": value for name, value in asdict(counts).items()}
        return found

    def spans(self) -> dict[str, list[Span]]:
        """Of training."""
        return {name: list(clock.spans) for name, clock in self.loaders["train"].clocks.items()}

    def close(self) -> None:
        """End the writer."""
        if self.history is not None:
            self.history.close()


def _activations(row: int, layers: int, most: int | None, nodes: int, pairs: int) -> int:
    """Bytes of a step's activations. row: bytes of a row of the hidden width; most: pairs at once, None: all."""
    return row * (_LAYER_ROWS * layers * nodes + _PAIR_ROWS * (pairs if most is None else min(pairs, most)))
