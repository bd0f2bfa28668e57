"""A run on a temporal graph, whatever its mode: the loop, its checkpoints and its results.

An epoch goes through the training's time from an empty state of the nodes; validation goes on from the state that it leaves,
and the test from that behind validation, where validation is the best so far. So no score knows of what comes after it. A
checkpoint is taken inside the training's time and right behind it: a run killed while it is scored goes on from before that.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.models.contexts import evaluating
from ooc.runtime.clock import Span
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.pace import Pace
from ooc.runtime.trace import write_trace
from ooc.training import checkpoint, summary
from ooc.training.event_stream import EventStream
from ooc.training.grown import take_up_in_time
from ooc.training.loop import finite, interruptible
from ooc.training.open_run import check_environment, make_optimizer, open_run, pick_device, write_config
from ooc.training.run import SUMMARY, Run, environment
from ooc.training.watchers import TensorBoardWatcher, Watcher, Watchers
from ooc.training.window_stream import WindowStream
from stores.dataset import Dataset
from stores.errors import ConfigError

Scores = dict[str, float | None]
SPLITS = ("val", "test")


class Mode(Protocol):
    """What a mode adds to a run: batches and losses, scores, and the state of the nodes that time carries along.

    Made of (config, dataset, device) and refused there where something does not fit; nothing is written before `open`.
    """

    model: nn.Module
    """on the device, its parameters drawn from the seed"""
    monitor: str
    """the score of validation that chooses the best model; of "loss" less is better"""
    steps_per_epoch: int
    rate: tuple[str, float]
    """(what a batch is made of, how many of it on average), for people: ("events", 200)"""
    parts: tuple[str, dict[str, int]]
    """("events", split -> how many of them it has)"""
    baselines: dict[str, dict[str, Scores]]
    """name -> split -> scores of what a model must beat, once `open` is called; none where it does not fit the memory"""

    def open(self, out: Path, state: dict[str, Any] | None, tell: Pace) -> None:
        """Make what the mode keeps in the run's directory, or take it up as it was when `state` was taken.

        tell: is told how far long passes without a step of training are, now and later.
        """

    def begin(self) -> None:
        """An epoch begins: the nodes' state is as if nothing had happened."""

    def batches(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches of the training's time from a step on, in order; it has `close`, for a pass that ends early."""

    def loss(self, batch: Any) -> Tensor:
        """The batch's loss; the state that it leaves behind is kept."""

    def score(self, split: str) -> Scores | None:
        """Scores of "val", right behind the training's time, or of "test", right behind "val"; None for an empty one."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: all that this stands for is durable."""

    def seen(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """What tells whether all that the epoch looked at in its first `step` steps (some, but not all) is as it was; state: as
        it was then. Of a store that has grown it is another where an event came in between, or into a window that was over."""

    def commit(self) -> None:
        """The checkpoint is saved."""

    def read(self) -> dict[str, Any]:
        """Bytes and rows by the names of `summary.COUNTS`, and the "stages" of the training's pipeline."""

    def spans(self) -> dict[str, list[Span]]:
        """When each stage worked on what; see `ooc.runtime.trace`."""

    def close(self) -> None:
        """Give back files and threads; idempotent."""


MODES: dict[str, Callable[[Any, Dataset, torch.device], Mode]] = {"events": EventStream, "snapshots": WindowStream}
"""each made of its own kind of configuration"""


@dataclass(kw_only=True)
class TemporalRun(Run):
    """A composed run of such a mode. scores: of the best model so far."""

    mode: Mode
    scores: dict[str, Scores] = field(default_factory=dict)

    def evaluate(self) -> dict[str, Any]:
        """What the epoch's line says of its scores: "val"; "best", and then "test"; "baselines" of these splits."""
        began, found = time.perf_counter(), dict[str, Scores]()
        better = True  # where there is nothing to validate on, the last model is the best
        with evaluating(self.model):
            if (val := self.mode.score("val")) is not None:
                value, found["val"] = val[self.mode.monitor], val
                better = self.judge(None if value is None else (-value if self.mode.monitor == "loss" else value))
            if better and (test := self.mode.score("test")) is not None:
                found["test"] = test
        if better:
            self.scores = found
        self.book("evaluate_seconds", began)
        beside = {name: {split: each[split] for split in found} for name, each in self.baselines.items()}
        return {**found, "best": better, "baselines": beside} if found else {}

    @property
    def baselines(self) -> dict[str, dict[str, Scores]]:
        """The mode's that have scores."""
        return {name: each for name, each in self.mode.baselines.items() if each}

    def unscored(self) -> dict[str, str]:
        """Split -> why the best model has no scores of it; and of what it must beat, where that has none at all."""
        unit, counts = self.mode.parts
        why = {}
        for name, found in self.mode.baselines.items():
            if not found and any(counts[split] for split in SPLITS):
                why[name] = "what it remembers does not fit the memory: give more --memory"
        for split in SPLITS:
            if not counts[split]:
                why[split] = f"none of the {sum(counts.values()):,} {unit} is for it: give --{split} a larger share"
            elif split not in self.scores:
                why[split] = "nothing that it has is labelled"
        return why

    def _kept(self) -> dict[str, Any]:
        state, step = self.mode.state(), self.state.step
        seen = self.mode.seen(step, state) if 0 < step < self.mode.steps_per_epoch else None
        return {"mode": state, "scores": self.scores, "seen": seen}

    def _commit(self) -> None:
        self.mode.commit()

    def _read(self) -> dict[str, Any]:
        found = self.mode.read()
        return {**dict.fromkeys(summary.COUNTS_READ, 0), **found, "stages": self.worked(found["stages"])}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a checkpoint, the scores of the best model with it."""
        super().restore(saved)
        self.scores = saved["scores"]

    def finish(self) -> dict[str, Any]:
        """Write the model, the best on validation, and the summary with the scores that it had."""
        self.take_best()
        unit, per_step = self.mode.rate
        result = {
            "metrics": self.scores,
            "unscored": self.unscored(),
            "baselines": self.baselines,
            "monitor": self.mode.monitor,
            **self.result(self.mode.steps_per_epoch, 1),
        }
        each = result["seconds_per_batch"]
        result |= {"unit": unit, "units_per_second": None if not each else per_step / each}
        write_trace(self.config.out, self.mode.spans())
        checkpoint.write_json(self.config.out / SUMMARY, result)
        return result

    def close(self) -> None:
        """End what works in the background."""
        self.mode.close()


def train(config: RunConfig, resume: bool = False, watcher: Watcher | None = None, grown: bool = False) -> dict[str, Any]:
    """Train, write the run's files into `config.out`, and return the summary (RUN/summary.json); see
    `ooc.training.node_loop.train`.

    grown: with `resume`, go on though the store has grown (`ooc.training.grown`).

    >>> train(EventsConfig(store="messages.ooc", out="runs/tgn"))["metrics"]["test"]["ap"]
    0.93
    """
    make = partial(compose, config, grown)
    with open_run(config, resume, Watchers([watcher] if watcher else []), make) as run:
        with run.measure("training"):
            fit(run)
        return run.finish()


def compose(
    config: RunConfig,
    grown: bool,
    dataset: Dataset,
    watchers: Watchers,
    meter: MemoryMeter,
    run_dir: checkpoint.RunDir,
    saved: dict[str, Any] | None,
) -> TemporalRun:
    """Put the run together, and take up the checkpoint `saved` where there is one."""
    threads = saved["threads"] if saved else config.threads
    if threads is not None:
        torch.set_num_threads(threads)
    device = pick_device(config.device)
    mode = MODES[config.mode](config, dataset, device)
    if config.patience is not None and not mode.parts[1]["val"]:
        raise ConfigError(f"patience needs {mode.parts[0]} to validate on, and none is for that: leave it out, or raise --val")
    if saved:
        saved, note = take_up_in_time(config, dataset, saved, grown, mode.seen)
        if note is not None:
            watchers.note(note)
        check_environment(config, saved, environment(device, dataset, mode.model))
    log = run_dir.claim(saved["metrics_bytes"] if saved else 0)
    run = TemporalRun(
        config=config,
        dataset=dataset,
        device=device,
        model=mode.model,
        optimizer=make_optimizer(config, mode.model),
        log=log,
        watchers=watchers,
        meter=meter,
        mode=mode,
    )
    if saved:
        run.restore(saved)
    else:  # from here on it is a run, which --resume takes
        write_config(config)
    if config.tensorboard:
        watchers.all.append(TensorBoardWatcher(config.out, run.state.total_steps))
    mode.open(config.out, saved["mode"] if saved else None, Pace(watchers.note))
    if saved:  # settings that were refused are not those of the next --resume
        write_config(config)
    return run


def fit(run: TemporalRun) -> None:
    """Epochs until there are enough, `max_steps` is reached, or validation has not improved for `patience` evaluations."""
    config, state, mode = run.config, run.state, run.mode
    if not mode.steps_per_epoch:
        unit, counts = mode.parts
        shorter = "take shorter windows, or " if unit == "windows" else ""
        none = f"of {sum(counts.values()):,} {unit} none is for that; {shorter}give --val and --test smaller shares"
        raise ConfigError(f"{config.store} has no event to train on: {none}")
    run.watchers.start(state.epoch, state.step, config.epochs, mode.steps_per_epoch, mode.rate)
    with interruptible(run):
        while state.epoch < config.epochs and not run.out_of_patience and run.steps_left > 0:
            train_epoch(run)
            if state.step < mode.steps_per_epoch:
                break  # max_steps ends the run inside the epoch
            due = state.epoch + 1 == config.epochs or (state.epoch + 1) % config.eval_every == 0
            if due:
                run.checkpoint()
            run.end_epoch(run.evaluate() if due else {})
            run.checkpoint_if_due(epoch_end=True)
    run.checkpoint()
    if state.step:  # behind the checkpoint: a resumed run with more steps rolls these scores back
        run.end_epoch(run.evaluate())


def train_epoch(run: TemporalRun) -> None:
    """From the cursor to the end of its epoch, or to `max_steps`."""
    config, state, mode = run.config, run.state, run.mode
    if state.step == mode.steps_per_epoch:  # a checkpoint between an epoch's last step and its scores
        return
    if not state.step:
        mode.begin()
    run.model.train()
    with closing(mode.batches(state.epoch, state.step)) as batches, run.training():  # type: ignore[type-var]
        for batch in batches:
            torch.manual_seed(key(config.seed, Purpose.TORCH, state.epoch, state.step) >> 1)
            loss = mode.loss(batch)
            value = finite(loss, state.epoch, state.step)
            loss.backward()  # type: ignore[no-untyped-call]
            if config.grad_clip is not None:
                nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            run.end_step(value)
            run.checkpoint_if_due()
            if run.steps_left <= 0:
                break
