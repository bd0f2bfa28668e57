"""A run on the whole graph: a step's gradient is that of all labelled nodes of the training split, and a step is an epoch."""

import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ooc.config.full import FullConfig
from ooc.fullgraph.ir import Program, TensorPlacement
from ooc.fullgraph.placement.plan import StepPlan
from ooc.fullgraph.step import FullGraph
from ooc.layerwise.scores import ExactScores
from ooc.metrics.nodes import Loss, out_channels
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory import MemoryMeter, keep_large_blocks, return_freed
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.pace import Pace
from ooc.runtime.trace import write_trace
from ooc.training import checkpoint, summary
from ooc.training.full_placement import FOLDER, asked_of, place, scores_beside
from ooc.training.grown import take_up
from ooc.training.loop import finite, interruptible
from ooc.training.node_run import SWEEP, NodeRun
from ooc.training.open_run import (
    check_environment,
    make_model,
    make_optimizer,
    model_bytes,
    open_run,
    pick_device,
    write_config,
)
from ooc.training.run import SUMMARY, environment
from ooc.training.tasks import check_task, labels_of, make_loss
from ooc.training.watchers import TensorBoardWatcher, Watcher, Watchers
from stores.dataset import Dataset
from stores.errors import ConfigError
from stores.sizes import format_bytes


class SplitLoss:
    """The loss of a split's labelled nodes, a few rows at a time: what they add to the mean over all of them.

    >>> SplitLoss(loss, ds, "train")(8192, logits)  # of nodes 8192, 8193, ...: [n, C]; None where none of them counts
    """

    def __init__(self, loss: Loss, dataset: Dataset, split: str) -> None:
        self._loss, self._dataset, self._members = loss, dataset, dataset.members(split)
        self.total = sum(loss.weight(labels) for labels in labels_of(dataset, split))
        if not self.total:
            raise ConfigError(f"split {split!r} of {dataset.path} has no known label: nothing to train on")

    def __call__(self, first: int, logits: Tensor) -> Tensor | None:
        node = np.arange(first, first + len(logits))
        at = np.flatnonzero(self._members.contains(node))
        if not len(at):
            return None
        labels: Any = self._dataset.labels
        known = torch.from_numpy(np.asarray(labels[node[at]]))
        if not self._loss.weight(known):
            return None
        return self._loss.part(logits[torch.from_numpy(at)], known) / self.total


@dataclass(kw_only=True)
class FullRun(NodeRun):
    """A composed run. full: carries out the steps; share: the loss; exact: the scores, of all splits by one sweep."""

    config: FullConfig
    full: FullGraph
    share: SplitLoss
    exact: ExactScores
    both_fit: bool
    """whether memory has room for what steps and scores keep at once"""
    plan: StepPlan | None
    """as predicted before the first step"""
    seconds: list[float] = field(default_factory=list)
    """of every step of this process"""

    def step(self) -> float:
        """One exact step: gradients are in the parameters; the loss."""
        if not self.both_fit:
            self.exact.make_room()
        pace = Pace(self.watchers.note)

        def progress(what: str, done: int, total: int) -> None:
            pace(what, done, total, "edges" if what == "edges" else "nodes")
            if self.interrupted:
                raise KeyboardInterrupt

        began = time.perf_counter()
        loss = self.full.step(self.share, progress)
        self.seconds.append(time.perf_counter() - began)
        return loss

    def score(self, split: str, epoch: int) -> dict[str, float | None] | None:
        """Scores of a split, None where the store has none of that name."""
        if not self.both_fit:
            if self.exact.beside:
                self.full.trim()
            else:
                self.full.make_room()
        return_freed()
        return self.score_exactly(split)

    def _kept(self) -> dict[str, Any]:
        return {}

    def _read(self) -> dict[str, Any]:
        traffic = self.full.traffic
        return {**dict.fromkeys(summary.COUNTS_READ, 0), "bytes_read": traffic.bytes_read, "stages": {}}

    def finish(self) -> dict[str, Any]:
        """Score the splits at the best model on validation, and write the model and the summary."""
        metrics = self.final_scores()
        traffic = self.full.traffic
        result = {
            "metrics": metrics,
            "monitor": self.monitor,
            **self.result(1, self.dataset.num_nodes),
            "sweeps": {"read": self.exact.bytes_read, "written": self.exact.bytes_written},
            "full": {
                "bytes_read": traffic.bytes_read,
                "bytes_written": traffic.bytes_written,
                "step_seconds": self.seconds,
                "op_seconds": traffic.seconds,
                "ops": traffic.ops,
                "busy_seconds": traffic.busy(),
            },
            **self._predicted(),
            "budget": asdict(self.full.budget),
            "reading": self.dataset.reading("x"),
        }
        self.exact.close(keep=False)
        self.full.discard()
        checkpoint.write_json(self.config.out / SUMMARY, result)
        return result

    def _predicted(self) -> dict[str, Any]:
        """What was predicted of this process's steps, beside what they took; the last one's trace."""
        traffic, steps = self.full.traffic, len(self.seconds)
        write_trace(self.config.out, traffic.spans(), traffic.samples)
        if self.plan is None or not steps:
            return {}
        read, written = self.plan.moved(TensorPlacement.DISK)
        predicted = {
            "seconds_per_epoch": self.plan.seconds,
            "value_bytes": self.plan.peak[0],
            "bytes_read": steps * read,
            "bytes_written": steps * written,
        }
        actual = {
            "seconds_per_epoch": statistics.median(self.seconds),
            "value_bytes": max((sample.memory for sample in traffic.samples), default=0),
            "bytes_read": traffic.bytes_read,
            "bytes_written": traffic.bytes_written,
        }
        return {"plan": {"predicted": predicted, "actual": actual, "advice": None}}

    def close(self) -> None:
        """Give back files and threads; idempotent."""
        self.full.close()
        self.exact.close()


