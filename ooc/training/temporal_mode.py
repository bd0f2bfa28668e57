"""What modes on temporal graphs share: batches in order of time, scores behind them, and the state of nodes that goes along.

An epoch goes through the training's time from an empty state of the nodes; validation goes on from the state that it leaves,
and the test from that behind validation, where validation is the best so far. So no score knows of what comes after it. A
checkpoint is taken inside the training's time and right behind it: a run killed while it is scored goes on from before that.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ooc.config.events import EventsConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.history.history import Growth, History
from ooc.loading.event_loader import EventLoader
from ooc.metrics.links import PAIR_BYTES
from ooc.models.layers import evaluating
from ooc.runtime.clock import write_trace
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.messages import Pace
from ooc.runtime.ranks import ALONE, Ranks
from ooc.sampling.negatives import Negatives, destinations_of, fallback_counts, negatives_of
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.temporal.forecast_loader import ForecastLoader
from ooc.training.build import model_bytes
from ooc.training.mode import Mode, RunContext, RunState, Scores

SPLITS = ("val", "test")
STATE_A_NODE = 6
"""bytes in memory for every node that has a state: when it was written, and how often it was read"""


DESTINATION = 9
"""bytes in memory for every node, at most, to draw negatives among the training's destinations"""


class TimeMode(Mode):
    """Training on a temporal graph; see `Mode`."""

    config: EventsConfig | SnapshotsConfig
    unit: ClassVar[str]
    """what splits are counted in: events or windows"""
    splits: dict[str, tuple[int, int]]
    """split -> (first, last) of its units"""
    loaders: Mapping[str, EventLoader | ForecastLoader]
    """"train" is the training's"""
    negatives: dict[str, Negatives]
    """by split; empty where nothing is drawn"""
    baselines: dict[str, dict[str, Scores]]
    """name -> split -> scores of what a model must beat, once the mode is open; none where it does not fit the memory"""
    history: History | None = None
    """the state of the nodes, from `open` on; None where the model has none"""
    pace: Pace
    """reports how far passes without a step are"""

    def __init__(self, config: EventsConfig | SnapshotsConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.baselines = {}
        self.scores: dict[str, Scores] = {}
        """of the best model so far"""

    def _set_model(self, model: nn.Module, keeps_state: bool, kept: int = 0) -> None:
        """Put the model on the device, and divide the memory beside it.

        keeps_state: whether nodes have a state; kept: bytes that the mode itself keeps.
        """
        dataset = self.dataset
        self.model = model.to(self.device)
        a_node = STATE_A_NODE * keeps_state + 16 * ("birth" in dataset.names) + DESTINATION * self._draws_destinations
        kept += dataset.num_nodes * a_node + PAIR_BYTES
        self.budget = plan_memory(dataset, model_bytes(self.config, self.model) + kept)

    @property
    def counts_of(self) -> dict[str, int]:
        """Split -> how many units it has."""
        return {split: last - first for split, (first, last) in self.splits.items()}

    def _check_splits(self, events: int) -> None:
        """Raise ConfigError where there is nothing to train on, or nothing to be patient by. events: those of training."""
        self.rate = ("events", events / max(self.steps_per_epoch, 1))
        unit, counts = self.unit, self.counts_of
        if self.config.needs_scores and not counts["val"]:
            needs = f"{self.config.needs_scores} needs {unit} to validate on"
            raise ConfigError(f"{needs}, and none is for that: leave it out, or raise `val`")
        if not self.steps_per_epoch:
            shorter = "take shorter windows, or " if unit == "windows" else ""
            none = f"of {sum(counts.values()):,} {unit} none is for that; {shorter}give `val` and `test` smaller shares"
            raise ConfigError(f"{self.config.store} has no event to train on: {none}")

    def _negatives_by_split(self) -> dict[str, Negatives]:
        """Validation and test share theirs."""
        found = {split: self._draw_negatives(split) for split in ("train", "val")}
        return found | {"test": found["val"]}

    def _drawn(self, split: str) -> tuple[str, int]:
        """How negatives of a split are drawn, and how many per event."""
        config = self.config
        if split == "train":
            return config.negatives, config.ratio
        if config.eval_negatives == "tgb":  # TGB's are beside it
            return "destinations", 1
        return config.eval_negatives, config.eval_ratio

    @property
    def _draws_destinations(self) -> bool:
        drawn = {self._drawn(split)[0] for split in ("train", "val")}
        return "destinations" in drawn or ("historical" in drawn and not self.config.destinations)

    @property
    @abstractmethod
    def trained_events(self) -> tuple[int, int]:
        """(first, last) event of the training's time."""

    @cached_property
    def destinations(self) -> Ids:
        """Nodes that are destinations of training events, sorted: nothing later is known of."""
        return destinations_of(self.dataset, *self.trained_events)

    def _negatives_said(self) -> str | None:
        """What negatives are drawn from, said beside the scores; None if none are."""
        if not self.negatives:
            return None
        said = {"destinations": "nodes that are destinations of training events", "random": "all nodes"}
        if self._draws_destinations:
            said["destinations"] += f" ({len(self.destinations):,} of {self.dataset.num_nodes:,})"
        if self.config.destinations:
            said["random"] = "nodes {}..{}".format(*self.config.destinations)
        said["historical"] = "earlier destinations of the source"
        names = (self._drawn(split)[0] for split in ("train", "val"))
        train, scores = (said.get(name, name) for name in names)
        return f"negatives: {train}" if train == scores else f"negatives: {train}; for scores: {scores}"

    def _draw_negatives(self, split: str) -> Negatives:
        """Negatives of a split, as configured."""
        return negatives_of(self.dataset, *self._drawn(split), self.config.destinations, lambda: self.destinations)

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        """See `Mode`; the baselines depend on the events alone, so they are scored first, of several ranks by one. These open
        what they share in `prepare`, where they may wait for each other."""
        self.run, self.pace = run, Pace(run.watchers.note)
        if saved:
            self.scores = saved["scores"]
            self.baselines = saved["mode"]["baselines"]
        if (not saved or growth is not None) and self.ranks.first:
            self.baselines = self._score_baselines()
        self._begun = saved["mode"] if saved else None, growth
        if self.ranks.alone:
            self._open_state(*self._begun)

    def prepare(self) -> None:
        """See `open`."""
        if not self.ranks.alone:
            self._open_state(*self._begun)

    @abstractmethod
    def _score_baselines(self) -> dict[str, dict[str, Scores]]:
        """See `baselines`."""

    @abstractmethod
    def _open_state(self, state: dict[str, Any] | None, growth: Growth | None) -> None:
        """Make the state of the nodes, or take it up as it was at the checkpoint `state`."""

    def end_epoch(self, scored: bool) -> dict[str, Any]:
        """Take a checkpoint before scores, which change the state of the nodes."""
        if scored:
            self.run.checkpoint()
        return {}

    def evaluate(self) -> dict[str, Any]:
        """ "val"; "best", and then "test"; "baselines" of these splits."""
        found: dict[str, Scores] = {}
        best = kept = True  # where nothing can be compared on validation, the last model is the best
        with evaluating(self.model):
            if (val := self.score("val")) is not None:
                found["val"] = val
                best = self.run.judge(val)
                kept = best or self.run.state.best_epoch is None  # also while no score is defined
            if kept and (test := self.score("test")) is not None:
                found["test"] = test
        if kept:
            self.scores = found
        beside = {name: {split: each[split] for split in found} for name, each in self._scored_baselines().items()}
        return {**found, "best": best, "baselines": beside} if found else {}

    @abstractmethod
    def score(self, split: str) -> Scores | None:
        """Scores of "val", right behind the training's time, or of "test", right behind "val"; None for an empty one."""

    def final_scores(self) -> dict[str, Scores]:
        """Those that the best model had: the state of the nodes has gone on since."""
        return self.scores

    def _scored_baselines(self) -> dict[str, dict[str, Scores]]:
        return {name: each for name, each in self.baselines.items() if each}

    def unscored(self) -> dict[str, str]:
        """Split -> why the best model has no scores of it; and of what it must beat, where that has none at all."""
        unit, counts = self.unit, self.counts_of
        why = {}
        for name, found in self.baselines.items():
            if not found and any(counts[split] for split in SPLITS):
                why[name] = "what it remembers does not fit the memory: give more memory"
        for split in SPLITS:
            if not counts[split]:
                why[split] = f"none of the {sum(counts.values()):,} {unit} is for it: give `{split}` a larger share"
            elif split not in self.scores:
                why[split] = "nothing that it has is labelled"
        return why

    def state(self, cursor: RunState) -> dict[str, Any]:
        kept = {**self._kept(), "baselines": self.baselines}
        seen = self._all_seen(cursor.step, kept) if 0 < cursor.step < self.steps_per_epoch else None
        return {"mode": kept, "scores": self.scores, "seen": seen}

    @abstractmethod
    def _kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of the state of the nodes, and of the loader."""

    def _all_seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """`seen`, and what negatives are drawn from."""
        found = self.seen(step, state)
        if found and self._draws_destinations and self.negatives:
            found["destinations"] = hashlib.sha256(self.destinations.tobytes()).hexdigest()
        return found

    @abstractmethod
    def seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """What shows whether all that the epoch looked at in its first `step` steps (some, but not all) is as it was; state: as
        it was then. Of a store that has grown it is another where an event came in between, or into a window that was over."""

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: within the epoch where all that it has seen is as it was. ConfigError where no epoch is left."""
        config, dataset = self.config, self.dataset
        if (given := getattr(config, "negatives_file", None)) is not None:
            raise ConfigError(
                f"{config.out}: the rows of {given} are of events from validation's first on, which is another one now that "
                f"{dataset.path} has grown: begin another run, with negatives made for what is there now"
            )
        state = RunState(**saved["state"])
        was = saved.get("seen")
        if was is not None and self._all_seen(state.step, saved["mode"]) == was:
            why = f"epoch {state.epoch + 1} goes on: what it has seen is as it was"
        else:
            state = RunState.next_epoch(saved)
            late = ", as there are late events among those that this one has seen" if was is not None else ""
            why = f"the run goes on with epoch {state.epoch + 1}{late}"
        if state.epoch >= config.epochs:
            raise ConfigError(
                f"{config.out} is through its {config.epochs} epochs, and {dataset.path} has grown since: to go on with what "
                "is there now give more `epochs`"
            )
        state.best_score, state.best_epoch, state.best_scores, state.stale = None, None, None, 0
        taken = saved | {"state": asdict(state), "best_model": None, "scores": {}}
        return taken, Growth(touched, state.epoch, f"{dataset.path} has grown since this run last saw it: {why}")

    def commit(self) -> None:
        if self.history is not None:
            self.history.commit()

    def counts(self) -> dict[str, Any]:
        """See `Mode`; rows of the nodes' state count as history."""
        moved = [loader.moved for loader in self.loaders.values()]
        rows = sum(each.rows for each in moved)
        found: dict[str, Any] = {"bytes_read": sum(each.events + each.gathered for each in moved)}
        found |= fallback_counts(self.negatives.values())
        found |= {"rows_read": rows, "rows_asked": rows, "stages": self.loaders["train"].times()}
        if self.history is not None:
            found |= self.history.spent()
        return found

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        write_trace(self.config.out, self.loaders["train"].spans())
        (unit, per_step), each = self.rate, result["seconds_per_batch"]
        return {
            "negatives": self._negatives_said(),
            "unscored": self.unscored(),
            "baselines": self._scored_baselines(),
            "unit": unit,
            "units_per_second": None if not each else per_step / each,
        }


def link_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy of the logits of events [k] and of their negatives [k, r], each kind a mean (as in PyG's example)."""
    true = binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
    return true + binary_cross_entropy_with_logits(negative, torch.zeros_like(negative))