def train(config: FullConfig, resume: bool = False, watcher: Watcher | None = None, grown: bool = False) -> dict[str, Any]:
    """Train, write the run's files into `config.out`, and return the summary (RUN/summary.json); see
    `ooc.training.node_loop.train`.

    >>> train(FullConfig(store="cora.ooc", out="run", model="gcn"))["metrics"]["test"]["accuracy"]
    0.815
    """
    make = partial(compose, config, grown)
    with open_run(config, resume, Watchers([watcher] if watcher else []), make) as run:
        with run.measure("training"):
            fit(run)
        return run.finish()


def fit(run: FullRun) -> None:
    """Epochs until there are enough, `max_steps` is reached, or validation has not improved for `patience` evaluations."""
    config, state = run.config, run.state
    run.watchers.start(state.epoch, state.step, config.epochs, 1)
    with interruptible(run):
        while state.epoch < config.epochs and not run.out_of_patience and (run.steps_left > 0 or state.step):
            if not state.step:  # else a checkpoint between an epoch's step and its scores
                train_epoch(run)
            due = state.epoch + 1 == config.epochs or (state.epoch + 1) % config.eval_every == 0 or run.steps_left <= 0
            run.end_nodes(run.validate() if due else None)
            run.checkpoint_if_due(epoch_end=True)
    run.checkpoint()


def train_epoch(run: FullRun) -> None:
    """An epoch's step."""
    config, state = run.config, run.state
    run.model.train()
    with run.training():
        torch.manual_seed(key(config.seed, Purpose.TORCH, state.epoch, 0) >> 1)
        value = finite(torch.tensor(run.step()), state.epoch, 0)
        if config.grad_clip is not None:
            nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.end_step(value)
        run.checkpoint_if_due()


def plan(config: FullConfig) -> tuple[Program, StepPlan]:
    """What training by `config` would take: its values and ops, and the plan; nothing is left on disk.

    >>> plan(FullConfig(store="papers.ooc", out="run", memory="3GB"))[1].seconds
    """
    with tempfile.TemporaryDirectory(prefix="ooc-plan-", dir=_parent(config.out)) as folder:
        unlike = {"out": Path(folder) / "run", "tensorboard": False, "plan": True}
        trial = config.model_copy(update=unlike)
        with open_run(trial, False, Watchers([]), partial(compose, trial, False)) as run:
            assert run.plan is not None, "it was asked for"
            return run.full.program, run.plan


def _parent(out: Path) -> Path:
    """The nearest folder that exists above the one that a run would have: its disk is the run's."""
    return next(folder for folder in Path(out).resolve().parents if folder.is_dir())


def compose(
    config: FullConfig,
    grown: bool,
    dataset: Dataset,
    watchers: Watchers,
    meter: MemoryMeter,
    run_dir: checkpoint.RunDir,
    saved: dict[str, Any] | None,
) -> FullRun:
    """Put the run together, and take up the checkpoint `saved` where there is one."""
    task = check_task(config, dataset)
    threads = saved["threads"] if saved else config.threads
    if threads is not None:
        torch.set_num_threads(threads)
    device = pick_device("cpu" if config.device == "auto" else config.device)
    model = make_model(config, dataset.num_features, out_channels(task, dataset.num_classes or 2)).to(device)
    if saved:
        saved = take_up(config.out, dataset, saved, grown)
        check_environment(config, saved, environment(device, dataset, model))
    budget = plan_memory(dataset, model_bytes(config, model))
    loss = make_loss(config, dataset, task, device)
    model.train()
    engine = "auto" if config.engine == "gds" else config.engine
    share = SplitLoss(loss, dataset, config.train_split)
    with ExitStack() as refused:
        full = refused.enter_context(closing(FullGraph(model, dataset, config.out / FOLDER, budget=budget, engine=engine)))
        log = run_dir.claim(saved["metrics_bytes"] if saved else 0)
        keep_large_blocks(True)  # as steps do: their ops are timed
        made = place(config, full, config.out, share)
        exact = scores_beside(full, config.out / SWEEP, engine)
        refused.pop_all()
    run = FullRun(
        config=config,
        dataset=dataset,
        device=device,
        model=model,
        optimizer=make_optimizer(config, model),
        loss=loss,
        log=log,
        watchers=watchers,
        meter=meter,
        full=full,
        share=share,
        exact=exact,
        plan=made,
        both_fit=exact.memory_bytes is not None and full.most_bytes + exact.memory_bytes <= full.room,
    )
    if saved:
        run.restore(saved)
    write_config(config)  # from here on it is a run, which --resume takes
    if made is not None:
        checkpoint.write_json(config.out / checkpoint.PLAN, {**made.asdict(), "asked": asked_of(config, full)})
        watchers.note(f"plan: an epoch takes {made.seconds:.3g} s, values and sums {format_bytes(made.peak[0])} of memory")
    if config.tensorboard:
        watchers.all.append(TensorBoardWatcher(config.out, run.state.total_steps))
    if config.memory is not None:
        watchers.note(str(budget))
    watchers.note(f"features are read: {dataset.reading('x')}")
    return run
